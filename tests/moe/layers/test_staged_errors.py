"""What staged products refuse, by name, before anything is launched."""

from __future__ import annotations

import numpy
import pytest
from helpers.slot_pools import Model
from helpers.staged_layers import HIDDEN, INNER, StagedLayer

import graphcore
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import CapacityError, CaptureError, ConfigurationError, LifecycleError
from graphcore.moe import Location, StagedProducts, StagingMemory
from graphcore.resources.buffer import Buffer
from graphcore.resources.tensors import TensorRef


def test_memory_that_holds_no_expert_or_no_row_is_refused(graphcore_driver):
    layer = StagedLayer(graphcore_driver)
    expert = 4 * 3 * INNER * HIDDEN
    small = StagingMemory(expert_bytes=expert - 1, row_bytes=4096, driver=graphcore_driver)
    with pytest.raises(CapacityError, match=f"at least {expert} bytes for one expert"):
        layer.staged(small)
    tensors = layer.step(3, 2)
    small = StagingMemory(expert_bytes=expert, row_bytes=256, driver=graphcore_driver)
    with pytest.raises(CapacityError, match="for one row, got 256"):
        layer.staged(small).plan(*tensors.all())


@pytest.mark.parametrize("sizes", [{"expert_bytes": 0}, {"row_bytes": True}, {"row_bytes": "1"}],
                         ids=["none", "bool", "text"])  # fmt: skip
def test_sizes_that_cannot_be_are_refused(graphcore_driver, sizes):
    with pytest.raises(ConfigurationError, match="expected at least 1, got"):
        StagingMemory(driver=graphcore_driver, **{"expert_bytes": 1, "row_bytes": 1, **sizes})


def test_what_is_made_inside_a_capture_is_refused(graphcore_driver):
    layer = StagedLayer(graphcore_driver)
    memory = layer.memory()
    captured = graphcore.capture(driver=graphcore_driver)
    with pytest.raises(CaptureError, match="StagedProducts: not while"), captured:
        layer.staged(memory)
    captured = graphcore.capture(driver=graphcore_driver)
    with pytest.raises(CaptureError, match="StagingMemory: not while"), captured:
        StagingMemory(expert_bytes=1, row_bytes=1, driver=graphcore_driver)


def test_closed_memory_and_closed_products_plan_nothing(graphcore_driver):
    layer = StagedLayer(graphcore_driver)
    tensors, memory = layer.step(3, 2), layer.memory()
    staged = layer.staged(memory)
    step = staged.plan(*tensors.all())
    memory.close()
    assert memory.is_closed
    with pytest.raises(LifecycleError, match="staging memory"):
        staged.plan(*tensors.all())
    with pytest.raises(LifecycleError, match="staging memory"):
        layer.staged(memory)
    step.launch()
    tensors.check()
    staged.close()
    with pytest.raises(LifecycleError, match="staged experts"):
        staged.plan(*tensors.all())


def test_banks_that_do_not_fit_each_other_are_refused(graphcore_driver):
    layer = StagedLayer(graphcore_driver)
    memory = layer.memory()
    sources = dict(layer.sources)
    with pytest.raises(ConfigurationError, match="expected 'down'"):
        StagedProducts({"gate_up": sources["gate_up"]}, memory=memory)
    with pytest.raises(ConfigurationError, match=f"{INNER} columns between"):
        StagedProducts({**sources, "down": sources["gate_up"]}, memory=memory)
    with pytest.raises(ConfigurationError, match=r"expected \[experts, N, K\] each"):
        StagedProducts({**sources, "down": numpy.zeros(3, numpy.float32)}, memory=memory)


@pytest.mark.parametrize(
    ("name", "replaced", "message"),
    [
        ("ids", lambda t: t.x, "ids: expected int32 or int64"),
        ("ids", lambda t: numpy.zeros(3, numpy.int32), r"ids: expected \[rows, top_k\]"),
        ("weights", lambda t: numpy.zeros((2, 2), numpy.float32), "weights: expected two axes"),
        ("out", lambda t: t.x, "out: expected memory apart from x"),
        ("x", lambda t: numpy.zeros((3, 8), numpy.float32), "x.shape: expected"),
    ],
    ids=["floats as ids", "ids of one axis", "too few weights", "out is x", "narrow x"],
)
def test_operands_that_do_not_fit_are_refused_before_anything_is_launched(name, replaced, message):
    layer = StagedLayer(EmulatedDriver())
    tensors = layer.step(3, 2)
    given = dict(zip(("x", "ids", "weights", "out"), tensors.all(), strict=True))
    before = tensors.read()
    with pytest.raises(ConfigurationError, match=message):
        layer.staged(layer.memory()).launch(**{**given, name: replaced(tensors)})
    assert tensors.read() == before


def test_an_out_that_a_later_pass_would_read_is_refused(graphcore_driver):
    layer = StagedLayer(graphcore_driver)
    tensors, memory = layer.step(8, 2), layer.memory(3, 2, 2)
    both = Buffer.allocate((12, HIDDEN), "float32", driver=graphcore_driver)
    ref = both.__graphcore_tensor__()
    parts = [
        TensorRef(
            ref.address + 4 * HIDDEN * begin, (8, HIDDEN), (HIDDEN, 1), "float32", 4,
            ref.device_kind, ref.device, owner=ref.owner,
        )
        for begin in (0, 4)
    ]  # fmt: skip
    with pytest.raises(ConfigurationError, match="apart from x"):
        layer.staged(memory).plan(parts[1], tensors.ids, tensors.weights, parts[0])


def test_the_emulated_device_reads_what_nobody_calls_pageable():
    layer = StagedLayer(EmulatedDriver(), pageable=True)
    memory = layer.memory()
    assert not StagedProducts(layer.sources, memory=memory).has_pageable
    assert StagedProducts(layer.sources, memory=memory, location=Location.PAGEABLE).has_pageable


def test_experts_in_the_slots_of_a_model_are_found_by_their_banks_names(graphcore_driver):
    model = Model(graphcore_driver, ["layer"])
    memory = StagingMemory(expert_bytes=4096, row_bytes=4096, driver=graphcore_driver)
    with pytest.raises(ConfigurationError, match="expected 'up'"):
        StagedProducts.of_pool(model.pool, "layer", memory=memory, up_bank="up")
