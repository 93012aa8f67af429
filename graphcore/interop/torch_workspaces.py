"""The workspaces that torch's matrix products keep for a stream, and the memory they lie in.

torch makes one (32 MiB on an H200) for each thread's cuBLAS handle and stream at the first product,
from the memory pool that is in use just then, and keeps it as long as the process lives. Kernels of
a graph hold its address. So the memory must outlive every graph captured on the stream, also where
somebody makes torch forget its workspaces (``torch._C._cuda_clearCublasWorkspaces()``, which
torch's own graph trees call): the pool it lies in belongs to the stream.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import weakref
from collections.abc import Iterable
from typing import Any

from graphcore.driver import Driver, Stream
from graphcore.driver.lent_streams import Lane, lane_of
from graphcore.interop.pool_uses import pool_uses
from graphcore.interop.torch import MemoryPool

_log = logging.getLogger("graphcore")

# torch's own: of Hopper and what came after it, and of what came before
_SIZES = frozenset({32 << 20, (8 << 20) + (128 << 10)})
# how many times what is in use a kept pool may hold unused before the stream is given up instead
_MOST_IDLE = 8

# drivers on which a capture has multiplied: their streams are prepared from then on
_multiplying: weakref.WeakSet[Driver] = weakref.WeakSet()


class Workspaces:
    """The workspaces of one stream, in a pool that is theirs alone."""

    def __init__(self, device: int) -> None:
        self._pool = MemoryPool(device)
        self._threads: set[int] = set()

    def prepare(self) -> bool:
        """Lets torch make this thread's workspaces for the current stream, where it has none.

        Must come before the pool of a capture is used: torch takes the pool that was first.

        Returns:
            Whether it did; a step that multiplies makes them itself otherwise, elsewhere.
        """
        torch = self._pool.library
        try:
            with self._pool.use(), torch.no_grad():
                torch.cuda.current_blas_handle()  # makes that of cuBLAS
                # cuBLASLt may have one of its own. Once: later, a graph may run that works in it
                if threading.get_ident() not in self._threads:
                    _multiply_once(torch, self._pool.device)
                    self._threads.add(threading.get_ident())
        except RuntimeError as error:  # no memory; or torch was told to be deterministic
            _log.debug("no workspace was made ahead of the capture: %s", error)
            return False
        return True

    def bytes(self) -> int:
        """What they take of the device."""
        return self._pool.bytes()

    def is_needed(self) -> bool:
        """As long as the stream is."""
        return True

    def is_burden(self) -> bool:
        """Never: nothing else lies there."""
        return False


class KeptPool:
    """The pool of a capture in which a workspace lies that was not prepared before."""

    def __init__(self, pool: MemoryPool) -> None:
        self.id = pool.pool.id
        # a reference of its own, which goes as a pool's does: not while another one is in use
        holder = [pool.pool]
        self._pieces = pool.reader()
        self._live, self._idle = 0, 0
        weakref.finalize(self, pool_uses.drop, holder).atexit = False

    def is_needed(self) -> bool:
        """Whether torch still has the workspace."""
        pieces = self._pieces()
        self._live = sum(piece["allocated_size"] for piece in pieces)
        self._idle = sum(piece["total_size"] for piece in pieces) - self._live
        return _workspace_in(pieces)

    def is_burden(self) -> bool:
        """Whether what lies unused beside the workspace is far more than the workspace."""
        return self._idle > _MOST_IDLE * self._live


def expects_products(driver: Driver) -> bool:
    """Whether captures on ``driver`` are taken to multiply: one was seen to."""
    return driver in _multiplying


def prepare_workspaces(driver: Driver, stream: Stream, pool: MemoryPool, *, wanted: bool) -> bool:
    """Makes the workspaces of ``stream``, the current one, ahead of what is captured on it.

    Nothing is made where no capture on the driver was seen to multiply: a workspace is large.

    Args:
        driver: Of the stream.
        stream: Where the capture will be. Only streams that are lent are looked after.
        pool: What the capture will allocate from.
        wanted: The capture is known to multiply.

    Returns:
        Whether they lie in a pool of their own.
    """
    lane = lane_of(stream)
    if lane is None or pool.pool is None or not (wanted or expects_products(driver)):
        return False
    return _workspaces_of(lane, pool.device).prepare()


def keep_workspaces(driver: Driver, streams: Iterable[Stream], pool: MemoryPool) -> None:
    """Keeps ``pool`` with the ``streams`` of a capture that made a workspace in it, if one did.

    From then on they are prepared: the next captures on the driver are taken to multiply.
    """
    if pool.pool is None or not _workspace_in(pool.pieces()):
        return
    _multiplying.add(driver)
    for lane in filter(None, map(lane_of, streams)):
        kept = [each.id for each in lane.belongings if isinstance(each, KeptPool)]
        if pool.pool.id not in kept:
            lane.belongings.append(KeptPool(pool))


def workspace_bytes(stream: object) -> int:
    """What the workspaces of a lent stream take, in a pool of their own; 0 for anything else."""
    lane = lane_of(stream) if isinstance(stream, Stream) else None
    if lane is None:
        return 0
    return sum(each.bytes() for each in lane.belongings if isinstance(each, Workspaces))


def _workspaces_of(lane: Lane, device: int) -> Workspaces:
    for each in lane.belongings:
        if isinstance(each, Workspaces):
            return each
    made = Workspaces(device)
    lane.belongings.append(made)
    return made


def _multiply_once(torch: Any, device: int) -> None:
    # with a bias vector torch goes through cuBLASLt
    ones = torch.ones((16, 16), dtype=torch.float16, device=f"cuda:{device}")
    torch.addmm(ones[0], ones, ones)


def _workspace_in(pieces: list[dict[str, Any]]) -> bool:
    sizes = _SIZES | {_chosen_size()}
    return any(
        block["state"] == "active_allocated"
        and (block["size"] in sizes or block.get("requested_size") in sizes)
        for piece in pieces
        for block in piece["blocks"]
    )


def _chosen_size() -> int:
    """Bytes that the environment asks torch's workspaces to have; 0 where it does not."""
    chosen = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(size) * int(count) for size, count in chosen) * 1024
