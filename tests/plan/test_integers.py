"""What callers give where a plan wants integers: every library's are taken, all else is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from helpers.kernels import ONE_BLOCK, add_one

from graphcore import ConfigurationError, GraphPlan

SIZES: dict[str, Any] = {
    "a tuple": (2, 3),
    "a list": [2, 3],
    "a range": range(2, 4),
    "an iterator": iter((2, 3)),
    "a size of torch": torch.Size((2, 3)),
    "an array of NumPy": numpy.array([2, 3]),
    "numbers of NumPy": (numpy.int32(2), numpy.uint8(3)),
    "tensors without axes": (torch.tensor(2), torch.tensor(3)),
}
WRONG: dict[str, Any] = {
    "nothing": None,
    "a bool": True,
    "a float": 2.0,
    "text": "23",
    "bytes": b"\x02\x03",
    "bytes that change": bytearray(b"\x02\x03"),
    "memory": memoryview(b"\x02\x03"),
    "a type": int,
    "floats": (2.0, 3.0),
    "bools": (True, True),
    "pairs": ((2, 3), (2, 3)),
    "an array of floats": numpy.zeros(2),
    "a float without axes": torch.tensor(2.0),
    "an array without axes": numpy.array(2.0),
}
PLACES: dict[str, Callable[[GraphPlan, Any], object]] = {
    "shape": lambda plan, value: plan.buffer("b", value),
    "strides": lambda plan, value: plan.buffer("b", (2, 3), strides=value),
    "allocation": lambda plan, value: plan.allocate("b", value),
    "reshape": lambda plan, value: plan.buffers["x"].reshape(value),
    "as_strided": lambda plan, value: plan.buffers["x"].as_strided(value),
    "steps": lambda plan, value: plan.buffers["x"].as_strided((2, 3), value),
}
COUNTS: dict[str, Callable[[GraphPlan, Any], object]] = {
    "warmup": lambda plan, value: plan.call(print, warmup=value),
    "count": lambda plan, value: plan.switch(plan.condition("c"), value).__enter__(),
    "offset": lambda plan, value: plan.buffers["x"].as_strided((1,), None, value),
}
OPERANDS: dict[str, Callable[[GraphPlan, Any], object]] = {
    "reads": lambda plan, value: plan.callback(print, reads=value),
    "writes": lambda plan, value: plan.launch(add_one, ONE_BLOCK, None, 6, writes=value),
    "after": lambda plan, value: plan.join(after=value),
    "bindings": lambda plan, value: plan.embed(GraphPlan("inner"), value),
    "bindings of one buffer": lambda plan, value: plan.embed(plan_of_one_buffer(), value),
    "kernels": lambda plan, value: GraphPlan.from_json(plan.to_json(), kernels=value),
    "external": lambda plan, value: plan.event("e", external=value),
}


def plan_of_one_buffer() -> GraphPlan:
    inner = GraphPlan("inner")
    inner.buffer("z", (1,))
    return inner


def _plan() -> GraphPlan:
    plan = GraphPlan()
    plan.buffer("x", (6,))
    plan.join(name="first")
    plan.join(name="second")
    return plan


@pytest.mark.parametrize("name", SIZES)
def test_integers_of_every_library_are_sizes(name: str) -> None:
    assert _plan().buffer("b", SIZES[name]).shape == (2, 3)


@pytest.mark.parametrize(
    "value", [1, numpy.int64(1), torch.tensor(1)], ids=["int", "NumPy", "torch"]
)
def test_integers_of_every_library_are_counts_and_positions(value: Any) -> None:
    plan = _plan()
    assert plan.join(after=value).after == (1,)
    assert plan.join(after=[value]).after == (1,)
    assert plan.index_of(value) == 1
    assert plan.call(print, warmup=value).work.warmup == 1  # type: ignore[union-attr]


# no strides are dense ones
_CASES = [
    (name, place)
    for name in WRONG
    for place in PLACES
    if name != "nothing" or place not in ("steps", "strides")
]


@pytest.mark.parametrize(("name", "place"), _CASES)
def test_what_is_no_size_is_refused_and_leaves_nothing(name: str, place: str) -> None:
    plan = _plan()
    with pytest.raises(ConfigurationError, match="expected"):
        PLACES[place](plan, WRONG[name])
    assert [*plan.buffers] == ["x"]
    assert len(plan) == 2


@pytest.mark.parametrize("place", COUNTS)
@pytest.mark.parametrize(
    "value", [*WRONG.values(), (), (1, 2), [1]], ids=[*WRONG, "nothing", "a pair", "a list"]
)
def test_what_is_no_count_is_refused(value: Any, place: str) -> None:
    plan = _plan()
    with pytest.raises(ConfigurationError, match="expected"):
        COUNTS[place](plan, value)
    assert len(plan) == 2


ODD: dict[str, Any] = {
    "an array": numpy.array([1.5, 2]),
    "an array without axes": numpy.array(1.5),
    "a tensor": torch.zeros(4),
    "a tensor without axes": torch.tensor(1.5),
    "an object": object(),
}


@pytest.mark.parametrize("place", OPERANDS)
@pytest.mark.parametrize("name", ODD)
def test_arrays_in_other_places_are_refused_as_anything_else(name: str, place: str) -> None:
    plan = _plan()
    with pytest.raises(ConfigurationError, match="expected"):
        OPERANDS[place](plan, ODD[name])
    assert len(plan) == 2


def test_an_array_and_a_view_are_not_equal() -> None:
    view = _plan().buffers["x"].whole
    assert not numpy.zeros(6) == view  # noqa: SIM201
    assert view != numpy.zeros(6)
