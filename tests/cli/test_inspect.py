"""``graphcore inspect``: pages and tables of files and functions, comparisons, and refusals."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.repository import ROOT
from helpers.snapshots import HOSTILE, chain, decode_step, kernel_node, snapshot

from graphcore.cli import main
from graphcore.drawing.text import in_encoding
from graphcore.driver.records import LaunchConfig

WORK = """
import numpy
import torch
import graphcore
from graphcore.driver import kernel, open_driver
from graphcore.driver.records import LaunchConfig
from graphcore.graph import GraphSnapshot, diff

x = torch.zeros(8)
calls = 0

def step():
    global calls
    calls += 1
    x.add_(1).mul_(2)

def graph():
    return graphcore.capture_function(step, driver=open_driver("emulated"))

def snapshot():
    return graph().snapshot()

def comparison():
    empty = GraphSnapshot(())
    return diff(empty, snapshot())

thing = snapshot()
calls = 0
number = 7

class Odd(BaseException):
    def __str__(self):
        raise ValueError("a text of its own that fails too")

def odd():
    raise Odd

def ending():
    raise GeneratorExit

def interrupted():
    raise KeyboardInterrupt

add = kernel("add", "const f32* a, f32* b, i32 n", 'extern "C" __global__ void add() {}')

def plan():
    plan = graphcore.GraphPlan("two steps")
    a, b = plan.buffer("a", (64,), "float32"), plan.buffer("b", (64,), "float32")
    plan.launch(add, LaunchConfig((1, 1, 1), (32, 1, 1)), a, b, 64)
    plan.memset(b, 0, after=())
    return plan

def ordered_plan():
    plan = graphcore.GraphPlan("two steps")
    a, b = plan.buffer("a", (64,), "float32"), plan.buffer("b", (64,), "float32")
    plan.launch(add, LaunchConfig((1, 1, 1), (32, 1, 1)), a, b, 64)
    plan.memset(b, 0)
    return plan

class Kind:
    @staticmethod
    def step():
        step()

def raising():
    raise KeyError("the reason\\nand more")

def leaving():
    raise SystemExit(3)

def with_arguments(a, b=1):
    pass

def nothing():
    return 3

