"""Where the arguments of kernel nodes may hold addresses, worked out once for each function.

A pointer by the signature is one; of an argument that nobody declares every aligned word may be
one; declared numbers are none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphcore.driver.kernel import Pointer
from graphcore.driver.records import KernelParams
from graphcore.graph.nodes import NodeRecord
from graphcore.resources.attribution import pointers
from graphcore.resources.divisor_tables import divisor_tables, outside


@dataclass(frozen=True, slots=True)
class ArgumentShape:
    """One argument of a function.

    Args:
        index: Its place.
        field: "argument 2".
        name: The signature's name, or None.
        size: Bytes.
        offsets: Byte offsets in it of what may be an address.
        is_pointer: Whether it is one by the signature.
    """

    index: int
    field: str
    name: str | None
    size: int
    offsets: tuple[int, ...]
    is_pointer: bool

    def words(self, data: bytes) -> list[tuple[int, int]]:
        """(byte offset, value) of what may be an address in the bytes of the argument."""
        found = [(at, int.from_bytes(data[at : at + 8], "little")) for at in self.offsets]
        tables = () if self.is_pointer else divisor_tables(data)
        return list(outside(found, tables)) if tables else found


class ArgumentShapes:
    """The arguments of each function met; for one pass over a snapshot, which must be kept."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], tuple[ArgumentShape, ...]] = {}

    def of(self, node: NodeRecord) -> tuple[ArgumentShape, ...]:
        """The arguments of a kernel node, in order."""
        params = node.params
        assert isinstance(params, KernelParams)
        # by identity: a reading shares what nodes of one function have in common
        key = (id(node.function), id(node.kernel), len(params.arguments))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = tuple(_shapes(node))
        return known


def _shapes(node: NodeRecord) -> list[ArgumentShape]:
    shapes = []
    for argument in node.arguments:
        zeros = replace(argument, data=bytes(argument.size))
        offsets = tuple(offset for offset, _ in pointers(zeros))
        is_pointer = isinstance(argument.value, Pointer)
        shapes.append(
            ArgumentShape(
                index=argument.index,
                field=f"argument {argument.index}",
                name=argument.name,
                size=argument.size,
                offsets=offsets,
                is_pointer=is_pointer,
            )
        )
    return shapes
