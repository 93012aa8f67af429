"""Experts through scratch memory: the bits of the slots' way, for any rows, wherever they lie."""

from __future__ import annotations

import random

import numpy
import pytest
from graphcore_kernels import RouteStatus
from helpers.every_fault import each_fault
from helpers.staged_layers import EXPERTS, HIDDEN, INNER, StagedLayer

import graphcore
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import MemsetParams
from graphcore.errors import (
    CapacityError,
    CaptureError,
    CudaError,
)
from graphcore.moe import (
    ProductOptions,
    SlotAdmission,
    SlotPool,
    StagedProducts,
)
from graphcore.resources.buffer import Buffer
from graphcore.resources.tensors import TensorRef
from graphcore.testing import inject

KINDS = {
    "float32": ("float32", ProductOptions()),
    "bfloat16": ("bfloat16", ProductOptions()),
    "float16, interleaved": ("float16", ProductOptions(gate_up="interleaved")),
    "tf32x3": ("float32", ProductOptions(precision="tf32x3")),
    "kn": ("bfloat16", ProductOptions(layout="kn")),
}
# rows, top_k, experts at once, rows at once
SHAPES = {
    "one row": (1, 2, 3, 64),
    "one expert at once": (7, 2, 1, 64),
    "fewer routes than experts at once": (2, 2, 6, 64),
    "all experts at once": (9, 3, EXPERTS, 64),
    "more routes than experts": (33, 3, 4, 64),
    "rows in parts": (33, 2, 3, 8),
    "row by row": (5, 2, 4, 1),
}


@pytest.fixture(params=[False, True], ids=["pinned", "pageable"])
def pageable(request):
    return request.param


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_staged_step_has_the_bits_of_the_slots_and_is_near_the_truth(
    graphcore_driver, kind, shape
):
    rows, top_k, experts, rows_at_once = SHAPES[shape]
    layer = StagedLayer(graphcore_driver, *KINDS[kind])
    tensors, memory = layer.step(rows, top_k), layer.memory(experts, rows_at_once, top_k)
    staged = layer.staged(memory)
    assert staged.chunk == experts
    assert (len(staged.plan(*tensors.all()).passes) > 1) is (rows > rows_at_once)
    staged.launch(*tensors.all())
    tensors.check()
    assert tensors.read() == layer.through_slots(tensors)
    memory.check_guards()


@pytest.mark.gpu
@pytest.mark.parametrize("pageable", [False, True], ids=["pinned", "pageable"])
@pytest.mark.parametrize("rows", [15, 60, 100, 200, 700])
def test_every_form_of_the_product_gives_the_bits_of_the_slots(graphcore_driver, rows, pageable):
    if graphcore_driver.is_emulated:
        pytest.skip("the reference has one form")
    sizes = (32, 512, 384)
    layer = StagedLayer(graphcore_driver, "bfloat16", pageable=pageable, sizes=sizes)
    tensors, memory = layer.step(rows, 8), layer.memory(5, 300, 8)
    layer.staged(memory).launch(*tensors.all())
    found = tensors.read()
    memory.check_guards()
    pinned = StagedLayer(graphcore_driver, "bfloat16", sizes=sizes)
    assert found == pinned.through_slots(tensors)
    tensors.check()


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_in_pageable_memory_give_the_same_bits(graphcore_driver, kind, shape):
    rows, top_k, experts, rows_at_once = SHAPES[shape]
    pinned = StagedLayer(graphcore_driver, *KINDS[kind])
    pageable = StagedLayer(graphcore_driver, *KINDS[kind], pageable=True)
    made = []
    for layer in (pinned, pageable):
        tensors, memory = layer.step(rows, top_k), layer.memory(experts, rows_at_once, top_k)
        staged = layer.staged(memory)
        assert staged.has_pageable is (layer is pageable)
        staged.launch(*tensors.all())
        tensors.check()
        memory.check_guards()
        made.append(tensors.read())
    assert made[0] == made[1]


def test_only_experts_that_are_hit_reach_the_scratch_memory(graphcore_driver, pageable):
    layer = StagedLayer(graphcore_driver, pageable=pageable)
    tensors, memory = layer.step(4, 2), layer.memory(EXPERTS, 64, 2)
    tensors.route([[3, 7], [7, 3], [3, 8], [7, 8]])
    layer.staged(memory).launch(*tensors.all())
    tensors.check()
    rows = memory.experts.read().view(numpy.float32)[: EXPERTS * 2 * INNER * HIDDEN]
    rows = rows.reshape(EXPERTS, -1)
    for slot, expert in enumerate([3, 7, 8]):
        assert rows[slot].tobytes() == layer.experts["gate_up"][expert].tobytes()
    assert numpy.isnan(rows[3:]).all()


