"""Snapshots as JSON: the round trip, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

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
