"""Rules of the repository that no linter knows."""

import ast
import re
import tomllib

import list_pragmas
import pytest
from helpers.repository import ROOT, tracked_files, tracked_texts
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# where somebody happened to work; an example may speak of somebody's home
MACHINE_PATH = re.compile(
    r"(?<![\w./-])/(?:" + "|".join(["work", "root", "home", "Users", "tmp/scratch"]) + r")"
    r"(?![\w-])(?!/(?:someone|you)\b)"
)
UNFINISHED = re.compile(r"\b(?:" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3]) + r")\b")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAX_LINES = 500


def lines_matching(pattern):
    return [
        f"{name}:{number}: {line.strip()}"
        for name, text in tracked_texts()
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]


@pytest.mark.parametrize("pattern", [MACHINE_PATH, UNFINISHED], ids=["machine path", "unfinished"])
def test_no_tracked_text_has_a(pattern):
    assert lines_matching(pattern) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("cd /" + "work/main", True),
        ("see /" + "root", True),
        ("in '/" + "home/name/x'", True),
        ("at /home/someone/decode.py", False),
        ("kernels/work/x and https://example.org/home", False),
        ("the /worker of it", False),
    ],
)
def test_a_machine_path_is_told_from_other_text(text, found):
    assert bool(MACHINE_PATH.search(text)) is found


def python_files():
    return [path for path in tracked_files() if path.suffix == ".py"]


def test_every_module_says_in_its_first_line_what_it_owns():
    silent = []
    for path in python_files():
        text = path.read_text(encoding="utf-8")
        if text.strip() and not (ast.get_docstring(ast.parse(text)) or "").strip():
            silent.append(path.relative_to(ROOT))
    assert silent == []


def test_no_module_is_longer_than_anybody_wants_to_read():
    shipped = [path for path in python_files() if "tests" not in path.parts]
    long = {
        str(path.relative_to(ROOT)): count
        for path in shipped
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert long == {}


def pins():
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return {
        canonicalize_name(name): version
        for name, _, version in (line.partition("==") for line in lines if line)
    }


def requirements():
    project = PROJECT["project"]
    groups = [
        project["dependencies"],
        *project["optional-dependencies"].values(),
        *PROJECT["dependency-groups"].values(),
        PROJECT["build-system"]["requires"],
    ]
    found = {text: Requirement(text) for group in groups for text in group}
    return {
        text: requirement
        for text, requirement in found.items()
        if canonicalize_name(requirement.name) != project["name"]
    }


@pytest.mark.parametrize("text", requirements())
def test_a_pin_satisfies_the_range_of(text):
    requirement = requirements()[text]
    pinned = pins().get(canonicalize_name(requirement.name))
    if pinned is None:
        # only what `make` does not install may have no pin
        assert requirement.name in ("ipykernel", "nbclient")
        return
    assert requirement.specifier.contains(pinned, prereleases=True)


def test_every_pin_is_exact():
    assert all(re.fullmatch(r"[\w.!+]+", version) for version in pins().values())


def test_the_two_commands_of_the_readme_are_targets_of_the_makefile():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = set(re.findall(r"`make ([\w-]+)`|^make ([\w-]+)", readme, re.MULTILINE))
    named = {one or other for one, other in commands}
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_ci_runs_the_readmes_test_command():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make test\n" in script
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111, ".ci/run is not executable"


def test_lines_left_out_of_coverage_are_listed_and_counted(tmp_path, capsys):
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "one.py").write_text(f"x = 1\ny = 2  # {list_pragmas.MARK}\n", encoding="utf-8")
    assert list_pragmas.main(folder, tmp_path) == 0
    assert capsys.readouterr().out == (
        f"package/one.py:2: y = 2  # {list_pragmas.MARK}\n"
        f"1 lines of package/ are marked '{list_pragmas.MARK}'\n"
    )
