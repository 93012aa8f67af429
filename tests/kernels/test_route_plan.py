"""route_plan's reference against the oracle in plain Python, over random steps."""

from __future__ import annotations

import itertools
import random

import numpy
import pytest
from graphcore_kernels import RoutePolicy, RouteStatus
from graphcore_kernels.route_layout import MOST_FREQUENCY
from helpers.route_steps import RouteSteps
from hypothesis import given, settings
from hypothesis import strategies as st

# bounds that are reached at once, and soon
POLICIES = st.builds(
    RoutePolicy,
    uses_frequency=st.booleans(),
    clock_bound=st.sampled_from([1, 40, 2**62]),
    step_bound=st.sampled_from([16, 20, 2**34]),
)


@st.composite
def sizes(draw):
    experts = draw(st.integers(1, 24))
    return experts, draw(st.integers(1, experts + 2))


@settings(max_examples=80, deadline=None)
@given(data=st.data(), size=sizes(), policy=POLICIES)
def test_every_table_and_output_is_the_oracles_over_random_steps(data, size, policy):
    experts, _ = size
    steps = RouteSteps(*size, policy)
    ids = st.integers(0, experts - 1)
    for _ in range(data.draw(st.integers(1, 25), "steps")):
        match data.draw(st.integers(0, 12), "what"):
            case 0:
                steps.pin(data.draw(ids), data.draw(st.integers(0, 2)))
            case 1:
                steps.open(data.draw(st.booleans()))
            case _:
                top_k = data.draw(st.integers(1, 4), "top_k")
                wide = ids | st.sampled_from([-1, experts, 2**31 - 1, -(2**31)])
                rows = data.draw(st.integers(0, 6), "rows")
                which = wide if data.draw(st.integers(0, 15)) == 0 else ids
                routes = data.draw(st.lists(which, min_size=rows * top_k, max_size=rows * top_k))
                steps.step(routes, top_k, data.draw(st.sampled_from(["int32", "int64"])))


@pytest.mark.parametrize("uses_frequency", [True, False], ids=["frequency", "recency"])
def test_thousands_of_steps_of_a_skewed_router_agree_with_the_oracle(uses_frequency):
    draw = random.Random(7)
    steps = RouteSteps(64, 24, RoutePolicy(uses_frequency))
    for index in range(900):
        # what is popular drifts, so that old counters must be forgotten
        centre = index // 100 * 7
        ids = [(centre + min(int(draw.expovariate(0.12)), 63)) % 64 for _ in range(16)]
        steps.step(ids, 8)
    assert steps.oracle.hits > 400
    assert steps.oracle.misses > 400


def test_a_bound_of_the_clock_or_of_the_steps_changes_no_decision():
    draw = random.Random(11)
    policies = [RoutePolicy(), RoutePolicy(clock_bound=30), RoutePolicy(step_bound=16),
                RoutePolicy(clock_bound=1, step_bound=17)]  # fmt: skip
    all_steps = [RouteSteps(20, 6, policy) for policy in policies]
    for _ in range(300):
        ids = [draw.randrange(20) for _ in range(draw.randint(0, 6))]
        first, *others = [steps.step(ids) for steps in all_steps]
        assert all(other == first for other in others)
    plain, clocked, stepped, _ = (steps.oracle for steps in all_steps)
    assert plain.clock > 300 > 60 > clocked.clock
    assert plain.step == 299 > 17 > stepped.step


# ---- the policy, by example ---------------------------------------------------------------------


def fresh(experts: int = 8, slots: int = 4, **policy) -> RouteSteps:
    return RouteSteps(experts, slots, RoutePolicy(**policy))


def test_empty_slots_are_filled_in_their_order_before_anyone_is_evicted():
    steps = fresh()
    assert steps.step([5, 3]).misses == ((5, 0), (3, 1))
    decision = steps.step([7, 5, 2])
    assert decision.misses == ((7, 2), (2, 3))
    assert decision.evicted == (-1, -1)


def test_the_least_frequent_goes_first_and_among_those_the_least_recent():
    steps = fresh()
    for ids in ([0, 1, 2, 3], [0, 1], [1]):
        steps.step(ids)
    assert steps.step([4, 5, 6]).evicted == (2, 3, 0)


def test_by_recency_alone_the_least_recently_used_goes_first():
    steps = fresh(uses_frequency=False)
    for ids in ([0, 1, 2, 3], [0, 0], [2], [3]):
        steps.step(ids)
    assert steps.step([4, 5]).evicted == (1, 0)


def test_a_counter_counts_half_after_sixteen_steps_and_nothing_after_thirty_two_epochs():
    steps = fresh(slots=2)
    for _ in range(4):
        steps.step([0])
    steps.tables["frequency"][0] = steps.oracle.frequency[0] = MOST_FREQUENCY
    steps.step([0])
    assert steps.oracle.effective_frequency(0) == MOST_FREQUENCY
    for _ in range(15):
        steps.step([1])
    assert steps.oracle.effective_frequency(0) == MOST_FREQUENCY >> 1
    for _ in range(16 * 31):
        steps.step([1])
    assert steps.oracle.effective_frequency(0) == 0


def test_a_counter_at_its_end_stays_there():
    steps = fresh(slots=2)
    steps.step([0])
    steps.step([0])
    steps.tables["frequency"][0] = steps.oracle.frequency[0] = MOST_FREQUENCY
    steps.step([0])
    assert steps.tables["frequency"][0] == MOST_FREQUENCY


def test_what_a_step_decides_is_in_the_maps_only_after_the_next_one():
    steps = fresh()
    steps.step([6])
    assert steps.tables["slot_for_expert"][6] == -1
    assert steps.outputs["slots"][6] == 0
    steps.step([])
    assert steps.tables["slot_for_expert"][6] == 0