def reading():
    x.add_(1)
    return x.sum().item()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a module of things to look at."""
    (tmp_path / "work_of_a_test.py").write_text(WORK)
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
    for name in ("work_of_a_test", "broken_module"):
        sys.modules.pop(name, None)


def run(*arguments: str) -> int:
    return main(["inspect", *arguments, "--driver", "emulated"])


def save(path: Path, graph: Any) -> str:
    path.write_text(graph.to_json())
    return str(path)


# ---- pages --------------------------------------------------------------------------------------


def test_a_saved_snapshot_becomes_one_page_named_after_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(folder / "step.json", decode_step())
    assert run("step.json") == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "written: step.html\n")
    page = (folder / "step.html").read_text()
    assert "<title>step.json</title>" in page
    assert page.count('data-row="') == 401
    assert "<dt>edges</dt><dd>400</dd>" in page
    assert "<dt>fingerprint</dt><dd>" in page
    assert page.count("<html") == 1


@pytest.mark.parametrize(
    "name", ["step", "graph", "snapshot", "thing", "Kind.step"], ids=lambda name: name
)
def test_what_a_name_returns_or_launches_is_drawn(folder: Path, name: str) -> None:
    assert run(f"work_of_a_test:{name}", "-o", "page.html") == 0
    page = (folder / "page.html").read_text()
    assert "aten::add_.Tensor" in page
    assert "aten::mul_.Tensor" in page
    assert page.count('data-row="') == 2


def test_a_captured_function_is_warmed_up_and_its_memory_told(folder: Path) -> None:
    assert run("work_of_a_test:step", "-o", "page.html", "--warmup", "2") == 0
    assert sys.modules["work_of_a_test"].calls == 1 + 2 + 1
    page = (folder / "page.html").read_text()
    assert "<dt>an executable</dt>" in page
    assert "<h2>Memory</h2>" in page


def test_a_comparison_that_a_function_returns_is_drawn(folder: Path) -> None:
    assert run("work_of_a_test:comparison", "-o", "page.html") == 0
    page = (folder / "page.html").read_text()
    assert "would be refused (topology_changed)" in page
    assert page.count('<tr><td><b class="gc-sign gc-added"') == 2


def test_a_plan_is_drawn_with_its_buffers_and_what_is_wrong_with_it(folder: Path) -> None:
    assert run("work_of_a_test:plan", "-o", "page.html") == 0
    page = (folder / "page.html").read_text()
    assert "<dt>a</dt><dd>float32 64, 256 bytes, argument</dd>" in page
    assert "<h2>Validation</h2><pre>race: " in page
    plan = sys.modules["work_of_a_test"].plan()
    (folder / "plan.json").write_text(plan.to_json())
    assert run("plan.json", "-o", "saved.html") == 0
    assert (folder / "saved.html").read_text() == page.replace("work_of_a_test:plan", "plan.json")


def test_a_plan_with_a_race_fails_its_check_and_one_without_passes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("work_of_a_test:plan", "--check") == 1
    told = capsys.readouterr().out
    assert told.startswith("race: ")
    plan = sys.modules["work_of_a_test"].plan()
    assert told.splitlines() == [str(problem) for problem in plan.validate()]
    (folder / "racy.json").write_text(plan.to_json())
    assert run("racy.json", "--check") == 1
    assert capsys.readouterr().out == told
    assert run("work_of_a_test:ordered_plan", "--check") == 0
    assert capsys.readouterr().out == "nothing keeps it from being built\n"
    assert not list(folder.glob("*.html"))  # what CI runs leaves nothing behind


def test_a_check_draws_as_well_where_that_is_asked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("work_of_a_test:plan", "--check", "--text", "-o", "page.html") == 1
    told = capsys.readouterr().out
    assert told.startswith("race: ")
    assert "set b" in told.partition("\n")[2]
    assert "<h2>Validation</h2><pre>race: " in (folder / "page.html").read_text()
    # without --check it is looked at, and that went well
    assert run("work_of_a_test:plan", "-o", "page.html") == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["work_of_a_test:snapshot"], "expected a plan to check, got a GraphSnapshot"),
        (["work_of_a_test:step"], "expected a plan to check, got a Graph"),
        (
            ["work_of_a_test:snapshot", "--diff", "work_of_a_test:thing"],
            "--check: expected none with --diff",
        ),
    ],
    ids=["snapshot", "captured function", "comparison"],
)
def test_what_is_no_plan_cannot_be_checked(
    folder: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments, "--check") == 2
    assert said in capsys.readouterr().err


def test_a_page_can_show_every_node(folder: Path) -> None:
    save(folder / "step.json", decode_step())
    assert run("step.json", "-o", "page.html", "--full") == 0
    assert (folder / "page.html").read_text().count('<g class="gc-box"') == 401


def test_the_page_is_opened_where_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    save(folder / "step.json", chain(3))
    assert run("step.json", "--open") == 0
    assert opened == [(folder / "step.html").as_uri()]


# ---- text and comparisons -----------------------------------------------------------------------


def test_text_is_a_table_and_writes_no_page(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(folder / "step.json", chain(2))
    assert run("step.json", "--text") == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == "2 nodes, 1 edge (2 kernels)"
    assert said.err == ""
    assert list(folder.glob("*.html")) == []


def test_text_fits_the_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    save(folder / "step.json", decode_step())
    assert run("step.json", "--text", "--full") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 403
    assert max(map(len, lines)) <= 40


@pytest.mark.parametrize(
    ("grid", "status", "said"),
    [(1, 0, "possible, nothing to change"), (4, 1, "grid: 1 -> 4")],
    ids=["equal", "different"],
)
def test_a_comparison_says_by_its_status_whether_something_differs(
    folder: Path, grid: int, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(folder / "one.json", snapshot([kernel_node(0, "work")]))
    config = LaunchConfig((grid, 1, 1), (32, 1, 1))
    save(folder / "other.json", snapshot([kernel_node(0, "work", config=config)]))
    assert run("one.json", "--diff", "other.json", "--text", "-o", "page.html") == status
    assert said in capsys.readouterr().out
    assert "one.json and other.json" in (folder / "page.html").read_text()


def test_a_function_is_compared_with_a_saved_snapshot(folder: Path) -> None:
    assert run("work_of_a_test:snapshot", "-o", "page.html") == 0
    module = sys.modules["work_of_a_test"]
    save(folder / "saved.json", module.snapshot())
    assert run("saved.json", "--diff", "work_of_a_test:step", "-o", "page.html") == 0
    edited = module.snapshot()
    save(folder / "saved.json", replace(edited, nodes=edited.nodes[:1], edges=(), edge_data=()))
    assert run("saved.json", "--diff", "work_of_a_test:step", "-o", "page.html") == 1


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("utf-8", "2 kernels · a… → b"),
        ("ascii", "2 kernels , a~ > b"),
        ("cp437", "2 kernels , a~ > b"),
        ("no such encoding", "2 kernels , a~ > b"),
    ],
)
def test_a_terminal_without_the_signs_gets_plain_ones(encoding: str, shown: str) -> None:
    assert in_encoding("2 kernels · a… → b", encoding) == shown


# ---- refusals -----------------------------------------------------------------------------------

FUTURE = json.dumps({"format": "graphcore-snapshot", "version": 99})
FUTURE_PLAN = json.dumps({"format": "graphcore-plan", "version": 99})
DAMAGED = json.dumps({"format": "graphcore-snapshot", "version": 1, "functions": []})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "expected a readable JSON file: No such file or directory"),
        (b"", "expected JSON: "),
        (b"{", "expected JSON: "),
        (b"\xff\xfe\x00", "expected a readable JSON file: not UTF-8 text"),
        (b"[" * 100_000, "expected JSON: "),
        (b"[1, 2]", "got None"),
        (b'{"format": "onnx"}', "expected JSON with format 'graphcore-snapshot'"),
        (b'{"format": ["a"]}', "got ['a']"),
        (FUTURE.encode(), "snapshot: expected version 1, got 99"),
        (FUTURE_PLAN.encode(), "got 99"),
        (DAMAGED.encode(), "snapshot: damaged: KeyError: 'graph'"),
    ],
    ids=[
        "missing", "empty", "cut", "not text", "deep", "a list", "foreign", "odd", "future",
        "future plan", "damaged",
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_refused_in_one_line(
    folder: Path, content: bytes | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (folder / "file.json").write_bytes(content)
    assert run("file.json") == 2
    error = capsys.readouterr().err
    assert error.startswith("graphcore inspect: file.json: ")
    assert said in error
    assert error.count("\n") == 1
    assert list(folder.glob("*.html")) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:f", "raised ModuleNotFoundError: No module named 'no_such_module'"),
        ("broken_module:f", "importing broken_module raised ZeroDivisionError: division by zero"),
        ("work_of_a_test:nope", "module 'work_of_a_test' has no attribute 'nope'"),
        ("work_of_a_test:number", "or a function, got an int"),
        ("work_of_a_test:Kind", "or a function, got a type"),
        ("work_of_a_test:raising", "work_of_a_test:raising: raised KeyError: 'the reason"),
        ("work_of_a_test:leaving", "raised SystemExit: 3"),
        ("work_of_a_test:with_arguments", "got one that needs a"),
        ("work_of_a_test:nothing", "it returned an int and launched nothing"),
        ("work_of_a_test:reading", "CUDA_ERROR_STREAM_CAPTURE"),
        ("work_of_a_test:", "expected a readable JSON file"),
        ("work_of_a_test:odd", "work_of_a_test:odd: raised Odd"),
        ("work_of_a_test:ending", "work_of_a_test:ending: raised GeneratorExit"),
        (".", "expected a file or module:function, got a folder"),
        ("a\x00b", "expected a readable JSON file: no file has a null character in its name"),
        ("a" * 5000, "expected a readable JSON file: File name too long"),
        (f"{'a' * 5000}:f", "raised ModuleNotFoundError: No module named 'aaaa"),
    ],
    ids=lambda text: text[:40],
)
def test_a_name_that_gives_nothing_to_see_is_refused_in_one_line(
    folder: Path, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name, "-o", "page.html") == 2
    error = capsys.readouterr().err
    assert error.startswith("graphcore inspect: ")
    assert said in error
    assert error.count("\n") == 1
    assert not (folder / "page.html").exists()


def test_a_mark_that_an_editor_wrote_in_front_is_no_part_of_a_file(folder: Path) -> None:
    save(folder / "one.json", chain(2))
    text = (folder / "one.json").read_bytes()
    (folder / "two.json").write_bytes(b"\xef\xbb\xbf" + text)
    assert run("one.json", "--diff", "two.json", "--text") == 0


def test_ctrl_c_in_a_users_function_is_no_error_of_it(folder: Path) -> None:
    assert run("work_of_a_test:interrupted", "--text") == 130


def test_a_reader_that_has_seen_enough_is_no_failure(folder: Path) -> None:
    save(folder / "long.json", chain(3000))
    script = f"{shlex.quote(sys.executable)} -m graphcore inspect long.json --text --full"
    done = subprocess.run(
        ["/bin/sh", "-c", f"({script}; echo $? >&2) | head -n 1"],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])},
    )
    assert done.stdout.startswith("3000 nodes, ")
    assert done.stderr == "141\n"


def test_a_comparison_needs_two_graphs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(folder / "one.json", chain(2))
    assert run("one.json", "--diff", "work_of_a_test:comparison", "--text") == 2
    assert "expected a graph or snapshot to compare, got GraphDiff" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_refused_before_anything_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for page in ("missing/page.html", "p" * 5000, "p" * 5000 + "/page.html"):
        assert run("work_of_a_test:step", "-o", page) == 2
        assert "-o: expected a file " in capsys.readouterr().err
    assert "work_of_a_test" not in sys.modules


def test_debug_shows_where_a_function_raised(folder: Path) -> None:
    with pytest.raises(ValueError, match="raised KeyError") as caught:
        run("work_of_a_test:raising", "--debug")
    assert isinstance(caught.value.__cause__, KeyError)


def test_hostile_names_stay_text_on_the_page_and_in_the_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = HOSTILE.replace("\ud800", "")
    save(folder / "bad.json", snapshot([kernel_node(0, hostile, label=hostile)]))
    assert run("bad.json", "--text", "-o", "page.html") == 0
    assert "\x1b" not in capsys.readouterr().out
    assert "<script>alert" not in (folder / "page.html").read_text()


def test_the_command_runs_in_a_process_of_its_own(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "graphcore", "inspect", "work_of_a_test:step", "--text"],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={
            "PATH": "",
            "GRAPHCORE_DRIVER": "emulated",
            "PYTHONIOENCODING": "ascii",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        },
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "2 nodes, 1 edge (2 kernels)"
