"""Float32 copies with a step between rows, captured as kernels: an update changes their rows."""

from __future__ import annotations

import numpy
import pytest
from graphcore_kernels import strided_copy

import graphcore
from graphcore.driver.records import NodeKind
from graphcore.errors import ConfigurationError
from graphcore.executable import UpdateStatus

WIDTH, PITCH, MOST = 3, 5, 6


def plan_of(rows, dtype="float32", *, pitched=True):
    plan = graphcore.GraphPlan()
    src = plan.buffer("src", (MOST, PITCH), dtype)
    dst = plan.buffer("dst", (MOST, PITCH), dtype)
    part = slice(0, WIDTH) if pitched else slice(0, PITCH)
    plan.memcpy(dst[:rows, part], src[:rows, part])
    return plan


@pytest.fixture
def buffers(graphcore_driver):
    made = {
        name: graphcore.Buffer.allocate((MOST, PITCH), driver=graphcore_driver)
        for name in ("src", "dst")
    }
    made["src"].write(numpy.arange(MOST * PITCH, dtype=numpy.float32).reshape(MOST, PITCH))
    return made


def captured(plan, buffers, **options):
    return plan.capture(buffers, copy_kernel=strided_copy, **options)


def kinds(graph):
    return [node.kind for node in graph.snapshot().nodes]


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_row_counts_update_in_place_where_kernels_copy_rows(graphcore_driver, buffers, rows):
    first = captured(plan_of(3), buffers, rows_by_kernel=True)
    with first.instantiate() as made:
        outcome = made.update(captured(plan_of(rows), buffers, rows_by_kernel=True))
        assert outcome.status is UpdateStatus.UPDATED
        buffers["dst"].write(numpy.full((MOST, PITCH), numpy.nan, numpy.float32))
        made.launch()
        graphcore_driver.synchronize()
    expected = numpy.full((MOST, PITCH), numpy.nan, numpy.float32)
    expected[:rows, :WIDTH] = buffers["src"].read()[:rows, :WIDTH]
    assert buffers["dst"].read().tobytes() == expected.tobytes()


def test_a_memcpy_node_refuses_another_number_of_rows(buffers):
    first = captured(plan_of(3), buffers)
    with first.instantiate() as made:
        outcome = made.update(captured(plan_of(2), buffers))
    assert outcome.status is UpdateStatus.REINSTANTIATED


def test_only_float32_copies_with_a_step_between_rows_become_kernels(graphcore_driver, buffers):
    rows = captured(plan_of(2), buffers, rows_by_kernel=True)
    dense = captured(plan_of(2, pitched=False), buffers, rows_by_kernel=True)
    halves = {
        name: graphcore.Buffer.allocate((MOST, PITCH), "float16", driver=graphcore_driver)
        for name in ("src", "dst")
    }
    others = captured(plan_of(2, "float16"), halves, rows_by_kernel=True)
    assert kinds(rows) == [NodeKind.KERNEL]
    assert kinds(dense) == kinds(others) == [NodeKind.MEMCPY]


def test_outside_of_captures_and_without_asking_the_copy_stays_a_memcpy(buffers):
    assert kinds(captured(plan_of(2), buffers)) == [NodeKind.MEMCPY]
    assert kinds(plan_of(2).build(buffers, copy_kernel=strided_copy)) == [NodeKind.MEMCPY]


def test_without_a_copy_kernel_there_is_nothing_to_copy_by(buffers):
    with pytest.raises(ConfigurationError, match="copy_kernel"):
        plan_of(2).capture(buffers, rows_by_kernel=True)


def test_the_kernel_of_a_copy_is_loaded_before_the_capture_begins(graphcore_driver, buffers):
    begin, function = graphcore_driver.begin_capture, graphcore_driver.function
    seen = []
    graphcore_driver.begin_capture = lambda *given: (seen.append("begin"), begin(*given))[1]
    graphcore_driver.function = lambda kernel: (seen.append(kernel.name), function(kernel))[1]
    try:
        captured(plan_of(2), buffers, rows_by_kernel=True)
    finally:
        del graphcore_driver.begin_capture, graphcore_driver.function
    assert seen.index("begin") > 0
    assert set(seen[: seen.index("begin")]) == set(seen) - {"begin"}
