"""Numbers of graphs that never come back: after a change, undone or not, or at an old address."""

from __future__ import annotations

import gc

import pytest

from graphcore import CacheTypeError, GraphPlan
from graphcore.moe.decisions.graph_uids import GraphUids
from graphcore.moe.decisions.property_probe import Probe, Properties, probe

BEFORE, AFTER = (("add", 0x20),), (("add", 0x30),)


class Graph:
    """Something that is changed in place."""


def test_a_graph_keeps_its_uid_until_it_is_changed() -> None:
    uids, graph = GraphUids(), Graph()
    first = uids.of(graph, 0)
    assert uids.of(graph, 0) == first != 0
    assert uids.of(graph, 1) != first
    assert uids.of(Graph(), 1) not in (first, uids.of(graph, 1))


def test_a_uid_does_not_come_back_when_a_change_is_undone() -> None:
    uids, graph = GraphUids(), Graph()
    seen = [uids.of(graph, revision) for revision in ("a", "b", "a", "b")]
    assert len(set(seen)) == 4


def test_an_old_uid_never_skips_the_look() -> None:
    uids, graph = GraphUids(), Graph()
    before = Properties(uids.of(graph, 0), 11, BEFORE)
    uids.of(graph, 1)
    undone = uids.of(graph, 0)
    assert probe(before, undone, 11, lambda: AFTER).probe is Probe.CHANGED


def test_another_graph_at_the_same_address_has_another_uid() -> None:
    uids = GraphUids()
    seen = set()
    for _ in range(100):
        seen.add(uids.of(Graph(), 0))  # each dies at once, and its address is used again
        gc.collect(0)
    assert len(seen) == 100


def test_two_givers_never_give_one_uid() -> None:
    graph = Graph()
    assert GraphUids().of(graph, 0) != GraphUids().of(graph, 0)


def test_a_graph_plan_can_have_a_uid() -> None:
    uids, plan = GraphUids(), GraphPlan()
    assert uids.of(plan, 0) == uids.of(plan, 0)


@pytest.mark.parametrize("graph", [(1, 2), "graph", object()], ids=["tuple", "text", "object"])
def test_what_cannot_be_told_apart_or_watched_has_no_uid(graph: object) -> None:
    with pytest.raises(CacheTypeError, match="graph: expected an object"):
        GraphUids().of(graph, 0)
