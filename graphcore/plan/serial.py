"""Plans as JSON, versioned. What is Python code stays out: such nodes are refused by name.

Kernels are saved by name, signature, source and options; scalar arguments as their bytes, so that
they come back bit for bit. :mod:`graphcore.plan.loading` reads it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from graphcore.driver.kernel import Kernel
from graphcore.errors import PlanError
from graphcore.plan.contents import PlanContents
from graphcore.plan.records import (
    Allocate,
    Call,
    Callback,
    Condition,
    Conditional,
    Deallocate,
    Embed,
    EmbedGraph,
    Launch,
    Memcpy,
    Memset,
    PlanBuffer,
    PlanNode,
    RecordEvent,
    View,
    WaitEvent,
)

FORMAT = "graphcore-plan"
VERSION = 1

_UNSAVED = {
    Call: "calls Python code",
    Callback: "calls Python code",
    EmbedGraph: "embeds a graph of the driver",
}


def to_json(plan: PlanContents) -> str:
    """The plan as JSON text.

    Raises:
        PlanError: A node that calls Python code or embeds a graph of the driver, or one that uses
            what belongs to another plan; names the node.
    """
    if plan.is_body:
        raise PlanError(f"body {plan.name!r} is saved with the plan around it")
    writer = _Writer()
    root = writer.plan_number(plan)
    return json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "kernels": writer.kernels,
            "plans": writer.plans,
            "plan": root,
        },
        separators=(",", ":"),
    )


class _Writer:
    """One text: every kernel and every plan in it is written once."""

    def __init__(self) -> None:
        self.kernels: list[dict[str, Any]] = []
        self.plans: list[dict[str, Any]] = []
        self._kernel_numbers: dict[int, int] = {}
        self._plan_numbers: dict[int, int] = {}

    def plan_number(self, plan: PlanContents) -> int:
        if id(plan) not in self._plan_numbers:
            # embedded plans come before the plan that embeds them
            entry = {
                "name": plan.name,
                "buffers": [_buffer(buffer) for buffer in plan.buffers.values()],
                "events": [[event.name, event.external] for event in plan.events.values()],
                "conditions": [[c.name, c.default] for c in plan.conditions.values()],
                "nodes": self._nodes(plan),
            }
            self._plan_numbers[id(plan)] = len(self.plans)
            self.plans.append(entry)
        return self._plan_numbers[id(plan)]

    def _nodes(self, plan: PlanContents) -> list[dict[str, Any]]:
        return [self._node(plan, node) for node in plan.nodes]

    def _node(self, plan: PlanContents, node: PlanNode) -> dict[str, Any]:
        work = node.work
        if type(work) in _UNSAVED:
            raise PlanError(f"node {node.name!r} {_UNSAVED[type(work)]}, which cannot be saved")
        entry: dict[str, Any] = {"name": node.name, "work": type(work).__name__}
        awaited = [name for name, waiting in plan._awaited.items() if node.index in waiting]
        if node.after is not None:
            entry["after"] = [*node.after, *awaited]
        if node.label:
            entry["label"] = node.label
        entry |= self._work(plan, node)
        if not isinstance(work, (Embed, Conditional)):  # which follow from what is inside
            entry["reads"] = [_view(plan, node, view) for view in node.reads]
            entry["writes"] = [_view(plan, node, view) for view in node.writes]
        return entry

    def _work(self, plan: PlanContents, node: PlanNode) -> dict[str, Any]:
        work = node.work
        if isinstance(work, Launch):
            return {
                "kernel": self._kernel(work.kernel),
                "config": asdict(work.config),
                "arguments": _arguments(plan, node, work),
            }
        if isinstance(work, Memcpy):
            return {"dst": _view(plan, node, work.dst), "src": _view(plan, node, work.src)}
        if isinstance(work, Memset):
            return {"dst": _view(plan, node, work.dst), "value": work.value}
        if isinstance(work, (Allocate, Deallocate)):
            return {"buffer": _known(plan.buffers, work.buffer, node, "buffer")}
        if isinstance(work, (RecordEvent, WaitEvent)):
            return {"event": _known(plan.events, work.event, node, "event")}
        if isinstance(work, Embed):
            bindings = [[name, _view(plan, node, view)] for name, view in work.bindings]
            return {"plan": self.plan_number(work.plan), "bindings": bindings}
        if isinstance(work, Conditional):
            return {
                "form": work.form,
                "condition": _known(plan.conditions, work.condition, node, "condition"),
                "bodies": [self._nodes(body) for body in work.bodies],
            }
        return {}

    def _kernel(self, kernel: Kernel) -> int:
        if id(kernel) not in self._kernel_numbers:
            self._kernel_numbers[id(kernel)] = len(self.kernels)
            self.kernels.append(
                {
                    "name": kernel.name,
                    "parameters": [[p.name, p.type] for p in kernel.parameters],
                    "source": kernel.source,
                    "options": list(kernel.options),
                }
            )
        return self._kernel_numbers[id(kernel)]


def _buffer(buffer: PlanBuffer) -> dict[str, Any]:
    return {
        "name": buffer.name,
        "shape": buffer.shape,
        "dtype": buffer.dtype,
        "strides": buffer.strides,
        "origin": buffer.origin,
    }


def _arguments(plan: PlanContents, node: PlanNode, work: Launch) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    pairs = zip(work.kernel.parameters, work.arguments, strict=True)
    for index, (parameter, value) in enumerate(pairs):
        if isinstance(value, View):
            entries.append({"view": _view(plan, node, value)})
        elif isinstance(value, Condition):
            entries.append({"condition": _known(plan.conditions, value, node, "condition")})
        elif parameter.is_pointer:
            entries.append({"null": True})
        else:
            entries.append({"bytes": parameter.pack(index, value).hex()})
    return entries


def _view(plan: PlanContents, node: PlanNode, view: View) -> list[Any]:
    name = _known(plan.buffers, view.buffer, node, "buffer")
    return [name, view.offset, view.shape, view.strides, view.dtype]


def _known(known: dict[str, Any], thing: Any, node: PlanNode, sort: str) -> str:
    """The thing's name, which stands for it in the text."""
    name: str = thing.name
    if known.get(name) is not thing:
        raise PlanError(f"node {node.name!r}: {sort} {name!r} belongs to another plan")
    return name
