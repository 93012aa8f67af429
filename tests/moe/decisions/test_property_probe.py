"""What a look at the nodes of a graph finds, and when it is not needed."""

from __future__ import annotations

from typing import Any

import pytest

from graphcore.moe.decisions.property_probe import Probe, Properties, probe

RECORDS = (("mul", 0x10, (4, 16)), ("add", 0x20, (4, 16)))
BEFORE = Properties(uid=7, semantic_key=11, records=RECORDS)
MOVED = (RECORDS[0], ("add", 0x30, (4, 16)))

PROBES: dict[str, tuple[Properties | None, int, int, tuple[Any, ...], Probe]] = {
    "nothing known": (None, 7, 11, RECORDS, Probe.FIRST),
    "equal uid": (BEFORE, 7, 11, MOVED, Probe.SAME_UID),
    "equal uid, another meaning": (BEFORE, 7, 12, RECORDS, Probe.SEMANTICS),
    "another uid, equal nodes": (BEFORE, 8, 11, RECORDS, Probe.SAME),
    "another uid, a node changed": (BEFORE, 8, 11, MOVED, Probe.CHANGED),
    "another uid, a node fewer": (BEFORE, 8, 11, RECORDS[:1], Probe.COUNT),
    "another uid, another meaning": (BEFORE, 8, 12, MOVED, Probe.SEMANTICS),
    "a uid that was cleared, a node changed": (
        BEFORE.without_uid(), 7, 11, MOVED, Probe.CHANGED,
    ),
    "a uid that was cleared, equal nodes": (BEFORE.without_uid(), 7, 11, RECORDS, Probe.SAME),
    "no uid on both sides": (BEFORE.without_uid(), 0, 11, MOVED, Probe.CHANGED),
    "no uid now": (BEFORE, 0, 11, MOVED, Probe.CHANGED),
}  # fmt: skip


@pytest.mark.parametrize(
    ("before", "uid", "semantic_key", "records", "found"), PROBES.values(), ids=PROBES
)
def test_a_look_at_the_nodes_finds(
    before: Properties | None, uid: int, semantic_key: int, records: Any, found: Probe
) -> None:
    looked: list[int] = []
    result = probe(before, uid, semantic_key, lambda: looked.append(1) or records)
    assert result.probe is found
    assert result.probe.is_same is (found in (Probe.SAME, Probe.SAME_UID))
    assert len(looked) == (found is not Probe.SAME_UID)  # an equal uid costs no look
    if found is Probe.SAME_UID:
        assert result.properties is before
    else:
        assert result.properties == Properties(uid, semantic_key, records)


def test_every_finding_of_a_look_is_tested() -> None:
    assert {found for *_, found in PROBES.values()} == set(Probe)


def test_a_look_says_which_node_changed_into_what() -> None:
    text = str(probe(BEFORE, 8, 11, lambda: MOVED))
    assert text == (
        "a node changed: node 1: expected ('add', 32, (4, 16)), got ('add', 48, (4, 16))"
    )
    assert str(probe(BEFORE, 8, 11, lambda: RECORDS)) == "the same nodes"
