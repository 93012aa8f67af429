"""Attribution: which buffer each operand of each node points into.

Kernels of other libraries take structures whose fields nobody declares: every aligned word of
their parameters that lies in a known range counts as a pointer. A word that lies in two named
ranges is told as ambiguous, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from graphcore.driver.api import Driver
from graphcore.driver.kernel import Pointer
from graphcore.driver.records import (
    CopyOperand,
    FreeParams,
    MemcpyParams,
    MemoryKind,
    MemsetParams,
    NodeParams,
)
from graphcore.graph.nodes import Argument, NodeRecord
from graphcore.graph.snapshot import GraphSnapshot, snapshot_of
from graphcore.resources.addresses import AddressBook, KnownMemory, Place, nowhere, words
from graphcore.resources.driver_argument import checked_driver


@dataclass(frozen=True, slots=True, repr=False)
class Attribution:
    """One operand that points into known memory.

    Args:
        node: The node.
        operand: ``"arg 2"``, or the side of a copy or fill: ``"dst"``, ``"src"``, ``"address"``.
        argument: Index of the kernel argument, or None.
        byte_offset: Where in the argument the pointer lies (0 for a plain pointer).
        address: The pointer.
        place: The memory it points into.
    """

    node: NodeRecord
    operand: str
    argument: int | None
    byte_offset: int
    address: int
    place: Place

    def __repr__(self) -> str:
        return f"<Attribution {self.node}: {self}>"

    def __str__(self) -> str:
        inside = f" (byte {self.byte_offset})" if self.byte_offset else ""
        return f"{self.operand}{inside} = {self.place}"


def attribute(
    snapshot: GraphSnapshot, names: Mapping[str, Any] | None = None, driver: Driver | None = None
) -> list[Attribution]:
    """Every operand that points into a named range or, with a driver, into an allocation.

    Args:
        snapshot: The graph; inner graphs are searched too.
        names: Name -> tensor, buffer or (address, bytes).
        driver: Whom to ask about addresses that no name covers; None leaves them out.

    Raises:
        CacheTypeError: ``snapshot`` is no graph, or a named object is no tensor, no buffer and no
            (address, bytes).
        ConfigurationError: ``names`` is no mapping, or ``driver`` no driver.
    """
    chosen = None if driver is None else checked_driver(driver)
    book = AddressBook({} if names is None else names, chosen)
    return attribute_by(snapshot_of(snapshot, "snapshot"), book)


def attribute_by(
    snapshot: GraphSnapshot, memory: AddressBook | KnownMemory, *, also_unknown: bool = False
) -> list[Attribution]:
    """Every operand that points into ``memory``.

    Args:
        snapshot: The graph; inner graphs are searched too.
        memory: What is known.
        also_unknown: Also declared pointers, and operands of copies and fills, into nothing that is
            known: memory that was freed, or that no driver has.
    """
    return [found for node in snapshot.walk() for found in _operands(node, memory, also_unknown)]


def notes(attributions: Iterable[Attribution]) -> dict[int, list[str]]:
    """Attributions as lines by node index, for ``GraphSnapshot.drawing(notes=...)``.

    Those of inner graphs are left out: their indices are another graph's.
    """
    lines: dict[int, list[str]] = {}
    for found in attributions:
        lines.setdefault(found.node.index, []).append(str(found))
    return lines


def pointers(argument: Argument) -> Iterator[tuple[int, int]]:
    """(byte offset, value) of everything in an argument that may be a pointer."""
    if isinstance(argument.value, Pointer):
        yield 0, argument.value.address
    elif argument.type is None or argument.type.startswith("bytes:"):
        yield from words(argument.data, argument.offset)


def operands(params: NodeParams) -> Iterator[tuple[str, int]]:
    """(operand, address) of a node that is not a kernel."""
    if isinstance(params, MemcpyParams):
        yield "dst", params.dst.address
        yield "src", params.src.address
    elif isinstance(params, (MemsetParams, FreeParams)):
        yield "address", params.address


def _operands(
    node: NodeRecord, memory: AddressBook | KnownMemory, also_unknown: bool
) -> Iterator[Attribution]:
    for argument in node.arguments:
        is_declared = isinstance(argument.value, Pointer)
        for offset, value in pointers(argument):
            place = memory.find(value)
            if place is None and also_unknown and is_declared and value:
                place = nowhere(value)
            if place is not None:
                operand = argument.name or f"arg {argument.index}"
                yield Attribution(node, operand, argument.index, offset, value, place)
    for operand, address in operands(node.params):
        place = memory.find(address)
        if place is None and also_unknown and not _is_on_the_host(node, operand):
            place = nowhere(address)
        if place is not None:
            yield Attribution(node, operand, None, 0, address, place)


def _is_on_the_host(node: NodeRecord, operand: str) -> bool:
    """Whether a copy's side is host memory, of which a driver knows the pinned part only."""
    side = getattr(node.params, operand)
    return isinstance(side, CopyOperand) and side.memory is not MemoryKind.DEVICE
