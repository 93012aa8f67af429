"""What a graph depends on, field by field, in an order that the graph alone decides.

One pass over the nodes. What many kernels share (function, signature, launch shape) and what many
pointers share (the place they point into) is worked out once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from graphcore.driver.api import Driver
from graphcore.driver.kernel import Kernel
from graphcore.driver.records import (
    AllocParams,
    ConditionalParams,
    EventParams,
    FreeParams,
    HostParams,
    KernelParams,
    LaunchConfig,
    MemcpyParams,
    MemsetParams,
    NodeParams,
)
from graphcore.errors import ConfigurationError
from graphcore.graph.nodes import NodeRecord
from graphcore.graph.snapshot import GraphSnapshot
from graphcore.resources.addresses import AddressBook, Place
from graphcore.resources.argument_words import ArgumentShapes
from graphcore.resources.fields import Group, Named, StructValue, Value
from graphcore.resources.identity import identity_of
from graphcore.resources.pools import Blocks


@dataclass(frozen=True, slots=True)
class Owned:
    """A tensor that a graph keeps: its label, and how it was recorded."""

    label: str
    address: int
    nbytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is known of a graph beyond its nodes.

    Args:
        names: Name -> tensor, buffer or (address, bytes).
        driver: Whom to ask about other addresses; None asks nobody.
        private: (address, bytes) that are the graph's alone.
        owned: The tensors it keeps.
        blocks: The pieces that another allocator has handed out.
    """

    names: Mapping[str, Any]
    driver: Driver | None = None
    private: Iterable[tuple[int, int]] = ()
    owned: Iterable[Owned] = ()
    blocks: Blocks | None = None


def dependencies(snapshot: GraphSnapshot, around: Surroundings) -> tuple[tuple[Group, ...], str]:
    """The fields of a graph, inner graphs included, and their digest (32 hex digits)."""
    groups = []
    digest = blake2b(digest_size=16)
    for group, text in _Writer(snapshot, around).graph(snapshot, "", tuple(around.owned)):
        groups.append(group)
        digest.update(f"{group.level}{group.position}:{text}\n".encode())
    return tuple(groups), digest.hexdigest()


class _Shared:
    """Fields that many nodes share, with their text."""

    __slots__ = ("short_name", "text", "values")

    def __init__(self, values: Iterable[Named], short_name: str = "") -> None:
        self.values = tuple(values)
        self.text = repr(self.values)  # no places among them
        self.short_name = short_name


