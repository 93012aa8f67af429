"""What happened to a graph's owners since it was made: moved, resized, retyped, closed, freed.

Each recorded tensor is compared with what it is now. An owner is kept alive, so freed memory shows
only where something else gave it back (a closed buffer, a raw pointer's owner); the memory that
nobody gave us is in footprint.py, what is watched without being kept alive in watching.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphcore.errors import GraphcoreError, LifecycleError
from graphcore.resources.lifetime import Owner, OwnerSet, Record, buffer_id
from graphcore.resources.spans import extent
from graphcore.resources.tensors import TensorRef, describe, is_tensor

if TYPE_CHECKING:
    from graphcore.driver.api import Driver


@dataclass(frozen=True, slots=True)
class StaleResource:
    """One thing a graph depends on that is no longer what it was.

    Args:
        label: What it is called: its owner's label, a name that was given, else where it lies;
            empty for an owner without a label.
        field: What differs: "address", "nbytes", "dtype", "allocation", "memory", "held object",
            or "marked".
        expected: As it was when the graph was made.
        actual: As it is now.
        operand: Where the graph uses it, "argument 2 of node 5 (kernel add)", where that is known.
        is_certain: False for a word of an undeclared structure, which may be a number that looks
            like an address.
    """

    label: str
    field: str
    expected: str
    actual: str
    operand: str = ""
    is_certain: bool = True

    def __str__(self) -> str:
        where = f" ({self.operand})" if self.operand else ""
        doubt = "" if self.is_certain else "; a raw word, which may be a number or padding"
        return (
            f"{self.label or 'a resource'}{where}: {self.field}: expected {self.expected}, "
            f"got {self.actual}{doubt}"
        )


def find_stale(owners: OwnerSet, driver: Driver) -> list[StaleResource]:
    """Every recorded owner that changed; empty where the graph may be launched.

    Costs about 2 us an owner, and on a device one pointer query (about 1.5 us) more.
    """
    found = (_look_at(owner, owner.record, driver) for owner in owners if owner.record is not None)
    return [stale for stale in found if stale is not None]


def find_replaced(owners: OwnerSet, touched: Sequence[int]) -> Iterator[StaleResource]:
    """Owners in whose place another tensor stands now: the graph still works on the old one.

    Args:
        owners: What the graph keeps, with where it was found.
        touched: The addresses in the graph, sorted: what it does not work on does not matter.
    """
    for owner in owners:
        if owner.slot is None or owner.record is None:
            continue
        now = owner.slot.current()
        if now is owner.object or not is_tensor(now):
            continue
        try:
            is_same = _is_alike(describe(now, name=owner.label), owner.record.tensor)
        except GraphcoreError:
            continue  # of a kind that no kernel could have been given
        if not is_same and _is_touched(owner, touched):
            was = owner.record.tensor
            expected = f"the tensor at {was.address:#x} that the graph works on"
            yield StaleResource(owner.label, "held object", expected, f"another one: {_shown(now)}")


def _is_alike(now: TensorRef, was: TensorRef) -> bool:
    return (now.address, now.dtype, now.shape) == (was.address, was.dtype, was.shape)


def _is_touched(owner: Owner, touched: Sequence[int]) -> bool:
    assert owner.record is not None
    start, size = extent(owner.label, owner.record.tensor)
    index = bisect_left(touched, start)
    return index < len(touched) and touched[index] < start + size


def _shown(tensor: Any) -> str:
    ref = describe(tensor)
    return f"{ref.dtype}{list(ref.shape)} at {ref.address:#x}"


def _unreadable(error: GraphcoreError) -> str:
    """Why there is nothing to compare; the usual case in words of its own."""
    return "a closed buffer" if isinstance(error, LifecycleError) else str(error)


def _look_at(owner: Owner, record: Record, driver: Driver) -> StaleResource | None:
    return compare(owner.object, record, owner.label, driver)


def compare(obj: Any, record: Record, label: str, driver: Driver) -> StaleResource | None:
    """The first thing in which a tensor is not what its record says; None where nothing is."""
    was = record.tensor
    try:
        now = describe(obj, name=label)
    except GraphcoreError as error:
        return StaleResource(label, "memory", f"{was.nbytes} bytes", _unreadable(error))
    pairs = (
        ("address", f"{was.address:#x}", f"{now.address:#x}"),
        ("dtype", was.dtype, now.dtype),
        ("nbytes", f"{was.nbytes} (shape {was.shape})", f"{now.nbytes} (shape {now.shape})"),
    )
    for field, expected, actual in pairs:
        if getattr(was, field) != getattr(now, field):
            return StaleResource(label, field, expected, actual)
    identity = buffer_id(driver, now)
    if identity != record.buffer_id:
        return StaleResource(label, "allocation", f"id {record.buffer_id}", f"id {identity}")
    return None
