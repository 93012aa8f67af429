"""Copies of the tables on the host: who is resident, growing, emptying, undoing a step."""

from __future__ import annotations

import random

from graphcore_kernels import RoutePolicy, RouteStatus
from helpers.route_steps import RouteSteps

from graphcore.moe import SlotFault, SlotOracle, SlotState, SlotTotals


def state_of(steps: RouteSteps) -> SlotState:
    words = {name: values.tolist() for name, values in steps.tables.items()}
    return SlotState(steps.experts, steps.slots, words)


def stepped(count: int = 6) -> RouteSteps:
    steps, draw = RouteSteps(9, 4, RoutePolicy()), random.Random(1)
    for _ in range(count):
        steps.step([draw.randrange(9) for _ in range(3)])
    return steps


def test_an_empty_state_is_that_of_a_new_oracle():
    steps = RouteSteps(9, 4, RoutePolicy())
    assert SlotState.empty(9, 4).words == state_of(steps).words


def test_residents_are_the_oracles_with_what_the_newest_step_admits():
    for count in range(8):
        steps = stepped(count)
        assert state_of(steps).residents() == steps.oracle.residents()


def test_growing_keeps_residents_and_the_steps_that_follow():
    steps = stepped()
    grown = RouteSteps(9, 7, RoutePolicy())
    for name, values in state_of(steps).grown(7).words.items():
        grown.tables[name][:] = values
    grown.oracle.__dict__.update(steps.oracle._copy())
    for name, fresh in (("expert_for_slot", -1), ("last_used", 0), ("frequency", 0),
                        ("frequency_epoch", 0)):  # fmt: skip
        getattr(grown.oracle, name).extend([fresh] * 3)
    grown.check_tables()
    draw = random.Random(2)
    for _ in range(20):
        grown.step([draw.randrange(9) for _ in range(5)])


def test_emptying_keeps_pins_and_admission_only():
    state = state_of(stepped()).changed({"pinned": [1] * 9, "is_open": [0]})
    emptied = state.emptied()
    expected = SlotState.empty(9, 4).changed({"pinned": [1] * 9, "is_open": [0]})
    assert emptied == expected


def test_undoing_the_newest_step_empties_the_slots_of_its_misses():
    steps = RouteSteps(9, 4, RoutePolicy())
    for ids in ([0, 1, 2, 3], [0, 1], [0, 8]):
        steps.step(ids)
    state = state_of(steps)
    assert state.residents() == {0: 0, 1: 1, 8: 2, 3: 3}
    undone = state.without_pending()
    assert undone.residents() == {0: 0, 1: 1, 3: 3}
    assert undone.words["slot_for_expert"] == [0, 1, -1, 3, -1, -1, -1, -1, -1]
    assert undone.pending() == []
    assert state.residents() == {0: 0, 1: 1, 8: 2, 3: 3}
    assert undone.without_pending() == undone


def test_totals_and_faults_are_told_in_words():
    steps = stepped()
    steps.step([9])
    state, oracle = state_of(steps), steps.oracle
    assert state.totals == SlotTotals(6, 18, oracle.hits, oracle.misses)
    assert state.totals.hit_rate == oracle.hits / (oracle.hits + oracle.misses)
    assert state.fault == SlotFault(RouteStatus.INVALID_ROUTE, 0, 1)
    assert SlotState.empty(2, 1).totals.hit_rate == 1.0


def test_an_oracle_that_has_seen_nothing_has_no_residents():
    assert SlotOracle(4, 2).residents() == {}
