"""The run of compute-sanitizer over the kernels' tests: what it runs, counts and calls wrong."""

import json
import os
import subprocess
import sys

import pytest
from helpers import sanitizer_run
from helpers.repository import ROOT

RECORD = ROOT / "benchmarks/results/h200/sanitizer.json"

# takes its options, runs the rest, and says what it was told to have found
STAND_IN = """#!{python}
import subprocess, sys
tool = sys.argv[sys.argv.index("--tool") + 1]
subprocess.run(sys.argv[sys.argv.index("--tool") + 2:])
found = {found}
said = {{"racecheck": "RACECHECK SUMMARY: %d hazards displayed (0 errors, 0 warnings)"}}
planted = "-c" in sys.argv
print("=" * 9, said.get(tool, "ERROR SUMMARY: %d errors") % found[planted])
"""


def run_with(tmp_path, found, *arguments):
    """The run over two tests, with a stand-in that finds ``found`` (without, with a fault)."""
    stand_in = tmp_path / "compute-sanitizer"
    stand_in.write_text(STAND_IN.format(python=sys.executable, found=found), encoding="utf-8")
    stand_in.chmod(0o755)
    summary = tmp_path / "found.json"
    paths = {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests"))),
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        [sys.executable, "-c", ONLY_TWO, "--summary", str(summary), "--logs",
         str(tmp_path / "logs"), *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, **paths},
    )  # fmt: skip
    return done, summary


# two that pass without a device, and are named as the kernels' are
ONLY_TWO = """
import sys
from helpers import sanitizer_run
name = "tests/kernels/test_package.py::"
sanitizer_run.chosen_tests = lambda: [
    name + "test_the_public_names_are_sorted_and_there",
    name + "test_importing_it_loads_no_array_or_gpu_library",
]
sys.exit(sanitizer_run.main())
"""


@pytest.mark.parametrize(
    ("found", "status"),
    [((0, 1), 0), ((2, 1), 1), ((0, 0), 1)],
    ids=["clean", "errors", "a planted fault not found"],
)
def test_what_is_found_and_what_should_have_been_makes_the_exit_status(tmp_path, found, status):
    done, summary = run_with(tmp_path, found, "--tool", "memcheck", "--tool", "racecheck")
    assert done.returncode == status, done.stderr
    told = json.loads(summary.read_text(encoding="utf-8"))
    for tool in ("memcheck", "racecheck"):
        assert told[tool]["errors"] == found[0] * 2  # a process for each of two tests
        assert told[tool]["planted_errors_found"] == found[1]
        assert (told[tool]["passed"], told[tool]["failed"]) == (2, 0)


def test_a_tool_that_comes_to_no_end_is_told():
    with pytest.raises(AssertionError, match="the tool came to no end:\nkilled"):
        sanitizer_run.errors_of("killed")


def test_the_gpu_tests_of_the_kernels_are_chosen_but_those_that_are_too_large():
    chosen = sanitizer_run.chosen_tests()
    names = {test.partition("::")[0] for test in chosen}
    assert len(chosen) > 300
    subjects = ("moe_grouped_gemm", "strided_copy", "decode_loop", "expert_gather")
    assert {f"tests/kernels/test_{subject}.py" for subject in subjects} <= names
    assert not [test for test in chosen if any(part in test for part in sanitizer_run.TOO_LARGE)]
    assert any("[cuda" in test or "-cuda" in test for test in chosen)


@pytest.mark.parametrize("tool", list(sanitizer_run.SHARDS))
def test_on_a_device_the_tools_found_nothing_but_the_planted_faults(tool):
    told = json.loads(RECORD.read_text(encoding="utf-8"))
    found = told[tool]
    assert found["errors"] == found["failed"] == found["skipped"] == 0
    assert found["planted_errors_found"] > 0
    assert found["passed"] > 300
    assert found["without"] == list(sanitizer_run.NOT_SEEN.get(tool, ()))
    assert len(told["commit"]) == 40
