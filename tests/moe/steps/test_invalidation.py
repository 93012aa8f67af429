"""What ends a captured step, item by item: the capture, what is known of it, and what runs instead.

Every case first comes to a replay, then brings one item about. Outputs are NaN before each step and
must be right behind it, and a driver that writes calls down says whether a graph was launched.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from typing import NamedTuple

import numpy
import pytest
from helpers import moe_shortfalls as shortfalls
from helpers.moe_shortfalls import Prepare, check_sums, mended, variant_of
from helpers.moe_steps import HIDDEN, ROWS, Lane, Scene

from graphcore.errors import LifecycleError
from graphcore.moe import CallableStep, Kind, Namespace, Phase, Reason, RowSemantics
from graphcore.moe.decisions.driver_steps import DROP_STEPS, Step
from graphcore.moe.steps import sighting
from graphcore.reuse import Cause

DIRECT, CAPTURE, REPLAY = Kind.DIRECT, Kind.CAPTURE, Kind.REPLAY
UPDATE, DECLINED, FAILED = Kind.UPDATE, Kind.DECLINED, Kind.FAILED
WARM = [DIRECT, CAPTURE, REPLAY]
NOTHING = numpy.full((ROWS, HIDDEN), numpy.nan, numpy.float32)

ENDS = (
    "generation", "properties", "coverage", "outcome", "streams", "fingerprint", "owners",
    "activation", "scan", "evaluator or finish", "dispatch", "eviction", "not needed",
)  # fmt: skip
"""All that may end a capture; the name of each case begins with one of them."""


# ---- what brings it about, beside helpers.moe_shortfalls -----------------------------------------


def another_manifest(scene, lane, monkeypatch):
    scene.publish(scene.manifest)


def nodes_that_nobody_certified(scene, lane, monkeypatch):
    lane.step.set_groups(lane.uses()[:1])


def another_owner_of_the_same_memory(scene, lane, monkeypatch):
    lane.move_output()
    uses = [replace(use, admission=copy.copy(use.admission)) for use in lane.uses()]
    lane.step.set_groups(uses)


def no_kernel(scene, lane, monkeypatch):
    scene.reuse._finder.sights.forget()
    monkeypatch.setattr(sighting, "capability_of", lambda *_: None)
    lane.step.changed()


def others_that_fill_the_budget(scene, lane, monkeypatch):
    assert scene.lane(name="other").kinds(2) == WARM[:2]
    (gone,) = scene.reuse.departures
    assert gone.departure.cause is Cause.COUNT


def an_hour_without_it(scene, lane, monkeypatch):
    scene.now[0] += 3600.0
    scene.lane(name="other").run()
    (gone,) = scene.reuse.departures
    assert gone.departure.cause is Cause.IDLE


# ---- what ends a capture ------------------------------------------------------------------------


class Item(NamedTuple):
    """What ends a capture, and what its step does.

    Args:
        prepare: Brings it about.
        kind: Of the step.
        reason: Of it.
        words: Of its detail, where the reason alone does not tell.
        lasts: Whether it has to be mended.
        error: What the step raises.
        launched: How many graphs it launches.
        options: Of the reuse.
    """

    prepare: Prepare
    kind: Kind
    reason: Reason
    words: str = ""
    lasts: bool = False
    error: type[BaseException] | None = None
    launched: int = 0
    options: tuple[tuple[str, int], ...] = ()


ON = (("decode_boundary_overlap", 1),)

ITEMS = {
    "generation: another manifest": Item(another_manifest, DIRECT, Reason.GENERATION),
    "generation: a LoRA adapter": Item(
        shortfalls.an_adapter, DECLINED, Reason.COVERAGE, "a LoRA adapter is active", lasts=True
    ),
    "properties: changed without permission": Item(
        shortfalls.a_moved_output, DECLINED, Reason.PROPERTIES, "it is off"
    ),
    "coverage: lost": Item(
        nodes_that_nobody_certified, DECLINED, Reason.COVERAGE, "not those that were certified",
        lasts=True,
    ),
    "outcome: not grouped": Item(
        shortfalls.other_bits, DECLINED, Reason.NOT_READY, "it would round otherwise", lasts=True
    ),
    "outcome: a prompt, and nothing to retain": Item(
        shortfalls.rows_of_a_prompt_and_an_owner_is_gone, DECLINED, Reason.NOT_RETAINED
    ),
    "streams: incoherent": Item(
        shortfalls.another_stream_for_a_group, DECLINED, Reason.STREAMS_INCOHERENT, lasts=True
    ),
    "fingerprint: mismatch": Item(
        shortfalls.a_moved_output_and_another_stream, DECLINED, Reason.FINGERPRINT, "stream",
        options=ON,
    ),
    "owners: another one of the same memory": Item(
        another_owner_of_the_same_memory, DECLINED, Reason.OWNERS, "another owner", options=ON
    ),
    "owners: a witness is gone": Item(
        shortfalls.an_owner_is_gone, DECLINED, Reason.OWNERS, "an owner is gone"
    ),
    "activation: refused": Item(shortfalls.another_stream, DECLINED, Reason.ACTIVATION, "stream"),
    "scan: no kernel is capable": Item(
        no_kernel, FAILED, Reason.PLAN_ERROR, "no kernel for", lasts=True, error=LifecycleError
    ),
    "scan: no capture is possible": Item(
        shortfalls.an_obstacle, DECLINED, Reason.NOT_CAPTURABLE, "it asks the host", lasts=True
    ),
    "evaluator or finish: the work fails": Item(
        shortfalls.work_that_fails, FAILED, Reason.EVALUATOR, error=ZeroDivisionError, options=ON
    ),
    "evaluator or finish: the end fails": Item(
        shortfalls.an_end_that_fails, FAILED, Reason.FINISH, error=RuntimeError, launched=1
    ),
    "dispatch: refused": Item(shortfalls.another_dispatch, DECLINED, Reason.DISPATCH),
    "eviction: room for others": Item(
        others_that_fill_the_budget, DIRECT, Reason.FIRST, options=(("max_entries", 1),)
    ),
    "eviction: idle": Item(
        an_hour_without_it, DIRECT, Reason.FIRST, options=(("idle_seconds", 60),)
    ),
    "not needed: no experts any more": Item(
        shortfalls.no_experts_any_more, DECLINED, Reason.NOT_NEEDED, lasts=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("item", ITEMS.values(), ids=ITEMS)
def test_what_ends_a_capture_closes_and_forgets_it_and_launches_nothing_stale(
    recording, monkeypatch, item
):
    now = [0.0]
    scene = Scene(recording.driver, clock=lambda: now[0], **dict(item.options))
    scene.now = now
    lane = scene.lane()
    claim = scene.reuse.certificate(lane.step)  # the very object, so that looks may be saved
    assert lane.kinds(3, claim) == WARM
    variant, home, executable = variant_of(scene), lane.out, weakref.ref(lane.executable)
    assert variant.state.shortfalls() == ()
    recording.taken()
    with monkeypatch.context() as patch:
        options = item.prepare(scene, lane, patch) or {}
        before = recording.taken()
        home.write(NOTHING)
        if item.error is None:
            lane.run(claim, **options)  # looks at the bits
        else:
            with pytest.raises(item.error):
                lane.run(claim, check=False)
    scene.driver.synchronize()
    scene.reuse.cache.collect()  # what was given up has run by now
    asked = recording.taken()
    result = scene.seen[-1].result
    assert (result.kind, result.reason) == (item.kind, item.reason)
    assert item.words in result.detail
    assert asked.count(Step.LAUNCH) == item.launched
    if item.error is not None:
        written = lane.out.read().tobytes()
        assert written == (lane.expected() if item.launched else NOTHING.tobytes())
    assert lane.out is home or numpy.isnan(home.read()).all()
    # executable, then description; witnesses, fingerprint and generation are in the capture
    destroyed = [step for step in (*before, *asked) if step in DROP_STEPS]
    assert tuple(destroyed[-2:]) == DROP_STEPS
    assert executable() is None or executable().is_closed
    assert (variant.use, variant.fast, variant.state.capture) == (None, None, None)
    assert not variant.state.is_warm
    scene.after()
    if item.lasts:
        mended(scene, lane)
    kinds = lane.kinds(3, claim)
    assert (kinds.count(CAPTURE), kinds[-1]) == (1, REPLAY)
    assert variant.state.shortfalls() == ()
    check_sums(scene)


def test_every_item_that_ends_a_capture_has_a_case():
    assert tuple(dict.fromkeys(name.partition(":")[0] for name in ITEMS)) == ENDS


# ---- what ends none -----------------------------------------------------------------------------


def another_namespace(scene, lane, claim):
    return lane, replace(claim, namespace=Namespace.DRAFT)


def other_row_semantics(scene, lane, claim):
    return lane, replace(claim, row_semantics=RowSemantics.SPECULATIVE)


def other_rows(scene, lane, claim):
    return scene.lane(rows=1), replace(claim, rows=1)


def other_sequences(scene, lane, claim):
    return lane, replace(claim, sequences=2)


def another_owner(scene, lane, claim):
    return lane, replace(claim, owner=claim.owner + 1)


SEMANTICS = {
    "namespace": another_namespace,
    "row semantics": other_row_semantics,
    "rows": other_rows,
    "sequences": other_sequences,
    "owner": another_owner,
}


@pytest.mark.parametrize("means", SEMANTICS.values(), ids=SEMANTICS)
def test_a_step_of_another_meaning_has_a_sibling_and_the_capture_stays(recording, means):
    scene = Scene(recording.driver)
    lane = scene.lane()
    claim = scene.reuse.certificate(lane.step, row_semantics=RowSemantics.SEQUENTIAL, sequences=1)
    assert lane.kinds(3, claim) == WARM
    variant, executable = variant_of(scene), lane.executable
    state = variant.state
    other, meaning = means(scene, lane, claim)
    recording.taken()
    assert other.run(meaning).kind is DIRECT
    assert recording.taken() == ()
    assert other.kinds(2, meaning) == WARM[1:]
    (sibling,) = [each for each in scene.reuse.variants if each is not variant]
    assert sibling.use.executable is not executable
    assert sibling.state.capture.semantic_key != state.capture.semantic_key
    assert variant.state is state
    recording.taken()
    for one, said in ((lane, claim), (other, meaning)):
        assert (one.run(said).kind, recording.taken()) == (REPLAY, (Step.LAUNCH,))
    assert variant.state.capture is state.capture
    assert variant.use.executable is executable
    check_sums(scene)


PROMPTS = {"found as decoding": ({"phase": Phase.DECODE}, Reason.PHASE), "beside it": ({}, None)}


@pytest.mark.parametrize(("options", "reason"), PROMPTS.values(), ids=PROMPTS)
def test_a_retained_prompt_keeps_the_capture(recording, options, reason):
    scene = Scene(recording.driver)
    lane = scene.lane()
    claim = scene.reuse.certificate(lane.step)
    assert lane.kinds(3, claim) == WARM
    variant, executable = variant_of(scene), lane.executable
    capture = variant.state.capture
    for _ in range(3):
        result = lane.run(claim, prompt_rows=ROWS, **options)
        assert reason in (result.reason, None)
        assert variant.state.capture is capture
        recording.taken()
        assert (lane.run(claim).kind, recording.taken()) == (REPLAY, (Step.LAUNCH,))
        assert variant.use.executable is executable
    assert scene.reuse.counters.captures == (1 if reason else 2)
    check_sums(scene)


LOOKS = {"at nothing": lambda lane: None, "at all of it": lambda lane: lane.step.changed()}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_where_nothing_happens_the_same_executable_goes_on_replaying(recording, look):
    scene = Scene(recording.driver)
    lane = scene.lane()
    assert lane.kinds(3) == WARM
    variant, executable = variant_of(scene), lane.executable
    capture = variant.state.capture
    recording.taken()
    for _ in range(4):
        look(lane)
        result = lane.run()
        assert (result.kind, result.reason) == (REPLAY, Reason.UNCHANGED)
        assert recording.taken() == (Step.LAUNCH,)
        assert variant.use.executable is executable
        assert variant.state.capture is capture
    assert lane.calls == []
    check_sums(scene)


# ---- plain captures -----------------------------------------------------------------------------


class PlainLane(Lane):
    """The same steps with every expert in its place: none is cached."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene, scene.rows)
        self.step = CallableStep(
            "plain", self._staged, tensors={"x": self.x, "out": self.out}, takes_stream=True
        )

    def uses(self):
        return []


