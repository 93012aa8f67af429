"""Executables of the CUDA driver: instantiate, launch, update."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NoReturn

from graphcore.driver.api import LEGACY_STREAM
from graphcore.driver.codes import OUT_OF_MEMORY, cuda_error
from graphcore.driver.cuda.check import ask, code_name, error_of
from graphcore.driver.cuda.context import LAST_NAMED_STREAM, in_context
from graphcore.driver.cuda.copies import to_memcpy, to_memset
from graphcore.driver.cuda.nodes import NodeCalls, fill_kernel_node
from graphcore.driver.cuda.streams import NON_BLOCKING
from graphcore.driver.cuda.versions import EntryPoints, UpdateInfo, argument, cuda, result_of
from graphcore.driver.kernel_update import CALL, KernelUpdate
from graphcore.driver.records import (
    ChildParams,
    EventParams,
    ExecHandle,
    GraphHandle,
    HostParams,
    KernelParams,
    MemcpyParams,
    MemsetParams,
    NodeHandle,
    NodeKind,
    NodeParams,
    RawUpdate,
    StreamHandle,
    UpdateResult,
)

_AUTO_FREE, _NODE_PRIORITY = 1, 8  # CUgraphInstantiate_flags
_UPDATE_FAILURE = int(cuda.CUresult.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE)
_ACCEPTED = RawUpdate(UpdateResult.SUCCESS)
# numbers of CUgraphExecUpdateResult
_UPDATE_RESULTS = {
    0: UpdateResult.SUCCESS,
    1: UpdateResult.ERROR,
    2: UpdateResult.TOPOLOGY_CHANGED,
    3: UpdateResult.NODE_TYPE_CHANGED,
    4: UpdateResult.FUNCTION_CHANGED,
    5: UpdateResult.PARAMETERS_CHANGED,
    6: UpdateResult.NOT_SUPPORTED,
    7: UpdateResult.UNSUPPORTED_FUNCTION_CHANGE,
    8: UpdateResult.ATTRIBUTES_CHANGED,
}


class ExecutableCalls(NodeCalls):
    """The part of the driver that instantiates, launches and updates executables."""

    @in_context
    def instantiate(
        self, graph: GraphHandle, *, auto_free: bool = False, use_node_priority: bool = False
    ) -> ExecHandle:
        params = cuda.CUDA_GRAPH_INSTANTIATE_PARAMS()
        flags = _AUTO_FREE * auto_free + _NODE_PRIORITY * use_node_priority
        params.flags = cuda.cuuint64_t(flags)
        answer = cuda.cuGraphInstantiateWithParams(graph, params)
        if answer[0]:
            raise error_of(
                answer[0],
                "cuGraphInstantiateWithParams",
                node=int(params.hErrNode_out) or None,
                hint=_instantiate_hint(answer[0], params.result_out),
            )
        return ExecHandle(int(answer[1]))

    @in_context
    def destroy_exec(self, executable: ExecHandle) -> None:
        ask(cuda.cuGraphExecDestroy, executable)

    @in_context
    def launch_graph(self, executable: ExecHandle, stream: StreamHandle) -> None:
        ask(cuda.cuGraphLaunch, executable, stream)

    def bind_launch(self, executable: ExecHandle, stream: StreamHandle) -> Callable[[], object]:
        """As the protocol says.

        Where CuPy is installed its launch call is bound; a failure of it raises CuPy's own error,
        which :meth:`raise_launch` takes as well as a result. Else the entry point itself is called,
        and so it is where there are other devices: the runtime below CuPy works on the current one.
        A default stream (handles 0 to 2) belongs to the context current at the launch: this
        driver's is made so.
        """
        compiled = None if self._context.has_neighbours else compiled_launch()
        launch: Callable[[], object]
        if compiled is not None:
            # 0 means another stream to a CuPy that was told to work on streams of threads
            handles = int(executable), int(stream) or LEGACY_STREAM
            launch = functools.partial(compiled, *handles)
        else:
            prepared = argument(executable), argument(stream)
            launch = functools.partial(self._entry_points.prepared_launch, *prepared)
        return launch if stream > LAST_NAMED_STREAM else self._context.called_in(launch)

    @in_context
    def raise_launch(self, result: object) -> None:
        """Raises the CudaError of a bound launch: its result, or the exception it raised."""
        if isinstance(result, int) and result:
            raise error_of(result_of(result), "cuGraphLaunch")
        if isinstance(result, BaseException):
            status = getattr(result, "status", None)  # cupy.cuda.runtime.CUDARuntimeError
            if status is None:
                raise result
            raise error_of(result_of(int(status)), "cuGraphLaunch") from result

    @in_context
    def upload(self, executable: ExecHandle, stream: StreamHandle) -> None:
        ask(cuda.cuGraphUpload, executable, stream)

    @in_context
    def upload_aside(self, executable: ExecHandle) -> None:
        """As the protocol says, on one stream a device for the life of the process."""
        ask(cuda.cuGraphUpload, executable, _stream_aside(self.device))

    @in_context
    def update_exec(self, executable: ExecHandle, graph: GraphHandle) -> RawUpdate:
        info = UpdateInfo()
        number = self._entry_points.update(executable, graph, ctypes.byref(info))
        if number not in (0, _UPDATE_FAILURE):
            raise error_of(result_of(number), "cuGraphExecUpdate", node=info.error_node)
        if not number:
            return _ACCEPTED
        return RawUpdate(
            result=_UPDATE_RESULTS.get(info.result, UpdateResult.ERROR),
            node=NodeHandle(info.error_node) if info.error_node else None,
            from_node=NodeHandle(info.error_from_node) if info.error_from_node else None,
        )

    def bind_update(self, executable: ExecHandle, graph: GraphHandle) -> Callable[[], object]:
        """As the protocol says.

        An update works on handles that know their context: it is tried in whichever is current.
        """
        return functools.partial(
            self._entry_points.prepared_update,
            argument(executable),
            argument(graph),
            ctypes.byref(UpdateInfo()),
        )

    @in_context
    def set_exec_node_params(
        self, executable: ExecHandle, node: NodeHandle, params: NodeParams
    ) -> None:
        """As the protocol says. Attributes (cluster, cooperative, priority) are not changed by it.

        The callback of a changed host node is kept for the life of the process.
        """
        context = self._context.object
        place = (executable, node)
        match params:
            case KernelParams():
                built, _keep = self.kernel_node(params)
                ask(cuda.cuGraphExecKernelNodeSetParams, *place, built)
            case MemcpyParams():
                ask(cuda.cuGraphExecMemcpyNodeSetParams, *place, to_memcpy(params), context)
            case MemsetParams():
                ask(cuda.cuGraphExecMemsetNodeSetParams, *place, to_memset(params), context)
            case HostParams():
                ask(cuda.cuGraphExecHostNodeSetParams, *place, self.host_node(params)[0])
            case ChildParams():
                ask(cuda.cuGraphExecChildGraphNodeSetParams, *place, params.graph)
            case EventParams(kind=NodeKind.EVENT_RECORD):
                ask(cuda.cuGraphExecEventRecordNodeSetEvent, *place, params.event)
            case EventParams():
                ask(cuda.cuGraphExecEventWaitNodeSetEvent, *place, params.event)
            case _:
                raise cuda_error(
                    "CUDA_ERROR_NOT_SUPPORTED",
                    "cuGraphExecNodeSetParams",
                    node=node,
                    description=f"nodes of kind {params.kind.value} cannot be changed one by one",
                )

    @in_context
    def bind_exec_kernel_update(
        self, executable: ExecHandle, node: NodeHandle, params: KernelParams
    ) -> KernelUpdate:
        """As the protocol says: the structure is built once, an update writes what differs."""
        self.prepare_kernel(params)
        return BoundKernelUpdate(self._entry_points, self.prepare_kernel, executable, node, params)

    @in_context
    def set_node_enabled(self, executable: ExecHandle, node: NodeHandle, enabled: bool) -> None:
        ask(cuda.cuGraphNodeSetEnabled, executable, node, int(enabled))

    @in_context
    def node_enabled(self, executable: ExecHandle, node: NodeHandle) -> bool:
        return bool(ask(cuda.cuGraphNodeGetEnabled, executable, node))


class BoundKernelUpdate(KernelUpdate):
    """The CUDA driver's: one bound call on a structure that points into the block."""

    __slots__ = ("_built", "_kept", "_prepare")

    def __init__(
        self,
        entry_points: EntryPoints,
        prepare: Callable[[KernelParams], None],
        executable: ExecHandle,
        node: NodeHandle,
        params: KernelParams,
    ) -> None:
        super().__init__(node, params)
        self._prepare = prepare
        self._built = cuda.CUDA_KERNEL_NODE_PARAMS()
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.block)) if self.block else 0
        addresses = [base + offset for offset, _ in self.layout]
        self._kept = (ctypes.c_void_p * len(addresses))(*addresses)
        fill_kernel_node(self._built, params)
        self._built.kernelParams = ctypes.addressof(self._kept)
        self.commit = functools.partial(
            entry_points.prepared_node,
            argument(executable),
            argument(node),
            argument(self._built.getPtr()),
        )

    def refuse(self, result: object) -> NoReturn:
        """Raises the CudaError of a commit that failed."""
        assert isinstance(result, int)
        raise error_of(result_of(result), CALL, node=self.node)

    def _shape(self, params: KernelParams) -> None:
        if (params.function, params.config) != (self.params.function, self.params.config):
            self._prepare(params)
            fill_kernel_node(self._built, params)


def _instantiate_hint(code: Any, result: Any) -> str | None:
    if "CAPTURE" in code_name(code) or code_name(code) == OUT_OF_MEMORY:
        return None  # the reason is known, and has a hint of its own
    name = str(getattr(result, "name", result)).removeprefix("CUDA_GRAPH_INSTANTIATE_")
    return f"instantiation result {name}"


@functools.cache
def _stream_aside(ordinal: int) -> Any:
    """A stream of the device whose primary context is current; kept as that context is."""
    return ask(cuda.cuStreamCreateWithPriority, NON_BLOCKING, 0)


@functools.cache
def compiled_launch() -> Callable[[int, int], object] | None:
    """CuPy's launch of (executable, stream); None where it is not installed.

    It is compiled, takes integers and gives nothing back, and so costs Python less than ctypes or
    the bindings do. CuPy itself is not imported: the module stands alone.
    """
    try:
        from cupy_backends.cuda.api import runtime
    except ImportError:
        return None
    launch: Callable[[int, int], object] = runtime.graphLaunch
    return launch
