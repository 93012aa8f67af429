"""One node of a graph as it was read: what it does, with which parameters, under which label.

Pure data: a record owns no handle and keeps none alive. ``handle`` and the addresses in ``params``
are only numbers here; they mean something while the graph that was read lives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from graphcore.drawing.model import node_count
from graphcore.driver.kernel import Kernel, Pointer
from graphcore.driver.records import (
    ConditionalParams,
    FunctionInfo,
    KernelParams,
    LaunchConfig,
    MemcpyParams,
    MemsetParams,
    NodeHandle,
    NodeKind,
    NodeParams,
)

if TYPE_CHECKING:
    from graphcore.graph.snapshot import GraphSnapshot


@dataclass(frozen=True, slots=True)
class Argument:
    """One kernel argument.

    Args:
        index: Position in the signature.
        offset: Byte offset in the parameter block, by the function's layout.
        size: Bytes.
        data: The bytes themselves.
        value: The Python value where the kernel's signature is known (``Pointer`` for pointers).
        type: The signature's type, for example ``"const f32*"``, or None.
        name: The signature's name, or None.
    """

    index: int
    offset: int
    size: int
    data: bytes
    value: object | None = None
    type: str | None = None
    name: str | None = None

    def __str__(self) -> str:
        label = self.name or f"arg {self.index}"
        if isinstance(self.value, Pointer):
            return f"{label} = {self.value.address:#x}"
        if self.type is not None and not isinstance(self.value, bytes):
            return f"{label} = {self.value}"
        return f"{label} = {words_of(self.data)}"


def words_of(data: bytes, limit: int | None = 16) -> str:
    """The bytes of an argument as a person reads them: a number in hex, a text, or hex words.

    Args:
        data: The bytes.
        limit: How many bytes are shown as words; None shows all.
    """
    if len(data) in (1, 2, 4, 8):
        return f"{int.from_bytes(data, 'little'):#x}"
    if data.isascii() and (text := data.decode()).isprintable() and text:
        return repr(text)
    shown = data[:limit]
    more = "..." if len(shown) < len(data) else ""
    return f"<{len(data)} bytes {shown.hex(' ', -8)}{more}>"


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node.

    Args:
        index: Position in creation order; edges speak of it.
        handle: The driver's handle in the graph that was read.
        params: The decoded parameters.
        function: Of a kernel node: the function's name and parameter layout.
        kernel: The :class:`Kernel` behind the function where it is one of ours.
        label: Annotation path, for example ``"layer 3/attention"``; empty where there is none.
        child: The embedded graph of a child node.
        bodies: The body graphs of a conditional node, in order.
    """

    index: int
    handle: NodeHandle
    params: NodeParams
    function: FunctionInfo | None = None
    kernel: Kernel | None = None
    label: str = ""
    child: GraphSnapshot | None = None
    bodies: tuple[GraphSnapshot, ...] = ()

    def with_params(self, params: NodeParams) -> NodeRecord:
        """The same node with other parameters."""
        if isinstance(params, KernelParams):
            known = self.function, self.kernel
            made: Any = NodeFields(self.index, self.handle, params, known, self.label)
            made.__class__ = NodeRecord
            return cast("NodeRecord", made)
        # written out: dataclasses.replace costs several times as much, and graphs have many nodes
        return NodeRecord(
            self.index, self.handle, params, self.function, self.kernel, self.label, self.child,
            self.bodies,
        )  # fmt: skip

    @property
    def kind(self) -> NodeKind:
        return self.params.kind

    @property
    def name(self) -> str:
        """The kernel's demangled name; for other kinds what they are, ``"memcpy"``, ``"while"``."""
        if self.function is not None:
            return self.function.name
        if isinstance(self.params, ConditionalParams):
            return self.params.form
        return self.kind.value.replace("_", " ")

    @property
    def short_name(self) -> str:
        """The name without return type, parameter list and namespaces, for pictures."""
        return shorten(self.name)

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """Of a kernel node: every argument, typed where the signature is known."""
        if not isinstance(self.params, KernelParams):
            return ()
        return tuple(_arguments(self.params, self.function, self.kernel))

    @property
    def inner(self) -> tuple[GraphSnapshot, ...]:
        """The graphs inside this node: the child graph, or the bodies."""
        return self.bodies if self.child is None else (self.child,)

    @property
    def work(self) -> str:
        """One phrase saying how much the node does: its launch shape, or the bytes it moves."""
        params = self.params
        if isinstance(params, KernelParams):
            return launch_shape(params.config)
        if isinstance(params, MemcpyParams):
            return _extent(params.width, params.height, params.depth)
        if isinstance(params, MemsetParams):
            return _extent(params.width * params.element_size, params.height, 1)
        if self.inner:
            return node_count(sum(len(graph.nodes) for graph in self.inner))
        size = getattr(params, "size", None)
        return "" if size is None else f"{size} B"

    def __str__(self) -> str:
        return f"node {self.index} ({self.kind.value} {self.short_name})"


