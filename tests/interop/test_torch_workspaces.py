"""The workspaces of torch's products stay with the stream that they were made for.

With a double of torch, which this machine may lack a device for; what torch itself does is in
tests/executable/test_capture_workspaces.py.
"""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.contract import in_thread

from graphcore.driver import Stream
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.lent_streams import lane_of
from graphcore.interop.torch import MemoryPool
from graphcore.interop.torch_workspaces import (
    KeptPool,
    Workspaces,
    expects_products,
    keep_workspaces,
    prepare_workspaces,
    workspace_bytes,
)

WORKSPACE = 32 << 20
PoolId = tuple[int, int]
_numbers = itertools.count(1)


class Pool:
    """torch's pool: a number."""

    def __init__(self) -> None:
        self.id = (0, next(_numbers))


class Torch:
    """As much of torch as multiplies: a workspace for each stream, from the pool that is used."""

    float16 = "float16"

    def __init__(self) -> None:
        self.stream = 0
        self.used: list[PoolId] = []
        self.workspaces: dict[int, PoolId] = {}
        self.blocks: dict[PoolId, list[dict[str, Any]]] = {}
        self.refuses = False
        self.launches = 0
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            MemPool=Pool,
            memory_snapshot=self._snapshot,
            use_mem_pool=self._use,
            current_blas_handle=self.multiply,
        )

    @contextmanager
    def _use(self, pool: Any, device: int) -> Iterator[None]:
        self.used.append(pool.id)
        try:
            yield
        finally:
            self.used.remove(pool.id)

    def _snapshot(self, pool: PoolId) -> list[dict[str, Any]]:
        return [
            {
                "address": 64 * index,
                "total_size": block["size"],
                "allocated_size": block["size"] * (block["state"] == "active_allocated"),
                "blocks": [block],
            }
            for index, block in enumerate(self.blocks.get(pool, []))
        ]

    def hold(self, pool: PoolId, size: int, state: str = "active_allocated") -> dict[str, Any]:
        block = {"size": size, "requested_size": size, "state": state}
        self.blocks.setdefault(pool, []).append(block)
        return block

    def multiply(self) -> None:
        if self.refuses:
            raise RuntimeError("CUDA out of memory")
        if self.stream not in self.workspaces:
            self.workspaces[self.stream] = pool = self.used[0]  # the outermost, as torch's
            self.hold(pool, WORKSPACE)

    def forget_workspaces(self) -> None:
        for pool in self.workspaces.values():
            for block in self.blocks[pool]:
                block["state"] = "inactive"
        self.workspaces.clear()

    def ones(self, shape: Any, **_: Any) -> list[int]:
        return [1]

    def addmm(self, *_: Any) -> None:
        self.launches += 1
        self.multiply()

    def no_grad(self) -> Any:
        return nullcontext()


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    double = Torch()
    monkeypatch.setitem(sys.modules, "torch", double)
    return double


@pytest.fixture
def driver() -> EmulatedDriver:
    return EmulatedDriver()


def belongings(stream: Stream) -> list[Any]:
    lane = lane_of(stream)
    assert lane is not None
    return lane.belongings


def test_a_capture_that_multiplies_gets_workspaces_in_a_pool_of_their_own(
    torch: Torch, driver: EmulatedDriver
) -> None:
    pool, stream = MemoryPool(0), driver.capture_stream()
    assert prepare_workspaces(driver, stream, pool, wanted=True)
    (made,) = belongings(stream)
    assert isinstance(made, Workspaces)
    assert made.bytes() == workspace_bytes(stream) == WORKSPACE
    assert pool.bytes() == 0
    assert prepare_workspaces(driver, stream, pool, wanted=True)  # it has them
    assert workspace_bytes(stream) == WORKSPACE
    assert torch.launches == 1, "later, a graph on the stream may run, and work there"
    in_thread(lambda: prepare_workspaces(driver, stream, pool, wanted=True))
    assert torch.launches == 2, "of each thread, which has workspaces of its own"


def test_they_are_made_again_in_the_same_pool_where_torch_was_made_to_forget_them(
    torch: Torch, driver: EmulatedDriver
) -> None:
    pool, stream = MemoryPool(0), driver.capture_stream()
    prepare_workspaces(driver, stream, pool, wanted=True)
    first = torch.workspaces[torch.stream]
    torch.forget_workspaces()
    prepare_workspaces(driver, stream, pool, wanted=True)
    assert torch.workspaces[torch.stream] == first
    assert len(belongings(stream)) == 1


def test_nothing_is_made_for_captures_that_were_never_seen_to_multiply(
    torch: Torch, driver: EmulatedDriver
) -> None:
    pool, stream = MemoryPool(0), driver.capture_stream()
    assert not prepare_workspaces(driver, stream, pool, wanted=False)
    torch.hold(pool.pool.id, 4096)  # an output
    keep_workspaces(driver, [stream], pool)
    assert torch.workspaces == {}
    assert belongings(stream) == []
    assert not prepare_workspaces(driver, driver.capture_stream(), pool, wanted=False)


