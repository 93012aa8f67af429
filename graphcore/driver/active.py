"""The captures under way, what must wait until they are over, and what went wrong meanwhile.

The one thread-local of graphcore: each thread has its stack of captures, and of streams in use. An
action given to :func:`when_idle` runs only while no capture of ours is under way on any thread:
destroying an executable inside a capture breaks it, and in "global" mode any thread's does. A
capture that begins waits for actions that other threads have already begun, for their
:func:`outside_captures` and for their :data:`LEGACY_LAUNCHES`. Nor does an action run inside a host
callback, where CUDA must not be called: garbage is collected there too. It runs with the next one
of another thread.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from graphcore.driver.records import StreamHandle
from graphcore.errors import CudaError, GraphcoreWarning, LifecycleError

_log = logging.getLogger("graphcore")

# how long a beginning capture waits for another thread's destroy: a free may wait for the device,
# but a destructor that waits for a lock of the capturing thread would wait for ever
_PATIENCE_SECONDS = 30.0
_LOOK_AGAIN_SECONDS = 20e-6  # a launch takes some 3 us
_MOST_TROUBLES = 8
_MOST_FRAMES = 100


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that may have broken a capture.

    Args:
        what: In words.
        thread: Name of the thread that did it.
        frames: (file, line) of its stack, the innermost first.
        code: The CUDA error's name, where there was one.
        number: Of the thread.
    """

    what: str
    thread: str
    frames: tuple[tuple[str, int], ...]
    code: str | None = None
    number: int = field(default_factory=threading.get_ident)


@dataclass(eq=False, slots=True)
class ActiveCapture:
    """A capture under way: who records, where, and in which mode.

    ``stream`` is where this thread's captured work goes: the capture stream, or that of the fork
    whose block is open. ``name`` says where the capture was begun. ``owners`` are (object, label)
    that the graph must keep alive; :func:`keep` adds to them. ``breaks_on_legacy_work``: its stream
    orders with the legacy one, where work would break it. ``troubles``: see :func:`note`.
    ``is_waiting``: it has not begun, because another thread is not ready for it.
    """

    driver: object
    stream: StreamHandle
    mode: str
    name: str = "a capture"
    owners: list[tuple[object, str]] = field(default_factory=list)
    breaks_on_legacy_work: bool = False
    troubles: list[Trouble] = field(default_factory=list)
    is_waiting: bool = False


class _ThreadCaptures(threading.local):
    def __init__(self) -> None:
        self.stack: list[ActiveCapture] = []
        self.used: list[weakref.ref[_Use]] = []
        self.callbacks = 0
        self.number = threading.get_ident()


