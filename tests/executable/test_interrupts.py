"""Ctrl-C at any line of a capture: it is over, the stream is usable, the collector runs again."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers.contract import in_thread
from helpers.interrupts import press_at
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import graphcore
from graphcore.driver import active
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import CaptureState
from graphcore.executable import resting

_FILES = (
    "driver/active.py",
    "executable/branches.py",
    "executable/capture_ending.py",
    "executable/capture_place.py",
    "executable/capture_session.py",
    "executable/resting.py",
)


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

    lines, _ = press_at(0, step, _FILES)
    assert lines > 150
    pressed = []
    for number in range(1, lines + 1):
        _, where = press_at(number, step, _FILES)
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