class _Writer:
    """Writes the fields of one graph; knows what was met before, in order of appearance."""

    def __init__(self, snapshot: GraphSnapshot, around: Surroundings) -> None:
        driver = around.driver
        self._book = AddressBook(around.names, driver)
        owned = {
            f"private memory {index}": piece for index, piece in enumerate(_checked(around.private))
        }
        allocs = (node.params for node in snapshot.walk())
        for index, params in enumerate(p for p in allocs if isinstance(p, AllocParams)):
            owned[f"graph allocation {index}"] = (params.address, params.size)
        self._private = AddressBook(owned)
        self._blocks = around.blocks
        # a compiler leaves the padding of a structure, and unused elements in it, as they were: on
        # a device two captures of one torch kernel differ there (seen), so that of structures of
        # other libraries only the pointers count
        self._counts_foreign_structures = driver is None or driver.is_emulated
        self._numbers: dict[str, dict[int, int]] = {}
        self._places: dict[int, Place | None] = {}
        self._texts: dict[int, str] = {}  # of the places, by id
        self._shapes = ArgumentShapes()
        self._functions: dict[tuple[int, int], _Shared] = {}
        self._configs: dict[LaunchConfig, _Shared] = {}

    # ---- graphs and nodes ----------------------------------------------------------------------

    def graph(
        self, snapshot: GraphSnapshot, prefix: str, owned: tuple[Owned, ...] = ()
    ) -> Iterator[tuple[Group, str]]:
        """Every group with a text that tells its values from all others."""
        values: list[Named] = []
        if not prefix:
            values += [("device", snapshot.device), ("context", snapshot.context)]
        values.append(("nodes", len(snapshot.nodes)))
        for owner in owned:
            what = (self._pointer(owner.address), owner.nbytes, owner.dtype)
            values.append((f"owner {owner.label!r}", what))
        yield Group(prefix, None, "", tuple(values)), self._text(values)
        needs = _dependencies(snapshot)
        for node in snapshot.nodes:
            params, kind, index = node.params, node.kind.value, node.index
            need = needs[index]
            values = [("kind", kind), ("dependencies", need)]
            if isinstance(params, KernelParams):
                function, config = self._function(node), self._config(params.config)
                words = self._arguments(node, params, values)
                shared = (function.values, config.values)
                text = f"{kind}{need!r}{function.text}{config.text}{words}"
                yield Group(prefix, index, function.short_name, tuple(values), shared), text
            else:
                values += self._node(params)
                yield Group(prefix, index, node.short_name, tuple(values)), self._text(values)
            for number, inner in enumerate(node.inner):
                yield from self.graph(inner, f"{prefix}{node.index}.{number}.")

    def _node(self, params: NodeParams) -> Iterator[Named]:
        if isinstance(params, MemcpyParams):
            for side, operand in (("dst", params.dst), ("src", params.src)):
                yield from self._address(side, operand.address)
                yield f"{side}.memory", operand.memory.value
                yield f"{side}.pitch", operand.pitch
                yield f"{side}.rows", operand.rows
            yield from _named(params, "width", "height", "depth")
        elif isinstance(params, MemsetParams):
            yield from self._address("address", params.address)
            yield from _named(params, "value", "element_size", "width", "height", "pitch")
        elif isinstance(params, HostParams):
            yield "callback", self._callback(params)
        elif isinstance(params, EventParams):
            yield "event", self._number("event", params.event)
        elif isinstance(params, AllocParams):
            yield "size", params.size
        elif isinstance(params, FreeParams):
            yield "address", self._pointer(params.address)
        elif isinstance(params, ConditionalParams):
            yield "handle", self._number("conditional", params.handle)
            yield from _named(params, "form", "size")

    # ---- kernels -------------------------------------------------------------------------------

    def _arguments(self, node: NodeRecord, params: KernelParams, values: list[Named]) -> str:
        """Adds the arguments' fields to ``values``; their text."""
        parts: list[object] = []
        counts_all = self._counts_foreign_structures or node.kernel is not None
        for shape, data in zip(self._shapes.of(node), params.arguments, strict=True):
            if not shape.offsets and (counts_all or shape.size <= 8):
                values.append((shape.field, data))
                parts.append(data)
            elif shape.size != 8:
                counts = counts_all or shape.size <= 8
                value = self._structure(data, shape.words(data), counts=counts)
                values.append((shape.field, value))
                parts.append(self._words(value))
            else:
                parts.append(self._operand(shape.field, values, data))
        return repr(parts)

    def _function(self, node: NodeRecord) -> _Shared:
        info, kernel = node.function, node.kernel
        known = self._functions.get((id(info), id(kernel)))
        if known is None:
            values: list[Named] = []
            if info is not None:
                module = self._number("module", info.module) if info.module else None
                values = [("function", info.raw_name), ("layout", info.layout), ("module", module)]
            if kernel is not None:
                values.append(("source", _source(kernel)))
            known = self._functions[id(info), id(kernel)] = _Shared(values, node.short_name)
        return known

    def _config(self, config: LaunchConfig) -> _Shared:
        known = self._configs.get(config)
        if known is None:
            names = ("grid", "block", "shared_bytes", "cluster")
            more = ("cooperative", "priority", "programmatic")
            known = self._configs[config] = _Shared(_named(config, *names, *more))
        return known

    def _structure(self, data: bytes, found: list[tuple[int, int]], *, counts: bool) -> Value:
        """The bytes with every pointer cut out (where they count), and the pointers' places."""
        rest = bytearray(data)
        places = []
        for offset, address in found:
            place = self._place(address)
            if place is not None:
                rest[offset : offset + 8] = bytes(8)
                places.append((offset, place))
        if not places and counts:
            return data
        return StructValue(bytes(rest) if counts else b"", tuple(places))

    # ---- values and their text -------------------------------------------------------------------

    def _text(self, values: Iterable[Named]) -> str:
        return ";".join([f"{name}={self._words(value)}" for name, value in values])

    def _words(self, value: Value) -> str:
        if isinstance(value, Place):
            return self._texts[id(value)]
        if isinstance(value, StructValue):
            return f"<{value.rest!r}{[(at, self._texts[id(place)]) for at, place in value.places]}>"
        if isinstance(value, tuple):
            return f"({','.join(map(self._words, value))})"
        return repr(value)

    def _operand(self, name: str, values: list[Named], data: bytes) -> str:
        """Adds an address that is one for sure: where it points, and which piece of a pool.

        Returns the text of what was added.
        """
        address = int.from_bytes(data, "little")
        place = self._places.get(address) or self._place(address)
        if place is None:
            values.append((name, data))
            return data.hex()
        values.append((name, place))
        piece = None if self._blocks is None else self._piece(self._blocks, address, place)
        if piece is None:
            return self._texts[id(place)]
        values.append((f"{name} piece", piece))
        return f"{self._texts[id(place)]}{piece!r}"

    def _address(self, name: str, address: int) -> Iterator[Named]:
        """An operand of a copy or fill: where it points, and which piece of a pool that is."""
        place = self._place(address)
        yield name, address if place is None else place
        if place is not None and self._blocks is not None:
            piece = self._piece(self._blocks, address, place)
            if piece is not None:
                yield f"{name} piece", piece

    def _piece(self, blocks: Blocks, address: int, place: Place) -> Value:
        """(start in its allocation, bytes asked for) of the live piece around an address."""
        block = blocks.find(address) if place.allocation is not None else None
        if block is None or not block.is_live or place.allocation is None:
            return None
        return block.address - place.allocation.base, block.requested

    def _pointer(self, address: int) -> Value:
        place = self._place(address)
        return address if place is None else place

    def _place(self, address: int) -> Place | None:
        if address not in self._places:
            # a name says more than an order; an allocation's address says less
            named = self._book.find_named(address) or self._private.find_named(address)
            place = self._places[address] = named or self._book.find(address)
            if place is not None:
                self._texts[id(place)] = repr(place)
        return self._places[address]

    def _number(self, sort: str, handle: int) -> int:
        numbers = self._numbers.setdefault(sort, {})
        return numbers.setdefault(handle, len(numbers))

    def _callback(self, params: HostParams) -> Value:
        if params.callback is None:
            return params.function
        return identity_of(params.callback, lambda obj: self._number("object", id(obj)))


def _source(kernel: Kernel) -> str:
    text = repr((kernel.source, kernel.options, kernel.parameters))
    return blake2b(text.encode(), digest_size=8).hexdigest()


def _checked(private: Any) -> list[tuple[int, int]]:
    expected = "private: expected (address, bytes) pairs"
    if isinstance(private, (str, bytes)) or not isinstance(private, Iterable):
        raise ConfigurationError(f"{expected}, got {type(private).__name__}")
    pieces = list(private)
    for piece in pieces:
        pair = isinstance(piece, tuple) and len(piece) == 2
        if not pair or not all(isinstance(part, int) for part in piece):
            raise ConfigurationError(f"{expected}, got {piece!r} among them")
    return pieces


def _dependencies(snapshot: GraphSnapshot) -> list[Value]:
    needs: list[list[tuple[int, ...]]] = [[] for _ in snapshot.nodes]
    for (source, target), extra in snapshot.edges_with_data():
        needs[target].append((source, *extra) if any(extra) else (source,))
    return [tuple(sorted(entry)) for entry in needs]


def _named(record: object, *names: str) -> Iterator[tuple[str, Value]]:
    for name in names:
        yield name, getattr(record, name)
