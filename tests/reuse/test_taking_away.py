"""GraphCache: what takes entries away, its end, and the table it shows."""

from __future__ import annotations

import copy
import weakref

import pytest
from helpers.caching import Steps, add_up, check, foreign_graph, reasons

from graphcore import (
    CacheTypeError,
    ConfigurationError,
    GraphCache,
    LifecycleError,
)
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# ---- taking away --------------------------------------------------------------------------------


def test_what_is_taken_away_is_closed_and_gives_back_its_memory(graphcore_driver: Driver) -> None:
    cache, steps = GraphCache(driver=graphcore_driver), Steps(graphcore_driver)
    executable = cache.get_or_capture(1, steps(1))
    check(executable, 3.0)
    held = next(iter(executable.owners)).object  # type: ignore[union-attr]
    watch = weakref.ref(held)
    del held
    assert cache.evict(1)
    assert not cache.evict(1)
    assert executable.is_closed
    with pytest.raises(LifecycleError, match="closed"):
        executable.launch()
    assert (len(cache), cache.bytes) == (0, 0)
    assert watch() is None
    add_up(cache)


def test_a_pinned_entry_is_not_taken_away(graphcore_driver: Driver) -> None:
    cache = GraphCache(max_entries=2, driver=graphcore_driver)
    steps = Steps(graphcore_driver)
    for key in (1, 2):
        cache.get_or_capture(key, steps(key))
    with cache.pin(1) as executable:
        for call in (lambda: cache.evict(1), cache.clear, cache.close):
            with pytest.raises(LifecycleError, match="key 1: expected an entry that may go"):
                call()
        cache.get_or_capture(3, steps(3))
        assert cache.keys() == [1, 3], "the least recently used that is not pinned went"
        check(executable, 3.0)
    cache.get_or_capture(4, steps(4))
    assert 1 not in cache
    with (
        pytest.raises(ConfigurationError, match="key: expected one that is in the cache, got 9"),
        cache.pin(9),
    ):
        pass
    add_up(cache)


def test_what_lies_idle_goes_by_the_clock(graphcore_driver: Driver) -> None:
    clock = Clock()
    cache = GraphCache(idle_seconds=60, clock=clock, driver=graphcore_driver)
    steps = Steps(graphcore_driver)
    for key in (1, 2, 3):
        cache.get_or_capture(key, steps(key))
    clock.now = 50.0
    cache.get(2)
    clock.now = 70.0
    with cache.pin(3):
        assert cache.keys() == [2, 3], "who asks for one keeps it; 1 lay idle"
        clock.now = 140.0
        assert cache.collect() == 1
    assert cache.keys() == [3]
    clock.now = 200.0
    assert cache.collect() == 1
    assert (len(cache), cache.counters.evicted) == (0, 3)
    assert "lying idle" in reasons(cache)[-1]
    add_up(cache)


def test_at_its_end_a_cache_gives_everything_back(graphcore_driver: Driver) -> None:
    steps = Steps(graphcore_driver)
    with GraphCache(driver=graphcore_driver, share_pool=True) as cache:
        executables = [cache.get_or_capture(key, steps(key)) for key in (1, 2)]
        check(executables[0], 3.0)
    assert all(executable.is_closed for executable in executables)
    assert (len(cache), cache.bytes) == (0, 0)
    cache.close()
    for call in (
        lambda: cache.get(1),
        lambda: cache.get_or_capture(1, steps(1)),
        lambda: cache.evict(1),
        cache.collect,
        lambda: cache.get_or_build(1, foreign_graph),
    ):
        with pytest.raises(LifecycleError, match="expected an open cache, got a closed one"):
            call()


def test_a_cache_is_not_copied(graphcore_driver: Driver) -> None:
    with pytest.raises(CacheTypeError, match="cannot be copied"):
        copy.copy(GraphCache(driver=graphcore_driver))


# ---- what it shows ------------------------------------------------------------------------------


def test_a_cache_reads_as_a_table(graphcore_driver: Driver) -> None:
    clock = Clock()
    cache = GraphCache(10**9, 8, clock=clock, driver=graphcore_driver)
    steps = Steps(graphcore_driver)
    cache.get_or_capture(("decode", 1), steps(1))
    cache.get_or_capture(("decode", 2), steps(2), family="decode")
    clock.now = 5.0
    cache.get(("decode", 1))
    clock.now = 7.0
    with cache.pin(("decode", 1)):
        lines = repr(cache).splitlines()
    assert lines[0].startswith("<GraphCache 2 of 8 entries, ")
    assert " of 953.7 MiB" in lines[0]
    assert lines[1].split()[:4] == ["2", "hits,", "2", "misses,"]
    assert lines[2].split() == ["key", "nodes", "memory", "uses", "idle"]
    rows = [line.split() for line in lines[3:]]
    assert [row[:3] for row in rows] == [["('decode',", "1)", "2"], ["('decode',", "2)", "2"]]
    assert lines[3].endswith("0 s  pinned")
    assert lines[4].endswith("7 s  family 'decode'")


def test_a_budget_beyond_every_float_reads_as_a_table() -> None:
    assert repr(GraphCache(10**400, driver=EmulatedDriver())).startswith("<GraphCache 0 entries")


def test_a_long_table_is_cut() -> None:
    driver = EmulatedDriver()
    cache = GraphCache(driver=driver)
    for key in range(25):
        cache.get_or_capture(("x" * 60, key), lambda: None, warmup=0)
    lines = repr(cache).splitlines()
    assert lines[-1] == "  ... and 5 more"
    assert max(map(len, lines)) < 100
