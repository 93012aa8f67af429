"""KernelReader: the kernel nodes of a graph, read past the bindings into memory used again.

Reading a node takes five calls (its kind, its parameters, three attributes), which through the
bindings cost more in objects than in CUDA. What the nodes of a graph share, functions and launch
shapes, is asked and made once; all of a node is taken apart at once.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from graphcore.driver.codes import cuda_error
from graphcore.driver.cuda.attributes import READ_ATTRIBUTES, attributes_of
from graphcore.driver.cuda.check import error_of
from graphcore.driver.cuda.versions import EntryPoints, argument, result_of
from graphcore.driver.kernel_attributes import KernelAttributes
from graphcore.driver.records import (
    FunctionHandle,
    KernelFields,
    KernelParams,
    LaunchConfig,
    NodeHandle,
)

Layout = tuple[tuple[int, int], ...]

_KERNEL = 0  # CU_GRAPH_NODE_TYPE_KERNEL
_POINTER_BYTES = 8
_ADDRESS = (1 << 64) - 1
# three CUlaunchAttributeValue of 64 bytes: the first three ints, one int, one int
_ATTRIBUTES = struct.Struct("=3i52xi60xi60x")
# and behind them CUDA_KERNEL_NODE_PARAMS_v2: func, grid, block, shared, kernelParams, extra, kern,
# ctx
_NODE = struct.Struct("=3i52xi60xi60xQ7I4x4Q")
# of what _NODE takes apart, what nodes of one function and launch shape have in common
_SHAPE = slice(0, 13)


class KernelReader:
    """Reads kernel nodes of one graph; made for one reading, on one thread.

    Args:
        entry_points: The driver's calls.
        layout_of: (offset, size) of a function's parameters; asked once a function.
        function_of: The function behind a library's kernel handle.
    """

    def __init__(
        self,
        entry_points: EntryPoints,
        layout_of: Callable[[int], Layout],
        function_of: Callable[[int], int],
    ) -> None:
        self._calls = entry_points
        self._layout_of = layout_of
        self._function_of = function_of
        self._kind = ctypes.c_int()
        self._node = ctypes.create_string_buffer(_NODE.size)
        start = ctypes.addressof(self._node)
        self._params_at = argument(start + _ATTRIBUTES.size)
        self._reads = tuple(
            (ctypes.c_int.from_param(number), argument(start + 64 * index))
            for index, number in enumerate(READ_ATTRIBUTES)
        )
        self._configs: dict[tuple[int, ...], LaunchConfig] = {}
        self._functions: dict[int, Arguments] = {}

    def read(self, nodes: Iterable[NodeHandle]) -> list[KernelParams | None]:
        """The parameters of each kernel node; None for a node of another kind."""
        read_params, read_attribute = self._calls.kernel_params, self._calls.kernel_attribute
        params_at, whole, unpack = self._params_at, self._node, _NODE.unpack
        (cluster, cluster_at), (cooperative, cooperative_at), (priority, priority_at) = self._reads
        shapes: dict[tuple[int, ...], tuple[FunctionHandle, LaunchConfig, Arguments]] = {}
        found: list[KernelParams | None] = []
        for node, at in self._kernels(nodes):
            if at is None:
                found.append(None)
                continue
            code = read_params(at, params_at)
            if code:
                raise error_of(result_of(code), "cuGraphKernelNodeGetParams", node=node)
            code = (
                read_attribute(at, cluster, cluster_at)
                or read_attribute(at, cooperative, cooperative_at)
                or read_attribute(at, priority, priority_at)
            )
            if code:
                raise error_of(result_of(code), "cuGraphKernelNodeGetAttribute", node=node)
            fields = unpack(whole)
            key = fields[_SHAPE]
            shape = shapes.get(key)
            if shape is None:
                shape = self._shape(key, fields[15])
                if key[5]:  # a handle of a library's kernel is not a part of the key
                    shapes[key] = shape
            function, config, arguments = shape
            made: Any = KernelFields(function, config, arguments.read(fields[13], fields[14]))
            made.__class__ = KernelParams
            found.append(made)
        return found

    def attributes(self, nodes: Iterable[NodeHandle]) -> Iterator[KernelAttributes | None]:
        """Cluster, cooperative flag and priority of each kernel node; None for other nodes."""
        read_attribute, known = self._calls.kernel_attribute, {}
        for node, at in self._kernels(nodes):
            if at is None:
                yield None
                continue
            for number, place in self._reads:
                code = read_attribute(at, number, place)
                if code:
                    raise error_of(result_of(code), "cuGraphKernelNodeGetAttribute", node=node)
            values = _ATTRIBUTES.unpack_from(self._node)
            if values not in known:
                known[values] = attributes_of(*values)
            yield known[values]

    def _kernels(self, nodes: Iterable[NodeHandle]) -> Iterator[tuple[NodeHandle, Any]]:
        """Each node, with what names it in calls where it is a kernel's."""
        node_type, kind = self._calls.node_type, self._kind
        kind_at = ctypes.byref(kind)
        for node in nodes:
            at = argument(node)
            code = node_type(at, kind_at)
            if code:
                raise error_of(result_of(code), "cuGraphNodeGetType")
            yield node, None if kind.value != _KERNEL else at

    def _shape(
        self, key: tuple[int, ...], library_kernel: int
    ) -> tuple[FunctionHandle, LaunchConfig, Arguments]:
        function = key[5] or self._function_of(library_kernel)
        known = self._functions.get(function)
        if known is None:
            known = self._functions[function] = Arguments(self._layout_of(function))
        x, y, z, cooperative, priority, _, *sizes = key
        values = (x, y, z, cooperative, priority, *sizes)
        config = self._configs.get(values)
        if config is None:
            gx, gy, gz, bx, by, bz, shared = sizes
            attributes = attributes_of(x, y, z, cooperative, priority)
            config = LaunchConfig((gx, gy, gz), (bx, by, bz), shared, *attributes)
            self._configs[values] = config
        return FunctionHandle(function), config, known


