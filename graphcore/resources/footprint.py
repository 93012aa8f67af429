"""Footprint: the memory that a graph's nodes work on, as it was at one moment.

Every address in the graph is looked up once: typed pointers, operands of copies and fills, and the
aligned words of structures that nobody declares, inner graphs included. A later look says which of
that memory was freed, or freed and given out again. Typed numbers never count. A word of an
undeclared structure may be a number, or padding that no one initialised: it counts only where it
pointed into live memory at first, and what is said of it is marked as not certain.

Left out is what cannot go stale by itself: the graph's own memory, and memory whose owner the
graph keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from graphcore.driver.api import Driver
from graphcore.driver.records import (
    Allocation,
    AllocParams,
    FreeParams,
    KernelParams,
    MemcpyParams,
    MemoryKind,
    NodeHandle,
)
from graphcore.graph.nodes import NodeRecord
from graphcore.graph.snapshot import GraphSnapshot
from graphcore.resources.addresses import AddressBook
from graphcore.resources.argument_words import ArgumentShape, ArgumentShapes
from graphcore.resources.attribution import operands
from graphcore.resources.pools import Block, Blocks
from graphcore.resources.staleness import StaleResource


@dataclass(frozen=True, slots=True)
class Touch:
    """One place in a graph that holds an address.

    Args:
        address: The address.
        node: The node.
        field: The side of a copy or fill, or the argument of a kernel.
        offset: Byte offset in the argument.
        is_typed: A pointer by the kernel's signature, or an operand that must be device memory.
        is_certain: An address for sure, or an argument of exactly its size; not a word inside an
            undeclared structure.
    """

    address: int
    node: NodeRecord
    field: str | ArgumentShape
    offset: int
    is_typed: bool
    is_certain: bool

    @property
    def operand(self) -> str:
        """Where it stands, "argument 2 of node 5 (kernel add)"."""
        if isinstance(self.field, str):
            return f"{self.field} of {self.node}"
        label = f" {self.field.name}" if self.field.name else ""
        inside = f" (byte {self.offset})" if self.field.size > 8 else ""
        return f"argument {self.field.index}{label}{inside} of {self.node}"


@dataclass(frozen=True, slots=True)
class Piece:
    """Memory that is watched: the first operand that points into it, and what it was.

    ``allocation`` is None where no live memory was there when it was recorded.
    """

    touch: Touch
    name: str
    allocation: Allocation | None
    block: Block | None = None


@dataclass(frozen=True, slots=True)
class Footprint:
    """What is watched, and every address in the graph that may be one, sorted."""

    pieces: tuple[Piece, ...] = ()
    touched: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.pieces)

    def __len__(self) -> int:
        return len(self.pieces)


_NOTHING = Footprint()


def record(
    snapshot: GraphSnapshot,
    driver: Driver,
    *,
    names: Mapping[str, Any] | None = None,
    own: Iterable[tuple[int, int]] = (),
    blocks: Blocks | None = None,
    before: Footprint = _NOTHING,
    changed: frozenset[NodeHandle] = frozenset(),
) -> Footprint:
    """The memory that ``snapshot`` works on, as it is now.

    Costs some us a node, one driver query (about 1.5 us) an allocation and a word that is in none.

    Args:
        snapshot: The graph.
        driver: Whose memory it is.
        names: Name -> tensor, buffer or (address, bytes), for messages.
        own: (address, bytes) that need no watching: the graph's own, and what it keeps alive.
        blocks: The pieces that another allocator has handed out.
        before: What was recorded earlier: still counts for the nodes that are not ``changed``.
        changed: Nodes that point elsewhere since.
    """
    allocs = (node.params for node in snapshot.walk())
    private = [(p.address, p.size) for p in allocs if isinstance(p, AllocParams)]
    spared = AddressBook({str(i): piece for i, piece in enumerate((*own, *private))})
    named = AddressBook({} if names is None else names)
    book = AddressBook({}, driver)
    earlier = _Earlier(before)
    found: dict[tuple[str, int], Piece] = {}
    met: set[int] = set()
    doubtful: set[int] = set()  # of untyped words only: a typed pointer says more
    # what an unchanged node says of an address comes first
    ordered: Iterable[Touch] = touches(snapshot)
    if changed:
        ordered = sorted(ordered, key=lambda touch: touch.node.handle in changed)
    for touch in ordered:
        if touch.address in met and not (touch.is_typed and touch.address in doubtful):
            continue
        met.add(touch.address)
        if not touch.is_typed:
            doubtful.add(touch.address)
        if spared.find_named(touch.address) is not None:
            continue
        piece = None if touch.node.handle in changed else earlier.find(touch)
        if piece is None:
            place = named.find_named(touch.address)
            name = "" if place is None else " or ".join(match for match, _ in place.matches)
            inside = book.find(touch.address)
            allocation = None if inside is None else inside.allocation
            piece = _piece(touch, name, allocation, blocks, driver)
        if piece is not None:
            found.setdefault(_key(piece), piece)
    return Footprint(tuple(found.values()), tuple(sorted(met)))


class _Earlier:
    """Look-ups in a footprint that was recorded before."""

    def __init__(self, footprint: Footprint) -> None:
        self._pieces = footprint.pieces
        self._book = AddressBook({str(i): _range(piece) for i, piece in enumerate(self._pieces)})

    def find(self, touch: Touch) -> Piece | None:
        place = self._book.find_named(touch.address) if self._pieces else None
        if place is None:
            return None
        return replace(self._pieces[int(place.matches[0][0])], touch=touch)


def find_changed(
    footprint: Footprint, driver: Driver, blocks: Blocks | None = None
) -> Iterator[StaleResource]:
    """What of ``footprint`` is no longer the memory it was; one driver query an allocation."""
    now: dict[int, Allocation | None] = {}
    for piece in footprint:
        was = piece.allocation
        if was is None:
            yield _stale(
                piece, "memory", "live memory", "memory that was free when first looked at"
            )
            continue
        if was.base not in now:
            now[was.base] = driver.allocation_of(was.base)
        allocation = now[was.base]
        if allocation is None:
            yield _stale(piece, "memory", _words(was), "freed memory")
        elif (allocation.buffer_id, allocation.base) != (was.buffer_id, was.base):
            is_same = (allocation.base, allocation.size) == (was.base, was.size)
            how = "freed and allocated again" if is_same else "freed, and other memory is there"
            yield _stale(piece, "allocation", _words(was), f"{how}: {_words(allocation)}")
        elif piece.block is not None and blocks is not None:
            changed = _block_change(piece.block, blocks.find(piece.block.address))
            if changed:
                yield _stale(piece, "memory", _block_words(piece.block), changed)


def touches(snapshot: GraphSnapshot) -> Iterator[Touch]:
    """Every place of a graph that may hold an address, inner graphs included."""
    shapes = ArgumentShapes()
    for node in snapshot.walk():
        params = node.params
        if isinstance(params, KernelParams):
            for shape, data in zip(shapes.of(node), params.arguments, strict=True):
                is_certain = shape.size == 8
                for offset, address in shape.words(data):
                    yield Touch(address, node, shape, offset, shape.is_pointer, is_certain)
        else:
            for operand, address in operands(params):
                is_typed = _must_be_live(node, operand)
                yield Touch(address, node, operand, 0, is_typed, is_certain=True)


def _must_be_live(node: NodeRecord, operand: str) -> bool:
    """False where memory that no driver knows of is right: the host's, or another graph's."""
    params = node.params
    if isinstance(params, MemcpyParams):
        side = params.dst if operand == "dst" else params.src
        return side.memory is MemoryKind.DEVICE
    return not isinstance(params, FreeParams)


def _piece(
    touch: Touch,
    name: str,
    allocation: Allocation | None,
    blocks: Blocks | None,
    driver: Driver,
) -> Piece | None:
    if allocation is None:
        # on the emulated driver every host address is device memory, and most are not ours
        is_dead = touch.is_typed and touch.address and not driver.is_emulated
        return Piece(touch, name, None) if is_dead else None
    block = None if blocks is None else blocks.find(touch.address)
    if block is not None and not block.is_live:
        # padding often holds addresses of memory that is long free
        return Piece(touch, name, None) if touch.is_typed else None
    return Piece(touch, name, allocation, block)


def _key(piece: Piece) -> tuple[str, int]:
    if piece.allocation is None:
        return "dead", piece.touch.address
    if piece.block is not None:
        return "block", piece.block.address
    return f"allocation {piece.name}", piece.allocation.base


def _range(piece: Piece) -> tuple[int, int]:
    if piece.block is not None:
        return piece.block.address, piece.block.size
    if piece.allocation is not None:
        return piece.allocation.base, piece.allocation.size
    return piece.touch.address, 1


def _stale(piece: Piece, field: str, expected: str, actual: str) -> StaleResource:
    touch = piece.touch
    label = piece.name
    if not label:
        label = f"memory at {touch.address:#x}"
        if piece.allocation is not None:
            offset = touch.address - piece.allocation.base
            label = f"allocation {piece.allocation.base:#x}" + (f" + {offset}" if offset else "")
    return StaleResource(label, field, expected, actual, touch.operand, touch.is_certain)


def _block_change(was: Block, now: Block | None) -> str:
    """What became of a piece, in words; empty where it is as it was."""
    if now is None:
        return "memory that is no longer torch's"
    if not now.is_live:
        return f"memory that was given back to {was.library}"
    if (now.address, now.size, now.requested) != (was.address, was.size, was.requested):
        return f"given back, and given out again: {_block_words(now)}"
    return ""


def _block_words(block: Block) -> str:
    return f"{block.library}'s {block.requested} bytes at {block.address:#x}"


def _words(allocation: Allocation) -> str:
    return f"{allocation.size} bytes, buffer id {allocation.buffer_id}"