def test_steps_take_turns_over_one_scratch_memory_of_several_layers(graphcore_driver):
    layers = [StagedLayer(graphcore_driver, seed=seed) for seed in range(3)]
    memory = layers[0].memory(2, 6, 2)
    staged = [layer.staged(memory) for layer in layers]
    steps = [layer.step(rows, 2, seed=rows) for layer, rows in zip(layers, (4, 1, 9), strict=True)]
    plans = [each.plan(*step.all()) for each, step in zip(staged, steps, strict=True)]
    draw = random.Random(1)
    for _ in range(4):
        for step, plan in zip(steps, plans, strict=True):
            step.choose(draw)
            step.poison()
            plan.launch()
            step.check()
    memory.check_guards()


def test_a_replay_follows_the_routes_and_experts_of_its_own_time(graphcore_driver):
    layer = StagedLayer(graphcore_driver)
    tensors, memory = layer.step(6, 2), layer.memory(3, 4, 2)
    step = layer.staged(memory).plan(*tensors.all())
    with graphcore.capture(driver=graphcore_driver) as captured:
        step.launch()
    draw = random.Random(2)
    with captured.graph as graph, graph.instantiate() as made:
        for popular in (EXPERTS, 2, EXPERTS, 5):
            tensors.choose(draw, popular)
            tensors.poison()
            memory.poison()
            made.launch()
            tensors.check()
            assert tensors.read() == layer.through_slots(tensors)
            memory.check_guards()


def test_a_step_is_captured_without_being_planned_before(graphcore_driver):
    layer = StagedLayer(graphcore_driver)
    tensors, memory = layer.step(6, 2), layer.memory()
    staged = layer.staged(memory)
    with graphcore.capture(driver=graphcore_driver) as captured:
        staged.launch(*tensors.all())
    with captured.graph as graph, graph.instantiate() as made:
        # the graph keeps what it works on
        memory.close()
        staged.close()
        made.launch()
        tensors.check()


def test_pinned_experts_are_staged_without_the_host_waiting_for_anything():
    driver = EmulatedDriver()
    layer = StagedLayer(driver)
    tensors, memory = layer.step(6, 2), layer.memory()
    step = layer.staged(memory).plan(*tensors.all())
    waits = ("read", "write", "alloc", "synchronize_stream", "synchronize_event")
    for call in waits:
        inject(driver, call)
    step.launch()
    driver.faults.clear()
    tensors.check()


def test_pageable_experts_are_refused_inside_a_capture_and_nothing_is_launched(graphcore_driver):
    layer = StagedLayer(graphcore_driver, pageable=True)
    tensors, memory = layer.step(4, 2), layer.memory()
    step = layer.staged(memory).plan(*tensors.all())
    before = tensors.read()
    other = Buffer.allocate(4, "int32", driver=graphcore_driver)
    with graphcore.capture(driver=graphcore_driver) as captured:
        with pytest.raises(CaptureError, match="pageable memory, which the host must copy"):
            step.launch()
        graphcore_driver.fill(MemsetParams(other.address, 7, 4, 4), captured.stream.handle)
    with captured.graph as graph:
        assert len(graph.snapshot().nodes) == 1
    assert tensors.read() == before
    step.launch()
    tensors.check()


def test_a_capture_of_others_refuses_pageable_experts_too(graphcore_driver):
    layer = StagedLayer(graphcore_driver, pageable=True)
    tensors, memory = layer.step(4, 2), layer.memory()
    step = layer.staged(memory).plan(*tensors.all())
    with graphcore_driver.stream() as stream:
        graphcore_driver.begin_capture(stream.handle, "thread_local")
        try:
            with pytest.raises(CaptureError, match="pageable memory"):
                step.launch(stream)
        finally:
            graph = graphcore_driver.end_capture(stream.handle)
        assert not graphcore_driver.nodes(graph)
        graphcore_driver.destroy_graph(graph)


def test_slots_and_tables_of_the_pool_are_as_before(graphcore_driver):
    layer = StagedLayer(graphcore_driver)
    pool = SlotPool({"layer": layer.sources}, 4, driver=graphcore_driver)
    small = layer.step(2, 2, seed=5)
    admission = SlotAdmission(pool, "layer", small.ids, weights=small.weights)
    for _ in range(3):
        admission.launch()
    before = {name: tensor.read().tobytes() for name, tensor in pool.named_tensors().items()}
    assert len(pool.residents()["layer"]) > 1
    large, memory = layer.step(20, 2), layer.memory(3, 64, 2)
    with pytest.raises(CapacityError):
        SlotAdmission(pool, "layer", large.ids)
    staged = StagedProducts.of_pool(pool, "layer", memory=memory)
    staged.launch(*large.all())
    large.check()
    after = {name: tensor.read().tobytes() for name, tensor in pool.named_tensors().items()}
    assert after == before


