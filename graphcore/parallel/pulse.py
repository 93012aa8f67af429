"""Pulse: says again and again that this rank is alive, and looks whether the others are.

A thread of its own, for a rank may wait in a collective, or for a device, that never ends because
another rank is gone, or has failed before it sent anything. It tells who, so that who waits can be
released where the backend can (NCCL).
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
        current_round: Gives the round that this rank has not come to yet.
        when_stuck: Called once, on that thread, with the ranks that failed in a round which this
            one has not come to for so long.
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
        current_round: Callable[[], int],
        when_stuck: Callable[[Sequence[int]], object],
    ) -> None:
        self._store = store
        self._keys = [f"{prefix}/pulse/{each}" for each in range(size)]
        self._rank = rank
        self._timeout = timeout_seconds
        self._when_silent = when_silent
        self._current_round = current_round
        self._when_stuck = when_stuck
        self._failed_round = -1
        self._failures: dict[int, tuple[int, float]] = {}
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

    def note_failure(self, number: int) -> None:
        """Says from the next beat on that this rank failed in round ``number``."""
        self._failed_round = number

    def stuck(self) -> list[int]:
        """The ranks that failed, long ago, in a round that this one has not come to."""
        now, mine = time.monotonic(), self._current_round()
        return [
            rank
            for rank, (number, since) in self._failures.items()
            if number >= mine and now - since > self._timeout
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
        said = f"{self._beats} {self._failed_round}"
        self._store.set(self._keys[self._rank], said.encode())

    def _run(self) -> None:
        was_told = was_stuck = False
        while not self._stop.wait(self._period):
            with suppress(RuntimeError):  # a store that is gone says nothing: all are silent
                self._beat()
                self._look()
            silent = self.silent(self._timeout)
            if silent and not was_told:
                was_told = True
                self._when_silent(silent)
            stuck = self.stuck()
            if stuck and not was_stuck:
                was_stuck = True
                self._when_stuck(stuck)

    def _look(self) -> None:
        now = time.monotonic()
        for rank, said in enumerate(self._store.multi_get(self._keys)):
            if said != self._seen[rank][0]:
                self._seen[rank] = (said, now)
                self._note(rank, said, now)

    def _note(self, rank: int, said: bytes, now: float) -> None:
        """Remembers since when a rank says that it failed."""
        number = -1 if said == _LEFT else int(said.split()[1])
        known = self._failures.get(rank)
        if rank != self._rank and number >= 0 and (known is None or known[0] != number):
            self._failures[rank] = (number, now)
