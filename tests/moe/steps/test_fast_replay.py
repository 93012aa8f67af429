"""A replay of what is unchanged is decided by a few comparisons; whatever differs is looked at."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
from graphcore_kernels import strided_copy
from helpers import moe_shortfalls as shortfalls
from helpers.interrupts import press_at
from helpers.moe_recording import Step
from helpers.moe_steps import LAYERS, Lane, Scene
from helpers.threads import in_thread

import graphcore
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import CudaError, LifecycleError
from graphcore.moe import CallableStep, Kind, Phase, SlotPool
from graphcore.testing import inject

CAPTURE, DECLINED, DIRECT, REPLAY = Kind.CAPTURE, Kind.DECLINED, Kind.DIRECT, Kind.REPLAY
Happens = Callable[[Scene, Lane, pytest.MonkeyPatch], Any]


class Looks:
    """How often a call of a reuse was looked at, rather than replayed at once."""

    def __init__(self, scene: Scene, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        running = scene.reuse._running
        self._find = running._finder.find
        patch.setattr(running._finder, "find", self._counted)

    def _counted(self, *arguments: Any) -> Any:
        self.count += 1
        return self._find(*arguments)

    def taken(self) -> int:
        """Since this was last asked."""
        count, self.count = self.count, 0
        return count


@pytest.fixture
def lane() -> Lane:
    """One whose replays are known to be ones."""
    made = Scene(EmulatedDriver()).lane()
    assert made.kinds(4) == [DIRECT, CAPTURE, REPLAY, REPLAY]
    return made


# ---- what leaves it -----------------------------------------------------------------------------


def another_certificate(scene: Scene, lane: Lane, patch: pytest.MonkeyPatch) -> Any:
    return {"certificate": scene.reuse.certificate(lane.step)}


def another_phase(scene: Scene, lane: Lane, patch: pytest.MonkeyPatch) -> Any:
    return {"phase": Phase.DECODE}


def of_a_prompt(scene: Scene, lane: Lane, patch: pytest.MonkeyPatch) -> Any:
    return {"prompt_rows": 1}


def on_another_stream(scene: Scene, lane: Lane, patch: pytest.MonkeyPatch) -> Any:
    return {"stream": scene.driver.stream(blocking=True)}


def another_uid(scene: Scene, lane: Lane, patch: pytest.MonkeyPatch) -> None:
    lane.step.changed()


def another_state(scene: Scene, lane: Lane, patch: pytest.MonkeyPatch) -> None:
    variant = shortfalls.variant_of(scene)
    variant.state = shortfalls.replace(variant.state, is_warm=False)


def another_manifest(scene: Scene, lane: Lane, patch: pytest.MonkeyPatch) -> None:
    scene.publish(scene.manifest)


def a_group_was_changed(scene: Scene, lane: Lane, patch: pytest.MonkeyPatch) -> None:
    scene.pool.pin(LAYERS[0], [0])
    scene.pool.unpin(LAYERS[0], [0])


def a_group_is_changed(scene: Scene, lane: Lane, patch: pytest.MonkeyPatch) -> None:
    change = scene.manifests.ownership.changing(LAYERS[:1])
    change.__enter__()
    scene.after = partial(change.__exit__, None, None, None)


def admission_was_closed(scene: Scene, lane: Lane, patch: pytest.MonkeyPatch) -> None:
    assert scene.manifests.shut_down()


def doubtful_slots(scene: Scene, lane: Lane, patch: pytest.MonkeyPatch) -> None:
    scene.pool.doubt(LAYERS[1])


def a_step_of_others_between(scene: Scene, lane: Lane, patch: pytest.MonkeyPatch) -> None:
    scene.pool.order.enter(scene.driver.stream())


def grown_slots(scene: Scene, lane: Lane, patch: pytest.MonkeyPatch) -> None:
    scene.pool.grow(5)
    lane.replan()


def no_pool(scene: Scene, lane: Lane, patch: pytest.MonkeyPatch) -> None:
    scene.reuse.pool = None


def a_graph_given_up(scene: Scene, lane: Lane, patch: pytest.MonkeyPatch) -> None:
    scene.reuse.release()


def a_graph_evicted(scene: Scene, lane: Lane, patch: pytest.MonkeyPatch) -> None:
    (variant,) = scene.reuse.variants
    scene.reuse.cache.evict(variant.key)


EVENTS: dict[str, tuple[Happens, Kind]] = {
    "certificate": (another_certificate, REPLAY),
    "phase": (another_phase, REPLAY),
    "rows": (of_a_prompt, DIRECT),
    "stream": (on_another_stream, DECLINED),
    "uid": (another_uid, REPLAY),
    "state": (another_state, DECLINED),
    "obstacle": (shortfalls.an_obstacle, DECLINED),
    "output": (shortfalls.a_moved_output, DECLINED),
    "switched off": (shortfalls.graphs_are_off, DECLINED),
    "manifest": (another_manifest, DIRECT),
    "group changed": (a_group_was_changed, REPLAY),
    "group being changed": (a_group_is_changed, DECLINED),
    "another dispatch": (shortfalls.another_dispatch, DECLINED),
    "shut down": (admission_was_closed, DECLINED),
    "slots in doubt": (doubtful_slots, REPLAY),
    "another stream between": (a_step_of_others_between, REPLAY),
    "slots grown": (grown_slots, DECLINED),
    "no pool": (no_pool, DECLINED),
    "rows of a prompt": (shortfalls.rows_of_a_prompt, DECLINED),
    "released": (a_graph_given_up, DIRECT),
    "evicted": (a_graph_evicted, DIRECT),
}


@pytest.mark.parametrize(("happens", "kind"), EVENTS.values(), ids=EVENTS)
def test_a_fact_that_changed_is_looked_at_and_the_step_is_right(lane, monkeypatch, happens, kind):
    scene = lane.scene
    looks = Looks(scene, monkeypatch)
    assert lane.run().kind is REPLAY
    assert looks.taken() == 0
    with monkeypatch.context() as patch:
        options = happens(scene, lane, patch) or {}
        result = lane.run(**options)  # checks the bits
    assert (result.kind, looks.taken()) == (kind, 1), result
    assert scene.manifests.ownership.users().keys() <= set(LAYERS)
    scene.after()


def test_a_step_without_experts_is_looked_at_after_another_manifest(monkeypatch):
    scene = Scene(EmulatedDriver())
    source, out = scene.buffer(2), scene.buffer(2)
    source.write(numpy.ones(source.shape, numpy.float32))
    step = CallableStep(
        "plain", partial(strided_copy, out, source), tensors={"in": source, "out": out},
        takes_stream=True,
    )  # fmt: skip
    run = partial(scene.reuse.run, step, stream=scene.stream)
    assert [run().kind for _ in range(4)] == [DIRECT, CAPTURE, REPLAY, REPLAY]
    looks, before = Looks(scene, monkeypatch), scene.seen[-1].generation
    assert (run().kind, looks.taken()) == (REPLAY, 0)
    scene.publish(scene.manifest)
    assert (run().kind, looks.taken()) == (REPLAY, 1)
    assert scene.seen[-1].generation == before + 1
    out.write(numpy.full(out.shape, numpy.nan, numpy.float32))
    assert (run().kind, looks.taken()) == (REPLAY, 0)
    scene.driver.synchronize()
    assert (out.read() == 1).all()


def equal_stream(scene: Scene, lane: Lane, patch: pytest.MonkeyPatch) -> Any:
    return {"stream": int(str(int(scene.stream)))}


def same_pool_again(scene: Scene, lane: Lane, patch: pytest.MonkeyPatch) -> None:
    other = SlotPool.__new__(SlotPool)
    scene.reuse.pool = other
    scene.reuse.pool = scene.pool


def a_lease_of_other_work(scene: Scene, lane: Lane, patch: pytest.MonkeyPatch) -> None:
    ownership = scene.manifests.ownership
    lease = ownership.lease("other", LAYERS[:1])
    scene.after = partial(ownership.release, lease)


def a_step_on_the_same_stream_between(scene: Scene, lane: Lane, patch: pytest.MonkeyPatch) -> None:
    scene.pool.order.enter(scene.stream)  # the same stream: nothing to wait for


def an_observer(scene: Scene, lane: Lane, patch: pytest.MonkeyPatch) -> None:
    scene.reuse.observers.append(lambda record: None)


def nothing(scene: Scene, lane: Lane, patch: pytest.MonkeyPatch) -> None:
    pass


@pytest.mark.parametrize(
    "happens",
    [
        nothing,
        equal_stream,
        same_pool_again,
        a_lease_of_other_work,
        a_step_on_the_same_stream_between,
        an_observer,
    ],
)
def test_what_changes_nothing_is_replayed_at_once(lane, monkeypatch, happens):
    scene = lane.scene
    looks = Looks(scene, monkeypatch)
    options = happens(scene, lane, monkeypatch) or {}
    assert lane.kinds(1, **options) == [REPLAY]
    if happens is equal_stream:  # a number is not the object of before, and is found out once
        looks.taken()
        assert lane.kinds(1, **options) == [REPLAY]
    assert looks.taken() == 0
    scene.after()
    assert scene.manifests.ownership.users() == {}


def test_steps_of_several_threads_in_turn_are_replayed_at_once(lane, monkeypatch):
    looks = Looks(lane.scene, monkeypatch)
    for _ in range(2):
        with in_thread(lane.run) as ran:
            pass
        assert ran[0].kind is REPLAY
        assert lane.run().kind is REPLAY
    assert looks.taken() == 0
    assert lane.scene.manifests.ownership.users() == {}


def test_steps_that_take_turns_are_replayed_at_once(monkeypatch):
    scene = Scene(EmulatedDriver())
    lanes = [scene.lane(name=name) for name in ("one", "two")]
    for lane in lanes:
        lane.kinds(3)
    looks = Looks(scene, monkeypatch)
    assert [lane.run().kind for _ in range(3) for lane in lanes] == [REPLAY] * 6
    assert looks.taken() == 0


def test_replays_at_once_are_in_all_books(lane):
    reuse = lane.scene.reuse
    before, calls = reuse.totals[REPLAY], reuse.counters
    results = [lane.run() for _ in range(3)]
    after = reuse.totals[REPLAY]
    assert after.calls == before.calls + 3
    took = sum(each.seconds.launch for each in results)
    assert after.seconds.launch == pytest.approx(before.seconds.launch + took)
    assert reuse.counters.replays == calls.replays + 3
    assert reuse.counters.ready == calls.ready + 3 * len(LAYERS)
    assert [each.number for each in lane.scene.seen] == list(range(1, 8))
    shortfalls.check_sums(lane.scene)


def test_a_closed_reuse_and_a_capture_refuse_what_would_have_been_replayed_at_once(lane):
    scene = lane.scene
    with graphcore.capture(driver=scene.driver), pytest.raises(graphcore.CaptureError):
        scene.reuse.run(lane.step, stream=scene.stream)
    scene.reuse.close()
    with pytest.raises(LifecycleError, match="closed"):
        scene.reuse.run(lane.step, stream=scene.stream)


def test_a_refused_launch_gives_the_groups_back_and_the_next_step_is_right(lane):
    scene = lane.scene
    with inject(scene.driver, "launch_graph"), pytest.raises(CudaError) as caught:
        scene.reuse.run(lane.step, stream=scene.stream)
    assert any("the step was to" in note for note in caught.value.__notes__)
    assert scene.manifests.ownership.users() == {}
    assert scene.reuse.counters.failed == 1
    assert lane.kinds(2)[-1] is REPLAY


# ---- Ctrl-C -------------------------------------------------------------------------------------

_FILES = (
    "moe/graph_reuse.py", "moe/steps/fast_running.py", "moe/steps/variant_table.py",
    "moe/manifests/ownership.py", "moe/manifests/leases.py", "reuse/renewable.py",
    "executable/graph_exec.py",
)  # fmt: skip


def test_after_ctrl_c_anywhere_in_a_replay_the_next_step_is_right(lane):
    scene, number, places = lane.scene, 1, []
    ownership = scene.manifests.ownership
    while True:
        lane.choose()
        call = partial(scene.reuse.run, lane.step, stream=scene.stream)
        _, where = press_at(number, call, _FILES)
        if where is None:
            break
        places.append(where)
        scene.driver.synchronize()
        assert lane.run().kind in (REPLAY, DIRECT, CAPTURE), where  # checks the bits
        assert (ownership.users(), ownership.is_busy(LAYERS[0])) == ({}, False), where
        with ownership.changing(LAYERS, timeout=0):  # nobody is waited for
            pass
        assert lane.kinds(2)[-1] is REPLAY, where
        number += 1
    assert {place.split(":")[0] for place in places} >= {"ownership.py", "fast_running.py"}
    assert len(places) > 30


# ---- the driver ---------------------------------------------------------------------------------


def test_a_replay_at_once_is_one_launch(recording):
    lane = Scene(recording.driver).lane()
    assert lane.kinds(4) == [DIRECT, CAPTURE, REPLAY, REPLAY]
    recording.taken()
    assert lane.run().kind is REPLAY
    assert recording.taken() == (Step.LAUNCH,)
