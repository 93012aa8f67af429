"""The kernels of ``decode_loop.cu`` in Python: what the emulated driver runs."""

from __future__ import annotations

from typing import Any

from graphcore.driver.kernel import Pointer
from graphcore.driver.records import LaunchConfig

BUDGET, STOP, PUBLISHED, OVER = range(4)
"""Words of the control block."""
CONTROL_WORDS = 4
_MADE, _ALLOWED = range(2)


def run_begin(
    _config: LaunchConfig,
    handle: int,
    finished: Pointer,
    progress: Pointer,
    control: int,
    rows: int,
) -> None:
    """Starts the count, and decides whether there is a first step."""
    words, state = _words(control), progress.array(2)
    state[_MADE], state[_ALLOWED] = 0, words[BUDGET]
    is_done = words[BUDGET] <= 0 or finished.array(rows).all()
    _decide(handle, words, is_done=bool(is_done))


def run_step_end(
    _config: LaunchConfig,
    handle: int,
    token: Pointer,
    finished: Pointer,
    progress: Pointer,
    ring: int,
    control: int,
    rows: int,
) -> None:
    """Publishes the step's token, and decides whether there is another step."""
    words, state = _words(control), progress.array(2)
    made = int(state[_MADE])
    Pointer(ring + made * rows * 8, "int64").array(rows)[:] = token.array(rows)
    state[_MADE] = words[PUBLISHED] = made + 1
    is_done = made + 1 >= state[_ALLOWED] or finished.array(rows).all()
    _decide(handle, words, is_done=bool(is_done))


def _words(control: int) -> Any:
    return Pointer(control, "int64").array(CONTROL_WORDS)


def _decide(handle: int, words: Any, *, is_done: bool) -> None:
    from graphcore.driver.emulated import set_conditional

    more = not is_done and words[STOP] == 0
    if not more:
        words[OVER] = 1
    set_conditional(handle, int(more))
