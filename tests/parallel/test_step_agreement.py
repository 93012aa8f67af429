"""What the choice of all ranks means for the decision of one."""

import pytest
from helpers.moe_calls import PLAN

from graphcore.moe.decisions.decision import Decision
from graphcore.moe.decisions.reasons import Reason, Retention
from graphcore.moe.manifests.names import Kind, Way
from graphcore.moe.steps.step_agreement import CHOICES, EAGER, agreed, choice_of


def decision(kind, way=Way.GRAPH, retention=Retention.KEEP):
    return Decision(kind, Reason.UNCHANGED, "", way, retention, False, PLAN)


def test_what_a_decision_means_for_others_is_its_graph_or_that_it_uses_none():
    found = [choice_of(decision(kind)) for kind in (Kind.REPLAY, Kind.UPDATE, Kind.CAPTURE)]
    assert (*found, choice_of(decision(Kind.STAGED, Way.STAGED))) == CHOICES


def test_a_choice_that_is_ones_own_changes_nothing():
    mine = decision(Kind.REPLAY)
    assert agreed(mine, "replay", "") is mine


@pytest.mark.parametrize(
    ("choice", "kind", "way", "retention"),
    [
        ("update", Kind.UPDATE, Way.GRAPH, Retention.KEEP),
        ("capture", Kind.CAPTURE, Way.GRAPH, Retention.DROP),
        (EAGER, Kind.DECLINED, Way.DIRECT, Retention.RETAIN),
    ],
)
def test_a_replay_becomes_what_all_ranks_do(choice, kind, way, retention):
    found = agreed(decision(Kind.REPLAY), choice, "rank 1: changed")
    assert (found.kind, found.way, found.retention) == (kind, way, retention)
    assert (found.reason, found.detail) == (Reason.RANKS, "rank 1: changed")
