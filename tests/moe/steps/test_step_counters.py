"""What each kind of step adds to the counters: every counter has a step that moves it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, fields
from typing import Any, NamedTuple

import pytest
from helpers import moe_shortfalls as shortfalls
from helpers.moe_shortfalls import Prepare, check_sums, claim_of
from helpers.moe_steps import EXPERTS, LAYERS, TOP_K, Lane, Scene

from graphcore.errors import LifecycleError
from graphcore.moe import MoECounters, manifest_of
from graphcore.moe.manifests.ownership import Admission
from graphcore.moe.steps import fact_finder


def nothing(scene, lane, monkeypatch):
    pass


def other_nodes(scene, lane, monkeypatch):
    lane.extra = 1
    lane.step.set_value("extra", 1)


def a_manifest_under_way(scene, lane, monkeypatch):
    ownership = scene.manifests.ownership
    ownership.set_admission(Admission.REPLACING)
    scene.after = lambda: ownership.set_admission(Admission.OPEN)


def no_plan(scene, lane, monkeypatch):
    scene.reuse._finder.sights.forget()
    lane.move_output()
    monkeypatch.setattr(fact_finder, "make_plan", lambda _: 1 / 0)


def a_step_half_done(scene, lane, monkeypatch):
    scene.pool.doubt(LAYERS[1])


def a_group_of_others_half_done(scene, lane, monkeypatch):
    scene.pool.doubt(LAYERS[1])
    lane.step.set_groups(lane.uses()[:1])


def slots_for_all(scene, lane, monkeypatch):
    scene.pool.grow(EXPERTS)
    lane.replan()
    scene.publish(manifest_of(scene.pool, top_k=TOP_K))


PLAN = {"plan_calls": 1, "calls": 1}
MADE = {**PLAN, "plan_compiles": 1}
AGAIN = {**PLAN, "plan_reuses": 1}
SLOTS = {"ready": 2, "completed": 2}
READY = {"ready": 2}


class Case(NamedTuple):
    """A step, and what it adds.

    Args:
        adds: Counter -> how much.
        prepare: What happens before it.
        before: Steps before that.
        error: What it raises.
        required: Whether a shortfall is an error.
        wide: Whether it has more routes than slots.
        options: Of the reuse.
    """

    adds: dict[str, int]
    prepare: Prepare = nothing
    before: int = 3
    error: type[BaseException] | None = None
    required: bool = False
    wide: bool = False
    options: tuple[tuple[str, Any], ...] = ()


ON = (("decode_boundary_overlap", 1),)

CASES = {
    "the first": Case({**MADE, **SLOTS, "direct": 1}, before=0),
    "a capture": Case({**AGAIN, **SLOTS, "captures": 1}, before=1),
    "a replay": Case({**AGAIN, **SLOTS, "replays": 1}),
    "an update": Case(
        {**MADE, **SLOTS, "updates": 1}, shortfalls.a_moved_output, options=ON
    ),
    "an update that is refused": Case(
        {**MADE, **SLOTS, "reinstantiations": 1}, other_nodes, options=ON
    ),
    "a change": Case({**MADE, **SLOTS, "declined": 1}, shortfalls.a_moved_output),
    "slots in use": Case(
        {**AGAIN, **READY, "declined": 1, "fallback": 1}, shortfalls.another_dispatch
    ),
    "a manifest under way": Case(
        {**PLAN, "plan_unavailable": 1, "declined": 1, "fallback": 1}, a_manifest_under_way
    ),
    "more routes than slots": Case(
        {**MADE, "declined": 1, "fallback": 1}, before=0, wide=True
    ),
    "more routes than slots, required": Case(
        {**MADE, **READY, "staged": 1, "fallback": 1}, before=0, wide=True, required=True
    ),
    "slots for all at last": Case(
        {**MADE, **SLOTS, "direct": 1, "strategy_switches": 2}, slots_for_all, before=1, wide=True
    ),
    "a step half done": Case({**AGAIN, **SLOTS, "replays": 1, "rollback": 1}, a_step_half_done),
    "a group half done that it does not use": Case(
        {**MADE, "declined": 1}, a_group_of_others_half_done
    ),
    "a plan that cannot be made": Case(
        {"plan_calls": 1, "prepare_error": 1}, no_plan, error=ZeroDivisionError
    ),
    "required and refused": Case(
        {**MADE, "failed": 1, "required_unsupported": 1}, shortfalls.other_bits,
        error=LifecycleError, required=True,
    ),
    "required work that fails": Case(
        {**MADE, **READY, "failed": 1}, shortfalls.work_that_fails, error=ZeroDivisionError,
        required=True, options=ON,
    ),
    "an end that fails": Case(
        {**AGAIN, **READY, "failed": 1, "finish_error": 1}, shortfalls.an_end_that_fails,
        error=RuntimeError,
    ),
    "an end of required work that fails": Case(
        {**AGAIN, **READY, "failed": 1, "finish_error": 1}, shortfalls.an_end_that_fails,
        error=RuntimeError, required=True,
    ),
}  # fmt: skip


def added(scene: Scene, before: MoECounters) -> dict[str, int]:
    now, then = asdict(scene.reuse.counters), asdict(before)
    return {name: count - then[name] for name, count in now.items() if count != then[name]}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_step_adds_to_these_counters_and_no_others(graphcore_driver, monkeypatch, case):
    scene = Scene(graphcore_driver, **dict(case.options))
    lane = Lane(scene, 4, in_slots=False) if case.wide else scene.lane()
    lane.kinds(case.before, claim_of(lane, case.required))
    with monkeypatch.context() as patch:
        case.prepare(scene, lane, patch)
        before = scene.reuse.counters
        with pytest.raises(case.error) if case.error else nullcontext():
            lane.run(claim_of(lane, case.required), check=case.error is None)
    assert added(scene, before) == case.adds
    scene.after()
    check_sums(scene)


def test_every_counter_has_a_step_that_moves_it():
    moved = {name for case in CASES.values() for name in case.adds}
    assert moved == {field.name for field in fields(MoECounters)}


def test_what_is_counted_on_the_device_is_in_the_report(graphcore_driver):
    scene = Scene(graphcore_driver)
    lane = scene.lane()
    lane.kinds(6)
    report, pool = scene.reuse.report(), scene.pool
    totals = {name: pool.totals(name) for name in LAYERS}
    assert report.admissions == sum(each.misses for each in totals.values()) > 0
    assert report.hits == sum(each.hits for each in totals.values())
    assert report.moved_bytes == sum(pool.copied_nbytes(name) for name in LAYERS)
    assert {each.steps for each in totals.values()} == {scene.reuse.counters.calls}
    assert sum(each.steps for each in totals.values()) == scene.reuse.counters.completed
