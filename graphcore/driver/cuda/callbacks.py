"""Python callbacks that CUDA's host nodes call, and how long each is kept.

There is one C function for all of them; a node's user data is a number that finds the callable in a
table. So no code pointer can ever dangle: the worst that an early release could do is a call that
finds nothing, which is logged.

A callback is released when the last graph or executable that holds it is gone. CUDA knows when
that is: a user object travels with the graph into its clones, parents and executables, also where
another library makes or destroys them. Its destructor is libc's ``sem_post`` on a semaphore of
ours, so no Python runs on the driver's threads or at process exit; the count is read when the next
callback is registered. Where there is no such object (a changed node of an executable, a platform
without ``sem_post``) the callback is kept for the life of the process: a small leak rather than a
dangling pointer.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

from graphcore.driver import active
from graphcore.driver.cuda.versions import cuda

_log = logging.getLogger("graphcore")

_SEMAPHORE_BYTES = 64  # more than sizeof(sem_t) of any libc
_NO_DESTRUCTOR_SYNC = 1
_MOVE_REFERENCE = 1


class HostCallbacks:
    """The table of callbacks of one process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a released callback may own a graph
        self._numbers = itertools.count(1)
        self._callables: dict[int, Callable[[], None]] = {}
        self._once: set[int] = set()
        self._semaphores: dict[int, int] = {}
        self._libc = _semaphore_library()
        # held here for the life of the table: nodes hold its address
        self._trampoline = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._fire)
        self.function = ctypes.cast(self._trampoline, ctypes.c_void_p).value or 0

    def __len__(self) -> int:
        self.collect()
        return len(self._callables)

    def register(self, callback: Callable[[], None], *, once: bool = False) -> int:
        """Keeps ``callback`` and returns the user data that finds it; ``once``: for one call."""
        self.collect()
        with self._lock:
            number = next(self._numbers)
            self._callables[number] = callback
            if once:
                self._once.add(number)
        return number

    def find(self, function: int, number: int) -> Callable[[], None] | None:
        """The callable behind a node's function and user data, None where it is not ours."""
        return self._callables.get(number) if function == self.function else None

    def forget(self, number: int) -> None:
        """Releases a callback that no node holds."""
        with self._lock:
            self._callables.pop(number, None)
            self._once.discard(number)

    def tie(self, number: int, graph: Any) -> None:
        """Lets ``graph`` (and what is made from it) decide how long the callback is kept.

        Where that cannot be arranged the callback stays for good.
        """
        if self._libc is None:
            return
        semaphore = int(self._libc.calloc(1, _SEMAPHORE_BYTES) or 0)
        if not semaphore:
            return
        destructor = ctypes.cast(self._libc.sem_post, ctypes.c_void_p).value
        code, user_object = cuda.cuUserObjectCreate(
            semaphore, cuda.CUhostFn(destructor), 1, _NO_DESTRUCTOR_SYNC
        )
        if code:
            self._libc.free(semaphore)
            return
        code, *_ = cuda.cuGraphRetainUserObject(graph, user_object, 1, _MOVE_REFERENCE)
        if code:
            # the reference stays ours and is not given back: the destructor never runs
            return
        with self._lock:
            self._semaphores[number] = semaphore

    def collect(self) -> None:
        """Releases the callbacks whose last graph is gone."""
        if self._libc is None:
            return
        with self._lock:
            gone = [
                number
                for number, semaphore in self._semaphores.items()
                if self._libc.sem_trywait(semaphore) == 0
            ]
            for number in gone:
                self._libc.free(self._semaphores.pop(number))
                self._callables.pop(number, None)

    def _fire(self, user_data: int | None) -> None:
        with active.host_callback():
            self._call(user_data or 0)

    def _call(self, number: int) -> None:
        callback = self._callables.get(number)
        if callback is None:
            _log.error("a CUDA host node called callback %d, which was released", number)
            return
        if number in self._once:
            self.forget(number)
        try:
            callback()
        except Exception:  # nothing may leave a C callback
            _log.exception("a host callback raised; the graph went on")


def _semaphore_library() -> Any:
    try:
        libc = ctypes.CDLL(None)
        for name in ("sem_post", "sem_trywait", "free"):
            getattr(libc, name).argtypes = (ctypes.c_void_p,)
        libc.calloc.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
        libc.calloc.restype = ctypes.c_void_p
    except (AttributeError, OSError, TypeError):  # not a POSIX libc
        return None
    return libc


@functools.cache
def host_callbacks() -> HostCallbacks:
    """The one table of this process: a graph may outlive the driver object that made it."""
    return HostCallbacks()
