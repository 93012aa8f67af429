"""The lock by which a gpu test has the device to itself among the workers of a parallel run."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graphcore.testing import plugin
from graphcore.testing.exclusive import device_lock, lock_folder


class Holder(threading.Thread):
    """Holds the lock until told to let go."""

    def __init__(self, folder: Path, exclusive: bool) -> None:
        super().__init__(daemon=True)
        self._arguments = (folder, exclusive)
        self.holds = threading.Event()
        self.let_go = threading.Event()
        self.start()

    def run(self) -> None:
        folder, exclusive = self._arguments
        with device_lock(folder, exclusive=exclusive):
            self.holds.set()
            self.let_go.wait(10)


def end(*holders: Holder) -> None:
    for holder in holders:
        holder.let_go.set()
    for holder in holders:
        holder.join(10)


def test_tests_that_do_not_ask_to_be_alone_run_beside_each_other(tmp_path: Path) -> None:
    one, two = Holder(tmp_path, False), Holder(tmp_path, False)
    assert one.holds.wait(5)
    assert two.holds.wait(5)
    end(one, two)


@pytest.mark.parametrize("first", [True, False], ids=["alone first", "alone second"])
def test_one_that_asks_to_be_alone_is(tmp_path: Path, first: bool) -> None:
    one = Holder(tmp_path, first)
    assert one.holds.wait(5)
    two = Holder(tmp_path, not first)
    assert not two.holds.wait(0.2)
    end(one)
    assert two.holds.wait(5)
    end(two)


def test_one_that_waits_to_be_alone_is_not_overtaken(tmp_path: Path) -> None:
    running = Holder(tmp_path, False)
    assert running.holds.wait(5)
    alone = Holder(tmp_path, True)
    time.sleep(0.1)
    late = Holder(tmp_path, False)
    assert not late.holds.wait(0.2)
    end(running)
    assert alone.holds.wait(5)
    assert not late.holds.is_set()
    end(alone)
    assert late.holds.wait(5)
    end(late)


def test_without_other_workers_nothing_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_TESTRUNUID", raising=False)
    assert lock_folder() is None
    with device_lock(None, exclusive=True), device_lock(None, exclusive=True):
        pass
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", "run7")
    folder = lock_folder()
    assert folder is not None
    assert folder.name == "graphcore-run7"


def test_waiting_for_the_device_is_in_no_tests_time_limit() -> None:
    # pytest-timeout's clock starts in its own wrapper of this hook, which lies inside of ours
    options = plugin.pytest_runtest_protocol.pytest_impl  # type: ignore[attr-defined]
    assert options["wrapper"]
    assert options["tryfirst"]


class Marked:
    """A test with one mark, or with none."""

    def __init__(self, mark: str = "") -> None:
        self.mark = mark

    def get_closest_marker(self, name: str) -> bool | None:
        return True if name == self.mark else None


@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "serial"])
def test_a_parallel_run_begins_with_lengthy_tests_and_ends_with_exclusive_ones(
    parallel: bool,
) -> None:
    one, alone, lengthy, other = Marked(), Marked("exclusive"), Marked("lengthy"), Marked()
    items: list[Any] = [one, alone, lengthy, other]
    config: Any = SimpleNamespace(workerinput={}) if parallel else SimpleNamespace()
    plugin.pytest_collection_modifyitems(config, items)
    assert items == ([lengthy, one, other, alone] if parallel else [one, alone, lengthy, other])
