"""GraphReuse on steps with experts in slots: the scenarios of its contract, bit for bit."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
from helpers.moe_steps import LAYERS, Scene

import graphcore
from graphcore.driver import Driver
from graphcore.errors import CaptureError, GraphcoreWarning, LifecycleError
from graphcore.moe import (
    CallableStep,
    GraphReuse,
    Kind,
    Namespace,
    Phase,
    Reason,
    RowSemantics,
    Way,
)

DIRECT, CAPTURE, REPLAY, UPDATE, DECLINED = (
    Kind.DIRECT, Kind.CAPTURE, Kind.REPLAY, Kind.UPDATE, Kind.DECLINED,
)  # fmt: skip
WARM = [DIRECT, CAPTURE, REPLAY]


@pytest.fixture
def scene(graphcore_driver: Driver) -> Scene:
    return Scene(graphcore_driver)


@pytest.fixture
def overlapping(graphcore_driver: Driver) -> Scene:
    return Scene(graphcore_driver, decode_boundary_overlap=1)


def captured(lane):
    """Handle, fingerprint and semantic key of what a lane has captured."""
    (variant,) = [each for each in lane.scene.reuse.variants if each.use is not None]
    capture = variant.state.capture
    return variant.use.executable, capture.fingerprint, capture.semantic_key


def test_t1_direct_then_captured_then_replayed_with_other_routes(scene):
    lane = scene.lane()
    first = lane.run()
    assert (first.kind, first.reason, first.way) == (DIRECT, Reason.FIRST, Way.DIRECT)
    (variant,) = scene.reuse.variants
    assert variant.use is None
    assert variant.state.capture is None
    assert lane.run().kind is CAPTURE
    executable, fingerprint, key = captured(lane)
    assert fingerprint.number != 0
    assert key != 0
    for _ in range(4):
        assert (lane.run().kind, lane.calls) == (REPLAY, [])
        assert captured(lane) == (executable, fingerprint, key)


def test_t2_a_prompt_between_replays_leaves_the_decode_capture_alone(scene):
    decode, prompt = scene.lane(), scene.lane(rows=1, name="prompt")
    assert decode.kinds(3) == WARM
    before = captured(decode)
    rows = scene.pool[LAYERS[0]].rows["down"].address
    assert prompt.run(prompt_rows=1).kind is DIRECT
    assert captured(decode) == before
    assert scene.pool[LAYERS[0]].rows["down"].address == rows
    assert decode.run().kind is REPLAY
    assert prompt.kinds(2, prompt_rows=1) == [CAPTURE, REPLAY]
    assert decode.run().kind is REPLAY


def test_t3_an_output_that_moves_there_and_back_updates_one_executable(overlapping):
    lane = overlapping.lane()
    assert lane.kinds(3) == WARM
    executable, fingerprint, _ = captured(lane)
    home = lane.out
    for target in (None, home, None):
        lane.move_output(target)
        result = lane.run()
        assert (result.kind, result.reason) == (UPDATE, Reason.BOUNDARY)
        assert captured(lane)[:2] == (executable, fingerprint)
        assert lane.run().kind is REPLAY


def test_t3_without_the_option_an_output_that_moves_drops_the_capture(scene):
    lane = scene.lane()
    assert lane.kinds(3) == WARM
    lane.move_output()
    result = lane.run()
    assert (result.kind, result.reason, result.way) == (DECLINED, Reason.PROPERTIES, Way.DIRECT)
    assert len(scene.reuse.cache) == 0
    assert lane.kinds(2) == [CAPTURE, REPLAY]


def test_t4_main_draft_main_on_one_graph_keeps_mains_executable(scene):
    lane = scene.lane()
    main = scene.reuse.certificate(lane.step)
    draft = replace(main, namespace=Namespace.DRAFT)
    assert lane.kinds(3, main) == WARM
    executable = captured(lane)[0]
    assert lane.kinds(3, draft) == WARM
    assert lane.run(main).kind is REPLAY
    held = {each.use.executable for each in scene.reuse.variants}
    assert len(held) == 2
    assert executable in held


def test_t5_a_published_manifest_ends_the_capture(scene):
    lane = scene.lane()
    assert lane.kinds(3) == WARM
    executable = captured(lane)[0]
    scene.publish(scene.manifest)
    result = lane.run()
    assert (result.kind, result.reason) == (DIRECT, Reason.GENERATION)
    assert executable.is_closed
    assert lane.kinds(2) == [CAPTURE, REPLAY]


def test_t6_a_plan_is_compiled_once_and_used_by_every_other_step(scene):
    lane = scene.lane()
    lane.kinds(6)
    counters = scene.reuse.counters
    assert (counters.plan_compiles, counters.plan_reuses) == (1, 5)
    assert (counters.fallback, counters.rollback, counters.failed) == (0, 0, 0)
    assert counters.calls == counters.direct + counters.captures + counters.replays == 6
    assert counters.ready == counters.completed == 6 * len(LAYERS)


def test_required_work_is_captured_and_replayed_under_its_own_name(scene):
    lane = scene.lane()
    draft = scene.reuse.certificate(
        lane.step, namespace=Namespace.DRAFT, row_semantics=RowSemantics.SEQUENTIAL, sequences=1,
        required=True,
    )  # fmt: skip
    assert lane.kinds(4, draft) == [*WARM, REPLAY]
    lane.step.changed()
    with pytest.raises(LifecycleError, match=r"graph_uid.*nothing was launched"):
        lane.run(draft)
    assert lane.calls == []
    assert scene.reuse.counters.required_unsupported == 1
    assert scene.seen[-1].result.kind is Kind.FAILED


def test_observers_are_told_of_every_step_in_order(scene):
    lane = scene.lane()
    results = [lane.run() for _ in range(4)]
    assert [each.result for each in scene.seen] == results
    assert [each.number for each in scene.seen] == [1, 2, 3, 4]
    assert {each.phase for each in scene.seen} == {Phase.DECODE}
    assert scene.seen[1].result.seconds.capture > 0
    assert scene.seen[3].result.seconds.launch > 0
    assert [each.result.kind for each in scene.reuse.records] == [DIRECT, CAPTURE]


def test_steps_of_one_identity_that_take_turns_are_warned_of_once(scene, caplog):
    lane, other = scene.lane(), scene.lane()
    with caplog.at_level("WARNING", logger="graphcore"):
        kinds = {each.run().kind for _ in range(20) for each in (lane, other)}
    assert kinds == {DIRECT}
    (told,) = [record.getMessage() for record in caplog.records]
    assert "16 calls in a row found other nodes" in told
    assert "need an identity each" in told
    caplog.clear()
    with caplog.at_level("WARNING", logger="graphcore"):
        for name in ("one", "two"):
            assert scene.lane(name=name).kinds(20)[2:] == [REPLAY] * 18
    assert not caplog.records


def test_what_an_observer_raises_is_a_warning_and_the_next_is_told(scene):
    def broken(record):
        raise ValueError("no room for it")

    lane = scene.lane()
    scene.reuse.observers.insert(0, broken)
    for number, kind in enumerate((DIRECT, CAPTURE, REPLAY), 1):
        told = rf"step {number} has run; observer .*broken.* raised ValueError: no room for it"
        with pytest.warns(GraphcoreWarning, match=told):
            assert lane.run().kind is kind
    assert [each.number for each in scene.seen] == [1, 2, 3]


@pytest.mark.parametrize("happens", ["another stream", "a step half done"])
def test_what_others_do_to_the_slots_before_a_replay_enters_is_seen(scene, monkeypatch, happens):
    lane, pool, ownership = scene.lane(), scene.pool, scene.manifests.ownership
    lane.kinds(4)
    enter, other = ownership.enter_again, scene.driver.stream()

    def enter_late(passage):
        monkeypatch.undo()
        if happens == "another stream":
            pool.order.enter(other)
        else:
            pool.doubt(LAYERS[0])
        return enter(passage)

    monkeypatch.setattr(ownership, "enter_again", enter_late)
    assert lane.run().kind is REPLAY
    assert pool.order.handle == scene.stream.handle
    assert pool.is_settled
    other.close()


def test_without_a_registry_the_pool_says_what_its_manifest_is(scene):
    lane = scene.lane()
    scene.pool.ownership = None
    with GraphReuse(pool=scene.pool) as reuse:
        scene.reuse = reuse
        assert lane.kinds(4) == [*WARM, REPLAY]
        assert reuse.driver is scene.driver
        assert reuse.manifests.current.manifest == scene.manifest
        assert scene.pool.ownership is reuse.manifests.ownership
        assert reuse.variants[0].state.capture.is_grouped


def test_a_step_is_no_part_of_a_capture(scene):
    lane = scene.lane()
    for _ in range(4):  # before its capture, and as a replay that is known to be one
        refused = pytest.raises(CaptureError, match="no part of a capture")
        with graphcore.capture(driver=scene.driver), refused:
            scene.reuse.run(lane.step, stream=scene.stream)
        lane.run()
    assert scene.reuse.counters.calls == 4


def test_steps_that_take_turns_under_one_name_are_not_kept_alive(overlapping):
    lane = overlapping.lane()
    lane.kinds(3)
    steps = []
    for _ in range(5):
        lane.step = CallableStep(
            "decode", lane._launch, tensors={"x": lane.x, "out": lane.move_output()},
            groups=lane.uses(), takes_stream=True,
        )  # fmt: skip
        steps.append(weakref.ref(lane.step))
        assert lane.run().kind is UPDATE
        assert lane.run().kind is REPLAY
    gc.collect()
    assert [step() is not None for step in steps] == [False] * 4 + [True]


def test_a_stream_by_its_number_is_the_same_stream(scene):
    lane = scene.lane()
    lane.kinds(3)
    seen = scene.reuse.counters.plan_calls
    looks = len(scene.reuse.records)
    for _ in range(3):
        number = int(str(int(scene.stream)))  # another object each time
        assert lane.run(stream=number).kind is REPLAY
    assert scene.reuse.counters.plan_calls == seen + 3
    assert len(scene.reuse.records) == looks
