"""The captures under way, and what must wait until they are over.

The one thread-local of graphcore: each thread has its stack of captures. It guarantees that an
action given to :func:`when_idle` runs only while no capture of ours is under way on any thread:
destroying an executable inside a capture breaks it, and in "global" mode any thread's does.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from graphcore.driver.records import StreamHandle


@dataclass(frozen=True, slots=True)
class ActiveCapture:
    """A capture under way: who records, where, and in which mode.

    ``name`` says where it was begun. ``owners`` are (object, label) that the graph must keep alive;
    :func:`keep` adds to them.
    """

    driver: object
    stream: StreamHandle
    mode: str
    name: str = "a capture"
    owners: list[tuple[object, str]] = field(default_factory=list, compare=False)


class _ThreadCaptures(threading.local):
    def __init__(self) -> None:
        self.stack: list[ActiveCapture] = []


class _Waiting:
    """Actions that wait, and the number of captures they wait for."""

    def __init__(self) -> None:
        # reentrant: a finalizer may call when_idle while this thread holds the lock
        self.lock = threading.RLock()
        self.captures = 0
        self.actions: deque[Callable[[], None]] = deque()

    def next(self) -> Callable[[], None] | None:
        with self.lock:
            if self.captures or not self.actions:
                return None
            return self.actions.popleft()


_captures = _ThreadCaptures()
_waiting = _Waiting()


def push(capture: ActiveCapture) -> None:
    """Notes that a capture has begun on this thread."""
    with _waiting.lock:
        _waiting.captures += 1
    _captures.stack.append(capture)


def pop() -> None:
    """Notes that this thread's newest capture is over, and runs what waited for the last one."""
    _captures.stack.pop()
    with _waiting.lock:
        _waiting.captures -= 1
    run_waiting()


def current() -> ActiveCapture | None:
    """This thread's newest capture under way, or None."""
    return _captures.stack[-1] if _captures.stack else None


def is_any_under_way() -> bool:
    """Whether any thread captures: then the device must not be asked or waited for."""
    return _waiting.captures > 0


def keep(owner: object, label: str = "") -> None:
    """Lets the graph that this thread captures keep ``owner`` alive; nothing outside a capture."""
    if _captures.stack:
        _captures.stack[-1].owners.append((owner, label))


def when_idle(action: Callable[[], None]) -> None:
    """Runs ``action`` now, or once no capture is under way. It must not raise."""
    _waiting.actions.append(action)
    run_waiting()


def run_waiting() -> None:
    """Runs what waits, unless a capture is under way."""
    while (action := _waiting.next()) is not None:
        action()
