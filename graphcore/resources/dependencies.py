"""What a graph depends on, field by field: the fields that a fingerprint is made of.

Handles are left out or counted by first appearance; pointers become the place they point into.
Values are plain data with one ``repr`` each, so that they can be hashed and compared.
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
    MemcpyParams,
    MemsetParams,
)
from graphcore.errors import ConfigurationError
from graphcore.graph.nodes import Argument, NodeRecord
from graphcore.graph.snapshot import GraphSnapshot
from graphcore.resources.addresses import AddressBook, Place
from graphcore.resources.attribution import pointers


@dataclass(frozen=True, slots=True)
class StructValue:
    """An argument with pointers inside: its other bytes, and (byte offset, place) of each.

    ``rest`` is empty where the other bytes do not count.
    """

    rest: bytes
    places: tuple[tuple[int, Place], ...]

    def __str__(self) -> str:
        pieces = [f"at byte {offset} {place}" for offset, place in self.places]
        if any(self.rest):
            pieces.insert(0, words_of(self.rest))
        return ", ".join(pieces)


Value = None | bool | int | str | bytes | Place | StructValue | tuple["Value", ...]


@dataclass(frozen=True, slots=True)
class Field:
    """One thing a graph depends on: ``where`` names the node (or the graph) in words."""

    where: str
    field: str
    value: Value

    def __str__(self) -> str:
        return f"{self.where}: {self.field} = {words_of(self.value)}"


def dependencies(
    snapshot: GraphSnapshot,
    names: Mapping[str, Any],
    driver: Driver | None,
    private: Iterable[tuple[int, int]],
) -> Iterator[Field]:
    """Every field of a graph, inner graphs included; arguments as of ``fingerprint``."""
    return _Writer(snapshot, names, driver, private).graph(snapshot, "")


def words_of(value: Value) -> str:
    """A field's value as a person reads it."""
    if not isinstance(value, bytes):
        return str(value)
    if len(value) in (1, 2, 4, 8):
        return f"{int.from_bytes(value, 'little'):#x}"
    return f"<{value.hex(' ', -8)}>"


class _Writer:
    """Writes the fields of one graph; knows what was met before, in order of appearance."""

    def __init__(
        self,
        snapshot: GraphSnapshot,
        names: Mapping[str, Any],
        driver: Driver | None,
        private: Iterable[tuple[int, int]],
    ) -> None:
        self._book = AddressBook(names, driver)
        owned = {f"private memory {index}": piece for index, piece in enumerate(_checked(private))}
        allocs = (node.params for node in snapshot.walk())
        for index, params in enumerate(p for p in allocs if isinstance(p, AllocParams)):
            owned[f"graph allocation {index}"] = (params.address, params.size)
        self._private = AddressBook(owned)
        # a compiler leaves the padding of a structure, and unused elements in it, as they were: on
        # a device two captures of one torch kernel differ there (seen), so that of structures of
        # other libraries only the pointers count
        self._counts_foreign_structures = driver is None or driver.is_emulated
        self._numbers: dict[str, dict[int, int]] = {}
        self._sources: dict[Kernel, str] = {}

    def graph(self, snapshot: GraphSnapshot, prefix: str) -> Iterator[Field]:
        where = f"graph {prefix}".strip()
        if not prefix:
            yield Field(where, "device", snapshot.device)
            yield Field(where, "context", snapshot.context)
        yield Field(where, "nodes", len(snapshot.nodes))
        needs = _dependencies(snapshot)
        for node in snapshot.nodes:
            name = f"node {prefix}{node.index} ({node.kind.value} {node.short_name})"
            yield Field(name, "kind", node.kind.value)
            yield Field(name, "dependencies", needs[node.index])
            for field, value in self._node(node):
                yield Field(name, field, value)
            for number, inner in enumerate(node.inner):
                yield from self.graph(inner, f"{prefix}{node.index}.{number}.")

    def _node(self, node: NodeRecord) -> Iterator[tuple[str, Value]]:
        params = node.params
        if isinstance(params, KernelParams):
            yield from self._kernel(node, params)
        elif isinstance(params, MemcpyParams):
            for side, operand in (("dst", params.dst), ("src", params.src)):
                yield side, self._pointer(operand.address)
                yield f"{side}.memory", operand.memory.value
                yield f"{side}.pitch", operand.pitch
                yield f"{side}.rows", operand.rows
            yield from _named(params, "width", "height", "depth")
        elif isinstance(params, MemsetParams):
            yield "address", self._pointer(params.address)
            yield from _named(params, "value", "element_size", "width", "height", "pitch")
        elif isinstance(params, HostParams):
            yield "callback", _callback(params)
        elif isinstance(params, EventParams):
            yield "event", self._number("event", params.event)
        elif isinstance(params, AllocParams):
            yield "size", params.size
        elif isinstance(params, FreeParams):
            yield "address", self._pointer(params.address)
        elif isinstance(params, ConditionalParams):
            yield "handle", self._number("conditional", params.handle)
            yield from _named(params, "form", "size")

    def _kernel(self, node: NodeRecord, params: KernelParams) -> Iterator[tuple[str, Value]]:
        if node.function is not None:
            yield "function", node.function.raw_name
            yield "layout", node.function.layout
        if node.kernel is not None:
            yield "source", self._source(node.kernel)
        config = params.config
        yield from _named(config, "grid", "block", "shared_bytes", "cluster")
        yield from _named(config, "cooperative", "priority", "programmatic")
        for argument in node.arguments:
            is_defined = len(argument.data) <= 8 or node.kernel is not None
            counts = is_defined or self._counts_foreign_structures
            yield f"argument {argument.index}", self._argument(argument, counts)

    def _argument(self, argument: Argument, counts: bool) -> Value:
        """The bytes with every pointer cut out (where they count), and the pointers' places."""
        rest = bytearray(argument.data)
        places = []
        for offset, address in pointers(argument):
            place = self._place(address)
            if place is not None:
                rest[offset : offset + 8] = bytes(8)
                places.append((offset, place))
        if not counts:
            return StructValue(b"", tuple(places))
        if not places:
            return argument.data
        return places[0][1] if len(rest) == 8 else StructValue(bytes(rest), tuple(places))

    def _pointer(self, address: int) -> Value:
        place = self._place(address)
        return address if place is None else place

    def _place(self, address: int) -> Place | None:
        # a name says more than an order; an allocation's address says less
        named = self._book.find_named(address) or self._private.find_named(address)
        return named or self._book.find(address)

    def _number(self, sort: str, handle: int) -> int:
        numbers = self._numbers.setdefault(sort, {})
        return numbers.setdefault(handle, len(numbers))

    def _source(self, kernel: Kernel) -> str:
        if kernel not in self._sources:
            text = repr((kernel.source, kernel.options))
            self._sources[kernel] = blake2b(text.encode(), digest_size=8).hexdigest()
        return self._sources[kernel]


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


def _callback(params: HostParams) -> Value:
    callback = params.callback
    if callback is None:
        return params.function
    kind = type(callback)
    return (
        getattr(callback, "__module__", None) or kind.__module__,
        getattr(callback, "__qualname__", kind.__qualname__),
    )
