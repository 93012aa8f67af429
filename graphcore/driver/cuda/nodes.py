"""Node parameters of the CUDA driver, both ways: adding, reading and changing nodes of a graph.

What a getter returns points into the driver's memory: everything is copied at once, nothing there
is ever edited.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from graphcore.driver.codes import cuda_error
from graphcore.driver.cuda.attributes import read_attributes, write_attributes
from graphcore.driver.cuda.check import ask, error_of
from graphcore.driver.cuda.context import in_context
from graphcore.driver.cuda.copies import from_memcpy, from_memset, to_memcpy, to_memset
from graphcore.driver.cuda.functions import FunctionCalls
from graphcore.driver.cuda.graphs import GraphCalls, node_objects
from graphcore.driver.cuda.reading import KernelReader
from graphcore.driver.cuda.versions import argument, cuda, result_of
from graphcore.driver.kernel_attributes import KernelAttributes
from graphcore.driver.records import (
    AllocParams,
    ChildParams,
    ConditionalHandle,
    ConditionalParams,
    Edge,
    EmptyParams,
    EventHandle,
    EventParams,
    FreeParams,
    GraphHandle,
    HostParams,
    KernelParams,
    LaunchConfig,
    MemcpyParams,
    MemsetParams,
    NodeHandle,
    NodeKind,
    NodeParams,
    OpaqueParams,
)

_PLAIN_ATTRIBUTES: KernelAttributes = ((1, 1, 1), False, None)
_PROGRAMMATIC_EDGE = (1, 0, 1)  # from the programmatic port, type programmatic
_FORMS = {
    "if": cuda.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF,
    "while": cuda.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE,
    "switch": cuda.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_SWITCH,
}
_EVENT_GETTERS = {
    NodeKind.EVENT_RECORD: cuda.cuGraphEventRecordNodeGetEvent,
    NodeKind.EVENT_WAIT: cuda.cuGraphEventWaitNodeGetEvent,
}
_FORM_NAMES = {int(number): form for form, number in _FORMS.items()}


class NodeCalls(GraphCalls, FunctionCalls):
    """The part of the driver that knows what nodes of each kind hold."""

    # ---- adding -------------------------------------------------------------------------------

    @in_context
    def add_node(
        self, graph: GraphHandle, dependencies: Iterable[NodeHandle], params: NodeParams
    ) -> NodeHandle:
        before = list(dependencies)
        match params:
            case KernelParams():
                return self._add_kernel(graph, before, params)
            case HostParams():
                return self._add_host(graph, before, params)
            case ConditionalParams():
                return self._add_conditional(graph, before, params)
        place = (graph, node_objects(before), len(before))
        return NodeHandle(int(self._add_plain(place, params)))

    def _add_plain(self, place: tuple[Any, Any, int], params: NodeParams) -> Any:
        context = self._context.object
        match params:
            case MemcpyParams():
                return ask(cuda.cuGraphAddMemcpyNode, *place, to_memcpy(params), context)
            case MemsetParams():
                return ask(cuda.cuGraphAddMemsetNode, *place, to_memset(params), context)
            case ChildParams():
                return ask(cuda.cuGraphAddChildGraphNode, *place, params.graph)
            case EmptyParams():
                return ask(cuda.cuGraphAddEmptyNode, *place)
            case EventParams(kind=NodeKind.EVENT_RECORD):
                return ask(cuda.cuGraphAddEventRecordNode, *place, params.event)
            case EventParams():
                return ask(cuda.cuGraphAddEventWaitNode, *place, params.event)
            case AllocParams():
                return ask(cuda.cuGraphAddMemAllocNode, *place, self._alloc_node(params))
            case FreeParams():
                return ask(cuda.cuGraphAddMemFreeNode, *place, params.address)
        raise _unsupported("cuGraphAddNode", params)

    def _add_kernel(
        self, graph: GraphHandle, before: list[NodeHandle], params: KernelParams
    ) -> NodeHandle:
        config = params.config
        built, _keep = self.kernel_node(params)
        plain = [] if config.programmatic else before
        node = ask(cuda.cuGraphAddKernelNode, graph, node_objects(plain), len(plain), built)
        try:
            write_attributes(node, config, _PLAIN_ATTRIBUTES)
            if config.programmatic and before:
                target = NodeHandle(int(node))
                self.add_edges(graph, [Edge(n, target, _PROGRAMMATIC_EDGE) for n in before])
        except BaseException:
            cuda.cuGraphDestroyNode(node)
            raise
        return NodeHandle(int(node))

    def _add_host(
        self, graph: GraphHandle, before: list[NodeHandle], params: HostParams
    ) -> NodeHandle:
        built, number = self.host_node(params)
        try:
            objects = node_objects(before)
            node = ask(cuda.cuGraphAddHostNode, graph, objects, len(before), built)
        except BaseException:
            self._callbacks.forget(number)
            raise
        if number:
            self._callbacks.tie(number, cuda.CUgraph(graph))
        return NodeHandle(int(node))

    def _add_conditional(
        self, graph: GraphHandle, before: list[NodeHandle], params: ConditionalParams
    ) -> NodeHandle:
        form = _FORMS.get(params.form)
        if form is None:
            raise cuda_error(
                "CUDA_ERROR_INVALID_VALUE",
                "cuGraphAddNode",
                description=f"form: expected one of {', '.join(_FORMS)}, got {params.form!r}",
            )
        built = cuda.CUgraphNodeParams()
        built.type = cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        built.conditional.handle = cuda.CUgraphConditionalHandle(params.handle)
        built.conditional.type = form
        built.conditional.size = params.size
        built.conditional.ctx = self._context.object
        objects = node_objects(before)
        node = int(ask(cuda.cuGraphAddNode, graph, objects, None, len(before), built))
        self._conditionals[node] = (graph, _from_conditional(built.conditional))
        return NodeHandle(node)

    # ---- reading ------------------------------------------------------------------------------

    @in_context
    def node_params(self, node: NodeHandle) -> NodeParams:
        kind = self._kind(node)
        match kind:
            case NodeKind.KERNEL:
                [params] = self._kernel_reader().read([node])
                assert params is not None
                return params
            case NodeKind.CONDITIONAL:
                return self._read_conditional(node)
            case NodeKind.HOST:
                host = ask(cuda.cuGraphHostNodeGetParams, node)
                function, number = int(host.fn), int(host.userData)
                return HostParams(self._callbacks.find(function, number), function, number)
        return _read_plain(node, kind)

    def _kernel_reader(self) -> KernelReader:
        return KernelReader(self._entry_points, self._layout, _function_of_kernel)

    @in_context
    def all_params(self, graph: GraphHandle) -> list[tuple[NodeHandle, NodeParams]]:
        """As the protocol says; kernel nodes by one reader."""
        nodes = self.nodes(graph)
        read = self._kernel_reader().read(nodes)
        return [
            (node, self.node_params(node) if params is None else params)
            for node, params in zip(nodes, read, strict=True)
        ]

    @in_context
    def kernel_attributes(self, graph: GraphHandle) -> list[KernelAttributes]:
        found: list[KernelAttributes] = []
        nodes = self.nodes(graph)
        read = self._kernel_reader().attributes(nodes)
        for node, attributes in zip(nodes, read, strict=True):
            if attributes is not None:
                found.append(attributes)
                continue
            match self._kind(node):
                case NodeKind.CHILD:
                    inner = ask(cuda.cuGraphChildGraphNodeGetGraph, node)
                    found += self.kernel_attributes(GraphHandle(int(inner)))
                case NodeKind.CONDITIONAL:
                    params = self._read_conditional(node)
                    bodies = params.bodies if isinstance(params, ConditionalParams) else ()
                    found += [each for body in bodies for each in self.kernel_attributes(body)]
        return found

    def _read_conditional(self, node: NodeHandle) -> ConditionalParams | OpaqueParams:
        if self._entry_points.has_node_params:
            return _from_conditional(ask(cuda.cuGraphNodeGetParams, node).conditional)
        made = self._conditionals.get(node)
        return made[1] if made else OpaqueParams(NodeKind.CONDITIONAL)

    # ---- changing -----------------------------------------------------------------------------

    @in_context
    def set_node_params(self, node: NodeHandle, params: NodeParams) -> None:
        match params:
            case KernelParams():
                self._set_kernel(node, params)
            case MemcpyParams():
                ask(cuda.cuGraphMemcpyNodeSetParams, node, to_memcpy(params))
            case MemsetParams():
                ask(cuda.cuGraphMemsetNodeSetParams, node, to_memset(params))
            case HostParams():
                # the node does not say which graph it is in: the new callback stays for good
                ask(cuda.cuGraphHostNodeSetParams, node, self.host_node(params)[0])
            case EventParams(kind=NodeKind.EVENT_RECORD):
                ask(cuda.cuGraphEventRecordNodeSetEvent, node, params.event)
            case EventParams():
                ask(cuda.cuGraphEventWaitNodeSetEvent, node, params.event)
            case _:
                raise _unsupported("cuGraphNodeSetParams", params)

    @in_context
    def set_arguments(self, changes: Iterable[tuple[NodeHandle, KernelParams]]) -> None:
        """As the protocol says: one structure a function and launch shape."""
        forms: dict[tuple[int, LaunchConfig], _ArgumentForm] = {}
        call = self._entry_points.prepared_kernel
        for node, params in changes:
            key = params.function, params.config
            form = forms.get(key)
            if form is None or not form.fits(params.arguments):
                self.prepare_kernel(params)  # refuses what is of another size
                form = forms[key] = _ArgumentForm(params)
            form.write(params.arguments)
            number = call(argument(node), form.at)
            if number:
                raise error_of(result_of(number), "cuGraphKernelNodeSetParams", node=node)

    def _set_kernel(self, node: NodeHandle, params: KernelParams) -> None:
        built, _keep = self.kernel_node(params)
        current = read_attributes(self._entry_points, node)
        write_attributes(node, params.config, current)
        try:
            ask(cuda.cuGraphKernelNodeSetParams, node, built)
        except BaseException:
            cluster, cooperative, priority = current
            before = LaunchConfig((1, 1, 1), (1, 1, 1), 0, cluster, cooperative, priority)
            write_attributes(node, before, read_attributes(self._entry_points, node))
            raise

    # ---- building structures ------------------------------------------------------------------

    def prepare_kernel(self, params: KernelParams) -> None:
        """Checks the arguments' sizes and lets the function use what its launch asks for."""
        self._parameters(params.function).check(params.arguments)
        self._grant(params.function, params.config)

    def kernel_node(self, params: KernelParams) -> tuple[Any, Any]:
        """(``CUDA_KERNEL_NODE_PARAMS``, the argument pointers it needs to outlive the call)."""
        self.prepare_kernel(params)
        listed = [bytes(data) for data in params.arguments]  # c_char_p takes nothing else
        pointers = (ctypes.c_char_p * len(listed))(*listed)
        built = cuda.CUDA_KERNEL_NODE_PARAMS()
        fill_kernel_node(built, params)
        built.kernelParams = ctypes.addressof(pointers)
        return built, pointers

    def host_node(self, params: HostParams) -> tuple[Any, int]:
        """(``CUDA_HOST_NODE_PARAMS``, number of the registered callback or 0)."""
        built = cuda.CUDA_HOST_NODE_PARAMS()
        number = 0
        if params.callback is None:
            built.fn, built.userData = cuda.CUhostFn(params.function), params.user_data
        else:
            number = self._callbacks.register(params.callback)
            built.fn, built.userData = cuda.CUhostFn(self._callbacks.function), number
        return built, number

    def _alloc_node(self, params: AllocParams) -> Any:
        built = cuda.CUDA_MEM_ALLOC_NODE_PARAMS()
        pool = built.poolProps
        pool.allocType = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        pool.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        pool.location.id = self.device
        built.bytesize = params.size
        return built


