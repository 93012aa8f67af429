"""diff(a, b, names): a comparison of two graphs whose addresses are told by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphcore.executable.attributions import owned
from graphcore.graph.diff import GraphDiff, HasSnapshot
from graphcore.graph.diff import diff as pure
from graphcore.graph.snapshot import GraphSnapshot
from graphcore.graph.telling import Names, with_names
from graphcore.resources.addresses import AddressBook


def diff(
    a: GraphSnapshot | HasSnapshot,
    b: GraphSnapshot | HasSnapshot,
    names: Mapping[str, Any] | None = None,
) -> GraphDiff:
    """What changed from ``a`` to ``b``: snapshots, or graphs and executables that are read first.

    Args:
        a: The old graph.
        b: The new graph.
        names: Name -> tensor, buffer or (address, bytes), of both graphs: changed pointers are told
            "layer 4 keys + 512 bytes (0x7f...)", also those inside of structures that nobody
            declares. What has no name there goes by the labels under which a graph keeps its
            tensors. None: addresses are told as numbers.

    Raises:
        CacheTypeError: One of them is neither, or a named object is no tensor, no buffer and no
            (address, bytes).
        ConfigurationError: ``names`` is no mapping.
    """
    if names is None:
        return pure(a, b)
    given = AddressBook(names)
    return with_names(pure(a, b), _names(given, a), _names(given, b))


def _names(given: AddressBook, graph: Any) -> Names:
    owners = getattr(graph, "owners", None)
    kept = AddressBook({} if owners is None else owned(owners))

    def called(address: int) -> str | None:
        place = given.find_named(address) or kept.find_named(address)
        return None if place is None else str(place)

    return called
