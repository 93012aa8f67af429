"""OwnerSet: what a graph keeps alive, as an immutable value, and how each part looked.

One set belongs to one version of a graph's parameters; an executable that is updated swaps its set
as a whole, after the driver accepted the change. Each owner that is a tensor carries a record of
its memory, so that a later look tells what moved.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from graphcore.errors import GraphcoreError
from graphcore.resources.holders import (
    Slot,
    Walk,
    is_module,
    is_opaque,
    is_plain,
    is_record,
    variables,
)
from graphcore.resources.tensors import TensorRef, describe, is_tensor

if TYPE_CHECKING:
    from graphcore.driver.api import Driver


@dataclass(frozen=True, slots=True)
class Record:
    """How an owner's memory looked: its description without owner, and its allocation's id.

    ``memory`` keeps the memory itself: an owner may be closed, or given other memory, while a graph
    still works on the old one.
    """

    tensor: TensorRef
    buffer_id: int | None = None
    memory: object = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Owner:
    """One thing kept alive.

    Args:
        object: The thing.
        label: What messages call it.
        record: How its memory was; of tensors alone.
        slot: Where it was found, for a later look at what stands there now.
    """

    object: Any
    label: str = ""
    record: Record | None = None
    slot: Slot | None = None


class OwnerSet:
    """An immutable set of owners; an object counts once, under its first label."""

    __slots__ = ("_ids", "_owners")

    def __init__(self, owners: Iterable[Owner] = ()) -> None:
        unique: dict[int, Owner] = {}
        for owner in owners:
            known = unique.setdefault(id(owner.object), owner)
            if known.slot is None and owner.slot is not None:
                unique[id(owner.object)] = replace(known, slot=owner.slot)
        self._owners = tuple(unique.values())
        self._ids = frozenset(unique)

    def with_(self, *objects: Any, label: str = "") -> OwnerSet:
        """This set and ``objects``, all under ``label``."""
        return OwnerSet((*self._owners, *(Owner(each, label) for each in objects)))

    def union(self, other: OwnerSet) -> OwnerSet:
        """Both sets."""
        return OwnerSet((*self._owners, *other))

    def covers(self, other: OwnerSet) -> bool:
        """Whether everything that ``other`` keeps alive is kept alive by this set too.

        The memory a tensor had when it was recorded counts: its owner may have let go of it.
        """
        return self is other or (self._ids >= other._ids and self._memories() >= other._memories())

    def _memories(self) -> set[int]:
        records = (owner.record for owner in self._owners)
        return {id(each.memory) for each in records if each is not None}

    def recorded(self, driver: Driver) -> OwnerSet:
        """This set with a record of every tensor in it that has none yet."""
        return OwnerSet(
            owner if owner.record else replace(owner, record=_record(owner, driver))
            for owner in self._owners
        )

    def labels(self) -> tuple[str, ...]:
        """The labels that are not empty, in the order they came."""
        return tuple(owner.label for owner in self._owners if owner.label)

    def __iter__(self) -> Iterator[Owner]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, obj: object) -> bool:
        return any(owner.object is obj for owner in self._owners)

    def __repr__(self) -> str:
        return f"<OwnerSet {len(self)}: {', '.join(self.labels())}>"


def collect(obj: Any, label: str) -> Iterator[Owner]:
    """``obj`` and the tensors it works on, labelled.

    Those inside lists, tuples, mappings and torch modules; of a function or a callable object the
    tensors in its variables, in what it is bound to, and in their parts ("function's x").
    """
    yield from _collect(obj, label, None, Walk())


def _collect(obj: Any, label: str, slot: Slot | None, walk: Walk) -> Iterator[Owner]:
    if is_tensor(obj):
        yield Owner(obj, label, slot=slot)
        return
    if is_plain(obj) or (walk.is_inside and is_record(obj)) or not walk.enters(obj):
        return
    is_container = isinstance(obj, (Mapping, list, tuple))
    if not is_container and not walk.is_inside:
        yield Owner(obj, label, slot=slot)
    if is_module(obj):
        yield from _module_tensors(obj, label)
    elif is_container:
        yield from _parts(obj, label, walk)
    elif (callable(obj) or walk.is_inside) and not is_opaque(obj):
        yield from _inside(obj, label, walk)


def _inside(obj: Any, label: str, walk: Walk) -> Iterator[Owner]:
    """What a function works on, or an object that one of its variables holds."""
    outer, walk.is_inside = walk.is_inside, True
    for name, slot, value in variables(obj):
        yield from _collect(value, f"{label}'s {name}", slot, walk)
    yield from _parts(obj, label, walk)
    walk.is_inside = outer


def _parts(obj: Any, label: str, walk: Walk) -> Iterator[Owner]:
    walk.depth += 1
    for name, slot, value in walk.parts(obj, label):
        yield from _collect(value, name, slot, walk)
    walk.depth -= 1


def _module_tensors(module: Any, label: str) -> Iterator[Owner]:
    for tensors in (module.named_parameters(), module.named_buffers()):
        for name, tensor in tensors:
            path, _, attribute = name.rpartition(".")
            slot = Slot(module.get_submodule(path), attribute, "attribute")
            yield Owner(tensor, f"{label}.{name}", slot=slot)


def _record(owner: Owner, driver: Driver) -> Record | None:
    if not is_tensor(owner.object):
        return None
    try:
        ref = describe(owner.object, name=owner.label or "owner")
    except GraphcoreError:
        return None  # of a kind without plain memory: kept alive, not watched
    return Record(replace(ref, owner=None), buffer_id(driver, ref), memory_of(owner.object, ref))


def memory_of(obj: Any, ref: TensorRef) -> object:
    """The object whose life is the memory's: torch's storage, CuPy's chunk, a buffer's allocation.

    A tensor whose ``data`` is replaced lets go of its old storage.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        return obj.untyped_storage()
    library = type(obj).__module__.partition(".")[0]
    if library == "cupy":
        return getattr(getattr(obj, "data", None), "mem", obj)
    if library == "numpy":
        while obj.base is not None:  # a view goes, what it looks at stays
            obj = obj.base
            if not hasattr(obj, "base"):
                break
        return obj
    return ref.owner


def buffer_id(driver: Driver, ref: TensorRef) -> int | None:
    """The id of the driver's allocation that ``ref`` lies in, None where it knows none."""
    found = driver.allocation_of(ref.address) if ref.size else None
    return None if found is None else found.buffer_id