def test_the_pool_may_grow_and_staged_steps_go_on(graphcore_driver):
    layer = StagedLayer(graphcore_driver)
    pool = SlotPool({"layer": layer.sources}, 4, driver=graphcore_driver)
    tensors, memory = layer.step(20, 2), layer.memory()
    step = StagedProducts.of_pool(pool, "layer", memory=memory).plan(*tensors.all())
    pool.grow(6)
    step.launch()
    tensors.check()


def test_experts_and_bytes_are_counted_pass_by_pass(graphcore_driver, pageable):
    layer = StagedLayer(graphcore_driver, pageable=pageable)
    tensors, memory = layer.step(9, 2), layer.memory(3, 3, 2)
    staged = layer.staged(memory)
    step = staged.plan(*tensors.all())
    assert staged.totals() == (0, 0, 0, 0)
    expert, draw, expected = 4 * 3 * INNER * HIDDEN, random.Random(3), [0, 0, 0]
    for _ in range(3):
        tensors.choose(draw)
        step.launch()
        each = staged.rows_at_once(9, 2)
        for begin in range(0, 9, each):
            chosen = tensors.chosen[begin : begin + each]
            expected = [expected[0] + 1, expected[1] + chosen.size,
                        expected[2] + len(numpy.unique(chosen))]  # fmt: skip
    assert staged.totals() == (*expected, expected[2] * expert)


def test_a_step_without_rows_launches_nothing(graphcore_driver, pageable):
    layer = StagedLayer(graphcore_driver, pageable=pageable)
    tensors = layer.step(0, 2)
    step = layer.staged(layer.memory()).plan(*tensors.all())
    assert not step.passes
    step.launch()


@pytest.mark.parametrize("ids", ["int32", "int64"])
def test_an_expert_that_does_not_exist_gives_zeros_and_a_fault(graphcore_driver, ids, pageable):
    layer = StagedLayer(graphcore_driver, pageable=pageable)
    tensors, memory = layer.step(3, 2), layer.memory()
    chosen = Buffer.allocate((3, 2), ids, driver=graphcore_driver)
    staged = layer.staged(memory)
    step = staged.plan(tensors.x, chosen, tensors.weights, tensors.out)
    chosen.write([[0, 1], [2, EXPERTS], [3, 4]])
    step.launch()
    assert not tensors.out.read().any()
    fault = staged.fault()
    assert (fault.status, fault.detail, fault.count) == (RouteStatus.INVALID_ROUTE, 3, 1)
    staged.clear_fault()
    chosen.write(tensors.chosen)
    tensors.poison()
    step.launch()
    tensors.check()
    assert staged.fault().status is RouteStatus.OK


def test_one_expert_may_be_chosen_twice_by_a_row(graphcore_driver):
    layer = StagedLayer(graphcore_driver)
    tensors, memory = layer.step(3, 2), layer.memory()
    tensors.route([[4, 4], [1, 4], [1, 1]])
    layer.staged(memory).launch(*tensors.all())
    tensors.check()


def test_out_may_be_part_of_a_wider_tensor_and_nothing_beside_it_is_written(graphcore_driver):
    layer = StagedLayer(graphcore_driver)
    tensors, memory = layer.step(9, 2), layer.memory(3, 4, 2)
    wide = Buffer.allocate((9, HIDDEN + 8), "float32", driver=graphcore_driver)
    wide.write(float("nan"))
    ref = wide.__graphcore_tensor__()
    part = TensorRef(
        ref.address, (9, HIDDEN), (HIDDEN + 8, 1), "float32", 4, ref.device_kind, ref.device,
        owner=ref.owner,
    )  # fmt: skip
    layer.staged(memory).launch(tensors.x, tensors.ids, tensors.weights, part)
    assert numpy.isnan(wide.read()[:, HIDDEN:]).all()
    assert wide.read()[:, :HIDDEN].tobytes() == layer.through_slots(tensors)


def test_after_a_refused_launch_the_next_one_is_right(pageable):
    def prepare(driver):
        layer = StagedLayer(driver, pageable=pageable)
        tensors, memory = layer.step(5, 2), layer.memory(3, 3, 2)
        return tensors, layer.staged(memory).plan(*tensors.all())

    seen = 0
    for driver, faulted in each_fault(prepare, lambda state: state[1].launch()):
        tensors, step = faulted.state
        assert isinstance(faulted.error, CudaError), faulted.where
        assert faulted.leaves_nothing(driver), faulted.where
        step.launch()
        tensors.check()
        seen += 1
    assert seen > 3
