"""A cache whose captures share a pool: what counts, what goes, and when the pool is made anew.

With a pool that pretends, so that the emulated driver, which shares nothing, shows it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.caching import Steps, add_up, reasons

import graphcore
from graphcore import CapacityError, GraphCache
from graphcore.driver import Stream
from graphcore.driver.emulated import EmulatedDriver
from graphcore.interop.torch import MemoryPool
from graphcore.reuse import cache as cache_module
from graphcore.reuse import holding as holding_module

MIB = 1 << 20


class PretendedPool(MemoryPool):
    """Grows to the largest step so far, and never shrinks, as torch's do."""

    made = 0

    def __init__(self, device: int) -> None:
        super().__init__(device)
        self.size = 0
        type(self).made += 1

    def segments(self) -> list[tuple[int, int]]:
        return [(1 << 40, self.size)] if self.size else []


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> EmulatedDriver:
    real = graphcore.capture_function

    def capture_function(fn: Any, *, pool: Any = None, **options: Any) -> graphcore.Graph:
        graph = real(fn, pool=pool, **options)
        if pool is not None:
            pool.size = max(pool.size, graph.outputs)
            pool.note_capture(graph.runs)
            graph._owners = graph._owners.with_(pool, label="torch memory pool")
        return graph

    monkeypatch.setattr(cache_module, "capture_function", capture_function)
    monkeypatch.setattr(holding_module, "MemoryPool", PretendedPool)
    PretendedPool.made = 0
    return EmulatedDriver()


def step(size: int) -> Callable[[], int]:
    """A step whose temporaries take ``size`` MiB of the pool."""
    return lambda: size * MIB


def test_the_pool_counts_once_and_goes_with_the_last_entry(driver: EmulatedDriver) -> None:
    cache = GraphCache(driver=driver, share_pool=True)
    for size in (8, 4, 2, 6):
        cache.get_or_capture(size, step(size), warmup=0)
    assert cache.pool_bytes == cache.bytes == 8 * MIB
    assert "8.0 MiB of it shared" in repr(cache)
    for size in (8, 4, 2):
        cache.evict(size)
    assert cache.pool_bytes == 8 * MIB, "torch keeps the segments while one graph lies there"
    cache.evict(6)
    assert (cache.pool_bytes, cache.bytes) == (0, 0)
    cache.get_or_capture(2, step(2), warmup=0)
    assert (cache.pool_bytes, PretendedPool.made) == (2 * MIB, 2)


def test_a_pool_that_grew_past_the_budget_is_made_anew_for_what_fits_alone(
    driver: EmulatedDriver,
) -> None:
    cache = GraphCache(max_bytes=10 * MIB, driver=driver, share_pool=True)
    for size in (4, 8):
        cache.get_or_capture(size, step(size), warmup=0)
    pool = next(iter(cache._holding.pools.values()))
    pool.size = 12 * MIB  # type: ignore[attr-defined] # torch split it badly
    cache.get_or_capture(6, step(6), warmup=0)
    assert cache.keys() == [6]
    assert (cache.bytes, PretendedPool.made) == (6 * MIB, 2)
    assert sum("left the cache: budget" in text for text in reasons(cache)) == 2
    assert cache.counters.captures == 3
    add_up(cache)


def test_what_does_not_fit_a_pool_of_its_own_is_refused_and_the_pool_goes(
    driver: EmulatedDriver,
) -> None:
    cache = GraphCache(max_bytes=10 * MIB, driver=driver, share_pool=True)
    cache.get_or_capture(4, step(4), warmup=0)
    with pytest.raises(CapacityError, match=r"key 12: expected a graph that fits max_bytes"):
        cache.get_or_capture(12, step(12), warmup=0)
    assert (len(cache), cache.bytes) == (0, 0)
    cache.get_or_capture(4, step(4), warmup=0)
    assert cache.bytes == 4 * MIB
    add_up(cache)


def test_a_pool_with_a_pinned_entry_is_not_made_anew(driver: EmulatedDriver) -> None:
    cache = GraphCache(max_bytes=10 * MIB, driver=driver, share_pool=True)
    cache.get_or_capture(4, step(4), warmup=0)
    with cache.pin(4), pytest.raises(CapacityError, match="beside 1 entries that must stay"):
        cache.get_or_capture(12, step(12), warmup=0)
    assert cache.keys() == [4]
    assert PretendedPool.made == 1


def test_the_size_of_bulk_captures_is_that_of_the_largest(driver: EmulatedDriver) -> None:
    cache = GraphCache(max_bytes=70 * MIB, driver=driver, share_pool=True)
    cache.capture_all(list(range(1, 65)), lambda size: size * MIB, progress=False, warmup=0)
    assert (len(cache), cache.bytes) == (64, 64 * MIB)


def test_a_capture_waits_for_the_launches_that_work_in_its_pool(
    driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[Any] = []
    wait = Stream.wait
    monkeypatch.setattr(
        driver, "query_event", lambda _event: False
    )  # the launches run on, as far as anybody can tell

    def noting(self: Stream, event: Any, **options: Any) -> None:
        waits.append(self.handle)
        wait(self, event, **options)

    cache = GraphCache(driver=driver, share_pool=True)
    launched = [cache.get_or_capture(size, step(size), warmup=0) for size in (1, 2)]
    for executable in launched:
        executable.launch(driver.stream())
    monkeypatch.setattr(Stream, "wait", noting)
    cache.get_or_capture(3, step(3), warmup=0)
    [pool] = cache._holding.pools.values()
    assert waits == [pool.capture_stream(driver, blocking=True, products=False).handle] * 2
    monkeypatch.undo()
    driver.synchronize()
    cache.close()


def test_captures_that_share_nothing_wait_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = EmulatedDriver()
    cache, steps = GraphCache(driver=driver), Steps(driver)
    cache.get_or_capture(1, steps(1)).launch(driver.stream())
    monkeypatch.setattr(Stream, "wait", lambda *_, **__: pytest.fail("it waited"))
    assert isinstance(cache.get_or_capture(2, steps(2), warmup=0).outputs, torch.Tensor)
