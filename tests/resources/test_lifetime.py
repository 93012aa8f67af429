"""OwnerSet: immutable, labelled, recorded; and what has become of the owners since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from helpers.tensors import filled

from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.resources.buffer import Buffer
from graphcore.resources.lifetime import Owner, OwnerSet, collect
from graphcore.resources.staleness import find_stale


def test_a_set_is_immutable_and_counts_an_object_once() -> None:
    one, two = object(), object()
    empty = OwnerSet()
    first = empty.with_(one, label="one")
    both = first.with_(one, two, label="later")
    assert (len(empty), len(first), len(both)) == (0, 1, 2)
    assert both.labels() == ("one", "later")
    assert one in both
    assert object() not in both
    assert first.union(both).labels() == ("one", "later")
    assert [owner.object for owner in both] == [one, two]
    assert repr(both) == "<OwnerSet 2: one, later>"
    assert empty.with_(one).labels() == ()


def test_equal_objects_are_different_owners() -> None:
    assert len(OwnerSet().with_([1], [1])) == 2


def test_tensors_are_recorded_once_and_other_things_are_not(graphcore_driver: Driver) -> None:
    x = filled(graphcore_driver, 1.0)
    sparse = torch.eye(2).to_sparse()
    owners = OwnerSet().with_(x, object(), sparse, label="x").recorded(graphcore_driver)
    records = [owner.record for owner in owners]
    assert records[1:] == [None, None], "what has no plain memory is kept alive, not watched"
    assert records[0] is not None
    assert records[0].tensor.address == x.data_ptr()
    assert records[0].tensor.owner is None
    assert [owner.record for owner in owners.recorded(graphcore_driver)] == records


def test_collecting_looks_into_containers_and_modules() -> None:
    tensor, array = torch.ones(1), numpy.ones(1)
    layer = torch.nn.Linear(2, 2)
    other = object()
    nested = {"a": [tensor, (array, 3)], 7: layer, "text": "ignored", "none": None, "o": other}
    found = {owner.label: owner.object for owner in collect(nested, "arg")}
    assert set(found) == {
        "arg['a'][0]",
        "arg['a'][1][0]",
        "arg[7]",
        "arg[7].weight",
        "arg[7].bias",
        "arg['o']",
    }
    assert found["arg['a'][0]"] is tensor
    assert found["arg['a'][1][0]"] is array
    assert found["arg[7]"] is layer


# ---- staleness ----------------------------------------------------------------------------------


def _watch(driver: Driver, obj: Any) -> OwnerSet:
    return OwnerSet().with_(obj, label="x").recorded(driver)


def _move(x: torch.Tensor) -> None:
    x.data = x.detach().clone()


def _grow(x: torch.Tensor) -> None:
    x.resize_(1)


def _retype(x: torch.Tensor) -> None:
    x.data = x.detach().view(torch.int32)


def _nothing(x: torch.Tensor) -> None:
    x.add_(1)


CHANGES: dict[str, tuple[Callable[[torch.Tensor], None], str | None]] = {
    "contents": (_nothing, None),
    "moved": (_move, "address"),
    "shrunk": (_grow, "nbytes"),
    "retyped": (_retype, "dtype"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_of_a_tensor_is_found_and_named(graphcore_driver: Driver, change: str) -> None:
    act, field = CHANGES[change]
    x = filled(graphcore_driver, 1.0)
    owners = _watch(graphcore_driver, x)
    assert find_stale(owners, graphcore_driver) == []
    act(x)
    found = find_stale(owners, graphcore_driver)
    assert [(stale.label, stale.field) for stale in found] == (
        [] if field is None else [("x", field)]
    )
    if field is not None:
        assert found[0].expected != found[0].actual
        assert str(found[0]).startswith(f"x: {field}: expected ")


def test_a_closed_buffer_is_found(graphcore_driver: Driver) -> None:
    buffer = Buffer.allocate(4, driver=graphcore_driver)
    owners = _watch(graphcore_driver, buffer)
    buffer.close()
    [stale] = find_stale(owners, graphcore_driver)
    assert (stale.field, stale.expected) == ("memory", "16 bytes")
    assert "closed" in stale.actual


class _Raw:
    """A tensor over memory that somebody else allocates and frees."""

    def __init__(self, address: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": (4,),
            "typestr": "<f4",
            "data": (address, False),
        }
        self._array = numpy.asarray(self)

    def __dlpack__(self, **options: Any) -> object:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def test_memory_freed_and_allocated_again_at_the_same_address_is_found() -> None:
    driver = EmulatedDriver()
    address = driver.alloc(64)
    owners = _watch(driver, _Raw(address))
    assert find_stale(owners, driver) == []
    driver.free(address)
    [stale] = find_stale(owners, driver)
    assert (stale.field, stale.actual) == ("allocation", "id None")
    again = driver.alloc(64)
    assert again == address, "the case needs the same address"
    [stale] = find_stale(owners, driver)
    assert stale.field == "allocation"
    assert stale.expected != stale.actual


def test_an_owner_without_a_label_is_still_told_of(graphcore_driver: Driver) -> None:
    x = filled(graphcore_driver, 1.0)
    owners = OwnerSet([Owner(x)]).recorded(graphcore_driver)
    x.data = x.detach().clone()
    [stale] = find_stale(owners, graphcore_driver)
    assert str(stale).startswith("a resource: address: ")
