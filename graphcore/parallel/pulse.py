"""Pulse: says again and again that this rank is alive, and looks whether the others are.

A thread of its own, for a rank may wait in a collective, or for a device, that never ends because
another rank is gone. It tells who is, and releases who waits where the backend can (NCCL).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

_LEFT = b"left"
_BEATS = 10
_LONGEST_SECONDS = 1.0


class Pulse:
    """The pulse of one rank.

    Args:
        store: Of ``torch.distributed``, for this object alone.
        prefix: Of its keys.
        rank: This one.
        size: How many there are.
        timeout_seconds: Of silence, after which ``when_silent`` is told.
        when_silent: Called once, on the pulse's thread, with the ranks that are silent.
    """

    def __init__(
        self,
        store: Any,
        prefix: str,
        rank: int,
        size: int,
        *,
        timeout_seconds: float,
        when_silent: Callable[[Sequence[int]], object],
    ) -> None:
        self._store = store
        self._keys = [f"{prefix}/pulse/{each}" for each in range(size)]
        self._rank = rank
        self._timeout = timeout_seconds
        self._when_silent = when_silent
        self._period = min(_LONGEST_SECONDS, timeout_seconds / _BEATS)
        now = time.monotonic()
        self._seen: list[tuple[bytes, float]] = [(b"", now)] * size
        self._stop = threading.Event()
        self._beats = 0
        self._thread = threading.Thread(target=self._run, name="graphcore pulse", daemon=True)
        self._beat()

    def start(self) -> None:
        """Begins; every rank must have made its pulse before."""
        self._thread.start()

    def silent(self, seconds: float | None = None) -> list[int]:
        """The ranks that said nothing for so long; None: for half of the timeout."""
        limit = self._timeout / 2 if seconds is None else seconds
        now = time.monotonic()
        return [
            rank
            for rank, (said, since) in enumerate(self._seen)
            if rank != self._rank and said != _LEFT and now - since > limit
        ]

    def close(self) -> None:
        """Ends it, and says that this rank has left."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(self._timeout)
        with suppress(RuntimeError):
            self._store.set(self._keys[self._rank], _LEFT)

    # ---- inside ---------------------------------------------------------------------------------

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(self._keys[self._rank], str(self._beats).encode())

    def _run(self) -> None:
        was_told = False
        while not self._stop.wait(self._period):
            with suppress(RuntimeError):  # a store that is gone says nothing: all are silent
                self._beat()
                self._look()
            silent = self.silent(self._timeout)
            if silent and not was_told:
                was_told = True
                self._when_silent(silent)

    def _look(self) -> None:
        now = time.monotonic()
        for rank, said in enumerate(self._store.multi_get(self._keys)):
            if said != self._seen[rank][0]:
                self._seen[rank] = (said, now)
