"""KernelReader: the kernel nodes of a graph, read past the bindings into memory used again.

Reading a node takes five calls (its kind, its parameters, three attributes), which through the
bindings cost more in objects than in CUDA. What the nodes of a graph share, functions and launch
shapes, is asked and made once.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

from graphcore.driver.codes import cuda_error
from graphcore.driver.cuda.attributes import READ_ATTRIBUTES, attributes_of
from graphcore.driver.cuda.check import error_of
from graphcore.driver.cuda.versions import EntryPoints, result_of
from graphcore.driver.records import FunctionHandle, KernelParams, LaunchConfig, NodeHandle

Layout = tuple[tuple[int, int], ...]

_KERNEL = 0  # CU_GRAPH_NODE_TYPE_KERNEL
# CUDA_KERNEL_NODE_PARAMS_v2: func, grid, block, shared, kernelParams, extra, kern, ctx
_KERNEL_PARAMS = struct.Struct("=Q7I4x4Q")
_POINTER_BYTES = 8
# three CUlaunchAttributeValue of 64 bytes: the first three ints, one int, one int
_ATTRIBUTES = struct.Struct("=3i52xi60xi60x")


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
        self._kind_at = ctypes.byref(self._kind)
        self._params = ctypes.create_string_buffer(_KERNEL_PARAMS.size)
        self._values = ctypes.create_string_buffer(_ATTRIBUTES.size)
        start = ctypes.addressof(self._values)
        self._reads = tuple((number, start + 64 * i) for i, number in enumerate(READ_ATTRIBUTES))
        self._configs: dict[tuple[int, ...], LaunchConfig] = {}
        self._functions: dict[int, Arguments] = {}

    def read(self, node: NodeHandle) -> KernelParams | None:
        """The parameters of a kernel node; None for a node of another kind."""
        code = self._calls.node_type(node, self._kind_at)
        if code:
            raise error_of(result_of(code), "cuGraphNodeGetType")
        if self._kind.value != _KERNEL:
            return None
        code = self._calls.kernel_params(node, self._params)
        if code:
            raise error_of(result_of(code), "cuGraphKernelNodeGetParams", node=node)
        attribute = self._calls.kernel_attribute
        for number, place in self._reads:
            code = attribute(node, number, place)
            if code:
                raise error_of(result_of(code), "cuGraphKernelNodeGetAttribute", node=node)
        fields = _KERNEL_PARAMS.unpack(self._params)
        function, pointers, extra = fields[0], fields[8], fields[9]
        function = function or self._function_of(fields[10])
        known = self._functions.get(function)
        if known is None:
            known = self._functions[function] = Arguments(self._layout_of(function))
        config = self._config(fields[1:8] + _ATTRIBUTES.unpack(self._values))
        return KernelParams(FunctionHandle(function), config, known.read(pointers, extra))

    def _config(self, key: tuple[int, ...]) -> LaunchConfig:
        config = self._configs.get(key)
        if config is None:
            gx, gy, gz, bx, by, bz, shared, *values = key
            cluster, cooperative, priority = attributes_of(*values)
            config = self._configs[key] = LaunchConfig(
                (gx, gy, gz), (bx, by, bz), shared, cluster, cooperative, priority
            )
        return config


class Arguments:
    """How the argument bytes of one function are copied out of a node."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._offsets = [offset for offset, _ in layout]
        self._slices = [slice(offset, offset + size) for offset, size in layout]
        self._size = layout[-1][0] + layout[-1][1] if layout else 0
        self._addresses = struct.Struct(f"={len(layout)}Q")

    def read(self, pointers: int, extra: int) -> tuple[bytes, ...]:
        """Copies argument bytes from either form a node may hold them in."""
        if not self._offsets:
            return ()
        if pointers:
            listed = ctypes.string_at(pointers, len(self._offsets) * _POINTER_BYTES)
            addresses = self._addresses.unpack(listed)
            start = addresses[0]
            if [address - start for address in addresses] != self._offsets:
                pairs = zip(addresses, self._layout, strict=True)
                return tuple([ctypes.string_at(address, size) for address, (_, size) in pairs])
        else:
            start = _extra_buffer(extra)
        # the arguments lie as the kernel takes them: one block, cut up here
        block = ctypes.string_at(start, self._size)
        return tuple([block[piece] for piece in self._slices])


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
