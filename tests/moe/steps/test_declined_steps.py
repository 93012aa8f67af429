"""Every row of the table of declines and failures, by a step that comes to it.

After each the next steps are right, and a capture that was kept replays at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from helpers import moe_shortfalls as shortfalls
from helpers.moe_shortfalls import Prepare, check_sums, claim_of, mended
from helpers.moe_steps import LAYERS, Lane, Scene

from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import LifecycleError
from graphcore.moe import Kind, Reason, Way
from graphcore.moe.decisions.decline_table import DECLINE_TABLE, ruling

DECLINED, FAILED = Kind.DECLINED, Kind.FAILED
GRAPH, DIRECT, STAGED, NOTHING = Way


@dataclass(frozen=True)
class Row:
    """What leads to a reason, and what comes of it."""

    prepare: Prepare
    reason: Reason
    ordinary: tuple[Kind, Way]
    required: tuple[Kind, Way]
    is_kept: bool = False
    on: int = 0


_BOTH_DIRECT = ((DECLINED, DIRECT), (DECLINED, DIRECT))
_DIRECT_FAILED = ((DECLINED, DIRECT), (FAILED, NOTHING))
_STAGED_FAILED = ((DECLINED, STAGED), (FAILED, NOTHING))
_FAILED = ((FAILED, NOTHING), (FAILED, NOTHING))

ROWS = {
    "graphs are off": Row(shortfalls.graphs_are_off, Reason.DISABLED, *_BOTH_DIRECT, is_kept=True),
    "phase": Row(shortfalls.rows_of_a_prompt, Reason.PHASE, *_BOTH_DIRECT, is_kept=True),
    "phase, not retained": Row(
        shortfalls.rows_of_a_prompt_and_an_owner_is_gone, Reason.NOT_RETAINED, *_BOTH_DIRECT
    ),
    "certificate": Row(shortfalls.malformed, Reason.CERTIFICATE, *_DIRECT_FAILED, is_kept=True),
    "no slots": Row(shortfalls.no_slots, Reason.NO_CONTEXT, *_STAGED_FAILED),
    "not ready": Row(shortfalls.other_bits, Reason.NOT_READY, *_DIRECT_FAILED),
    "corrupt plan": Row(shortfalls.nobody_chose_the_ids, Reason.PLAN_ERROR, *_FAILED),
    "coverage": Row(shortfalls.an_adapter, Reason.COVERAGE, *_DIRECT_FAILED),
    "not needed": Row(shortfalls.no_experts_any_more, Reason.NOT_NEEDED, *_BOTH_DIRECT),
    "not capturable": Row(shortfalls.an_obstacle, Reason.NOT_CAPTURABLE, *_BOTH_DIRECT),
    "properties": Row(shortfalls.a_moved_output, Reason.PROPERTIES, *_BOTH_DIRECT),
    "capture in part": Row(shortfalls.a_capture_in_part, Reason.CAPTURE_INCOMPLETE, *_BOTH_DIRECT),
    "streams unresolved": Row(
        shortfalls.a_stream_that_is_closed, Reason.STREAMS_UNRESOLVED, *_STAGED_FAILED
    ),
    "streams incoherent": Row(
        shortfalls.another_stream_for_a_group, Reason.STREAMS_INCOHERENT, *_STAGED_FAILED
    ),
    "no fingerprint": Row(shortfalls.no_fingerprint, Reason.NO_FINGERPRINT, *_DIRECT_FAILED),
    "fingerprint": Row(
        shortfalls.a_moved_output_and_another_stream, Reason.FINGERPRINT, *_DIRECT_FAILED, on=1
    ),
    "owners": Row(shortfalls.an_owner_is_gone, Reason.OWNERS, *_DIRECT_FAILED),
    "no witnesses": Row(
        shortfalls.owners_that_nobody_can_watch, Reason.NO_WITNESSES, *_BOTH_DIRECT
    ),
    "dispatch": Row(shortfalls.another_dispatch, Reason.DISPATCH, *_STAGED_FAILED),
    "activation": Row(shortfalls.another_stream, Reason.ACTIVATION, *_DIRECT_FAILED),
}  # fmt: skip

ELSEWHERE = {
    Reason.BACKEND: "test_with_another_driver_options_do_nothing_and_every_step_is_declined",
    Reason.RANKS: "tests/parallel/test_step_agreement.py",
    Reason.HOST_STAGED: "test_more_experts_than_slots_are_staged",
    Reason.SEMANTICS: "a step of another meaning has a variant of its own (T4)",
    Reason.UNAVAILABLE: "test_t7_a_step_under_way_holds_up_a_manifest_and_nobody_else",
    Reason.DRIVER: "tests/moe/steps/test_step_faults.py",
    Reason.EVALUATOR: "test_work_that_fails_is_known_to_have_failed",
    Reason.FINISH: "test_an_end_that_fails_drops_the_capture",
}


@pytest.mark.parametrize("required", [False, True], ids=["ordinary", "required"])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_step_comes_to_its_row(graphcore_driver, monkeypatch, row, required):
    scene = Scene(graphcore_driver, decode_boundary_overlap=row.on)
    lane = scene.lane()
    scene.claim = claim_of(lane, required)
    assert lane.kinds(3, scene.claim) == [Kind.DIRECT, Kind.CAPTURE, Kind.REPLAY]
    executable = lane.executable
    with monkeypatch.context() as patch:
        options = row.prepare(scene, lane, patch) or {}
        claim = claim_of(lane, required)
        if options.pop("malformed", False):
            claim = replace(claim, rows=0)
        kind, way = row.required if required else row.ordinary
        if kind is FAILED:
            with pytest.raises(LifecycleError, match="nothing was launched"):
                lane.run(claim, check=False, **options)
            assert lane.calls == []
        else:
            lane.run(claim, **options)
            assert lane.calls == [{DIRECT: "run", STAGED: "staged"}[way]]
    result = scene.seen[-1].result
    assert (result.kind, result.reason, result.way) == (kind, row.reason, way)
    assert str(result)
    scene.after()
    drops = ruling(row.reason, is_required=required).retention.drops
    assert executable.is_closed or not drops
    assert not (executable.is_closed and row.is_kept)
    counters = scene.reuse.counters
    assert counters.required_unsupported == (required and kind is FAILED)
    assert counters.fallback == (way is STAGED)
    if row.is_kept:
        assert lane.run(claim_of(lane, required)).kind is Kind.REPLAY
    mended(scene, lane)
    kinds = lane.kinds(4, claim_of(lane, required))
    assert kinds[-1] is Kind.REPLAY
    check_sums(scene)


def test_every_row_is_tested():
    reasons = {row.reason for row in ROWS.values()}
    assert reasons | set(ELSEWHERE) == set(DECLINE_TABLE)
    assert not reasons & set(ELSEWHERE)


# ---- rows that need more than a step of the usual kind ------------------------------------------


class Hip(EmulatedDriver):
    """A driver of another backend."""

    name = "hip"


def test_with_another_driver_options_do_nothing_and_every_step_is_declined():
    scene = Scene(Hip(), decode_boundary_overlap=1, decode_overlap=1)
    assert not scene.reuse.effective_options.decode_boundary_overlap
    assert scene.reuse.options_refused.startswith("backend")
    lane = scene.lane()
    results = [lane.run() for _ in range(3)]
    assert {(each.kind, each.reason, each.way) for each in results} == {
        (DECLINED, Reason.BACKEND, DIRECT)
    }
    assert len(scene.reuse.cache) == 0


@pytest.mark.parametrize("required", [False, True], ids=["ordinary", "required"])
def test_more_experts_than_slots_are_staged(graphcore_driver: Driver, required):
    scene = Scene(graphcore_driver)
    wide = Lane(scene, 4, "wide", in_slots=False)  # eight routes, six experts, four slots
    for _ in range(3):
        result = wide.run(claim_of(wide, required), experts=range(6))
        assert result.way is STAGED
        assert (result.kind, result.reason) == (
            (Kind.STAGED, Reason.HOST_STAGED) if required else (DECLINED, Reason.NOT_READY)
        )
    assert scene.pool.residents() == {name: {} for name in LAYERS}


def test_without_a_staged_way_a_step_waits_for_its_slots(graphcore_driver):
    scene = Scene(graphcore_driver, patience_seconds=0.05)
    lane = scene.lane()
    lane.step._staged = None
    assert lane.kinds(3)[-1] is Kind.REPLAY
    shortfalls.another_dispatch(scene, lane, None)
    with pytest.raises(LifecycleError, match="give it a staged way"):
        lane.run(check=False)
    assert lane.calls == []
    scene.after()
    scene.reuse.pool = None
    result = lane.run()
    assert (result.kind, result.reason, result.way) == (DECLINED, Reason.NO_CONTEXT, DIRECT)
    assert "no staged way" in result.detail


def test_work_that_fails_is_known_to_have_failed(graphcore_driver, monkeypatch):
    scene = Scene(graphcore_driver)
    lane = scene.lane()
    assert lane.kinds(3)[-1] is Kind.REPLAY
    with monkeypatch.context() as patch:
        shortfalls.work_that_fails(scene, lane, patch)
        with pytest.raises(ZeroDivisionError) as caught:
            lane.run(check=False)
    assert "its work failed" in caught.value.__notes__[-1]
    result = scene.seen[-1].result
    assert (result.kind, result.reason) == (FAILED, Reason.EVALUATOR)
    (variant,) = scene.reuse.variants
    assert variant.state.properties is None
    assert lane.kinds(3) == [Kind.DIRECT, Kind.CAPTURE, Kind.REPLAY]


def test_work_that_fails_in_a_capture_drops_what_was_captured(graphcore_driver, monkeypatch):
    scene = Scene(graphcore_driver, decode_boundary_overlap=1)
    lane = scene.lane()
    assert lane.kinds(3)[-1] is Kind.REPLAY
    executable = lane.executable
    with monkeypatch.context() as patch:
        shortfalls.work_that_fails(scene, lane, patch)
        with pytest.raises(ZeroDivisionError):
            lane.run(check=False)
    assert executable.is_closed
    assert lane.kinds(3) == [Kind.DIRECT, Kind.CAPTURE, Kind.REPLAY]


def test_an_end_that_fails_drops_the_capture(graphcore_driver, monkeypatch):
    scene = Scene(graphcore_driver)
    lane = scene.lane()
    assert lane.kinds(3)[-1] is Kind.REPLAY
    shortfalls.an_end_that_fails(scene, lane, monkeypatch)
    with pytest.raises(RuntimeError, match="no end"):
        lane.run(check=False)
    result = scene.seen[-1].result
    assert (result.kind, result.reason) == (FAILED, Reason.FINISH)
    assert scene.reuse.counters.finish_error == 1
    assert scene.manifests.ownership.users() == {}
    assert len(scene.reuse.cache) == 0
    assert lane.kinds(3) == [Kind.DIRECT, Kind.CAPTURE, Kind.REPLAY]
