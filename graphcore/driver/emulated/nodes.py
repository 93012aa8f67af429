"""From parameters to what a node does: checks of every node kind before it is added or changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphcore.driver.emulated.calls import Refused, invalid
from graphcore.driver.emulated.functions import check_launch
from graphcore.driver.emulated.graph import Graph, Payload, Reservation
from graphcore.driver.emulated.memory import check_copy, check_fill
from graphcore.driver.records import (
    AllocParams,
    ChildParams,
    ConditionalParams,
    EmptyParams,
    EventParams,
    FreeParams,
    HostParams,
    KernelParams,
    MemcpyParams,
    MemsetParams,
    NodeKind,
    NodeParams,
)

if TYPE_CHECKING:
    from graphcore.driver.emulated.machine import Machine

_EVENT_KINDS = (NodeKind.EVENT_RECORD, NodeKind.EVENT_WAIT)


def make_payload(machine: Machine, graph: Graph, params: NodeParams) -> Payload:
    """What a node of ``graph`` with ``params`` does; raises before anything is made."""
    maker = _MAKERS.get(type(params))
    if maker is None:
        raise Refused(
            "CUDA_ERROR_NOT_SUPPORTED", f"nodes of kind {params.kind.value} cannot be made here"
        )
    return maker(machine, graph, params)


def _kernel(machine: Machine, _: Graph, params: KernelParams) -> Payload:
    function = machine.functions.find(params.function)
    check_launch(function, params.config, params.arguments)
    frozen = replace(params, arguments=tuple(map(bytes, params.arguments)))
    return Payload(frozen, function=function)


def _memcpy(_machine: Machine, _graph: Graph, params: MemcpyParams) -> Payload:
    check_copy(params)
    if not (params.width and params.height):
        raise invalid(
            f"copy: expected at least 1 byte of 1 row, got {params.width} x {params.height}"
        )
    return Payload(params)


def _memset(_machine: Machine, _graph: Graph, params: MemsetParams) -> Payload:
    check_fill(params)
    if not (params.width and params.height):
        raise invalid(
            f"fill: expected at least 1 element of 1 row, got {params.width} x {params.height}"
        )
    return Payload(params)


def _host(_machine: Machine, _graph: Graph, params: HostParams) -> Payload:
    if params.callback is None:
        raise invalid("host node: callback: expected a callable, got None")
    return Payload(params)


def _empty(_machine: Machine, _graph: Graph, params: EmptyParams) -> Payload:
    return Payload(params)


def _event(machine: Machine, _: Graph, params: EventParams) -> Payload:
    if params.kind not in _EVENT_KINDS:
        raise invalid(f"event node: kind: expected a record or a wait, got {params.kind.value}")
    return Payload(params, event=machine.streams.events.find(params.event))


def _child(machine: Machine, graph: Graph, params: ChildParams) -> Payload:
    child = machine.graphs.find(params.graph)
    if child is graph:
        raise invalid("child node: a graph cannot hold itself")
    return embed(child, params)


def embed(child: Graph, params: ChildParams) -> Payload:
    """A child node's payload: a copy of ``child``, which may hold no memory or conditional node."""
    if child.has_memory_nodes or child.has_conditional_nodes:
        raise Refused(
            "CUDA_ERROR_NOT_SUPPORTED",
            "child node: the graph holds allocation, free or conditional nodes",
        )
    return Payload(params, child=child.copy()[0])


def _alloc(machine: Machine, graph: Graph, params: AllocParams) -> Payload:
    address = machine.memory.reserve(graph.device, params.size)
    reservation = Reservation(machine.memory, address)
    return Payload(replace(params, address=address), reservation=reservation)


def _free(machine: Machine, graph: Graph, params: FreeParams) -> Payload:
    memory = machine.memory
    if not memory.is_reserved(params.address):
        raise invalid(f"free node: {params.address:#x} is no graph-owned allocation")
    for node in graph.nodes:
        if isinstance(node.payload.params, FreeParams) and node.payload.params == params:
            raise invalid(f"free node: {params.address:#x} is freed in this graph already")
    return Payload(params)


def _conditional(machine: Machine, graph: Graph, params: ConditionalParams) -> Payload:
    most = {"if": 2, "while": 1, "switch": 2**31}.get(params.form)
    if most is None:
        raise invalid(f"conditional: form: expected if, while or switch, got {params.form!r}")
    if not 1 <= params.size <= most:
        raise invalid(f"conditional: size: expected 1 to {most} bodies, got {params.size}")
    found = [one for one in graph.conditionals if one.handle == params.handle]
    if not found:
        raise invalid(f"conditional: handle {params.handle:#x} is not of this graph")
    if any(node.payload.conditional is found[0] for node in graph.nodes):
        raise invalid(f"conditional: handle {params.handle:#x} belongs to another node already")
    bodies = tuple(Graph(graph.device) for _ in range(params.size))
    return Payload(replace(params, bodies=()), conditional=found[0], bodies=bodies)


_MAKERS: dict[type, Callable[[Machine, Graph, Any], Payload]] = {
    KernelParams: _kernel,
    MemcpyParams: _memcpy,
    MemsetParams: _memset,
    HostParams: _host,
    EmptyParams: _empty,
    EventParams: _event,
    ChildParams: _child,
    AllocParams: _alloc,
    FreeParams: _free,
    ConditionalParams: _conditional,
}
