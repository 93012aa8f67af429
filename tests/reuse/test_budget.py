"""One budget of measured bytes in total: never exceeded, counters add up, thrash is warned of."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.caching import Steps, add_up, check, reasons
from helpers.tensors import cuda_driver, filled

import graphcore
from graphcore import CapacityError, GraphCache
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.executable.calibration import node_memory

MB = 10**6
BUDGET = 100 * MB


class Buckets:
    """Steps that each hold some 20 MB of memory of their own: a temporary and an output."""

    def __init__(self, driver: Driver, count: int) -> None:
        self.keys = list(range(count, 0, -1))
        self.x = filled(driver, 1.0, 2 * MB + 100_000 * count)

    def __call__(self, key: int) -> Callable[[], torch.Tensor]:
        return lambda: (self.x[: 2 * MB + 100_000 * key] + key) * 2


def test_200_captures_under_a_cap_of_100_mb_never_exceed_it(
    graphcore_driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    buckets = Buckets(graphcore_driver, 8)
    cache = GraphCache(max_bytes=BUDGET, driver=graphcore_driver)
    before = reserved(graphcore_driver)
    most_entries = 0
    with caplog.at_level(logging.WARNING, logger="graphcore"):
        for number in range(200):
            key = buckets.keys[number % len(buckets.keys)]
            executable = cache.get_or_capture(key, buckets(key), warmup=int(number < 8))
            assert cache.bytes <= BUDGET
            most_entries = max(most_entries, len(cache))
            if number % 40 == 0:
                check(executable, 2.0 * (1 + key))
                if not graphcore_driver.is_emulated:
                    assert reserved(graphcore_driver) - before <= BUDGET
    assert cache.peak_bytes <= BUDGET, "room was made before each capture"
    counted = cache.counters
    assert (counted.misses, counted.captures, counted.hits) == (200, 200, 0)
    assert counted.recaptures == 192
    assert counted.evicted == 200 - len(cache)
    add_up(cache)
    assert 2 <= most_entries < 8
    told = [line for line in caplog.messages if "thrashes" in line]
    assert len(told) == 1
    [thrash] = cache.warnings
    assert thrash.keys == 8  # type: ignore[union-attr]
    assert thrash.bytes > BUDGET  # type: ignore[union-attr]
    cache.close()
    assert cache.bytes == 0
    if not graphcore_driver.is_emulated:
        assert reserved(graphcore_driver) <= before


def reserved(driver: Driver) -> int:
    """What torch holds of the device for this process, beyond what it would give back."""
    if driver.is_emulated:
        return 0
    driver.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_stats()["reserved_bytes.all.current"])


def test_with_the_size_that_the_warning_names_nothing_is_captured_twice(
    graphcore_driver: Driver,
) -> None:
    steps = Steps(graphcore_driver, 64)
    small = GraphCache(max_entries=4, driver=graphcore_driver)
    for _ in range(6):
        for key in range(1, 6):
            small.get_or_capture(key, steps(key), warmup=0)
    [thrash] = small.warnings
    assert small.counters.hits == 0
    large = GraphCache(
        thrash.bytes,  # type: ignore[union-attr]
        thrash.keys,  # type: ignore[union-attr]
        driver=graphcore_driver,
    )
    for _ in range(6):
        for key in range(1, 6):
            large.get_or_capture(key, steps(key), warmup=0)
    assert (large.counters.captures, large.counters.evicted) == (5, 0)
    assert large.warnings == ()


def test_entry_bytes_are_pool_allocations_and_nodes(graphcore_driver: Driver) -> None:
    cache, steps = GraphCache(driver=graphcore_driver), Steps(graphcore_driver, 1000)
    executable = cache.get_or_capture(3, steps(3))
    report = executable.memory_report()  # type: ignore[union-attr]
    nodes = 2 * node_memory(graphcore_driver).bytes_per_node
    assert report.pool_bytes >= 8000
    assert cache.bytes == report.pool_bytes + report.allocation_bytes + round(nodes)
    assert cache.bytes == report.own_bytes


def test_the_cap_is_one_in_total_whatever_the_variants(graphcore_driver: Driver) -> None:
    cache, steps = GraphCache(max_entries=4, driver=graphcore_driver), Steps(graphcore_driver)
    for variant in ("greedy", "sampled", "speculative"):
        for key in range(3):
            cache.get_or_capture((variant, key), steps(key), warmup=0)
            assert len(cache) <= 4
    assert cache.counters.evicted == 5


@pytest.mark.parametrize("share_pool", [False, True])
def test_a_graph_that_alone_exceeds_the_budget_is_refused_and_given_back(
    graphcore_driver: Driver, share_pool: bool
) -> None:
    buckets = Buckets(graphcore_driver, 1)
    steps = Steps(graphcore_driver)
    cache = GraphCache(max_bytes=10 * MB, driver=graphcore_driver, share_pool=share_pool)
    cache.get_or_capture("small", steps(3))
    with pytest.raises(CapacityError, match=r"max_bytes=10000000 .*\n.*pool") as caught:
        cache.get_or_capture("large", buckets(1))
    if share_pool and not graphcore_driver.is_emulated:
        # the pool they share had to be made anew
        assert "small" not in cache
        assert any("evicted" in text or "left" in text for text in reasons(cache))
    else:
        assert cache.keys() == ["small"]
        assert getattr(caught.value, "__notes__", []) == []
    assert cache.bytes <= 10 * MB
    check(cache.get_or_capture("small", steps(3)), 7.0)
    add_up(cache)


def test_an_error_says_what_had_to_make_room_before(graphcore_driver: Driver) -> None:
    cache, steps = GraphCache(max_entries=1, driver=graphcore_driver), Steps(graphcore_driver)
    cache.get_or_capture(1, steps(1))
    with pytest.raises(ZeroDivisionError) as caught:
        cache.get_or_capture(2, lambda: 1 // 0)
    assert "the cache had already evicted to make room: 1" in caught.value.__notes__
    add_up(cache)


def test_only_pinned_entries_leave_no_room(graphcore_driver: Driver) -> None:
    cache, steps = GraphCache(max_entries=1, driver=graphcore_driver), Steps(graphcore_driver)
    cache.get_or_capture(1, steps(1))
    with cache.pin(1), pytest.raises(CapacityError, match="beside 1 entries that must stay"):
        cache.get_or_capture(2, steps(2))
    assert cache.keys() == [1]
    add_up(cache)


def test_65_keys_in_a_cache_of_64_are_warned_of_with_the_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = EmulatedDriver()
    cache = GraphCache(max_entries=64, driver=driver)
    with caplog.at_level(logging.WARNING, logger="graphcore"):
        for _ in range(2):
            for key in range(65):
                cache.get_or_capture(("decode", key), lambda: None, warmup=0)
    told = [line for line in caplog.messages if "cache" in line and "thrashes" in line]
    assert len(told) == 1
    assert "max_entries=65" in told[0]


def test_one_graph_for_each_length_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    driver = EmulatedDriver()
    cache = GraphCache(driver=driver)
    steps = Steps(driver)
    with caplog.at_level(logging.WARNING, logger="graphcore"):
        for length in range(40):
            cache.get_or_capture(("decode", length), steps(length), warmup=0)
    assert [line for line in caplog.messages if "never seen" in line] == [
        "each of the last 32 lookups captured a graph for a key never seen before; key[1] is 0, 1, "
        "2, 3, .... Pad inputs to a few sizes, and leave out of the key what differs from call to "
        "call (addresses, positions, request numbers)"
    ]


def test_memory_that_a_graph_allocates_counts_against_the_budget(graphcore_driver: Driver) -> None:
    from graphcore.driver.records import AllocParams, FreeParams

    def build() -> graphcore.Graph:
        graph = graphcore.Graph(graphcore_driver, graphcore_driver.create_graph())
        node = graphcore_driver.add_node(graph.handle, [], AllocParams(8 * MB))
        params: Any = graphcore_driver.node_params(node)
        graphcore_driver.add_node(graph.handle, [node], FreeParams(params.address))
        return graph

    cache = GraphCache(max_bytes=20 * MB, driver=graphcore_driver)
    for key in range(4):
        cache.get_or_build(key, build)
        assert cache.bytes <= 20 * MB
    assert cache.keys() == [2, 3]
    add_up(cache)


# ---- a shared pool -------------------------------------------------------------------------------


def test_entries_of_a_shared_pool_give_the_eager_results(graphcore_driver: Driver) -> None:
    cache = GraphCache(driver=graphcore_driver, share_pool=True)
    steps = Steps(graphcore_driver)
    executables = {key: cache.get_or_capture(key, steps(key)) for key in (3, 2, 1)}
    for key, executable in executables.items():
        check(executable, 2.0 * key + 1)
    add_up(cache)
    cache.close()
    assert (cache.bytes, cache.pool_bytes) == (0, 0)


@pytest.mark.gpu
def test_a_shared_pool_counts_once_and_goes_with_its_last_entry() -> None:
    driver = cuda_driver()
    buckets = Buckets(driver, 8)
    private = GraphCache(driver=driver)
    shared = GraphCache(driver=driver, share_pool=True)
    for key in buckets.keys:
        private.get_or_capture(key, buckets(key), warmup=1)
        shared.get_or_capture(key, buckets(key), warmup=1)
    # outputs stay apart, temporaries share
    assert shared.bytes < 0.75 * private.bytes
    assert shared.pool_bytes < shared.bytes < shared.pool_bytes + MB
    for key in buckets.keys[:-1]:
        shared.evict(key)
    assert shared.pool_bytes > 0
    shared.evict(buckets.keys[-1])
    assert (shared.pool_bytes, shared.bytes) == (0, 0)


@pytest.mark.gpu
def test_a_shared_pool_that_grew_past_the_budget_is_made_anew() -> None:
    driver = cuda_driver()
    buckets = Buckets(driver, 8)
    cache = GraphCache(max_bytes=BUDGET, driver=driver, share_pool=True)
    for _ in range(3):
        for key in buckets.keys:
            executable = cache.get_or_capture(key, buckets(key), warmup=1)
            assert cache.bytes <= BUDGET
            check(executable, 2.0 * (1 + key))
    add_up(cache)
    assert cache.counters.evicted > 0
