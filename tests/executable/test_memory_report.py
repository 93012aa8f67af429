"""Memory reports of graphs, and the measured figure for a node behind them."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref

import pytest
import torch
from helpers.contract import Bench, in_thread
from helpers.kernels import add_one, set_value
from helpers.tensors import cuda_driver, filled

import graphcore
from graphcore import Graph, LifecycleError
from graphcore.driver import CaptureMode, Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.emulated.execution import BYTES_PER_NODE
from graphcore.driver.records import AllocParams, ChildParams, FreeParams
from graphcore.executable import calibration
from graphcore.executable.calibration import node_memory, slope
from graphcore.executable.memory_report import covered_bytes, in_words

MIB = 1 << 20


# ---- a node's bytes -----------------------------------------------------------------------------


@pytest.mark.exclusive
def test_a_nodes_bytes_are_measured_and_all_given_back(graphcore_driver: Driver) -> None:
    free = graphcore_driver.memory_info()[0]
    measured = node_memory(graphcore_driver)
    assert measured.is_measured
    if graphcore_driver.is_emulated:
        assert measured.bytes_per_node == BYTES_PER_NODE
        assert graphcore_driver.memory_info()[0] == free
    assert 64 < measured.bytes_per_node < 65536
    assert measured.of(100) == round(measured.bytes_per_node * 100)


def test_a_driver_is_measured_once_over_100_instantiations() -> None:
    made = []

    class Counting(EmulatedDriver):
        def instantiate(self, graph, **options):  # type: ignore[no-untyped-def]
            made.append(graph)
            return super().instantiate(graph, **options)

    driver = Counting()
    assert node_memory(driver) is node_memory(driver)
    assert len(made) == 100
    watch = weakref.ref(driver)
    del driver, made[:]
    gc.collect()
    assert watch() is None, "the figure must not keep the driver"


def test_measuring_inside_a_capture_is_refused_and_leaves_it_whole(
    graphcore_driver: Driver,
) -> None:
    x = filled(graphcore_driver, 1.0)
    with graphcore.capture(driver=graphcore_driver) as capture:
        with pytest.raises(LifecycleError, match=r"memory per node: the capture .* is under way"):
            node_memory(graphcore_driver)
        x.add_(1)
    assert len(capture.graph.snapshot().nodes) == 1


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_measuring_breaks_no_capture_of_another_thread(
    graphcore_driver: Driver, mode: CaptureMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_known", weakref.WeakKeyDictionary())
    x = filled(graphcore_driver, 1.0)
    with graphcore.capture(driver=graphcore_driver, mode=mode) as capture:
        assert in_thread(lambda: node_memory(graphcore_driver)).bytes_per_node > 0
        x.add_(1)
    assert len(capture.graph.snapshot().nodes) == 1


def test_threads_that_ask_at_once_measure_one_after_another() -> None:
    made = []

    class Counting(EmulatedDriver):
        def instantiate(self, graph, **options):  # type: ignore[no-untyped-def]
            made.append(threading.get_ident())
            time.sleep(1e-5)  # lets the other one come in between
            return super().instantiate(graph, **options)

    driver = Counting()
    found = []
    asking = [threading.Thread(target=lambda: found.append(node_memory(driver))) for _ in range(2)]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    assert found[0] is found[1]
    assert len(made) == 100
    assert len(set(made)) == 1


def test_a_failure_while_measuring_leaves_nothing() -> None:
    driver = EmulatedDriver()
    driver.faults.inject("instantiate", after=50)
    free = driver.memory_info()[0]
    with pytest.raises(graphcore.CudaError):
        node_memory(driver)
    assert driver.memory_info()[0] == free
    assert node_memory(driver).is_measured


def test_where_memory_is_short_measuring_takes_none_and_fails_nothing() -> None:
    driver = EmulatedDriver(total_memory=100_000)
    assert not node_memory(driver).is_measured
    assert driver.memory_info() == (100_000, 100_000)


READINGS = {
    "smooth": [1000 * MIB - 5 * index for index in range(21)],
    "somebody takes a GiB in between": [
        1000 * MIB - 5 * index - (1024 * MIB if index > 7 else 0) for index in range(21)
    ],
    "somebody gives a GiB back and takes it again": [
        1000 * MIB - 5 * index + (1024 * MIB if 4 < index < 9 else 0) for index in range(21)
    ],
}


@pytest.mark.parametrize("readings", READINGS.values(), ids=READINGS)
def test_the_slope_is_not_moved_by_other_users_of_the_device(readings: list[int]) -> None:
    assert slope(readings) == pytest.approx(5, abs=0.01)


def test_memory_taken_in_steps_still_gives_the_slope() -> None:
    readings = [-(-(1000 * MIB - 700_000 * index) // (2 * MIB)) * 2 * MIB for index in range(21)]
    assert slope(readings, 10) == pytest.approx(700_000, rel=0.08)


def test_readings_that_do_not_fall_show_that_kept_memory_is_used() -> None:
    fresh = [1000 * MIB - 5 * index for index in range(11)]
    assert calibration.all_fall(fresh)
    assert calibration.all_fall([*fresh[:5], 2000 * MIB, *fresh[6:]]), "one is somebody else's"
    every_second = [1000 * MIB - 5 * (index // 2) for index in range(11)]
    assert not calibration.all_fall(every_second)
    assert slope(every_second, 5) < 3


@pytest.mark.parametrize(
    ("share", "every"),
    [*itertools.product([0.0, 0.4, 0.7, 1.5], [1, 2]), (20.0, 1)],
    ids=lambda value: f"{value:.0%}" if isinstance(value, float) else f"every {value}",
)
def test_memory_kept_of_destroyed_executables_makes_no_node_cheaper(
    share: float, every: int
) -> None:
    """Kept memory is used first, or in turns with new memory: each second time."""
    reading = 10 * 4 * BYTES_PER_NODE

    class Keeping(EmulatedDriver):
        def memory_info(self) -> tuple[int, int]:
            free, total = super().memory_info()
            kept = round(share * 10 * reading)  # of all that a round takes
            taken = total - free
            whole, part = divmod(taken, every * reading)
            reused = min(kept, whole * reading + min(part, reading))
            return total - (taken - reused), total

    found = node_memory(Keeping())
    assert found.is_measured
    assert found.bytes_per_node == pytest.approx(BYTES_PER_NODE, rel=0.03)


def test_where_nothing_can_be_measured_the_known_figure_stands_in_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Silent(EmulatedDriver):
        def memory_info(self) -> tuple[int, int]:
            return (1, 2)

    with caplog.at_level("INFO", logger="graphcore"):
        found = node_memory(Silent())
    assert not found.is_measured
    assert found.bytes_per_node == BYTES_PER_NODE
    assert "not measurable just now: assumed" in caplog.text


@pytest.mark.exclusive
@pytest.mark.gpu
def test_the_figure_of_a_device_is_that_of_its_driver_notes() -> None:
    calibration._known.clear()
    measured = node_memory(cuda_driver())
    assert measured.is_measured
    assert 1024 < measured.bytes_per_node < 8192


# ---- reports ------------------------------------------------------------------------------------


def test_a_report_counts_nodes_pool_and_owners_apart(graphcore_driver: Driver) -> None:
    x = filled(graphcore_driver, 1.0, 1024)
    graph = graphcore.capture_function(lambda a: (a * 2) + 1, x, driver=graphcore_driver)
    report = graph.memory_report()
    per_node = node_memory(graphcore_driver).bytes_per_node
    assert (report.nodes, report.bytes_per_node) == (2, per_node)
    assert report.node_bytes == round(2 * per_node)
    assert report.pool_bytes >= 2 * 4096
    assert report.owner_bytes == 4096, "the input; the output lies in the pool"
    assert report.allocation_bytes == 0
    assert report.own_bytes == report.total_bytes == report.pool_bytes + report.node_bytes
    with graph.instantiate() as executable:
        assert executable.memory_report() == report


def test_an_overlap_of_owners_counts_once(graphcore_driver: Driver) -> None:
    x = filled(graphcore_driver, 1.0, 100)
    with graphcore.capture(driver=graphcore_driver) as capture:
        capture.keep([x, x[10:], x.view(10, 10)], "input")
        x.add_(1)
    assert capture.graph.memory_report().owner_bytes == 400


def test_the_nodes_of_inner_graphs_count(bench: Bench) -> None:
    x = bench.alloc(4)
    inner = bench.new_graph()
    for _ in range(3):
        bench.add_kernel(inner, add_one, x, 1)
    outer = bench.new_graph()
    bench.add(outer, ChildParams(inner))
    handle, _, bodies = bench.add_conditional(outer, "if")
    bench.add_kernel(bodies[0], set_value, handle, 0)
    # child and its three, conditional and its one
    assert Graph(bench.driver, outer, owned=False).memory_report().nodes == 6


def test_memory_that_a_graph_allocates_counts(bench: Bench) -> None:
    graph = bench.new_graph()
    alloc = bench.add(graph, AllocParams(8 * MIB))
    params = bench.driver.node_params(alloc)
    assert isinstance(params, AllocParams)
    bench.add(graph, FreeParams(params.address), [alloc])
    report = Graph(bench.driver, graph, owned=False).memory_report()
    assert (report.nodes, report.allocation_bytes) == (2, 8 * MIB)
    assert report.own_bytes == report.total_bytes == 8 * MIB + report.node_bytes


def test_a_report_reads_as_a_table(graphcore_driver: Driver) -> None:
    x = filled(graphcore_driver, 1.0)
    text = str(graphcore.capture_function(torch.neg, x, driver=graphcore_driver).memory_report())
    lines = [line.split()[0] for line in text.splitlines()]
    assert lines == ["pool", "graph", "executable", "in", "kept"]
    assert "(1 x " in text


def test_a_closed_graph_has_no_report(graphcore_driver: Driver) -> None:
    graph = graphcore.capture_function(lambda: None, driver=graphcore_driver)
    graph.close()
    with pytest.raises(LifecycleError, match="closed"):
        graph.memory_report()


@pytest.mark.parametrize(
    ("spans", "without", "expected"),
    [
        ([], [], 0),
        ([(0, 10), (20, 5)], [], 15),
        ([(0, 10), (5, 10), (7, 2)], [], 15),
        ([(0, 10), (5, 10)], [(8, 100)], 8),
        ([(0, 10)], [(0, 10), (3, 1)], 0),
    ],
)
def test_bytes_are_counted_once(
    spans: list[tuple[int, int]], without: list[tuple[int, int]], expected: int
) -> None:
    assert covered_bytes(spans, without) == expected
    assert covered_bytes(iter(spans), iter(without)) == expected


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (3 << 20, "3.0 MiB"),
        (5 << 40, "5120.0 GiB"),
    ],
)
def test_bytes_in_words(size: int, words: str) -> None:
    assert in_words(size) == words
