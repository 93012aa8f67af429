"""Snapshots as JSON: the round trip, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.contract import Bench, copy_1d, copy_2d
from helpers.kernels import add_one, scale, set_value
from helpers.snapshots import kernel_node, node, snapshot

from graphcore.driver.records import (
    AllocParams,
    ChildParams,
    EmptyParams,
    EventParams,
    FreeParams,
    GraphHandle,
    HostParams,
    LaunchConfig,
    MemsetParams,
    NodeKind,
    OpaqueParams,
)
from graphcore.errors import ConfigurationError
from graphcore.graph import GraphSnapshot, diff, read
from graphcore.resources.fingerprint import fingerprint


def everything(bench: Bench) -> GraphSnapshot:
    graph, inner = bench.new_graph(), bench.new_graph()
    x, y = bench.alloc(4096), bench.alloc(4096)
    event = bench.new_event()
    bench.add_kernel(inner, add_one, x, 4)
    config = LaunchConfig((4, 2, 1), (32, 1, 1), 64, (2, 1, 1))
    first = bench.add_kernel(graph, scale, x, 2.5, 4, config=config)
    bench.add(graph, copy_1d(x, y, 64), [first])
    bench.add(graph, copy_2d(x, y, 16, 4, 64, 64))
    bench.add(graph, MemsetParams(x, 1, 2, 8))
    bench.add(graph, HostParams(lambda: None))
    bench.add(graph, ChildParams(inner))
    bench.add(graph, EmptyParams())
    bench.add(graph, EventParams(event.handle, NodeKind.EVENT_RECORD))
    handle, _, bodies = bench.add_conditional(graph, "if", 2)
    for body in bodies:
        bench.add_kernel(body, set_value, handle, 0)
    return read(bench.driver, graph, annotations=[(0, 2, "start")])


def test_a_snapshot_comes_back_equal_in_all_but_handles(bench: Bench) -> None:
    before = everything(bench)
    text = before.to_json()
    after = GraphSnapshot.from_json(text)
    assert after.to_json() == text
    assert diff(before, after).is_empty
    assert after.edges == before.edges
    assert [record.label for record in after.nodes] == [record.label for record in before.nodes]
    assert after.to_text() == before.to_text()
    assert [str(a) for a in after.nodes[0].arguments] == [str(a) for a in before.nodes[0].arguments]


def test_nodes_that_only_an_allocation_graph_has_come_back_too() -> None:
    before = snapshot(
        [
            node(0, AllocParams(256, 0x7000)),
            node(1, FreeParams(0x7000)),
            node(2, OpaqueParams(NodeKind.BATCH_MEM_OP)),
        ],
        [(0, 1)],
    )
    after = GraphSnapshot.from_json(before.to_json())
    assert [record.params for record in after.nodes] == [record.params for record in before.nodes]


def test_the_text_does_not_depend_on_handles() -> None:
    first = snapshot([kernel_node(0, "a"), kernel_node(1, "b"), kernel_node(2, "a")])
    moved = replace(
        first,
        nodes=tuple(
            replace(
                record,
                handle=record.handle * 7,  # type: ignore[type-var]
                params=replace(record.params, function=record.params.function + 99),  # type: ignore
            )
            for record in first.nodes
        ),
    )
    assert first.to_json() == moved.to_json()
    assert len(json.loads(first.to_json())["functions"]) == 2


def test_a_file_written_by_an_earlier_release_still_reads() -> None:
    text = (Path(__file__).parent / "data" / "snapshot-1.json").read_text()
    read_back = GraphSnapshot.from_json(text)
    assert read_back.to_json() == text.strip()
    assert fingerprint(read_back).digest == fingerprint(GraphSnapshot.from_json(text)).digest
    assert read_back.summary() == {"kernel": 2, "conditional": 1, "memcpy": 1, "memset": 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "expected JSON"),
        ("[]", "expected format 'graphcore-snapshot'"),
        ('{"format":"other","version":1}', "expected format 'graphcore-snapshot'"),
        ('{"format":"graphcore-snapshot","version":2}', "expected version 1, got 2"),
        ('{"format":"graphcore-snapshot"}', "expected version 1, got None"),
        ('{"format":"graphcore-snapshot","version":1}', "damaged: KeyError"),
        (
            '{"format":"graphcore-snapshot","version":1,"functions":[],"graph":'
            '{"nodes":[{"params":{"type":"os.system"}}]}}',
            "damaged: KeyError",
        ),
    ],
    ids=["no JSON", "no object", "other format", "newer", "no version", "empty", "unknown node"],
)
def test_what_is_no_snapshot_of_a_known_version_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match="snapshot: ") as caught:
        GraphSnapshot.from_json(text)
    assert words in str(caught.value)


def _saved() -> dict[str, Any]:
    inner = snapshot([kernel_node(0, "inner")])
    nodes = [
        kernel_node(0, "add"),
        node(1, MemsetParams(0x7000, 1, 4, 8)),
        node(2, ChildParams(GraphHandle(0)), child=inner),
    ]
    saved: dict[str, Any] = json.loads(snapshot(nodes, [(0, 1), (1, 2)]).to_json())
    return saved


def _nested(depth: int) -> dict[str, Any]:
    saved = _saved()
    child = saved["graph"]["nodes"][2]
    for _ in range(depth):
        graph = {**saved["graph"], "nodes": [child], "edges": []}
        child = {"params": child["params"], "inner": [graph]}
    saved["graph"]["nodes"][2] = child
    return saved


EMPTY = {"device": 0, "context": 0, "driver": "", "nodes": [], "edges": []}
FIRST, FILL = ("graph", "nodes", 0), ("graph", "nodes", 1, "params")


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ((*FIRST, "params", "function"), -1, "function: expected a number below"),
        ((*FIRST, "params", "function"), True, "function: expected a"),
        ((*FIRST, "params", "config", "grid"), [1, 1], "LaunchConfig.grid: expected"),
        ((*FIRST, "params", "config", "grid"), [1, 1, "1"], "LaunchConfig.grid: expected"),
        ((*FIRST, "params", "config", "shared_bytes"), 1.5, "LaunchConfig.shared_bytes: expected"),
        ((*FIRST, "params", "arguments"), ["zz"], "damaged: ValueError"),
        ((*FIRST, "params", "kind"), "memset", "kind: expected that of KernelParams, got memset"),
        ((*FIRST, "label"), 3, "label: expected text, got 3"),
        ((*FIRST, "inner"), [EMPTY], "inner: expected none in a kernel node"),
        ((*FILL, "address"), 1 << 64, "MemsetParams.address: expected a whole number of 64 bits"),
        ((*FILL, "width"), None, "MemsetParams.width: expected a whole number of 64 bits"),
        ((*FILL, "extra"), 1, "damaged: TypeError"),
        (("graph", "edges", 0, 1), 7, "edges: expected a number below 3, got 7"),
        (("graph", "edges", 0, 0), -1, "edges: expected a number below 3, got -1"),
        (("graph", "edges", 0, 0), 1, "edges: expected an order, got a circle behind node 1"),
        (("graph", "edges", 0, 2), "x", "edges: expected a number"),
        (("graph", "device"), [], "device: expected a number"),
        (("graph", "driver"), None, "driver: expected text"),
        (("graph", "nodes"), 3, "damaged: TypeError"),
        (("functions", 0, "name"), {}, "FunctionInfo.name: expected text"),
        (("functions", 0, "layout"), [[0, "x"]], "FunctionInfo.layout: expected"),
        (("functions",), 1, "damaged: TypeError"),
        (("functions", 0), [], "damaged: TypeError"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_a_field_of_another_type_is_refused_where_it_is_read(
    place: tuple[str | int, ...], value: Any, words: str
) -> None:
    saved = _saved()
    GraphSnapshot.from_json(json.dumps(saved))
    *path, last = place
    holder: Any = saved
    for key in path:
        holder = holder[key]
    holder[last] = value
    with pytest.raises(ConfigurationError, match="snapshot: damaged: ") as caught:
        GraphSnapshot.from_json(json.dumps(saved))
    assert words in str(caught.value)


def test_arguments_that_a_kernels_signature_does_not_have_are_refused(bench: Bench) -> None:
    saved = json.loads(everything(bench).to_json())
    arguments = saved["graph"]["nodes"][0]["params"]["arguments"]
    arguments[0] = arguments[0][2:]
    with pytest.raises(ConfigurationError, match=r"arguments: expected \[8, 4, 4\] bytes"):
        GraphSnapshot.from_json(json.dumps(saved))


def test_graphs_inside_graphs_are_read_to_a_depth_and_not_beyond() -> None:
    read_back = GraphSnapshot.from_json(json.dumps(_nested(60)))
    assert len(list(read_back.walk())) == 64
    for depth in (80, 5000):
        with pytest.raises(ConfigurationError, match="snapshot: "):
            GraphSnapshot.from_json(_text_of(depth))


def _text_of(depth: int) -> str:
    """As JSON, which Python does not write that deep."""
    inner = '{"device":0,"context":0,"driver":"","edges":[],"nodes":['
    child = '{"params":{"type":"ChildParams","kind":"child"},"inner":['
    graph = (inner + child) * depth + inner + "]}" + "]}]}" * depth
    return f'{{"format":"graphcore-snapshot","version":1,"functions":[],"graph":{graph}}}'