def test_a_step_of_no_rows_commits_and_asks_for_nothing():
    steps = fresh()
    steps.step([1, 2])
    assert steps.step([]).misses == ()
    assert steps.outputs["offsets"].tolist() == [0] * 9


def test_an_expert_that_this_step_uses_is_never_its_victim():
    steps = fresh(slots=3)
    steps.step([0, 1, 2])
    decision = steps.step([3, 0])
    assert decision.evicted == (1,)
    for ids in itertools.permutations([0, 2, 4]):
        assert set(steps.step(list(ids)).slots) == {-1, 0, 1, 2}


def test_a_pinned_expert_keeps_its_slot_and_too_many_pins_refuse_the_step():
    steps = fresh(slots=2)
    steps.step([0, 1])
    steps.pin(0, 1)
    assert steps.step([2]).evicted == (1,)
    refused = steps.step([3, 4])
    assert (refused.status, refused.detail) == (RouteStatus.TOO_MANY_ROUTES, 2)
    steps.pin(0, 0)
    assert steps.step([3, 4]).status is RouteStatus.OK


def test_more_routes_than_slots_are_fine_where_every_expert_has_a_slot():
    steps = fresh(experts=4, slots=4)
    decision = steps.step([3, 1] * 100, 2)
    assert decision.status is RouteStatus.OK
    assert decision.offsets == (0, 0, 100, 100, 200)


def test_rows_of_an_expert_are_in_the_order_of_its_routes():
    steps = fresh(slots=6)
    decision = steps.step([2, 5, 2, 2, 5, 0], 2)
    assert decision.scatter == (5, 0, 2, 3, 1, 4)
    assert decision.gather == (2, 0, 1, 1, 0, 2)


# ---- what is refused ----------------------------------------------------------------------------


def tampered(name: str, *at: tuple[int, int]) -> RouteSteps:
    """Two steps in, then a table is damaged."""
    steps = fresh()
    steps.step([0, 1, 2])
    steps.step([1, 3])
    for index, value in at:
        steps.tables[name][index] = value
    return steps


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("slot_for_expert", (1, 2)),
        ("slot_for_expert", (7, 3)),
        ("slot_for_expert", (0, 4)),
        ("slot_for_expert", (0, -2)),
        ("slot_for_expert", (0, -1)),
        ("expert_for_slot", (0, 5)),
        ("expert_for_slot", (0, 8)),
        ("expert_for_slot", (3, -9)),
        ("expert_for_slot", (0, -1)),
        ("pending", (0, 2)),
        ("pending", (1, 5)),
        ("pending", (1, -1)),
        ("pending", (2, 1)),
        ("pending", (3, 2)),
        ("pending_expert", (0, 8)),
        ("pending_expert", (0, 0)),
        ("pending_expert", (0, 3)),
        ("pending_slot", (1, -1)),
        ("pending_slot", (1, 1)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value[0]} is {value[1]}",
)
def test_tables_that_contradict_each_other_refuse_the_step_and_stay(name, at):
    steps = tampered(name, at)
    before = {each: table.copy() for each, table in steps.tables.items()}
    steps.run([0, 1])
    assert steps.outputs["report"].tolist() == [RouteStatus.INVALID_STATE, 0, 0, -1]
    assert_refused(steps, before, [RouteStatus.INVALID_STATE, -1, 1])


@pytest.mark.parametrize(
    ("ids", "closed", "report"),
    [
        ([0, 8, -1], False, [RouteStatus.INVALID_ROUTE, 1]),
        ([-1], False, [RouteStatus.INVALID_ROUTE, 0]),
        ([0, 1, 2, 3, 4], False, [RouteStatus.TOO_MANY_ROUTES, 5]),
        ([0, 0, 0, 0, 0], False, [RouteStatus.TOO_MANY_ROUTES, 5]),
        ([0], True, [RouteStatus.CLOSED, -1]),
        ([99, 99, 99, 99, 99], True, [RouteStatus.CLOSED, -1]),
    ],
    ids=["an id too large", "a negative id", "too many", "too many alike", "closed", "all of it"],
)
def test_a_refused_step_changes_no_table_and_has_no_rows(ids, closed, report):
    steps = tampered("fault")
    steps.open(not closed)
    before = {each: table.copy() for each, table in steps.tables.items()}
    steps.step(ids)
    assert_refused(steps, before, [*report, 1])
    steps.open(True)
    assert steps.step([1, 4]).status is RouteStatus.OK


def assert_refused(steps: RouteSteps, before, fault) -> None:
    for name, table in steps.tables.items():
        if name not in ("fault", "miss_count"):
            assert (table == before[name]).all(), name
    assert steps.tables["fault"].tolist() == fault
    assert steps.tables["miss_count"][0] == 0
    assert not steps.outputs["offsets"].any()
    for name in ("slots", "gather", "scatter", "route_slots"):
        assert (steps.outputs[name] == -1).all(), name


def test_the_first_fault_stays_until_it_is_cleared_and_all_are_counted():
    steps = fresh()
    steps.step([9])
    steps.step([0] * 5)
    assert steps.tables["fault"].tolist() == [RouteStatus.INVALID_ROUTE, 0, 2]


# ---- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_weights_come_in_the_order_of_the_rows(dtype):
    steps = fresh(slots=6)
    weights = numpy.arange(6, dtype=dtype).reshape(3, 2) / 8
    steps.run([2, 5, 1, 2, 5, 0], 2, weights=weights)
    assert steps.outputs["scale"].dtype == "float32"
    expected = weights.reshape(-1)[steps.outputs["scatter"]]
    assert steps.outputs["scale"].tolist() == expected.tolist()
    steps.run([9, 9], 2, weights=weights[:1])
    assert steps.outputs["scale"].tolist() == [0, 0]
