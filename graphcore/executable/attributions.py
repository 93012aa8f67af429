"""What the pointers of a graph, or of an executable, point into, by everything that is known of it.

By the names a user gives; else by the tensors the graph keeps and watches, by their labels; else by
its own memory; else by the pieces of torch's allocator; else by the driver's allocations. All of
that is read once a call and searched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graphcore.driver import Driver
from graphcore.driver.records import AllocParams
from graphcore.graph.snapshot import GraphSnapshot
from graphcore.interop.torch_memory import blocks_of
from graphcore.resources.addresses import AddressBook, KnownMemory
from graphcore.resources.attribution import Attribution, attribute_by
from graphcore.resources.lifetime import OwnerSet


def attributions(
    snapshot: GraphSnapshot,
    driver: Driver,
    owners: OwnerSet,
    own_memory: Iterable[tuple[int, int]],
    names: Mapping[str, Any] | None,
) -> list[Attribution]:
    """Every pointer of ``snapshot`` with the memory it points into.

    Args:
        snapshot: The graph.
        driver: Its driver.
        owners: What the graph keeps.
        own_memory: (address, bytes) of memory that is the graph's alone.
        names: Name -> tensor, buffer or (address, bytes).

    Raises:
        CacheTypeError: A named object is no tensor, no buffer and no (address, bytes).
        ConfigurationError: ``names`` is no mapping.
    """
    books = [
        ("name", AddressBook({} if names is None else names)),
        ("owner", AddressBook(owned(owners))),
        ("graph", AddressBook(_own(snapshot, own_memory))),
    ]
    torch = blocks_of(driver)
    memory = KnownMemory(books, None if torch is None else torch.read(), driver)
    # host memory is the emulated driver's memory, and nobody knows all of it
    return attribute_by(snapshot, memory, also_unknown=not driver.is_emulated)


def owned(owners: OwnerSet) -> dict[str, Any]:
    """The tensors that a graph keeps alive, by label.

    Labels that are met twice are numbered; of two labels for the same memory the first counts.
    """
    names: dict[str, Any] = {}
    met: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for owner in owners:
        if owner.record is None or not owner.label:
            continue
        tensor = owner.record.tensor
        memory = (tensor.address, tensor.shape, tensor.strides)
        if memory in met:
            continue
        met.add(memory)
        name, number = owner.label, 1
        while name in names:
            number += 1
            name = f"{owner.label} ({number})"
        names[name] = tensor
    return names


def _own(
    snapshot: GraphSnapshot, own_memory: Iterable[tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    named = {f"private memory {index}": piece for index, piece in enumerate(own_memory)}
    made = (node.params for node in snapshot.walk() if isinstance(node.params, AllocParams))
    for index, params in enumerate(made):
        assert isinstance(params, AllocParams)
        named[f"graph allocation {index}"] = (params.address, params.size)
    return named