class _Turn:
    """A thread beside which no capture begins, for as long as the frame that holds this."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()


class _Waiting:
    """Actions that wait, the captures they wait for, and the threads beside which none may begin.

    Ctrl-C may come between any two calls: a turn whose frame it has left counts no more, and the
    lock is held by itself, because the exit of a Condition is a function that it could leave.
    """

    def __init__(self) -> None:
        # reentrant: a finalizer may call when_idle while this thread holds the lock
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.captures: list[ActiveCapture] = []
        self.actions: deque[Callable[[], None]] = deque()
        self.turns: weakref.WeakSet[_Turn] = weakref.WeakSet()

    def next(self, turn: _Turn) -> Callable[[], None] | None:
        with self.lock:
            if self.captures or not self.actions or in_callback():
                return None
            self.turns.add(turn)
            return self.actions.popleft()

    def done(self, turn: _Turn) -> None:
        with self.lock:
            self.turns.discard(turn)
            self.changed.notify_all()

    def enter(self, turn: _Turn, seconds: float) -> None:
        """Waits for captures of other threads; those that would begin wait for ``turn``."""
        with self.lock:
            self.turns.add(turn)
            if not self.changed.wait_for(lambda: not self._begun(), seconds):
                raise LifecycleError(
                    f"expected no capture under way on another thread, got {self._begun()[0].name} "
                    f"still after {seconds:g} s, which would have been broken; nothing was done"
                )

    def _begun(self) -> list[ActiveCapture]:
        return [capture for capture in self.captures if not capture.is_waiting]

    def begin(self, capture: ActiveCapture, *, is_inner: bool = False) -> None:
        """Stops further actions, and waits for those that other threads have begun."""
        with self.lock:
            capture.is_waiting = not is_inner  # whoever has a turn may wait for the outer one
            self.captures.append(capture)
            is_quiet = is_inner or self.changed.wait_for(self._is_quiet, _PATIENCE_SECONDS)
            capture.is_waiting = False
            if not is_quiet:
                _log.warning(
                    "%s begins while another thread still destroys something, after %.0f s",
                    capture.name,
                    _PATIENCE_SECONDS,
                )
        _wait_for_legacy_launches(capture)

    def _is_quiet(self) -> bool:
        # who begins a capture inside an action of its own must not wait for itself, nor for
        # another thread that does the same
        threads = {turn.thread for turn in self.turns}
        return not threads or threading.get_ident() in threads

    def end(self, capture: ActiveCapture) -> None:
        with self.lock:
            if capture in self.captures:
                self.captures.remove(capture)
                self.changed.notify_all()


_captures = _ThreadCaptures()
_waiting = _Waiting()

UNDER_WAY: Collection[ActiveCapture] = _waiting.captures
"""The captures under way on all threads, as they come and go; costs next to nothing to test."""


HERE = _captures
"""What is known of this thread; its ``number`` costs a launch no new object."""
LEGACY_LAUNCHES: dict[int, None] = {}
"""Threads that launch on the legacy stream just now. Whoever does so is here before looking at the
captures under way, and a capture is among those before it looks here: one sees the other."""


def _launches_elsewhere() -> bool:
    """Whether another thread launches there; one that is gone (after a fork, too) does not."""
    others = {*LEGACY_LAUNCHES} - {threading.get_ident()}
    return bool(others) and not others.isdisjoint(sys._current_frames())


def _wait_for_legacy_launches(capture: ActiveCapture) -> None:
    until = time.monotonic() + _PATIENCE_SECONDS
    while _launches_elsewhere():
        if time.monotonic() > until:
            _log.warning(
                "%s begins while another thread still launches on the legacy stream, after %.0f s",
                capture.name,
                _PATIENCE_SECONDS,
            )
            return
        time.sleep(_LOOK_AGAIN_SECONDS)


def push(capture: ActiveCapture) -> None:
    """Notes that a capture begins on this thread; waits for destroys of other threads."""
    try:
        _waiting.begin(capture, is_inner=bool(_captures.stack))
        _captures.stack.append(capture)
    except BaseException:  # Ctrl-C
        drop(capture)
        raise


def pop() -> None:
    """Notes that this thread's newest capture is over, and runs what waited for the last one."""
    drop(_captures.stack[-1])


def drop(capture: ActiveCapture) -> None:
    """As :func:`pop`, for a capture that may be over or may not have begun."""
    _waiting.end(capture)
    if capture in _captures.stack:
        _captures.stack.remove(capture)
    run_waiting()


def current() -> ActiveCapture | None:
    """This thread's newest capture under way, or None."""
    return _captures.stack[-1] if _captures.stack else None


def is_any_under_way() -> bool:
    """Whether the device must not be asked or waited for: any thread captures, or a callback runs.

    A callback of this thread; see :func:`host_callback`.
    """
    return bool(_waiting.captures) or in_callback()


@contextmanager
def host_callback() -> Iterator[None]:
    """A block in which this thread runs what a stream called: CUDA must not be called there."""
    try:
        _captures.callbacks += 1
        yield
    finally:
        _captures.callbacks -= 1


def in_callback() -> bool:
    """Whether this thread runs a host callback."""
    return _captures.callbacks > 0


def under_way() -> tuple[ActiveCapture, ...]:
    """The captures under way on all threads, the oldest first."""
    return tuple(_waiting.captures)


class _Use:
    """What a :func:`using` block says."""

    __slots__ = ("__weakref__", "driver", "stream")

    def __init__(self, driver: Any, stream: StreamHandle) -> None:
        self.driver, self.stream = driver, stream