AGAIN = [UPDATE, REPLAY, REPLAY]
PLAIN = {
    "generation": (another_manifest, REPLAY, [REPLAY] * 3),
    "a LoRA adapter": (shortfalls.an_adapter, REPLAY, [REPLAY] * 3),
    "no slots": (shortfalls.no_slots, REPLAY, [REPLAY] * 3),
    "dispatch": (shortfalls.another_dispatch, REPLAY, [REPLAY] * 3),
    "properties": (shortfalls.a_moved_output, DIRECT, AGAIN),
    "scan": (shortfalls.an_obstacle, DECLINED, AGAIN),
    "evaluator": (shortfalls.work_that_fails, FAILED, [DIRECT, UPDATE, REPLAY]),
}


@pytest.mark.parametrize(("prepare", "kind", "then"), PLAIN.values(), ids=PLAIN)
def test_a_plain_capture_survives(recording, monkeypatch, prepare, kind, then):
    scene = Scene(recording.driver)
    lane = PlainLane(scene)
    assert lane.kinds(3) == WARM
    variant, executable = variant_of(scene), lane.executable
    assert not variant.state.capture.is_grouped
    recording.taken()
    with monkeypatch.context() as patch:
        prepare(scene, lane, patch)
        if kind is FAILED:
            with pytest.raises(ZeroDivisionError):
                lane.run(check=False)
        else:
            lane.run()
    assert scene.seen[-1].result.kind is kind
    # a capture that is kept is replayed only while it is what was seen last
    is_current = kind is REPLAY
    assert recording.taken() == (Step.LAUNCH,) * is_current
    assert variant.state.is_warm == is_current
    assert variant.use.executable is executable
    scene.after()
    lane.step.obstacle = ""
    assert lane.kinds(3) == then
    assert variant.use.executable is executable
    assert not executable.is_closed
    check_sums(scene)
