"""Snapshots as JSON, versioned. Handles become indices, so that a file says the same every time.

What cannot be written is left out and comes back as unknown: host callbacks, and the Python
references and sources of kernels (their signatures stay).
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from enum import Enum
from typing import Any

from graphcore.driver import records
from graphcore.driver.kernel import Kernel, Parameter
from graphcore.driver.records import FunctionInfo, LaunchConfig, NodeHandle, NodeParams
from graphcore.errors import ConfigurationError
from graphcore.graph.conforming import check_number, check_order, check_record, check_text
from graphcore.graph.nodes import NodeRecord
from graphcore.graph.snapshot import EdgeData, GraphSnapshot

FORMAT = "graphcore-snapshot"
VERSION = 1
_DEEPEST = 64  # graphs inside graphs: more is no graph that anybody made

_PARAMS = {
    cls.__name__: cls
    for cls in (
        records.KernelParams,
        records.MemcpyParams,
        records.MemsetParams,
        records.HostParams,
        records.ChildParams,
        records.EmptyParams,
        records.EventParams,
        records.AllocParams,
        records.FreeParams,
        records.ConditionalParams,
        records.OpaqueParams,
    )
}
# fields that hold a handle, and the sort of thing each numbers
_HANDLES = {"function": "function", "event": "event", "handle": "conditional"}


def to_json(snapshot: GraphSnapshot) -> str:
    """The snapshot as JSON text."""
    writer = _Writer()
    graph = writer.graph(snapshot)
    return json.dumps(
        {"format": FORMAT, "version": VERSION, "functions": writer.functions, "graph": graph},
        separators=(",", ":"),
    )


def from_json(text: str) -> GraphSnapshot:
    """The snapshot that :func:`to_json` wrote.

    Raises:
        ConfigurationError: Not such a text, or of a version this library does not know.
    """
    try:
        data = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigurationError(f"snapshot: expected JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ConfigurationError(f"snapshot: expected format {FORMAT!r}")
    if data.get("version") != VERSION or isinstance(data["version"], bool):
        raise ConfigurationError(
            f"snapshot: expected version {VERSION}, got {data.get('version')!r}"
        )
    try:
        return _Reader(data["functions"]).graph(data["graph"])
    except ConfigurationError as error:
        raise ConfigurationError(f"snapshot: damaged: {error}") from error
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"snapshot: damaged: {type(error).__name__}: {error}") from error


class _Writer:
    def __init__(self) -> None:
        self.functions: list[dict[str, Any]] = []
        self._numbers: dict[str, dict[int, int]] = {}

    def graph(self, snapshot: GraphSnapshot) -> dict[str, Any]:
        return {
            "device": snapshot.device,
            "context": snapshot.context,
            "driver": snapshot.driver,
            "nodes": [self._node(node) for node in snapshot.nodes],
            "edges": [[*edge, *data] for edge, data in snapshot.edges_with_data()],
        }

    def _node(self, node: NodeRecord) -> dict[str, Any]:
        entry: dict[str, Any] = {"params": self._params(node)}
        if node.label:
            entry["label"] = node.label
        if node.inner:
            entry["inner"] = [self.graph(inner) for inner in node.inner]
        return entry

    def _params(self, node: NodeRecord) -> dict[str, Any]:
        params = node.params
        entry: dict[str, Any] = {"type": type(params).__name__}
        for field in fields(params):
            value = getattr(params, field.name)
            if field.name in ("callback", "graph", "bodies"):
                continue
            if field.name in _HANDLES and not isinstance(params, records.HostParams):
                entry[field.name] = self._handle(_HANDLES[field.name], value, node)
            else:
                entry[field.name] = _plain(value)
        return entry

    def _handle(self, sort: str, handle: int, node: NodeRecord) -> int:
        numbers = self._numbers.setdefault(sort, {})
        if handle not in numbers:
            numbers[handle] = len(numbers)
            if sort == "function":
                self.functions.append(_function(node))
        return numbers[handle]


def _function(node: NodeRecord) -> dict[str, Any]:
    info = node.function or FunctionInfo("", "", ())
    entry: dict[str, Any] = {"name": info.name, "raw_name": info.raw_name, "layout": info.layout}
    if node.kernel is not None:
        entry["kernel"] = node.kernel.name
        entry["parameters"] = [[p.name, p.type] for p in node.kernel.parameters]
    return entry


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (records.CopyOperand, LaunchConfig)):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


class _Reader:
    def __init__(self, functions: list[dict[str, Any]]) -> None:
        self._functions = [_read_function(entry) for entry in functions]

    def graph(self, entry: dict[str, Any], depth: int = 0) -> GraphSnapshot:
        if depth > _DEEPEST:
            raise ConfigurationError(f"inner: expected at most {_DEEPEST} levels, got more")
        nodes = tuple(self._node(index, node, depth) for index, node in enumerate(entry["nodes"]))
        edges = tuple((edge[0], edge[1]) for edge in entry["edges"])
        for node in (node for edge in edges for node in edge):
            check_number("edges", node, len(nodes))
        check_order(edges, len(nodes))
        return GraphSnapshot(
            nodes,
            edges,
            tuple(_edge_data(*edge) for edge in entry["edges"]),
            check_number("device", entry["device"]),
            check_number("context", entry["context"]),
            check_text("driver", entry["driver"]),
        )

    def _node(self, index: int, entry: dict[str, Any], depth: int) -> NodeRecord:
        params = _read_params(entry["params"])
        function, kernel = None, None
        if isinstance(params, records.KernelParams):
            number = check_number("function", params.function, len(self._functions))
            function, kernel = self._functions[number]
            if kernel is not None:
                _check_arguments(params, kernel)
        inner = tuple(self.graph(graph, depth + 1) for graph in entry.get("inner", ()))
        is_child = isinstance(params, records.ChildParams)
        if inner and not is_child and not isinstance(params, records.ConditionalParams):
            raise ConfigurationError(f"inner: expected none in a {params.kind.value} node")
        return NodeRecord(
            index,
            NodeHandle(index),
            params,
            function,
            kernel,
            check_text("label", entry.get("label", "")),
            inner[0] if is_child else None,
            () if is_child else inner,
        )


def _edge_data(_source: int, _target: int, *data: Any) -> EdgeData:
    from_port, to_port, kind = (check_number("edges", number) for number in data)
    return from_port, to_port, kind


def _check_arguments(params: records.KernelParams, kernel: Kernel) -> None:
    sizes = [len(data) for data in params.arguments]
    wanted = [parameter.size for parameter in kernel.parameters]
    if sizes != wanted:
        raise ConfigurationError(
            f"arguments: expected {wanted} bytes for kernel {kernel.name}, got {sizes}"
        )


def _read_function(entry: dict[str, Any]) -> tuple[FunctionInfo | None, Kernel | None]:
    kernel = None
    if "kernel" in entry:
        parameters = tuple(Parameter(name, kind) for name, kind in entry["parameters"])
        kernel = Kernel(check_text("kernel", entry["kernel"]), parameters, source="")
    layout = tuple((offset, size) for offset, size in entry["layout"])
    info = FunctionInfo(entry["name"], entry["raw_name"], layout)
    check_record(info)
    return info, kernel


def _read_params(entry: dict[str, Any]) -> NodeParams:
    cls = _PARAMS[entry["type"]]
    values = {name: value for name, value in entry.items() if name != "type"}
    values["kind"] = records.NodeKind(values["kind"])
    if cls is records.KernelParams:
        config: dict[str, Any] = {
            n: tuple(v) if isinstance(v, list) else v for n, v in values["config"].items()
        }
        values["config"] = LaunchConfig(**config)
        check_record(values["config"])
        values["arguments"] = tuple(bytes.fromhex(data) for data in values["arguments"])
    elif cls is records.MemcpyParams:
        values["dst"], values["src"] = (_read_operand(values[side]) for side in ("dst", "src"))
    elif cls is records.HostParams:
        values["callback"] = None
    elif cls is records.ChildParams:
        values["graph"] = 0
    params: NodeParams = cls(**values)
    check_record(params)
    kinds = {field.name: field.default for field in fields(cls)}
    if params.kind is not kinds["kind"] and kinds["kind"] is not MISSING:
        raise ConfigurationError(f"kind: expected that of {cls.__name__}, got {params.kind.value}")
    return params


def _read_operand(entry: dict[str, Any]) -> records.CopyOperand:
    operand = records.CopyOperand(**{**entry, "memory": records.MemoryKind(entry["memory"])})
    check_record(operand)
    return operand
