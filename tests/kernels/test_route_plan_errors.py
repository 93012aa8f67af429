"""What route_plan refuses before anything is launched."""

from __future__ import annotations

import numpy
import pytest
from graphcore_kernels import RoutePolicy, route_plan
from graphcore_kernels.route_layout import output_shapes, table_shapes
from graphcore_kernels.route_plan import shared_bytes

from graphcore.errors import CacheTypeError, ConfigurationError

EXPERTS, SLOTS, ROWS, TOP_K = 8, 4, 2, 2


def arrays(shapes):
    return {name: numpy.zeros(shape, dtype) for name, (dtype, shape) in shapes.items()}


@pytest.fixture
def given():
    return {
        "ids": numpy.zeros((ROWS, TOP_K), numpy.int32),
        "tables": arrays(table_shapes(EXPERTS, SLOTS)),
        "outputs": arrays(output_shapes(EXPERTS, ROWS, TOP_K)),
    }


def plan(given):
    more = {name: value for name, value in given.items() if name in ("weights", "policy")}
    return route_plan.plan(given["ids"], given["tables"], given["outputs"], **more)


def test_what_fits_is_planned_with_one_block(given):
    made = plan(given)
    assert made.config.grid == (1, 1, 1)
    assert made.config.shared_bytes == shared_bytes(EXPERTS, SLOTS)


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("what", "name", "value", "says"),
    [
        ("ids", None, numpy.zeros((2, 2), numpy.int16), "ids: expected int32 or int64"),
        ("ids", None, numpy.zeros(4, numpy.int32), r"ids: expected .* got int32 \(4,\)"),
        ("ids", None, numpy.zeros((4, 0), numpy.int32), "top_k of at least 1"),
        ("ids", None, numpy.zeros((2, 4), numpy.int32)[:, ::2], "ids: expected contiguous"),
        ("tables", "clock", numpy.zeros(1, numpy.int32), "clock.*expected int64"),
        ("tables", "last_used", numpy.zeros(5, numpy.int64), r"last_used.*\(4,\)"),
        ("tables", "slot_for_expert", numpy.zeros((8, 1), numpy.int32), "one axis"),
        ("tables", "expert_for_slot", numpy.zeros(0, numpy.int32), "not empty"),
        ("tables", "pinned", read_only(numpy.zeros(8, numpy.int32)), "writable memory"),
        ("outputs", "offsets", numpy.zeros(8, numpy.int32), r"offsets.*\(9,\)"),
        ("outputs", "gather", numpy.zeros(8, numpy.int32)[::2], "gather.*contiguous"),
        ("weights", None, numpy.zeros((2, 2), numpy.float64), "weights.dtype"),
        ("weights", None, numpy.zeros((2, 3), numpy.float32), "weights: expected"),
        ("policy", None, RoutePolicy(clock_bound=0), "clock_bound"),
        ("policy", None, RoutePolicy(step_bound=8), "step_bound"),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_refused_by_its_name(given, what, name, value, says):
    if name is None:
        given[what] = value
    else:
        given[what][name] = value
    with pytest.raises(ConfigurationError, match=says):
        plan(given)


@pytest.mark.parametrize(("what", "name"), [("tables", "slot_for_expert"), ("tables", "fault"),
                                            ("outputs", "scale")])  # fmt: skip
def test_a_missing_tensor_is_named(given, what, name):
    del given[what][name]
    with pytest.raises(ConfigurationError, match=name):
        plan(given)


def test_tensors_that_share_memory_are_refused(given):
    given["outputs"]["scatter"] = given["outputs"]["gather"]
    with pytest.raises(ConfigurationError, match="shares bytes"):
        plan(given)


def test_what_is_no_tensor_is_refused(given):
    given["ids"] = [[0, 1], [2, 3]]
    with pytest.raises(CacheTypeError, match="ids"):
        plan(given)


def test_more_experts_than_a_block_holds_are_refused(given):
    given["tables"] = arrays(table_shapes(2000, SLOTS))
    with pytest.raises(ConfigurationError, match="2000 experts and 4 slots"):
        plan(given)


def test_512_experts_all_of_them_in_slots_fit_a_block():
    assert shared_bytes(512, 512) <= 48 * 1024
