"""Ctrl-C at any line of a capture: it is over, the stream is usable, the collector runs again."""

from __future__ import annotations

import dis
import functools
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from helpers.contract import in_thread
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import graphcore
from graphcore.driver import active
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import CaptureState
from graphcore.executable import resting

_FOLDER = Path(graphcore.__file__).parent
_FILES = {
    str(_FOLDER / name)
    for name in (
        "driver/active.py",
        "executable/branches.py",
        "executable/capture_ending.py",
        "executable/capture_session.py",
        "executable/resting.py",
    )
}


class CtrlC(KeyboardInterrupt):
    """The one that a test has pressed."""


def press_at(number: int, action: Callable[[], object]) -> tuple[int, str | None]:
    """Raises at the place of that number in the files above; (places seen, where it was).

    Python looks for signals where functions begin and after calls, so places are the beginnings of
    functions and of lines. It may come between the end of a block and ``__exit__``, too, where
    nobody can do anything: that place is left out.
    """
    seen, where = 0, None

    def look(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal seen, where
        path, line = frame.f_code.co_filename, frame.f_lineno
        if path not in _FILES:
            return None
        is_place = frame.f_code.co_name != "__exit__" if event == "call" else event == "line"
        if is_place and frame.f_lasti not in _quiet_places(frame.f_code):
            seen += 1
            if seen == number:
                where = f"{Path(path).name}:{line}"
                raise CtrlC
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        action()
    except CtrlC:
        pass
    finally:
        sys.settrace(before)
    return seen, where


@functools.cache
def _quiet_places(code: CodeType) -> frozenset[int]:
    """Where a line begins and no signal comes: a ``try:``, and the good end of a ``with``."""
    quiet = set()
    following: list[dis.Instruction] = []
    for each in reversed(list(dis.get_instructions(code))):
        following = [each, *following[:3]]
        nones = following[each.opname == "SWAP" :][:3]  # a value that is returned goes below
        is_end = all(one.opname == "LOAD_CONST" and one.argval is None for one in nones)
        if each.opname == "NOP" or (is_end and len(nones) == 3):
            quiet.add(each.offset)
    return frozenset(quiet)


def _is_free(lock: Any) -> bool:
    if not lock.acquire(timeout=1):
        return False
    lock.release()
    return True


# in a finalizer nothing can be raised: Python prints it and goes on
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_line_of_a_capture_leaves_nothing_under_way() -> None:
    driver = EmulatedDriver()
    x = torch.ones(4)
    stream = driver.stream(blocking=True)

    def step() -> None:
        with graphcore.capture(stream, driver=driver) as capture:
            x.add_(1)
            with capture.fork(), capture.annotate("side"):
                x.mul_(2)

    lines, _ = press_at(0, step)
    assert lines > 150
    pressed = []
    for number in range(1, lines + 1):
        _, where = press_at(number, step)
        pressed.append(where)
        assert active.under_way() == (), where
        assert active.current() is None, where
        assert not active._waiting.turns, where
        assert in_thread(lambda: _is_free(active._waiting.lock)), where
        assert in_thread(lambda: _is_free(resting._rest._lock)), where
        assert gc.isenabled(), where
        assert _get_current_dispatch_mode_stack() == [], where  # torch records no more
        assert driver.capture_status(stream.handle).state is CaptureState.NONE, where
    assert len({where for where in pressed if where is not None}) > 80
    with graphcore.capture(stream, driver=driver, expect=1):
        x.add_(1)