class NodeFields:
    """What the record of a kernel node holds, while it is made; as :class:`KernelFields`."""

    __slots__ = ("bodies", "child", "function", "handle", "index", "kernel", "label", "params")

    def __init__(
        self,
        index: int,
        handle: NodeHandle,
        params: KernelParams,
        known: tuple[FunctionInfo | None, Kernel | None],
        label: str,
    ) -> None:
        self.index = index
        self.handle = handle
        self.params = params
        self.function, self.kernel = known
        self.label = label
        self.child = None
        self.bodies = ()


def _arguments(
    params: KernelParams, function: FunctionInfo | None, kernel: Kernel | None
) -> Iterator[Argument]:
    layout = function.layout if function is not None else ()
    offset = 0
    for index, data in enumerate(params.arguments):
        if index < len(layout):
            offset = layout[index][0]
        if kernel is None:
            yield Argument(index, offset, len(data), data)
        else:
            typed = kernel.parameters[index]
            yield Argument(
                index, offset, len(data), data, typed.unpack(data), typed.type, typed.name
            )
        offset += len(data)


def launch_shape(config: LaunchConfig) -> str:
    """``grid 8x2, block 128``, with what else is not as usual."""
    text = f"grid {dim_text(config.grid)}, block {dim_text(config.block)}"
    if config.cluster != (1, 1, 1):
        text += f", cluster {dim_text(config.cluster)}"
    if config.shared_bytes:
        text += f", {config.shared_bytes} B shared"
    return text


def dim_text(dim: tuple[int, int, int]) -> str:
    """A launch dimension without its trailing ones: ``(8, 2, 1)`` is ``8x2``."""
    x, y, z = dim
    if z != 1:
        return f"{x}x{y}x{z}"
    return f"{x}x{y}" if y != 1 else str(x)


def _extent(width: int, height: int, depth: int) -> str:
    sizes = f"{width} B"
    if height != 1 or depth != 1:
        sizes += f" x {height}"
    return f"{sizes} x {depth}" if depth != 1 else sizes


_NAMESPACES = re.compile(r"(?:\(anonymous namespace\)::|\b[A-Za-z_]\w*::)+")


def shorten(name: str) -> str:
    """A demangled C++ name without return type, parameter list and namespaces.

    Names that are no C++ signatures (``aten::mm.default``, ``add_one``) come back as they are.
    """
    if "(" not in name and "<" not in name:
        return name
    plain = name.replace("(anonymous namespace)::", "")
    end = _at_depth_zero(plain, "(")
    head = plain if end is None else plain[:end]
    space = _at_depth_zero(head, " ")
    if space is not None:
        head = head[space + 1 :]
    return _NAMESPACES.sub("", head).strip() or name


def _at_depth_zero(text: str, wanted: str) -> int | None:
    """The first position of ``wanted`` outside template brackets, past the first character."""
    depth = 0
    for position, character in enumerate(text):
        if character == wanted and depth == 0 and position:
            return position
        depth += (character in "<{") - (character in ">}")
    return None
