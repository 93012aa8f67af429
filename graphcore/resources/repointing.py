"""Repointing: the parameters of a graph with every pointer into some memory moved to other memory.

Pure: it reads a snapshot and makes new parameters. All words are found in what the graph says now,
so that moves are simultaneous: two buffers may trade places, and a chain of moves does not cascade.
A declared number is never taken for a pointer. In what nobody declared (structures, arguments of
other libraries) every aligned 8-byte word that lies in the memory counts as one: addresses are so
large that an integer meets one only by intent or by a freak. So do those that torch left unwritten
in its tables: nobody reads them, and a word too many is moved rather than one too few.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphcore.driver.records import (
    AllocParams,
    CopyOperand,
    FreeParams,
    KernelFields,
    KernelParams,
    MemcpyParams,
    MemsetParams,
    NodeHandle,
    NodeParams,
)
from graphcore.errors import ConfigurationError
from graphcore.graph.nodes import NodeRecord
from graphcore.graph.snapshot import GraphSnapshot
from graphcore.resources.divisor_tables import divisor_tables, outside
from graphcore.resources.spans import Span

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Move:
    """Every pointer into ``old`` goes up by ``by`` bytes (down where it is negative)."""

    old: Span
    by: int


@dataclass(frozen=True, slots=True)
class Repointing:
    """New parameters by node (inner graphs' too), and how many words each move changed."""

    params: dict[NodeHandle, NodeParams]
    words: tuple[int, ...]


def repoint(
    snapshot: GraphSnapshot,
    moves: Sequence[Move],
    others: Iterable[Span] = (),
    *,
    allow_unused: bool = False,
) -> Repointing:
    """The parameters of ``snapshot`` after all ``moves``.

    Args:
        snapshot: The graph as it is.
        moves: What goes where; their spans do not overlap.
        others: Other known memory: a word that is in a move's span and in one of these that reaches
            beyond it may mean either.
        allow_unused: Memory that no node points into is fine.

    Raises:
        ConfigurationError: A word is ambiguous, a copy or fill reaches past the memory, the memory
            is the graph's own, or no node points into it; names node, operand and byte.
    """
    search = _Search(moves, others)
    for node in snapshot.walk():
        search.look_at(node)
    for move, count in zip(search.moves, search.words, strict=True):
        if not (count or allow_unused or search.problems):
            search.problems.append(f"{move.old.name}: not found: no node points into it")
    if search.problems:
        shown = search.problems[:_SHOWN]
        if len(search.problems) > _SHOWN:
            shown.append(f"and {len(search.problems) - _SHOWN} more")
        raise ConfigurationError("rebind: nothing was changed: " + "; ".join(shown))
    by_move = dict(zip(map(id, search.moves), search.words, strict=True))
    return Repointing(search.params, tuple(by_move[id(move)] for move in moves))


class _Search:
    """One pass over a graph."""

    def __init__(self, moves: Sequence[Move], others: Iterable[Span]) -> None:
        self.moves = sorted(moves, key=lambda move: move.old.start)
        self.words = [0] * len(self.moves)
        self.params: dict[NodeHandle, NodeParams] = {}
        self.problems: list[str] = []
        self._starts = [move.old.start for move in self.moves]
        self._dense = [
            move.old.tensor is None or move.old.tensor.is_contiguous for move in self.moves
        ]
        self._known_places: dict[tuple[int, int, int], list[tuple[int, int, str]]] = {}
        self._low, self._high = self._starts[0], max(move.old.end for move in self.moves)
        known = list(others)
        self._rivals = [
            [each for each in known if each.overlaps(move.old) and not move.old.covers(each)]
            for move in self.moves
        ]

    def look_at(self, node: NodeRecord) -> None:
        """Notes the node's new parameters, or what is wrong with it."""
        params = node.params
        if isinstance(params, KernelParams):
            self._look_at_kernel(node, params)
            return
        changed: NodeParams = params
        if isinstance(params, MemcpyParams):
            changed = replace(
                params,
                dst=self._side(node, "dst", params.dst, params),
                src=self._side(node, "src", params.src, params),
            )
        elif isinstance(params, MemsetParams):
            changed = replace(params, address=self._filled(node, params))
        elif isinstance(params, (AllocParams, FreeParams)):
            index = self._find(params.address)
            if index is not None:
                name = self.moves[index].old.name
                self.problems.append(f"{node}: {name} is memory that the graph allocates itself")
        if changed != params:
            self.params[node.handle] = changed

    # ---- kernels -------------------------------------------------------------------------------

    def _look_at_kernel(self, node: NodeRecord, params: KernelParams) -> None:
        arguments = params.arguments
        moved: list[bytes] | None = None
        for index, first, operand in self._places(node, params):
            data = arguments[index]
            if len(data) == 8 and not first:  # a pointer, as most are
                value = int.from_bytes(data, "little")
                move = self._find(value) if self._low <= value < self._high else None
                if move is None:
                    continue
                new = self._move(move, node, operand, value, 0).to_bytes(8, "little")
            else:
                new = self._words(node, operand, data, first)
                if new is data:
                    continue
            moved = moved or list(arguments)
            moved[index] = new
        if moved is not None:
            made: Any = KernelFields(params.function, params.config, tuple(moved))
            made.__class__ = KernelParams
            self.params[node.handle] = made

    def _places(self, node: NodeRecord, params: KernelParams) -> list[tuple[int, int, str]]:
        """(argument, first byte where an aligned word may begin, name) of what may hold words."""
        # by identity: a reading shares what nodes of one function have in common
        key = id(node.function), id(node.kernel), len(params.arguments)
        if key not in self._known_places:
            sizes = enumerate(map(len, params.arguments))
            found = (_place(node, index) for index, size in sizes if size >= 8)
            self._known_places[key] = [place for place in found if place is not None]
        return self._known_places[key]

    def _words(self, node: NodeRecord, operand: str, data: bytes, first: int) -> bytes:
        found = list(self._hits(data, first))
        for at, value in outside(self._hits(data, (first + 4) % 8), divisor_tables(data)):
            name = self._name(value)
            self.problems.append(
                f"{node}: {operand}, byte {at}: a word that is not aligned points into {name}"
            )
        if not found:
            return data
        result = bytearray(data)
        for at, value in found:
            moved = self._moved(node, operand, value, at)
            result[at : at + 8] = moved.to_bytes(8, "little")
        return bytes(result)

    def _hits(self, data: bytes, first: int) -> Iterator[tuple[int, int]]:
        """(byte, value) of the words from byte ``first`` on that lie in a move's span."""
        count = (len(data) - first) // 8
        if count <= 0:
            return
        for position, value in enumerate(struct.unpack_from(f"<{count}Q", data, first)):
            if self._low <= value < self._high and self._find(value) is not None:
                yield first + 8 * position, value

    # ---- copies and fills ----------------------------------------------------------------------

    def _side(
        self, node: NodeRecord, side: str, operand: CopyOperand, params: MemcpyParams
    ) -> CopyOperand:
        rows = [
            operand.address + (level * operand.rows + row) * operand.pitch
            for level in range(params.depth)
            for row in range(params.height)
        ]
        address = self._range(node, side, rows, params.width)
        return operand if address == operand.address else replace(operand, address=address)

    def _filled(self, node: NodeRecord, params: MemsetParams) -> int:
        rows = [params.address + row * params.pitch for row in range(params.height)]
        return self._range(node, "address", rows, params.width * params.element_size)

    def _range(self, node: NodeRecord, operand: str, rows: list[int], width: int) -> int:
        """Where the operand goes that touches ``width`` bytes from each of ``rows``."""
        address = rows[0]
        end = max(rows) + width
        if end <= self._low or address >= self._high:
            return address
        index = self._find(address)
        if index is not None:
            old = self.moves[index].old
            if end > old.end:
                self.problems.append(
                    f"{node}: {operand} touches {end - address} bytes from byte "
                    f"{address - old.start} of {old.name} on, which has {old.size}"
                )
            return self._moved(node, operand, address)
        for move in self.moves:
            old = move.old
            if any(row < old.end and old.start < row + width for row in rows):
                self.problems.append(
                    f"{node}: {operand} begins outside {old.name} and reaches into it"
                )
        return address

    # ---- words ---------------------------------------------------------------------------------

    def _find(self, address: int) -> int | None:
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        old = self.moves[index].old
        is_in = address < old.end if self._dense[index] else old.holds(address)
        return index if is_in else None

    def _name(self, address: int) -> str:
        index = self._find(address)
        assert index is not None
        return self.moves[index].old.name

    def _moved(self, node: NodeRecord, operand: str, address: int, at: int | None = None) -> int:
        """Where ``address`` goes, of byte ``at`` of the operand."""
        index = self._find(address)
        assert index is not None
        return self._move(index, node, operand, address, at)

    def _move(
        self, index: int, node: NodeRecord, operand: str, address: int, at: int | None
    ) -> int:
        move = self.moves[index]
        rivals = self._rivals[index]
        rival = next((each for each in rivals if each.holds(address)), None) if rivals else None
        if rival is not None:
            where = operand if at is None else f"{operand}, byte {at}"
            self.problems.append(
                f"{node}: {where}: ambiguous: {move.old.name} + {address - move.old.start} bytes "
                f"or {rival.name} + {address - rival.start} bytes"
            )
        self.words[index] += 1
        return address + move.by


def _place(node: NodeRecord, index: int) -> tuple[int, int, str] | None:
    """As of :meth:`_Search._places`; None for what is declared to be a number."""
    operand, offset = f"arg {index}", 0
    if node.function is not None and index < len(node.function.layout):
        offset = node.function.layout[index][0]
    if node.kernel is not None:
        parameter = node.kernel.parameters[index]
        operand += f" ({parameter.name})"
        if parameter.is_pointer:
            offset = 0
        elif not parameter.type.startswith("bytes:"):
            return None
    return index, -offset % 8, operand
