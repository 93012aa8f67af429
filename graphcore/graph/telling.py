"""A comparison whose addresses have names: which buffer each changed pointer pointed into.

Who knows names is above: here they come as functions of an address. An argument without a signature
is its bytes; every aligned word of it that has a name is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from graphcore.graph.diff import FieldChange, GraphDiff, NodeChange, Word
from graphcore.graph.nodes import NodeRecord

Names = Callable[[int], str | None]
"""What an address is called; None where it has no name."""

_WORD = 8


def with_names(found: GraphDiff, old: Names, new: Names) -> GraphDiff:
    """``found`` with every changed address called by its name, in inner graphs too.

    Args:
        found: The comparison.
        old: Names of the addresses in the old graph.
        new: Of those in the new one.
    """
    return replace(found, changed=tuple(_node(change, old, new) for change in found.changed))


def _node(change: NodeChange, old: Names, new: Names) -> NodeChange:
    fields = tuple(
        replace(
            each,
            before_name=_called(each, each.before, change.before, old),
            after_name=_called(each, each.after, change.after, new),
        )
        for each in change.fields
    )
    inner = tuple(with_names(each, old, new) for each in change.inner)
    return replace(change, fields=fields, inner=inner)


def _called(change: FieldChange, value: object, node: NodeRecord, names: Names) -> str:
    """The names of the addresses in a value; empty where there are none."""
    if isinstance(value, Word):
        return names(value) or ""
    if not isinstance(value, bytes):
        return ""
    offset = _offset(change, node)
    told = [(at, names(word)) for at, word in _words(value, offset)]
    if len(value) == _WORD:
        return next((name for _, name in told if name), "")
    return ", ".join(f"byte {at} = {name}" for at, name in told if name)


def _offset(change: FieldChange, node: NodeRecord) -> int:
    """Where an argument begins in its kernel's parameters: words are aligned there."""
    last = change.field.rpartition(" ")[2]
    arguments = node.arguments
    index = int(last) if last.isdigit() else len(arguments)
    return arguments[index].offset if index < len(arguments) else 0


def _words(data: bytes, offset: int) -> Iterator[tuple[int, int]]:
    for at in range(-offset % _WORD, len(data) - _WORD + 1, _WORD):
        yield at, int.from_bytes(data[at : at + _WORD], "little")
