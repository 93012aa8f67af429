"""The command fed garbage: arguments and files; it ends in 0, 1 or 2 and shows no traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.garbage import bounded, damaged, texts
from helpers.snapshots import decode_step
from hypothesis import given
from hypothesis import strategies as st

from graphcore import GraphPlan
from graphcore.cli import main

SNAPSHOT = decode_step(layers=1, per_layer=3).to_json()
WORDS = [
    "inspect", "doctor", "--driver", "emulated", "cuda", "--text", "--full", "--diff", "-o",
    "--warmup", "0", "-1", "3", "x.json", "good.json", "nothing:at_all", "json:loads", ":", "a:b:c",
    "", " ", "--", "-", "--debug", "--no-such-option", "page.html", "missing/page.html", ".", "..",
    "\x00", "\u2028", "é", "{}", "9" * 30, "nan", "*", "~", "$HOME",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with one good file; what is imported from it is forgotten afterwards."""
    (tmp_path / "good.json").write_text(SNAPSHOT)
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before


FORMS = [["--text"], ["-o", "page.html"], ["--diff", "good.json"]]
SIZES = ["slots", "tokens", "layers", "hidden", "heads", "experts", "top-k", "rows", "bucket"]
SIZES += ["decode-overlap", "decode-boundary-overlap", "dtype"]
VALUES = ["0", "-1", "1e3", "x", "", "50%", "101%", "%", "2.5", "nan", "9" * 20]


def ends_well(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """The exit status, which is one of three; there is no traceback."""
    status = main(arguments)
    said = capsys.readouterr()
    assert status in (0, 1, 2), (arguments, status)
    assert "Traceback" not in said.err + said.out, arguments
    if status == 2:
        assert said.err.strip(), arguments
    return status


@bounded(120)
@given(arguments=st.lists(st.sampled_from(WORDS) | st.text(max_size=6), max_size=6))
def test_arguments_without_sense_end_in_two_with_a_reason(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    kept = [each for each in arguments if each not in ("--debug", "--open")]
    ends_well(["inspect", *kept, "--driver", "emulated"], capsys)
    if not {"demo", "moe", "bench", "doctor"} & set(kept[:1]):
        ends_well(kept, capsys)


@bounded(120)
@given(data=st.data(), form=st.sampled_from(FORMS))
def test_a_file_of_garbage_is_refused_by_its_name_or_shown(
    folder: Path, capsys: pytest.CaptureFixture[str], data: Any, form: list[str]
) -> None:
    text = data.draw(st.one_of(texts, damaged(SNAPSHOT), damaged(_plan())))
    (folder / "x.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    status = main(["inspect", "x.json", *form, "--driver", "emulated"])
    said = capsys.readouterr()
    assert status in (0, 1, 2)
    assert "Traceback" not in said.err
    if status == 2:
        assert "x.json" in said.err


def _plan() -> str:
    plan = GraphPlan("good")
    x, y = plan.buffer("x", (4,)), plan.buffer("y", (4,))
    plan.memset(x, 1.0)
    plan.memcpy(y, x)
    return plan.to_json()


@bounded(120)
@given(sizes=st.dictionaries(st.sampled_from(SIZES), st.sampled_from(VALUES), max_size=3))
def test_sizes_of_a_model_that_cannot_be_end_in_two_with_a_reason(
    folder: Path, capsys: pytest.CaptureFixture[str], sizes: dict[str, str]
) -> None:
    options = [f"--{name}={value}" for name, value in sizes.items()]
    # one size that never works, so that nothing is decoded
    assert ends_well(["moe", "--driver", "emulated", *options, "--heads=-3"], capsys) == 2
