"""Shortfalls: what brings a step of a captured variant to each reason not to replay it.

Each of them changes the scene or its lane, and gives options for the next call where it takes any.
``scene.after`` ends what goes on beside; :func:`mended` makes everything as it should be again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from helpers.moe_steps import LAYERS, Lane, Scene

from graphcore.moe import GroupUse, Kind, Namespace, Phase, RowSemantics
from graphcore.moe.decisions.resource_fingerprint import FingerprintReason, FingerprintRefusal
from graphcore.moe.decisions.witnesses import Witnesses
from graphcore.moe.manifests.ownership import Transaction
from graphcore.moe.steps import fact_finder

Options = dict[str, Any]
Prepare = Callable[[Scene, Lane, pytest.MonkeyPatch], Options | None]


def claim_of(lane: Lane, required: bool) -> Any:
    if not required:
        return lane.scene.reuse.certificate(lane.step)
    return lane.scene.reuse.certificate(
        lane.step, namespace=Namespace.DRAFT, row_semantics=RowSemantics.SEQUENTIAL, sequences=1,
        required=True,
    )  # fmt: skip


def check_sums(scene: Scene) -> None:
    """The counters add up, and say what the steps said."""
    now = scene.reuse.counters
    plans = now.plan_compiles + now.plan_reuses + now.plan_unavailable + now.prepare_error
    assert now.plan_calls == plans
    calls = now.direct + now.staged + now.captures + now.replays + now.updates
    assert now.calls == calls + now.reinstantiations + now.declined + now.failed
    assert now.calls == len(scene.seen) == sum(each.calls for each in scene.reuse.totals.values())


def mended(scene: Scene, lane: Lane) -> None:
    """All is as it should be again."""
    scene.reuse.pool = scene.pool
    scene.reuse._finder.sights.forget()
    lane.step.obstacle = ""
    lane.step.set_groups(lane.uses())
    scene.publish(scene.manifest)


class Owner:
    """What owned slots once."""


def variant_of(scene: Scene) -> Any:
    (found,) = [each for each in scene.reuse.variants if each.use is not None]
    return found


def with_uses(lane: Lane, **changes: Any) -> None:
    lane.step.set_groups([replace_use(use, **changes) for use in lane.uses()])


def replace_use(use: GroupUse, **changes: Any) -> GroupUse:
    fields = {"admission": use.admission, **changes}
    return GroupUse(use.group, use.ids, **fields)


# ---- what leads to each reason ------------------------------------------------------------------


def graphs_are_off(scene, lane, monkeypatch):
    monkeypatch.setenv("GRAPHCORE_DISABLE", "1")


def rows_of_a_prompt(scene, lane, monkeypatch):
    return {"phase": Phase.DECODE, "prompt_rows": lane.rows}


def rows_of_a_prompt_and_an_owner_is_gone(scene, lane, monkeypatch):
    an_owner_is_gone(scene, lane, monkeypatch)
    return rows_of_a_prompt(scene, lane, monkeypatch)


def malformed(scene, lane, monkeypatch):
    return {"malformed": True}


def no_slots(scene, lane, monkeypatch):
    scene.reuse.pool = None


def other_bits(scene, lane, monkeypatch):
    with_uses(lane, equivalence="it would round otherwise")


def nobody_chose_the_ids(scene, lane, monkeypatch):
    with_uses(lane, chain=())


def an_adapter(scene, lane, monkeypatch):
    scene.publish(scene.manifest.adapted("lora", ["layers.1.down"]))


def no_experts_any_more(scene, lane, monkeypatch):
    scene.claim = scene.reuse.certificate(lane.step)
    lane.step.set_groups([])


def an_obstacle(scene, lane, monkeypatch):
    lane.step.obstacle = "it asks the host"


def a_moved_output(scene, lane, monkeypatch):
    lane.move_output()


def a_capture_in_part(scene, lane, monkeypatch):
    variant = variant_of(scene)
    variant.state = replace(variant.state, is_warm=False)


def a_stream_that_is_closed(scene, lane, monkeypatch):
    stream = scene.driver.stream()
    stream.close()
    with_uses(lane, stream=stream)


def another_stream_for_a_group(scene, lane, monkeypatch):
    with_uses(lane, stream=scene.driver.stream())


def no_fingerprint(scene, lane, monkeypatch):
    scene.reuse.release()
    assert lane.run(scene.claim).kind is Kind.DIRECT
    refusal = FingerprintRefusal(FingerprintReason.REFRESHING, "group layers.0")
    monkeypatch.setattr(fact_finder, "fingerprint_refusal", lambda *_: refusal)


def owners_that_nobody_can_watch(scene, lane, monkeypatch):
    scene.reuse.release()
    scene.reuse._finder.sights.forget()
    monkeypatch.setattr(fact_finder, "owners_of", lambda *_: (object(),))
    assert lane.run(scene.claim).kind is Kind.DIRECT


def a_moved_output_and_another_stream(scene, lane, monkeypatch):
    lane.move_output()
    return {"stream": scene.driver.stream(blocking=True)}


def an_owner_is_gone(scene, lane, monkeypatch):
    variant = variant_of(scene)
    witnesses = Witnesses.of([Owner()])
    gc.collect()
    capture = replace(variant.state.capture, witnesses=witnesses)
    variant.state = replace(variant.state, capture=capture)


def another_dispatch(scene, lane, monkeypatch):
    ownership = scene.manifests.ownership
    other = ownership.enter("other", LAYERS, scene.manifests.current.generation)
    assert isinstance(other, Transaction)
    scene.after = lambda: ownership.leave(other)


def another_stream(scene, lane, monkeypatch):
    return {"stream": scene.driver.stream(blocking=True)}


def work_that_fails(scene, lane, monkeypatch):
    lane.move_output()
    monkeypatch.setattr(lane.step, "_function", lambda _: 1 / 0)


def an_end_that_fails(scene, lane, monkeypatch):
    lane.step.changed()  # so that it is looked at
    ownership, leave = scene.manifests.ownership, scene.manifests.ownership.leave
    ends = [RuntimeError("no end")]

    def fail_once(transaction):
        if ends:
            raise ends.pop()
        leave(transaction)

    monkeypatch.setattr(ownership, "leave", fail_once)
