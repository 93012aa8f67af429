"""GraphCache: looking up, capturing at a miss, capturing again with a reason."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from helpers.caching import Steps, add_up, check, foreign_graph, reasons, state_of
from helpers.tensors import cuda_driver, filled

import graphcore
from graphcore import (
    CacheTypeError,
    CaptureError,
    ConfigurationError,
    EagerExec,
    GraphCache,
    LifecycleError,
    UpdateRefused,
)
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver

# ---- hits and misses ----------------------------------------------------------------------------


def test_a_miss_captures_and_a_hit_gives_the_same_executable(graphcore_driver: Driver) -> None:
    cache, steps = GraphCache(driver=graphcore_driver), Steps(graphcore_driver)
    executable = cache.get_or_capture("three", steps(3))
    check(executable, 7.0)
    ran = steps.runs
    assert cache.get_or_capture("three", steps(5)) is executable
    assert cache.get("three") is executable
    assert steps.runs == ran, "a hit runs nothing"
    steps.x.fill_(10.0)
    check(executable, 31.0)
    assert cache.get("other") is None
    assert (len(cache), "three" in cache, "other" in cache) == (1, True, False)
    counted = cache.counters
    assert (counted.hits, counted.misses, counted.absent) == (2, 1, 1)
    add_up(cache)
    cache.close()


def test_the_warm_up_and_the_options_of_a_capture_are_passed_on(graphcore_driver: Driver) -> None:
    cache, steps = GraphCache(driver=graphcore_driver), Steps(graphcore_driver)
    cache.get_or_capture(1, steps(1), warmup=1)
    assert steps.runs == 2
    stream = graphcore_driver.stream()
    executable = cache.get_or_capture(2, steps(2), stream=stream, on_legacy_work="ignore")
    assert any(owner.object is stream for owner in executable.owners)  # type: ignore[union-attr]
    with pytest.raises(CaptureError, match="expected at least 99 nodes"):
        cache.get_or_capture(3, steps(3), expect=99)
    add_up(cache)


@pytest.mark.parametrize("name", ["driver", "pool"])
def test_options_that_are_the_caches_own_are_refused(graphcore_driver: Driver, name: str) -> None:
    cache = GraphCache(driver=graphcore_driver, share_pool=True)
    with pytest.raises(ConfigurationError, match=f"{name}: expected none here"):
        cache.get_or_capture(1, lambda: None, **{name: None})


def test_two_devices_have_entries_of_their_own_under_one_key() -> None:
    first = EmulatedDriver(devices=2)
    second = first.for_device(1)
    cache = GraphCache()
    streams = [driver.stream(blocking=True) for driver in (first, second)]
    one, two = (
        cache.get_or_capture("key", Steps(driver)(1), stream=stream)
        for driver, stream in zip((first, second), streams, strict=True)
    )
    assert one is not two
    assert len(cache) == 2
    again = cache.get_or_capture("key", Steps(first)(1), stream=streams[0])
    assert again is one
    cache.clear()
    assert len(cache) == 0


def test_an_entry_of_another_context_is_another_entry() -> None:
    one, two = EmulatedDriver(), EmulatedDriver()
    assert one.context_id() != two.context_id()
    cache = GraphCache()
    made = [
        cache.get_or_capture("key", Steps(driver)(1), stream=driver.stream(blocking=True))
        for driver in (one, two)
    ]
    assert made[0] is not made[1]


@pytest.mark.parametrize("key", [[1], {"a": 1}, (1, [2]), torch.zeros(2)], ids=type)
@pytest.mark.parametrize("call", ["get", "get_or_capture", "contains", "evict"])
def test_a_key_that_can_change_is_refused_by_every_call(
    graphcore_driver: Driver, call: str, key: Any
) -> None:
    cache = GraphCache(driver=graphcore_driver)
    calls: dict[str, Any] = {
        "get": lambda: cache.get(key),
        "get_or_capture": lambda: cache.get_or_capture(key, lambda: None),
        "contains": lambda: key in cache,
        "evict": lambda: cache.evict(key),
    }
    with pytest.raises(CacheTypeError, match="key"):
        calls[call]()
    assert len(cache) == 0


def test_a_key_that_equals_another_of_another_kind_is_refused(graphcore_driver: Driver) -> None:
    cache, steps = GraphCache(driver=graphcore_driver), Steps(graphcore_driver)
    cache.get_or_capture((1, "a"), steps(1))
    with pytest.raises(
        ConfigurationError, match=r"got \(True, 'a'\), which Python takes for equal"
    ):
        cache.get_or_capture((True, "a"), steps(2))
    for call in (cache.get, cache.evict, cache.__contains__):
        with pytest.raises(ConfigurationError, match="which Python takes for equal"):
            call((True, "a"))
    assert cache.keys() == [(1, "a")]


def test_what_is_refused_is_no_lookup_and_the_counters_still_add_up() -> None:
    driver = EmulatedDriver()
    cache, steps = GraphCache(driver=driver), Steps(driver)
    cache.get_or_capture(1, steps(1))
    for key in ([1], float("nan"), torch.zeros(2), True, driver.alloc(64)):
        with pytest.raises((CacheTypeError, ConfigurationError)):
            cache.get_or_capture(key, steps(2))
    with pytest.raises(CacheTypeError):
        cache.get_or_capture(2, steps(2), family=[1])
    for key in ([1], float("nan"), torch.zeros(2)):
        with pytest.raises((CacheTypeError, ConfigurationError)):
            cache.get(key)
    add_up(cache)
    assert cache.counters.lookups == 1


def test_an_address_as_key_is_refused_before_anything_is_captured(
    graphcore_driver: Driver,
) -> None:
    cache, steps = GraphCache(driver=graphcore_driver), Steps(graphcore_driver)
    address = graphcore_driver.alloc(64)
    with pytest.raises(ConfigurationError, match=r"key\[1\]: expected no address, got 0x"):
        cache.get_or_capture(("decode", address + 8), steps(1))
    assert (len(cache), steps.runs) == (0, 0)
    graphcore_driver.free(address)


@pytest.mark.parametrize("call", ["get_or_capture", "get_or_build"])
def test_what_cannot_be_called_is_refused(graphcore_driver: Driver, call: str) -> None:
    cache = GraphCache(driver=graphcore_driver)
    with pytest.raises(ConfigurationError, match="expected a callable, got int"):
        getattr(cache, call)(1, 3)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"guard": "some"}, "guard: expected one of"),
        ({"driver": "cuda"}, "driver: expected an open driver"),
        ({"max_entries": 0}, "max_entries: expected"),
        ({"clock": None}, "clock: expected a function, got None"),
    ],
    ids=repr,
)
def test_a_cache_that_cannot_work_is_refused(options: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        GraphCache(**options)


def test_a_graph_that_is_built_is_cached_too(graphcore_driver: Driver) -> None:
    cache, steps = GraphCache(driver=graphcore_driver), Steps(graphcore_driver)

    def build() -> graphcore.Graph:
        return graphcore.capture_function(steps(4), driver=graphcore_driver)

    executable = cache.get_or_build("built", build)
    check(executable, 9.0)
    assert cache.get_or_build("built", build) is executable
    with pytest.raises(CacheTypeError, match="build: expected it to give a Graph, got int"):
        cache.get_or_build("other", lambda: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigurationError, match="build: expected a graph of driver"):
        cache.get_or_build("other", foreign_graph)
    add_up(cache)


# ---- again, and why -----------------------------------------------------------------------------


def test_every_capture_has_a_reason_at_info(
    graphcore_driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    cache, steps = GraphCache(max_entries=2, driver=graphcore_driver), Steps(graphcore_driver)
    with caplog.at_level(logging.INFO, logger="graphcore"):
        for key in (1, 2, 3, 1):
            cache.get_or_capture(key, steps(key))
        cache.get_or_capture(1, steps(1)).close()
        cache.get_or_capture(1, steps(1))
    told = [line for line in caplog.messages if line.startswith("cache: ")]
    assert told == ["cache: " + text for text in reasons(cache)]
    starts = [
        "key 1: miss: never captured: captured and instantiated, ",
        "key 2: miss: never captured",
        "key 1 left the cache: the number of entries, ",
        "key 3: miss: never captured",
        "key 2 left the cache: the number of entries",
        "key 1: re-capture: evicted 1 lookup ago for the number of entries: captured",
        "key 1 left the cache: its executable was closed by its user",
        "key 1: re-capture: its executable was closed by its user: captured",
    ]
    assert len(told) == len(starts)
    for text, start in zip(reasons(cache), starts, strict=True):
        assert text.startswith(start)
    assert cache.counters.recaptures == 2
    add_up(cache)


def test_a_stale_entry_is_captured_again_and_its_executable_updated(
    graphcore_driver: Driver,
) -> None:
    cache, steps = GraphCache(driver=graphcore_driver), Steps(graphcore_driver)
    executable = cache.get_or_capture("key", steps(3))
    check(executable, 7.0)
    assert isinstance(executable, graphcore.GraphExec)
    steps.x = filled(graphcore_driver, 5.0)
    executable.mark_stale("moved", label="kv_k")
    with pytest.raises(graphcore.StaleGraphError, match="kv_k"):
        executable.launch()
    assert cache.get_or_capture("key", steps(3)) is executable
    check(executable, 16.0)
    assert "re-capture: stale: kv_k: marked: expected as captured, got moved" in reasons(cache)[-1]
    counted = cache.counters
    assert (counted.stale, counted.updated, counted.instantiated) == (1, 1, 1)
    add_up(cache)


@pytest.mark.parametrize(("guard", "captures"), [("full", 2), ("owners", 1), (None, 1)])
def test_a_full_guard_finds_a_moved_buffer_at_the_lookup(
    graphcore_driver: Driver, guard: Any, captures: int
) -> None:
    cache = GraphCache(driver=graphcore_driver, guard=guard)
    x = filled(graphcore_driver, 2.0)

    def build() -> graphcore.Graph:
        with graphcore.capture(driver=graphcore_driver) as capture:
            capture.keep(x, "kv_k")
            x.mul_(2)
        return capture.graph

    executable = cache.get_or_build("key", build)
    x.data = x.detach().clone()
    assert cache.get_or_build("key", build) is executable
    assert cache.counters.captures == captures
    if captures == 2:
        assert "re-capture: stale: kv_k: address: expected" in reasons(cache)[-1]


# ---- families -----------------------------------------------------------------------------------


def test_keys_of_a_family_take_turns_in_one_executable(graphcore_driver: Driver) -> None:
    cache, steps = GraphCache(driver=graphcore_driver), Steps(graphcore_driver)
    first = cache.get_or_capture(1, steps(1), family="decode")
    for key in (2, 3, 1, 2):
        executable = cache.get_or_capture(key, steps(key), family="decode")
        assert executable is first
        check(executable, 2.0 * key + 1)
    assert cache.keys() == [2]
    counted = cache.counters
    assert (counted.instantiated, counted.updated, counted.recaptures) == (1, 4, 2)
    assert "update instead of an instantiation (updated in place)" in reasons(cache)[-1]
    assert "re-capture: its executable was updated to another key: 2" in reasons(cache)[-2]
    other = cache.get_or_capture(7, steps(7), family="prefill")
    assert other is not first
    add_up(cache)
    cache.close()


def test_another_topology_is_reinstantiated_behind_the_executable(
    graphcore_driver: Driver,
) -> None:
    cache, steps = GraphCache(driver=graphcore_driver), Steps(graphcore_driver)
    first = cache.get_or_capture(1, steps(1), family="decode")
    executable = cache.get_or_capture(2, lambda: steps.x * 2 + 1 + 1, family="decode")
    assert executable is first
    check(executable, 6.0)
    assert cache.counters.reinstantiated == 1
    assert "re-instantiated behind the same executable (topology_changed" in reasons(cache)[-1]
    add_up(cache)


def test_updates_in_a_row_are_never_given_up(graphcore_driver: Driver) -> None:
    cache, steps = GraphCache(driver=graphcore_driver), Steps(graphcore_driver)
    for key in range(1, 21):
        check(cache.get_or_capture(key, steps(key), family="decode", warmup=0), 2.0 * key + 1)
    assert (cache.counters.updated, cache.counters.eager, len(cache)) == (19, 0, 1)


def test_a_strict_cache_raises_instead_of_reinstantiating(graphcore_driver: Driver) -> None:
    cache = GraphCache(driver=graphcore_driver, strict=True)
    steps = Steps(graphcore_driver)
    first = cache.get_or_capture(1, steps(1), family="decode")
    before = state_of(cache)
    with pytest.raises(UpdateRefused, match="topology_changed"):
        cache.get_or_capture(2, lambda: steps.x * 2 + 1 + 1, family="decode")
    assert state_of(cache) == before
    assert cache.get(1) is first
    check(first, 3.0)
    add_up(cache)


def test_a_pinned_executable_is_not_updated_to_another_key(graphcore_driver: Driver) -> None:
    cache, steps = GraphCache(driver=graphcore_driver), Steps(graphcore_driver)
    first = cache.get_or_capture(1, steps(1), family="decode")
    with cache.pin(1) as pinned:
        assert pinned is first
        other = cache.get_or_capture(2, steps(2), family="decode")
        assert other is not first
    check(first, 3.0)
    check(other, 5.0)
    assert cache.keys() == [1, 2]


# ---- graphs off ---------------------------------------------------------------------------------


def test_with_graphs_off_each_launch_calls_the_function(
    graphcore_driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRAPHCORE_DISABLE", "1")
    cache, steps = GraphCache(driver=graphcore_driver), Steps(graphcore_driver)
    with caplog.at_level(logging.INFO, logger="graphcore"):
        for _ in range(3):
            executable = cache.get_or_capture(3, steps(3))
            assert isinstance(executable, EagerExec)
            check(executable, 7.0)
    assert [line for line in caplog.messages if "GRAPHCORE_DISABLE=1" in line] == [
        "cache: GRAPHCORE_DISABLE=1: no graphs, every launch calls its function"
    ]
    assert steps.runs == 3
    assert (len(cache), cache.counters.eager, cache.counters.misses) == (0, 3, 0)
    with pytest.raises(CacheTypeError):
        cache.get_or_capture([1], steps(1))  # type: ignore[arg-type]
    assert list(cache.capture_all([1, 2], steps.of, progress=False)) == [1, 2]


def test_an_eager_executable_has_the_calls_of_a_graphs(
    graphcore_driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHCORE_DISABLE", "1")
    steps = Steps(graphcore_driver)
    with GraphCache(driver=graphcore_driver).get_or_capture(3, steps(3)) as executable:
        executable.upload()
        assert executable.check() == []
        assert executable.outputs is None
        with graphcore_driver.stream() as stream:
            executable.launch(stream)
            graphcore_driver.synchronize()
        assert executable.outputs.tolist() == [7.0] * 4
        assert "no graph: GRAPHCORE_DISABLE=1" in repr(executable)
    assert executable.is_closed
    with pytest.raises(LifecycleError, match="closed"):
        executable.launch()


def test_a_strict_cache_does_not_run_eagerly(
    graphcore_driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHCORE_DISABLE", "1")
    strict = GraphCache(driver=graphcore_driver, strict=True)
    with pytest.raises(CaptureError, match="GRAPHCORE_DISABLE=1 turns graphs off, and the cache"):
        strict.get_or_capture(1, lambda: None)
    with pytest.raises(CaptureError, match="GRAPHCORE_DISABLE=1"):
        GraphCache(driver=graphcore_driver).get_or_build(1, foreign_graph)


# ---- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt], ids=lambda e: e.__name__)
@pytest.mark.parametrize("at", ["warm-up", "capture"])
@pytest.mark.parametrize("share_pool", [False, True])
def test_an_exception_of_the_function_leaves_the_cache_as_before(
    graphcore_driver: Driver, error: type[BaseException], at: str, share_pool: bool
) -> None:
    cache = GraphCache(driver=graphcore_driver, share_pool=share_pool)
    steps = Steps(graphcore_driver)
    first = cache.get_or_capture(1, steps(1))
    before = state_of(cache)

    def failing() -> None:
        steps(2)()
        raise error

    with pytest.raises(error):
        cache.get_or_capture(2, failing, warmup=1 if at == "warm-up" else 0)
    assert state_of(cache) == before
    assert cache.counters.failures == 1
    check(cache.get_or_capture(2, steps(2)), 5.0)
    check(first, 3.0)
    add_up(cache)


def test_a_stale_entry_stays_where_its_new_capture_fails(graphcore_driver: Driver) -> None:
    cache, steps = GraphCache(driver=graphcore_driver), Steps(graphcore_driver)
    executable = cache.get_or_capture(1, steps(1))
    assert isinstance(executable, graphcore.GraphExec)
    executable.mark_stale("moved")
    with pytest.raises(ZeroDivisionError):
        cache.get_or_capture(1, lambda: 1 // 0)
    assert cache.keys() == [1]
    assert cache.get_or_capture(1, steps(1)) is executable
    check(executable, 3.0)


def test_what_fails_after_the_capture_leaves_neither_entry_nor_graph() -> None:
    driver = EmulatedDriver()
    cache, steps = GraphCache(driver=driver), Steps(driver)
    cache.get_or_capture(1, steps(1))
    before, free = state_of(cache), driver.memory_info()[0]
    driver.faults.inject("instantiate")
    with pytest.raises(graphcore.CudaError):
        cache.get_or_capture(2, steps(2))
    assert state_of(cache) == before
    gc.collect()
    assert driver.memory_info()[0] == free
    add_up(cache)


def test_the_function_may_look_up_but_not_capture_or_take_away(graphcore_driver: Driver) -> None:
    cache, steps = GraphCache(driver=graphcore_driver), Steps(graphcore_driver)
    inner = cache.get_or_capture("inner", steps(1))

    def outer() -> torch.Tensor:
        assert cache.get("inner") is inner
        for call in (
            lambda: cache.get_or_capture("new", steps(2)),
            lambda: cache.evict("inner"),
            cache.clear,
            cache.close,
            cache.collect,
            lambda: cache.capture_all([1], steps.of, progress=False),
        ):
            with pytest.raises(LifecycleError, match="the cache is capturing key 'outer'"):
                call()
        return steps(3)()

    check(cache.get_or_capture("outer", outer), 7.0)
    assert cache.keys() == ["inner", "outer"]


def test_a_cached_graph_becomes_part_of_a_capture_and_outlives_its_entry(
    graphcore_driver: Driver,
) -> None:
    cache, steps = GraphCache(driver=graphcore_driver), Steps(graphcore_driver)
    inner = cache.get_or_capture("inner", steps(3))
    output = inner.outputs
    with graphcore.capture(driver=graphcore_driver) as capture:
        inner.launch(capture.stream)
    cache.close()
    output.fill_(float("nan"))
    with capture.graph.instantiate() as executable:
        executable.launch()
        graphcore_driver.synchronize()
    assert output.tolist() == [7.0] * 4


def test_inside_a_capture_a_miss_is_refused_and_harms_nothing(graphcore_driver: Driver) -> None:
    cache = GraphCache(driver=graphcore_driver, max_entries=1)
    steps = Steps(graphcore_driver)
    cache.get_or_capture(1, steps(1))
    with graphcore.capture(driver=graphcore_driver) as capture:
        with pytest.raises(CaptureError, match="is under way on this thread"):
            cache.get_or_capture(2, steps(2))
        steps.x.add_(1)
    assert len(capture.graph.snapshot().nodes) == 1
    assert cache.keys() == [1]


@pytest.mark.gpu
def test_an_address_of_a_torch_tensor_as_key_is_refused() -> None:
    driver = cuda_driver()
    cache, steps = GraphCache(driver=driver), Steps(driver)
    with pytest.raises(ConfigurationError, match="key: expected no address"):
        cache.get_or_capture(steps.x.data_ptr(), steps(1))
