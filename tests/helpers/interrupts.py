"""Ctrl-C at a place that a test chooses, in files that it chooses."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import graphcore

_FOLDER = Path(graphcore.__file__).parent


class CtrlC(KeyboardInterrupt):
    """The one that a test has pressed."""


def press_at(
    number: int, action: Callable[[], object], files: Collection[str]
) -> tuple[int, str | None]:
    """Raises at the place of that number in ``files``; (places seen, where it was).

    Python looks for signals where functions begin and after calls, so places are the beginnings of
    functions and of lines. It may come between the end of a block and ``__exit__``, too, where
    nobody can do anything: that place is left out.
    """
    paths = {str(_FOLDER / name) for name in files}
    seen, where = 0, None

    def look(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal seen, where
        path, line = frame.f_code.co_filename, frame.f_lineno
        if path not in paths:
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
