"""Ctrl-C anywhere in a cache: it goes on working, and gives everything back."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from helpers.caching import Steps, check
from helpers.interrupts import press_at

from graphcore import GraphCache
from graphcore.driver.emulated import EmulatedDriver
from graphcore.executable.calibration import node_memory

_FILES = tuple(
    f"reuse/{name}.py" for name in ("cache", "counters", "filling", "holding", "serving")
)
_EVERY = 3


def work(cache: GraphCache, steps: Steps) -> None:
    """Hits, misses, evictions, an update, a stale entry, one that is taken away."""
    for key in (1, 2, 3, 3):
        cache.get_or_capture(key, steps(key), warmup=0)
    for key in (4, 5):
        executable: Any = cache.get_or_capture(key, steps(key), family="f", warmup=0)
    executable.mark_stale("moved")
    cache.get_or_capture(5, steps(5), family="f", warmup=0)
    cache.evict(5)


# in a finalizer nothing can be raised: Python prints it and goes on
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_line_leaves_a_cache_that_works() -> None:
    driver = EmulatedDriver()
    node_memory(driver)

    def press(number: int) -> tuple[GraphCache, Steps, int, str | None]:
        cache, steps = GraphCache(max_entries=2, driver=driver), Steps(driver)
        return cache, steps, *press_at(number, lambda: work(cache, steps), _FILES)

    places = press(0)[2]
    assert places > 300
    for number in range(1, places, _EVERY):
        cache, steps, _, where = press(number)
        for key in (1, 2, 4):
            family = "f" if key == 4 else None
            check(cache.get_or_capture(key, steps(key), family=family, warmup=0), 2.0 * key + 1)
            assert len(cache) <= 2, where
        counted = cache.counters
        assert counted.lookups == counted.hits + counted.misses + counted.absent, where
        assert counted.misses == counted.captures + counted.failures, where
        cache.close()
        assert (cache.bytes, len(cache)) == (0, 0), where
        assert not cache._holding.families, where


def test_ctrl_c_while_memory_is_measured_leaves_no_executable() -> None:
    files = ("executable/calibration.py",)
    places, _ = press_at(0, lambda: node_memory(EmulatedDriver()), files)
    for number in (*range(1, 40), *range(40, places, places // 40)):
        driver = EmulatedDriver()
        _, where = press_at(number, functools.partial(node_memory, driver), files)
        assert len(driver._machine.executables._items) <= 1, where  # one that had no name yet
