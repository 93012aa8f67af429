"""A script that takes its process down is told apart from one that ends."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from graphcore.testing import run_isolated


def test_a_script_that_ends_gives_its_output() -> None:
    run = run_isolated("import sys; print('said', *sys.argv[1:])", "a", "b")
    assert (run.survived, run.killed_by, run.stdout) == (True, None, "said a b\n")


def test_a_crash_is_named_and_leaves_us_alive() -> None:
    run = run_isolated("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert (run.survived, run.killed_by) == (False, "SIGSEGV")


def test_an_exception_is_no_signal() -> None:
    run = run_isolated("raise ValueError('why')")
    assert (run.survived, run.killed_by, run.returncode) == (False, None, 1)
    assert "ValueError: why" in run.stderr


def test_a_script_that_hangs_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_isolated("import time; time.sleep(60)", timeout=0.5)


def test_folders_are_searched_first(tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("answer = 42\n", encoding="utf-8")
    run = run_isolated("import only_here; print(only_here.answer)", search=[tmp_path])
    assert run.stdout == "42\n"


def test_the_environment_is_this_processs_or_the_one_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEN_HERE", "1")
    script = "import os; print('SEEN_HERE' in os.environ, 'GIVEN' in os.environ)"
    assert run_isolated(script).stdout == "True False\n"
    assert run_isolated(script, environment={"GIVEN": "1"}).stdout == "False True\n"