class Arguments:
    """How the argument bytes of one function are copied out of a node."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        # the list of pointers as one number: place by place it is the start, and the offset
        places = range(len(layout))
        self._starts = sum(1 << 64 * place for place in places)
        self._offsets = sum(layout[place][0] << 64 * place for place in places)
        pieces, end = [], 0
        for offset, size in layout:
            pieces.append(f"{offset - end}x{size}s")
            end = offset + size
        self._cut = struct.Struct("=" + "".join(pieces)).unpack
        self._block = (ctypes.c_char * end).from_address
        self._list = (ctypes.c_char * (_POINTER_BYTES * len(layout))).from_address

    def read(self, pointers: int, extra: int) -> tuple[bytes, ...]:
        """Copies argument bytes from either form a node may hold them in."""
        if not self._layout:
            return ()
        if pointers:
            listed = int.from_bytes(self._list(pointers), "little")
            start = listed & _ADDRESS
            if listed - start * self._starts != self._offsets:
                pairs = zip(
                    struct.iter_unpack("=Q", self._list(pointers)), self._layout, strict=True
                )
                return tuple([ctypes.string_at(address, size) for (address,), (_, size) in pairs])
        else:
            start = _extra_buffer(extra)
        # the arguments lie as the kernel takes them: one block, cut up here
        return self._cut(self._block(start))


def _extra_buffer(extra: int) -> int:
    """The address of the packed arguments in a launch's ``extra`` list of (name, value) pairs."""
    end, buffer_pointer = 0, 1  # CU_LAUNCH_PARAM_END, CU_LAUNCH_PARAM_BUFFER_POINTER
    while extra:
        name, value = (ctypes.c_void_p * 2).from_address(extra)
        if (name or end) == end:
            break
        if name == buffer_pointer:
            return value or 0
        extra += 2 * _POINTER_BYTES
    raise cuda_error(
        "CUDA_ERROR_NOT_SUPPORTED",
        "cuGraphKernelNodeGetParams",
        description="the kernel node holds its arguments in no form that is known",
    )