def test_a_pool_in_which_a_step_made_a_workspace_stays_with_the_stream_as_long_as_it_is_there(
    torch: Torch, driver: EmulatedDriver
) -> None:
    pool, stream = MemoryPool(0), driver.capture_stream()
    with pool.use():
        torch.multiply()
    keep_workspaces(driver, [stream], pool)
    keep_workspaces(driver, [stream], pool)
    (kept,) = belongings(stream)
    assert isinstance(kept, KeptPool)
    handle = stream.handle
    del pool, stream
    stream = driver.capture_stream()
    assert stream.handle == handle
    assert belongings(stream) == [kept]
    # what is in use is found by a graph whatever torch forgets; afterwards nothing needs it
    torch.forget_workspaces()
    assert belongings(stream) == [kept]
    del stream
    stream = driver.capture_stream()
    assert stream.handle == handle
    assert belongings(stream) == []


def test_once_a_capture_multiplied_the_next_ones_of_the_driver_are_prepared(
    torch: Torch, driver: EmulatedDriver
) -> None:
    pool, first, second = MemoryPool(0), driver.capture_stream(), driver.capture_stream()
    with pool.use():
        torch.multiply()
    assert not expects_products(driver)
    keep_workspaces(driver, [first], pool)
    assert expects_products(driver)
    torch.stream = 2
    assert prepare_workspaces(driver, second, MemoryPool(0), wanted=False)
    assert workspace_bytes(second) == WORKSPACE
    other = EmulatedDriver()
    assert not prepare_workspaces(other, other.capture_stream(), MemoryPool(0), wanted=False)


@pytest.mark.parametrize(
    ("chosen", "size", "is_kept"),
    [
        (None, WORKSPACE, True),
        (None, (8 << 20) + (128 << 10), True),
        (None, 1 << 20, False),
        (":1024:1", 1 << 20, True),
        (":16:8:4096:2", (8 << 20) + (128 << 10), True),
    ],
    ids=["hopper", "before", "no size of torch's", "chosen", "chosen of two kinds"],
)
def test_a_workspace_is_known_by_its_size(
    torch: Torch,
    driver: EmulatedDriver,
    monkeypatch: pytest.MonkeyPatch,
    chosen: str | None,
    size: int,
    is_kept: bool,
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", chosen)
    pool, stream = MemoryPool(0), driver.capture_stream()
    torch.hold(pool.pool.id, size)
    keep_workspaces(driver, [stream], pool)
    assert bool(belongings(stream)) is is_kept


@pytest.mark.parametrize(("idle", "stays"), [(4, True), (16, False)], ids=["little", "much"])
def test_a_stream_is_given_up_where_far_more_lies_unused_beside_its_workspace(
    torch: Torch, driver: EmulatedDriver, idle: int, stays: bool
) -> None:
    pool, stream = MemoryPool(0), driver.capture_stream()
    with pool.use():
        torch.multiply()
    torch.hold(pool.pool.id, idle * WORKSPACE, "inactive")
    keep_workspaces(driver, [stream], pool)
    handle = stream.handle
    del stream
    assert (handle in driver.own_streams()) is stays


def test_what_torch_refuses_is_left_to_the_step(torch: Torch, driver: EmulatedDriver) -> None:
    torch.refuses = True
    pool, stream = MemoryPool(0), driver.capture_stream()
    assert not prepare_workspaces(driver, stream, pool, wanted=True)
    assert torch.used == []
    torch.refuses = False
    with pool.use():
        torch.multiply()
    keep_workspaces(driver, [stream], pool)
    assert [type(each) for each in belongings(stream)] == [Workspaces, KeptPool]


def test_streams_of_others_are_left_alone(torch: Torch, driver: EmulatedDriver) -> None:
    pool, stream = MemoryPool(0), driver.stream()
    assert not prepare_workspaces(driver, stream, pool, wanted=True)
    torch.hold(pool.pool.id, WORKSPACE)
    keep_workspaces(driver, [stream], pool)
    assert workspace_bytes(stream) == workspace_bytes("no stream") == 0


def test_without_torch_a_stream_has_no_belongings(
    driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    pool, stream = MemoryPool(0), driver.capture_stream()
    assert not prepare_workspaces(driver, stream, pool, wanted=True)
    keep_workspaces(driver, [stream], pool)
    assert belongings(stream) == []


def test_a_pool_that_a_stream_keeps_outlives_its_capture_and_no_longer_than_the_stream(
    torch: Torch, driver: EmulatedDriver
) -> None:
    pool, stream = MemoryPool(0), driver.capture_stream()
    gone = weakref.ref(pool.pool)
    with pool.use():
        torch.multiply()
    keep_workspaces(driver, [stream], pool)
    del pool
    gc.collect()
    assert gone() is not None
    driver.close()
    del stream
    gc.collect()
    assert gone() is None
