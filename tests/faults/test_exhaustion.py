"""Memory runs out: the error says in bytes what was needed and what there was, nothing is left
behind, what stood before is right, and the same operation goes well once there is memory.

On a device each case has a process of its own, in which plain allocations take nearly everything.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.caching import Steps, add_up, check
from helpers.contract import refused
from helpers.exhaustion import EMULATED_MEMORY, MIB, Held, only, run_out, settle, torch_memory
from helpers.isolated import run_script
from helpers.kernels import ONE_BLOCK, add_one
from helpers.tensors import filled, replay

import graphcore
from graphcore import CapacityError, GraphCache
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.emulated.execution import BYTES_PER_NODE
from graphcore.errors import CudaError
from graphcore.reuse.decisions import Cause, Eviction

Exhausted = Callable[[str, str], None]

_ON_DEVICE = """
from helpers.exhaustion import on_device
from helpers.exhaustion_{part} import {case}
on_device({case})
"""


def _emulated(part: str, case: str) -> None:
    module = importlib.import_module(f"helpers.exhaustion_{part}")
    run_out(getattr(module, case), EmulatedDriver(total_memory=EMULATED_MEMORY))


def _cuda(part: str, case: str) -> None:
    done = run_script(_ON_DEVICE.format(part=part, case=case))
    assert done.survived, done.stderr


@pytest.fixture(
    params=["emulated", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.exclusive])]
)
def exhausted(request: pytest.FixtureRequest) -> Exhausted:
    """Runs a case of ``helpers.exhaustion_...`` by its name."""
    return _emulated if request.param == "emulated" else _cuda


# ---- graphs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["TorchInACapture", "TorchInAWarmUp"])
def test_a_step_without_memory_for_its_tensors_leaves_no_graph_and_is_captured_afterwards(
    exhausted: Exhausted, case: str
) -> None:
    exhausted("graphs", case)


def test_a_launch_without_memory_for_what_the_graph_allocates_runs_nothing(
    exhausted: Exhausted,
) -> None:
    exhausted("graphs", "MemoryOfTheGraph")


def test_an_executable_without_memory_is_not_made_and_its_need_is_told(
    exhausted: Exhausted,
) -> None:
    exhausted("graphs", "ManyNodes")


def test_where_an_update_finds_no_memory_for_another_executable_the_old_one_goes_on(
    exhausted: Exhausted,
) -> None:
    exhausted("graphs", "Reinstantiation")


# ---- caches of keys and values, runners, buckets ------------------------------------------------


def test_a_static_cache_without_memory_tells_what_all_of_it_takes(exhausted: Exhausted) -> None:
    exhausted("decode", "KeysAndValues")


@pytest.mark.parametrize("case", ["Runner", "FirstPrompt"])
def test_a_runner_without_memory_decodes_once_there_is(exhausted: Exhausted, case: str) -> None:
    exhausted("decode", case)


def test_buckets_without_memory_leave_none_of_them(exhausted: Exhausted) -> None:
    exhausted("decode", "Buckets")


# ---- experts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["Pool", "Growth", "Admission", "Staging"])
def test_experts_without_memory_for_slots_or_scratch_leave_those_that_are_there(
    exhausted: Exhausted, case: str
) -> None:
    exhausted("moe", case)


# ---- caches of executables ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", ["OneEntry", "OneEntryInASharedPool", "StrictCache", "OverTheBudget"]
)
def test_a_cache_without_memory_for_a_key_is_as_before(exhausted: Exhausted, case: str) -> None:
    exhausted("graphs", case)


class Scarce:
    """A cache of entries of a unit of memory each, and a small device."""

    def __init__(self, **options: Any) -> None:
        self.driver = EmulatedDriver(total_memory=EMULATED_MEMORY)
        self.cache = GraphCache(driver=self.driver, **options)

    def fill(self, count: int) -> None:
        self.steps = Steps(self.driver, MIB // 4)
        for key in range(1, count + 1):
            self.get(key)
        self.size = self.cache.bytes // count

    def get(self, key: Any) -> Any:
        return self.cache.get_or_capture(key, self.steps(key), warmup=0)

    def right(self, *keys: int) -> None:
        self.steps.x.fill_(2.0)
        for key in keys:
            check(self.cache.get(key), 2.0 * key + 1)


@contextmanager
def scarce(count: int, **options: Any) -> Iterator[Scarce]:
    made = Scarce(**options)
    with torch_memory(made.driver):
        made.fill(count)
        yield made


def departures(cache: GraphCache) -> list[tuple[Any, Cause]]:
    evictions = [each for each in cache.decisions if isinstance(each, Eviction)]
    return [(each.key, each.departure.cause) for each in evictions]


def test_entries_go_for_want_of_memory_one_and_then_twice_as_many_until_there_is_enough(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with scarce(8) as made:
        wide = made.steps.x.repeat(2)
        made.cache.get(1)  # so that it goes last
        with only(made.driver, made.size // 2), caplog.at_level(logging.WARNING, "graphcore"):
            made.get(9)
            assert departures(made.cache) == [(2, Cause.MEMORY)], "one entry is enough"
            captured = made.cache.get_or_capture("wide", lambda: torch.cat([wide, wide]), warmup=0)
            assert [key for key, _ in departures(made.cache)] == [2, 3, 4, 5]
            assert made.cache.keys() == [6, 7, 8, 1, 9, "wide"]
            wide.fill_(3.0)
            check(captured, 3.0)
            made.right(1, 6, 7, 8, 9)
            add_up(made.cache)
    assert "key 9: device memory ran out (" in caplog.text
    assert "tried again without 2" in caplog.text


def test_what_is_pinned_stays_and_the_error_names_what_went_for_nothing() -> None:
    with scarce(4) as made, only(made.driver, made.size // 2):
        too_large = lambda: torch.zeros(32 * MIB)  # noqa: E731
        with made.cache.pin(3), pytest.raises(torch.OutOfMemoryError) as caught:
            made.cache.get_or_capture("too large", too_large, warmup=0)
        assert caught.value.__notes__[-1] == ("the cache had already evicted to make room: 1, 2, 4")
        assert made.cache.keys() == [3]
        made.right(3)
        made.get(1)
        made.right(1, 3)
        add_up(made.cache)


def test_a_strict_cache_gives_no_entry_up_for_want_of_memory() -> None:
    with scarce(3, strict=True) as made, only(made.driver, made.size // 2):
        with pytest.raises(torch.OutOfMemoryError):
            made.get(4)
        assert made.cache.keys() == [1, 2, 3]
        made.cache.evict(2)
        settle(made.driver)
        made.get(4)
        made.right(1, 3, 4)


def test_a_graph_that_is_captured_is_not_captured_again_where_its_executable_finds_no_memory() -> (
    None
):
    nodes, runs = 200, []
    driver = EmulatedDriver(total_memory=EMULATED_MEMORY)
    cache, y = GraphCache(driver=driver), filled(driver, 0.0)
    function, arguments = driver.function(add_one), add_one.pack(y.data_ptr(), 4)

    def step() -> None:
        runs.append(1)
        stream = graphcore.driver.active.current().stream
        for _ in range(nodes):
            driver.launch(function, ONE_BLOCK, arguments, stream)

    def build() -> graphcore.Graph:
        return graphcore.capture_function(step, driver=driver, warmup=0)

    for key in (1, 2):
        cache.get_or_build(key, build)
    with torch_memory(driver), only(driver, nodes * BYTES_PER_NODE // 2):
        made = cache.get_or_build(3, build)
        assert len(runs) == 3
        assert departures(cache) == [(1, Cause.MEMORY)]
        y.fill_(0.5)
        replay(made)
        assert y.tolist() == [nodes + 0.5] * 4
        runs.clear()
        # what a user's function makes is not made twice: it says nothing of that
        with refused("OUT_OF_MEMORY"):
            cache.get_or_build(4, lambda: runs.append(1) or driver.alloc(EMULATED_MEMORY))
        assert len(runs) == 1
        assert cache.keys() == [2, 3]
    add_up(cache)


def test_a_stale_entry_keeps_its_executable_where_another_one_can_go() -> None:
    with scarce(2) as made, only(made.driver, made.size // 2):
        executable = made.get(1)
        executable.mark_stale("moved")
        assert made.get(1) is executable
        assert departures(made.cache) == [(2, Cause.MEMORY)]
        made.right(1)
        assert made.cache.counters.stale == made.cache.counters.updated == 1
        add_up(made.cache)


def test_the_budget_speaks_before_the_device_does() -> None:
    with scarce(2, max_bytes=5 * MIB) as made:
        before = Held.of(made.driver)
        with made.cache.pin(1), made.cache.pin(2), pytest.raises(CapacityError) as caught:
            made.cache.get_or_capture("wide", lambda: made.steps.x.repeat(8), warmup=0)
        assert "expected a graph that fits max_bytes=5242880" in str(caught.value)
        del caught
        assert Held.of(made.driver).is_like(before, 0)
        made.right(1, 2)


# ---- what is said -------------------------------------------------------------------------------


def test_an_allocation_that_finds_no_room_says_how_much_there_is_and_what_to_do() -> None:
    driver = EmulatedDriver(total_memory=1000)
    held = driver.alloc(300)
    with pytest.raises(CudaError) as caught:
        driver.alloc(900)
    assert "asked for 900 bytes, 700 of 1000 are free" in str(caught.value)
    assert caught.value.hint is not None
    assert "memory_report() tells what takes it" in caught.value.hint
    driver.free(held)
    driver.free(driver.alloc(900))