class _ArgumentForm:
    """``CUDA_KERNEL_NODE_PARAMS`` of one function and launch shape, and where its arguments go."""

    def __init__(self, params: KernelParams) -> None:
        self._sizes = [len(data) for data in params.arguments]
        packed = struct.Struct("=" + "".join(f"{size}s{-size % 8}x" for size in self._sizes))
        self._block = ctypes.create_string_buffer(max(packed.size, 1))
        self._pack = functools.partial(packed.pack_into, self._block, 0)
        places, at = [], ctypes.addressof(self._block)
        for size in self._sizes:
            places.append(at)
            at += size + -size % 8
        self._pointers = (ctypes.c_void_p * len(places))(*places)
        self._built = cuda.CUDA_KERNEL_NODE_PARAMS()
        fill_kernel_node(self._built, params)
        self._built.kernelParams = ctypes.addressof(self._pointers)
        self.at = argument(self._built.getPtr())

    def fits(self, arguments: Sequence[bytes]) -> bool:
        """Whether the arguments have the sizes of those it was made for."""
        return [len(data) for data in arguments] == self._sizes

    def write(self, arguments: Sequence[bytes]) -> None:
        """Puts them where the structure points."""
        self._pack(*arguments)


def fill_kernel_node(built: Any, params: KernelParams) -> None:
    """Writes function, grid, block and shared memory into ``CUDA_KERNEL_NODE_PARAMS``."""
    config = params.config
    built.func = cuda.CUfunction(params.function)
    built.gridDimX, built.gridDimY, built.gridDimZ = config.grid
    built.blockDimX, built.blockDimY, built.blockDimZ = config.block
    built.sharedMemBytes = config.shared_bytes


