"""Steps that are plans: products found by what they read, changes in place, rows that grow."""

from __future__ import annotations

import pytest
from helpers.moe_steps import HIDDEN, LAYERS, Scene

import graphcore
from graphcore.driver import Driver
from graphcore.driver.records import NodeKind
from graphcore.errors import ConfigurationError
from graphcore.moe import Kind, PlanStep, Reason, Way
from graphcore.moe.decisions.coverage import CoverageRecord
from graphcore.moe.slots.pool_bank import banks_of

WARM = [Kind.DIRECT, Kind.CAPTURE, Kind.REPLAY]


@pytest.fixture
def scene(graphcore_driver: Driver) -> Scene:
    return Scene(graphcore_driver)


@pytest.fixture
def overlapping(graphcore_driver: Driver) -> Scene:
    return Scene(graphcore_driver, rows=4, slots=6, decode_boundary_overlap=1)


def places(lane):
    pool, manifest = lane.scene.pool, lane.scene.manifest
    uses = lane.step.groups
    banks = [(use, banks_of(use.group, pool[use.group], manifest.group(use.group))) for use in uses]
    return lane.step.look(banks)


def test_products_are_the_nodes_that_read_slots_and_their_readers_are_seen(scene):
    lane = scene.plan_lane()
    look = places(lane)
    names = [node.name for node in lane.plan.nodes]
    for layer, place in zip(LAYERS, look.places, strict=True):
        assert [names[each.index] for each in place.products] == [f"{layer} up", f"{layer} down"]
        assert [each.bank for each in place.products] == [f"{layer}.gate_up", f"{layer}.down"]
        up, down = place.products
        assert [node[2] for node, _ in up.consumers] == [f"{layer} down"]
        assert [node for node, _ in down.consumers] == list(place.inner)
    assert look.places[0].inner[0][2] == "layers.1 up"
    assert look.places[1].inner[0][2] == "copy"


def test_a_plan_warms_up_is_captured_and_replayed(scene):
    lane = scene.plan_lane()
    assert lane.kinds(5) == [*WARM, Kind.REPLAY, Kind.REPLAY]
    assert scene.reuse.counters.plan_compiles == 1


def test_a_plan_that_grows_in_place_has_another_uid_and_is_not_covered_until_certified(scene):
    lane = scene.plan_lane()
    assert lane.kinds(3) == WARM
    uid = lane.step.uid
    lane.plan.memset(lane.plan.buffers["x"], 0.0, name="clear")
    assert lane.step.uid != uid
    result = lane.run()
    assert (result.kind, result.reason, result.way) == (
        Kind.DECLINED, Reason.COVERAGE, Way.DIRECT,
    )  # fmt: skip
    assert "not those that were certified" in result.detail
    assert isinstance(scene.reuse.certify(lane.step), CoverageRecord)
    assert lane.kinds(2) == WARM[1:]


def test_an_old_uid_never_skips_the_look_at_the_nodes(scene):
    lane = scene.plan_lane()
    assert lane.kinds(3) == WARM
    step, home = lane.step, lane.pitched
    away = graphcore.Buffer.allocate(home.shape, driver=scene.driver)
    uids = {step.uid}
    for target in (away, home):
        lane.pitched = target
        step.bind("out", target)
        assert step.uid not in uids
        uids.add(step.uid)
    # there and back again: the nodes are looked at, and are what they were
    assert lane.run().kind is Kind.REPLAY
    lane.pitched = away
    step.bind("out", away)
    assert lane.run().reason is Reason.PROPERTIES


@pytest.mark.parametrize("copied", [1, 2, 3])
def test_other_rows_of_a_strided_copy_update_the_executable(overlapping, copied):
    lane = overlapping.plan_lane(copied=4)
    assert lane.kinds(3) == WARM
    executable = lane.executable
    before = executable.graph.snapshot()
    assert NodeKind.MEMCPY not in {node.kind for node in before.walk()}
    lane.copy(copied)
    result = lane.run()
    assert (result.kind, result.reason) == (Kind.UPDATE, Reason.BOUNDARY)
    assert lane.executable is executable
    assert lane.run().kind is Kind.REPLAY
    counters = overlapping.reuse.counters
    assert (counters.updates, counters.reinstantiations) == (1, 0)


def test_without_the_option_strided_copies_stay_memcpy_nodes(scene):
    lane = scene.plan_lane()
    assert lane.kinds(3) == WARM
    kinds = [node.kind for node in lane.executable.graph.snapshot().walk()]
    assert kinds.count(NodeKind.MEMCPY) == 1


def test_something_outside_that_reads_between_the_products_is_a_broken_contract(scene):
    lane = scene.plan_lane()
    plan = lane.plan
    spare = plan.buffer("spare", plan.buffers["layers.0 hidden"].shape)
    lane._buffers["spare"] = graphcore.Buffer.allocate(spare.shape, driver=scene.driver)
    plan.memcpy(spare, plan.buffers["layers.0 hidden"], name="spy")
    lane.step = PlanStep("spied", plan, lane._buffers, groups=lane.step.groups)
    with pytest.raises(graphcore.LifecycleError, match="spy"):
        lane.run(check=False)
    assert scene.reuse.counters.failed == 1


def test_what_is_no_plan_with_nodes_is_refused(scene):
    for wrong in (graphcore.GraphPlan("empty"), None):
        with pytest.raises(ConfigurationError, match="a GraphPlan with nodes"):
            PlanStep("wrong", wrong, {})
    lane = scene.plan_lane()
    with pytest.raises(ConfigurationError, match="'other'"):
        lane.step.bind("other", lane.x)
    assert lane.step.extents[-2:] == ((2, HIDDEN), (1,))