@contextmanager
def using(driver: Any, stream: StreamHandle) -> Iterator[None]:
    """A block in which work of this thread that names no stream goes to ``stream``."""
    use = _Use(driver, stream)
    entry = weakref.ref(use)  # dies with this frame, wherever Ctrl-C came
    try:
        _captures.used.append(entry)
        yield
    finally:
        _captures.used[:] = [each for each in _captures.used if each is not entry and each()]


def used_stream(driver: Any) -> StreamHandle | None:
    """The stream of the innermost :func:`using` block for the context of ``driver``."""
    for entry in reversed(_captures.used):
        use = entry()
        if use is not None and (use.driver is driver or _is_same_context(use.driver, driver)):
            return use.stream
    return None


def _is_same_context(one: Any, other: Any) -> bool:
    try:
        same_name = (one.name, one.device) == (other.name, other.device)
        return same_name and bool(one.context_id() == other.context_id())
    except CudaError:  # of a closed one
        return False


@contextmanager
def outside_captures(seconds: float = _PATIENCE_SECONDS) -> Iterator[None]:
    """A block beside which no other thread captures.

    It waits for captures that are under way, and those that would begin wait for it. For what waits
    for the device or works on the legacy stream: both break captures of other threads. In a capture
    of this thread nothing is waited for: its own rules say what is allowed.

    Args:
        seconds: How long to wait.

    Raises:
        LifecycleError: Another thread still captures; nothing was done.
    """
    if _captures.stack:
        yield
        return
    turn = _Turn()
    try:
        _waiting.enter(turn, seconds)
        yield
    finally:
        try:
            _waiting.done(turn)
        finally:
            _waiting.done(turn)  # where Ctrl-C came into the first


def keep(owner: object, label: str = "") -> None:
    """Lets the graph that this thread captures keep ``owner`` alive; nothing outside a capture."""
    if _captures.stack:
        _captures.stack[-1].owners.append((owner, label))


# ---- what may have broken a capture -----------------------------------------------------------


def note_error(error: CudaError) -> CudaError:
    """Notes a driver's refusal with every capture under way, and returns it."""
    if _waiting.captures and "CAPTURE" in error.code:
        note(f"{error.call} answered {error.code}", error.code)
    return error


def note(what: str, code: str | None = None) -> None:
    """Notes, with every capture under way, what may break it, and this thread's stack.

    An error that the block swallows, or another thread gets, is forgotten by CUDA: the capture
    only ends as "invalidated". The first notes are kept, so that its error can say why.
    """
    captures = [each for each in under_way() if len(each.troubles) < _MOST_TROUBLES]
    if not captures:
        return
    frames: list[tuple[str, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < _MOST_FRAMES:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    trouble = Trouble(what, threading.current_thread().name, tuple(frames), code)
    for capture in captures:
        capture.troubles.append(trouble)


# ---- what waits -------------------------------------------------------------------------------


def when_idle(action: Callable[[], None]) -> None:
    """Runs ``action`` now, or once no capture is under way, and never in a host callback.

    What it raises becomes a GraphcoreWarning: nobody who could handle it is there.
    """
    _waiting.actions.append(action)
    run_waiting()


def run_waiting() -> None:
    """Runs what waits, unless a capture is under way or this is a host callback."""
    while True:
        turn = _Turn()
        try:
            action = _waiting.next(turn)
            if action is None:
                return
            action()
        except Exception as error:
            _report(error)
        finally:
            try:
                _waiting.done(turn)
            finally:
                _waiting.done(turn)  # where Ctrl-C came into the first


def _report(error: Exception) -> None:
    try:
        if isinstance(error, GraphcoreWarning):  # which a filter has made an error
            raise error
        warnings.warn(
            f"what had waited for captures failed: {type(error).__name__}: {error}",
            GraphcoreWarning,
            stacklevel=4,
        )
    except GraphcoreWarning as warning:
        _Unraisable(warning)


class _Unraisable:
    """Raises where Python reports what cannot be raised (``sys.unraisablehook``)."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __del__(self) -> None:
        raise self._error
