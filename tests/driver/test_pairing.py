"""The walk by which an update pairs nodes, held to the answers an H200 gave."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from graphcore.driver.pairing import Mismatch, Outline, pair

DATA = json.loads(
    (Path(__file__).parent / "data" / "topology_updates_h200.json").read_text(encoding="utf-8")
)
PLAIN = (0, 0, 0)


def outline(kinds: str, needs: list[list[int]]) -> Outline:
    return Outline(
        tuple(DATA["kinds"][kind] for kind in kinds),
        tuple(tuple((source, PLAIN) for source in sources) for sources in needs),
    )


def predicted(row: dict[str, Any]) -> tuple[str, int | None, int | None]:
    found = pair(
        outline(row["old_kinds"], row["old_needs"]), outline(row["new_kinds"], row["new_needs"])
    )
    if isinstance(found, Mismatch):
        return found.result.value, found.node, found.from_node
    return "success", None, None


def test_every_answer_of_the_h200_is_predicted_with_node_and_from_node() -> None:
    answers = DATA["answers"]
    wrong = [
        row for row in answers if predicted(row) != (row["result"], row["node"], row["from_node"])
    ]
    assert not wrong
    # the data has something of everything, or the comparison would prove little
    seen = Counter((row["result"], row["node"] is None) for row in answers)
    assert len(answers) > 400
    assert min(seen.values()) >= 10
    assert set(seen) == {
        ("success", True),
        ("topology_changed", True),
        ("topology_changed", False),
        ("node_type_changed", False),
    }


def test_nodes_are_paired_from_the_last_exit_upwards() -> None:
    before = outline("kkk", [[], [0], []])
    after = outline("kkk", [[], [], [0]])
    found = pair(before, after)
    assert isinstance(found, Mismatch)
    assert (found.node, found.field) == (2, "dependencies")
    assert pair(before, before) == ((2, 2), (1, 1), (0, 0))


def test_an_edge_of_another_kind_is_named() -> None:
    before = outline("kk", [[], [0]])
    after = Outline(before.kinds, ((), ((0, (1, 0, 1)),)))
    found = pair(before, after)
    assert isinstance(found, Mismatch)
    assert (found.field, found.node) == ("edge data", 1)


def test_a_cycle_is_no_topology_to_pair() -> None:
    ring = outline("kk", [[1], [0]])
    found = pair(ring, ring)
    assert isinstance(found, Mismatch)
    assert found.rule == "a graph has no cycle"
