"""Where a tensor was found: variables, attributes and items, and what stands there later."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from graphcore.driver.emulated import EmulatedDriver
from graphcore.resources.holders import MISSING, Slot, Walk
from graphcore.resources.lifetime import OwnerSet, collect
from graphcore.resources.staleness import find_replaced

GLOBAL = numpy.ones(2)
UNUSED = numpy.ones(3)


def uses_a_global(x: Any) -> Any:
    return x + GLOBAL


class Engine:
    """What a step is often bound to."""

    def __init__(self) -> None:
        self.weight = numpy.ones(4)
        self.cache = SimpleNamespace(layers=[{"keys": numpy.ones(5)}, {"keys": numpy.ones(6)}])
        self.layer = torch.nn.Linear(2, 2)
        self.name = "engine"
        self.driver = EmulatedDriver()
        self.itself = self

    def step(self) -> None: ...

    def __call__(self) -> None: ...


def closure() -> Callable[[], Any]:
    x, helpers = numpy.ones(2), [numpy.ones(3)]

    def inner() -> Any:
        return helpers[0]

    return lambda: (x, inner)


ENGINE_PARTS = [
    ".weight",
    ".cache.layers[0]['keys']",
    ".cache.layers[1]['keys']",
    ".layer.weight",
    ".layer.bias",
]
FOUND: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "global": (lambda: uses_a_global, ["f's GLOBAL"]),
    "closure": (closure, ["f's inner's helpers[0]", "f's x"]),
    "method": (lambda: Engine().step, [f"f's self{part}" for part in ENGINE_PARTS]),
    "callable object": (Engine, [f"f{part}" for part in ENGINE_PARTS]),
    "partial": (
        lambda: partial(uses_a_global, numpy.ones(2), key=numpy.ones(3)),
        ["f's key", "f's bound argument 0", "f's GLOBAL"],
    ),
    "module": (lambda: torch.nn.Linear(2, 2), ["f.weight", "f.bias"]),
    "builtin": (lambda: print, []),
    "numbers": (lambda: partial(print, 1, "two"), []),
}


@pytest.mark.parametrize("case", FOUND)
def test_the_tensors_a_function_works_on_are_found_with_their_names(case: str) -> None:
    make, labels = FOUND[case]
    function = make()
    owners = list(collect(function, "f"))
    tensors = [owner for owner in owners if owner.slot is not None and owner.label != "f"]
    assert [owner.label for owner in tensors] == labels
    for owner in tensors:
        assert owner.slot is not None
        assert owner.slot.current() is owner.object
    others = [owner.object for owner in owners if owner not in tensors]
    assert others == ([] if case == "builtin" else [function])


def test_a_holder_that_holds_itself_ends_the_walk() -> None:
    items: list[Any] = [numpy.ones(1)]
    items.append(items)
    assert [owner.label for owner in collect(items, "x")] == ["x[0]"]


def test_parts_of_variables_are_followed_only_so_far_and_what_was_given_to_the_end() -> None:
    tensor = numpy.ones(1)
    deep: Any = tensor
    for _ in range(50):
        deep = [deep]
    assert not any(owner.object is tensor for owner in collect(lambda: deep, "f"))
    assert any(owner.object is tensor for owner in collect(deep, "argument 0"))


@pytest.mark.parametrize(
    ("slot", "expected"),
    [
        (Slot({"a": 1}, "a", "item"), 1),
        (Slot({}, "a", "item"), MISSING),
        (Slot([], 3, "item"), MISSING),
        (Slot(SimpleNamespace(a=2), "a", "attribute"), 2),
        (Slot(SimpleNamespace(), "a", "attribute"), MISSING),
    ],
    ids=["item", "no item", "no position", "attribute", "no attribute"],
)
def test_a_slot_gives_what_is_there_now(slot: Slot, expected: Any) -> None:
    assert slot.current() is expected


def test_a_variable_without_a_value_is_missing() -> None:
    x = 1

    def step() -> int:
        return x

    assert step.__closure__ is not None
    cell = step.__closure__[0]
    slot = Slot(cell, "x", "cell")
    assert slot.current() == 1
    del cell.cell_contents
    assert slot.current() is MISSING


def watched(holder: dict[str, Any]) -> OwnerSet:
    return OwnerSet(collect(holder, "h")).recorded(EmulatedDriver())


def test_a_successor_is_told_where_the_graph_works_on_the_old_one() -> None:
    old = numpy.ones(4, numpy.float32)
    holder = {"x": old}
    owners = watched(holder)
    touched = [old.ctypes.data + 4]
    assert list(find_replaced(owners, touched)) == []
    holder["x"] = numpy.ones(4, numpy.float32)
    [stale] = find_replaced(owners, touched)
    assert (stale.label, stale.field) == ("h['x']", "held object")
    assert stale.actual.startswith("another one: float32[4] at 0x")
    assert list(find_replaced(owners, [old.ctypes.data + 16])) == [], "the graph is elsewhere"
    assert list(find_replaced(owners, [])) == []


@pytest.mark.parametrize(
    "successor",
    [
        lambda old: old[:],
        lambda old: None,
        lambda old: "text",
        lambda old: torch.eye(2).to_sparse(),
    ],
    ids=["another object over the same memory", "nothing", "no tensor", "no plain memory"],
)
def test_what_is_no_other_tensor_is_no_successor(successor: Callable[[Any], Any]) -> None:
    old = numpy.ones(4)
    holder = {"x": old}
    owners = watched(holder)
    holder["x"] = successor(old)
    assert list(find_replaced(owners, [old.ctypes.data])) == []


def test_an_object_met_twice_keeps_its_first_label_and_its_slot() -> None:
    x = numpy.ones(1)
    [owner] = OwnerSet([*collect(x, "argument 0"), *collect([x], "list")])
    assert owner.label == "argument 0"
    assert owner.slot is not None


def test_a_mapping_that_grows_while_it_is_walked_is_followed_as_it_was():
    held = {"first": 1, "second": 2}
    labels = []
    for label, _, _ in Walk().parts(held, "held"):
        labels.append(label)
        held[len(held)] = 0
    assert labels == ["held['first']", "held['second']"]