def _read_plain(node: NodeHandle, kind: NodeKind) -> NodeParams:
    match kind:
        case NodeKind.MEMCPY:
            return from_memcpy(ask(cuda.cuGraphMemcpyNodeGetParams, node))
        case NodeKind.MEMSET:
            return from_memset(ask(cuda.cuGraphMemsetNodeGetParams, node))
        case NodeKind.CHILD:
            return ChildParams(GraphHandle(int(ask(cuda.cuGraphChildGraphNodeGetGraph, node))))
        case NodeKind.EMPTY:
            return EmptyParams()
        case NodeKind.EVENT_RECORD | NodeKind.EVENT_WAIT:
            return EventParams(EventHandle(int(ask(_EVENT_GETTERS[kind], node))), kind)
        case NodeKind.ALLOC:
            made = ask(cuda.cuGraphMemAllocNodeGetParams, node)
            return AllocParams(int(made.bytesize), int(made.dptr))
        case NodeKind.FREE:
            return FreeParams(int(ask(cuda.cuGraphMemFreeNodeGetParams, node)))
    return OpaqueParams(kind)


def _function_of_kernel(library_kernel: int) -> int:
    return int(ask(cuda.cuKernelGetFunction, library_kernel))


def _from_conditional(found: Any) -> ConditionalParams:
    size = int(found.size)
    return ConditionalParams(
        handle=ConditionalHandle(int(found.handle)),
        form=_FORM_NAMES.get(int(found.type), "unknown"),
        size=size,
        bodies=tuple(GraphHandle(int(body)) for body in (found.phGraph_out or ())[:size]),
    )


def _unsupported(call: str, params: NodeParams) -> Exception:
    return cuda_error(
        "CUDA_ERROR_NOT_SUPPORTED",
        call,
        description=f"nodes of kind {params.kind.value} cannot be made or changed this way",
    )
