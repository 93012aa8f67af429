"""Torch memory pools in use, and dropped ones that wait until none is.

torch aborts the process where a ``MemPool`` is destroyed while any thread allocates into one
(measured with torch 2.11: ``captures_underway.empty()``), and whoever drops a graph on one thread
cannot know of a capture on another. So every use through graphcore is counted here, and a pool that
is dropped meanwhile goes when the last use ends. Uses of torch's own (``torch.cuda.graph``, a bare
``use_mem_pool``) cannot be seen.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class PoolUses:
    """How many blocks allocate into a pool, and the pools that wait for their end."""

    def __init__(self) -> None:
        # reentrant: letting a pool go may run finalizers that drop another
        self._lock = threading.RLock()
        self._uses = 0
        self._waiting: list[Any] = []

    @contextmanager
    def use(self, block: AbstractContextManager[None]) -> Iterator[None]:
        """Enters ``block``, which allocates into a pool."""
        with self._lock:  # a pool that is being destroyed is gone before
            self._uses += 1
        try:
            with block:
                yield
        finally:
            with self._lock:
                self._uses -= 1
                self._release()

    def drop(self, holder: list[Any]) -> None:
        """Takes the pools out of ``holder``, their last, and lets them go once none is used."""
        with self._lock:
            self._waiting += holder
            holder.clear()
            self._release()

    @property
    def waiting(self) -> int:
        """How many dropped pools wait."""
        return len(self._waiting)

    def _release(self) -> None:
        if not self._uses:
            self._waiting.clear()


pool_uses = PoolUses()
