"""Random use of a cache: whatever comes, limits hold, counters add up, launches are right."""

from __future__ import annotations

from typing import Any

from helpers.caching import Steps, add_up, check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphcore import CapacityError, GraphCache, GraphExec
from graphcore.driver.emulated import EmulatedDriver

KEYS = st.integers(1, 6)
ACTIONS = st.one_of(
    st.tuples(st.just("use"), KEYS),
    st.tuples(st.just("use"), KEYS),
    st.tuples(st.just("family"), KEYS),
    st.tuples(st.just("fail"), KEYS),
    st.tuples(st.just("stale"), KEYS),
    st.tuples(st.just("close"), KEYS),
    st.tuples(st.just("evict"), KEYS),
    st.tuples(st.just("pin"), KEYS),
    st.tuples(st.just("wait"), KEYS),
)


def act(cache: GraphCache, steps: Steps, clock: list[float], action: tuple[str, int]) -> None:
    what, key = action
    clock[0] += 1.0
    found: Any = cache.get(key) if what in ("stale", "close") else None
    if what in ("use", "family"):
        family = "odd" if what == "family" and key % 2 else None
        check(cache.get_or_capture(key, steps(key), family=family, warmup=0), 2.0 * key + 1)
    elif what == "fail" and key not in cache:
        try:
            cache.get_or_capture(key, lambda: 1 // 0, warmup=0)
        except ZeroDivisionError:
            return
        raise AssertionError("it did not raise")
    elif what == "stale" and found is not None:
        found.mark_stale("moved")
    elif what == "close" and found is not None:
        found.close()
    elif what == "evict":
        cache.evict(key)
    elif what == "wait":
        clock[0] += 10.0 * key
    elif what == "pin" and cache.get(key) is not None:
        with cache.pin(key) as pinned:
            try:
                check(cache.get_or_capture(7, steps(7), warmup=0), 15.0)
            except CapacityError:
                assert len(cache) == 1
            assert isinstance(pinned, GraphExec)
            check(pinned, 2.0 * key + 1)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    actions=st.lists(ACTIONS, min_size=1, max_size=25),
    entries=st.integers(1, 4),
    graphs=st.integers(1, 5),
    share_pool=st.booleans(),
)
def test_whatever_comes_limits_hold_and_counters_add_up(
    actions: list[tuple[str, int]], entries: int, graphs: int, share_pool: bool
) -> None:
    driver = EmulatedDriver()
    steps = Steps(driver)
    with GraphCache(driver=driver) as probe:
        probe.get_or_capture(1, steps(1), warmup=0)
        budget = probe.bytes * graphs
    free = driver.memory_info()[0]
    clock = [0.0]
    cache = GraphCache(
        budget,
        entries,
        30.0,
        clock=lambda: clock[0],
        driver=driver,
        share_pool=share_pool,
    )
    for action in actions:
        act(cache, steps, clock, action)
        assert len(cache) <= min(entries, graphs)
        assert cache.bytes <= budget
        add_up(cache)
    cache.close()
    assert cache.bytes == 0
    add_up(cache)
    assert driver.memory_info()[0] == free
