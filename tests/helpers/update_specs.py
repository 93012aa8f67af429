"""Graphs described without a driver (buffers, events and handles by name), and their builder.

A description is pure data, so that the same pair of graphs is built on any driver, in any process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy
from helpers.update_kernels import KERNELS

from graphcore.driver import Driver
from graphcore.driver.records import (
    AllocParams,
    ChildParams,
    ConditionalHandle,
    ConditionalParams,
    CopyOperand,
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
    MemoryKind,
    MemsetParams,
    NodeHandle,
    NodeKind,
    NodeParams,
)

BYTES = 8192
DEVICE_BUFFERS = ("a", "b", "c")
PINNED_BUFFERS = ("p", "q")
PAGEABLE_BUFFERS = ("h",)
EVENTS = ("e", "f")
WIDE = LaunchConfig((8, 1, 1), (32, 1, 1))


@dataclass(frozen=True)
class At:
    """A byte of a named buffer."""

    buffer: str
    offset: int = 0


@dataclass(frozen=True)
class Made:
    """The address that the allocation node at ``step`` of the same graph makes."""

    step: int


@dataclass(frozen=True)
class Handle:
    """The handle of the conditional node at ``step`` of the outermost graph."""

    step: int


@dataclass(frozen=True)
class Kern:
    kernel: str
    arguments: tuple[Any, ...]
    config: LaunchConfig = WIDE


@dataclass(frozen=True)
class Side:
    at: At | Made
    memory: MemoryKind = MemoryKind.DEVICE
    pitch: int = 0
    rows: int = 0


@dataclass(frozen=True)
class Copy:
    dst: Side
    src: Side
    width: int
    height: int = 1
    depth: int = 1


@dataclass(frozen=True)
class Fill:
    at: At | Made
    value: int
    element_size: int
    width: int
    height: int = 1
    pitch: int = 0


@dataclass(frozen=True)
class Host:
    number: int


@dataclass(frozen=True)
class Empty:
    pass


@dataclass(frozen=True)
class Record:
    event: str


@dataclass(frozen=True)
class Wait:
    event: str


@dataclass(frozen=True)
class Alloc:
    size: int


@dataclass(frozen=True)
class Free:
    """Frees what the allocation at ``step`` of the same graph made."""

    step: int


@dataclass(frozen=True)
class Nested:
    spec: Spec


@dataclass(frozen=True)
class Cond:
    form: str
    bodies: tuple[Spec, ...]
    default: int = 0


Action = Kern | Copy | Fill | Host | Empty | Record | Wait | Alloc | Free | Nested | Cond


@dataclass(frozen=True)
class Step:
    """One node; ``after`` are indices of steps, later ones too."""

    action: Action
    after: tuple[int, ...] = ()


Spec = tuple[Step, ...]


def chain(*actions: Action) -> Spec:
    """Each after the one before."""
    return tuple(
        Step(action, (index - 1,) if index else ()) for index, action in enumerate(actions)
    )


def shaped(actions: Iterable[Action], needs: Iterable[tuple[int, ...]]) -> Spec:
    """Actions with their dependencies."""
    return tuple(Step(action, tuple(after)) for action, after in zip(actions, needs, strict=True))


def inner_specs(action: Action) -> tuple[Spec, ...]:
    if isinstance(action, Nested):
        return (action.spec,)
    return action.bodies if isinstance(action, Cond) else ()


def walk(spec: Spec) -> Iterable[Step]:
    """All steps, those of inner graphs too."""
    for step in spec:
        yield step
        for inner in inner_specs(step.action):
            yield from walk(inner)


def is_chain(spec: Spec) -> bool:
    """Whether only one order is possible: then a run has one result."""
    return all(index == 0 or index - 1 in step.after for index, step in enumerate(spec)) and all(
        is_chain(inner) for step in spec for inner in inner_specs(step.action)
    )


class Workshop:
    """A driver with named buffers and events; builds, edits and runs descriptions."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.stream = driver.stream()
        self.addresses = {name: driver.alloc(BYTES) for name in DEVICE_BUFFERS}
        self.addresses |= {name: driver.alloc_pinned(BYTES) for name in PINNED_BUFFERS}
        self._pageable = {name: ctypes.create_string_buffer(BYTES) for name in PAGEABLE_BUFFERS}
        for name, buffer in self._pageable.items():
            self.addresses[name] = ctypes.addressof(buffer)
        self.events = {name: driver.event() for name in EVENTS}
        self.calls = [0] * 4
        self._graphs: list[GraphHandle] = []
        self._nodes: list[NodeHandle] = []

    def close(self) -> None:
        self.driver.synchronize()
        for graph in self._graphs:
            self.driver.destroy_graph(graph)
        for event in self.events.values():
            event.close()
        self.stream.close()
        for name in DEVICE_BUFFERS:
            self.driver.free(self.addresses[name])
        for name in PINNED_BUFFERS:
            self.driver.free_pinned(self.addresses[name])

    # ---- building -----------------------------------------------------------------------------

    def build(self, spec: Spec) -> GraphHandle:
        """The graph of a description, nodes and edges in its order."""
        graph = self.keep(self.driver.create_graph())
        handles = {
            index: self.driver.create_conditional(graph, step.action.default)
            for index, step in enumerate(spec)
            if isinstance(step.action, Cond)
        }
        self._fill(graph, spec, handles)
        return graph

    def keep(self, graph: GraphHandle) -> GraphHandle:
        self._graphs.append(graph)
        return graph

    def destroy(self, graph: GraphHandle) -> None:
        self._graphs.remove(graph)
        self.driver.destroy_graph(graph)

    def _fill(self, graph: GraphHandle, spec: Spec, handles: dict[int, ConditionalHandle]) -> None:
        nodes: list[NodeHandle] = []
        self._nodes = nodes
        for index, step in enumerate(spec):
            known = [nodes[source] for source in step.after if source < index]
            params = self.params(step.action, handles, index)
            self._nodes = nodes  # a child graph was built in between
            nodes.append(self.driver.add_node(graph, known, params))
            if isinstance(step.action, Cond):
                made = self.driver.node_params(nodes[-1])
                assert isinstance(made, ConditionalParams)
                for body, inner in zip(made.bodies, step.action.bodies, strict=True):
                    self._fill(body, inner, handles)
                self._nodes = nodes
        late = [
            Edge(nodes[source], nodes[index])
            for index, step in enumerate(spec)
            for source in step.after
            if source > index
        ]
        if late:
            self.driver.add_edges(graph, late)

    def edit(self, graph: GraphHandle, old: Spec, new: Spec) -> None:
        """Changes the nodes of a built graph in place, where the descriptions differ."""
        for node, before, after in zip(self.driver.nodes(graph), old, new, strict=True):
            if before.action != after.action:
                self.driver.set_node_params(node, self.params(after.action, {}, 0))

    def params(
        self, action: Action, handles: dict[int, ConditionalHandle], index: int
    ) -> NodeParams:
        """The parameters of one action on this driver."""
        match action:
            case Kern():
                kernel = KERNELS[action.kernel]
                arguments = [self._argument(value, handles) for value in action.arguments]
                function = self.driver.function(kernel)
                return KernelParams(function, action.config, kernel.pack(*arguments))
            case Cond():
                return ConditionalParams(handles[index], action.form, len(action.bodies))
            case Free():
                return FreeParams(self.address(Made(action.step)))
        return self._plain(action)

    def _plain(self, action: Action) -> NodeParams:
        match action:
            case Copy():
                dst, src = self._operand(action.dst), self._operand(action.src)
                return MemcpyParams(dst, src, action.width, action.height, action.depth)
            case Fill():
                sizes = (action.element_size, action.width, action.height, action.pitch)
                return MemsetParams(self.address(action.at), action.value, *sizes)
            case Host():
                return HostParams(self._callback(action.number))
            case Record():
                return EventParams(self._event(action.event), NodeKind.EVENT_RECORD)
            case Wait():
                return EventParams(self._event(action.event), NodeKind.EVENT_WAIT)
            case Alloc():
                return AllocParams(action.size)
            case Nested():
                return ChildParams(self.build(action.spec))
        return EmptyParams()

    def address(self, at: At | Made) -> int:
        if isinstance(at, Made):
            made = self.driver.node_params(self._nodes[at.step])
            assert isinstance(made, AllocParams)
            return made.address
        return self.addresses[at.buffer] + at.offset

    def _argument(self, value: Any, handles: dict[int, ConditionalHandle]) -> Any:
        if isinstance(value, (At, Made)):
            return self.address(value)
        return handles[value.step] if isinstance(value, Handle) else value

    def _operand(self, side: Side) -> CopyOperand:
        return CopyOperand(self.address(side.at), side.memory, side.pitch, side.rows)

    def _event(self, name: str) -> EventHandle:
        return self.events[name].handle

    def _callback(self, number: int) -> Callable[[], None]:
        def call() -> None:
            self.calls[number] += 1

        return call

    # ---- running ------------------------------------------------------------------------------

    def fill_buffers(self) -> None:
        """Gives every buffer bytes of its own, and counts no calls."""
        for number, name in enumerate(self.addresses):
            values = (numpy.arange(BYTES // 4) % 97 + 100 * number).astype("float32").tobytes()
            if name in DEVICE_BUFFERS:
                self.driver.write(self.addresses[name], values)
            else:
                ctypes.memmove(self.addresses[name], values, BYTES)
        self.calls = [0] * len(self.calls)

    def contents(self) -> tuple[Any, ...]:
        """What all buffers hold and how often each callback fired."""
        found: list[Any] = [
            self.driver.read(address, BYTES)
            if name in DEVICE_BUFFERS
            else ctypes.string_at(address, BYTES)
            for name, address in self.addresses.items()
        ]
        return (*found, *self.calls)
