"""GraphReuse beside others: manifests, adapters, prompts, drafts, budgets, foreign graphs."""

from __future__ import annotations

import random
from functools import partial
from itertools import product

import pytest
from helpers.moe_steps import EXPERTS, LAYERS, SLOTS, TOP_K, Scene
from helpers.threads import SOON, in_thread, until

import graphcore
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import LifecycleError
from graphcore.moe import (
    CallableStep,
    GroupUse,
    Kind,
    Namespace,
    Phase,
    Reason,
    RowSemantics,
    SlotAdmission,
    SlotOracle,
    Way,
)
from graphcore.moe.manifests.ownership import Admission, Transaction
from graphcore.resources.buffer import Buffer
from graphcore.resources.holders import Walk
from graphcore.resources.tensors import TensorRef
from graphcore.reuse import Cause

DIRECT, CAPTURE, REPLAY = Kind.DIRECT, Kind.CAPTURE, Kind.REPLAY
WARM = [DIRECT, CAPTURE, REPLAY]


def often(driver: Driver, on_device: int, here: int) -> int:
    """How often something is done: what the emulated driver would take minutes for is done less."""
    return here if driver.is_emulated else on_device


def draft_of(lane, namespace=Namespace.DRAFT, semantics=RowSemantics.SEQUENTIAL, sequences=1):
    return lane.scene.reuse.certificate(
        lane.step, namespace=namespace, row_semantics=semantics, sequences=sequences, required=True
    )


# ---- manifests ----------------------------------------------------------------------------------


def test_t7_a_step_under_way_holds_up_a_manifest_and_nobody_else(graphcore_driver):
    scene = Scene(graphcore_driver)
    lane = scene.lane()
    ownership, registry = scene.manifests.ownership, scene.manifests
    assert lane.kinds(3) == WARM
    assert lane.kinds(3, draft_of(lane)) == WARM
    other = ownership.enter("other", LAYERS, registry.current.generation)
    assert isinstance(other, Transaction)
    with in_thread(lambda: registry.replace(scene.manifest)) as published:
        until(lambda: ownership.admission is Admission.REPLACING)
        with pytest.raises(LifecycleError, match="nothing was launched"):
            lane.run(draft_of(lane), check=False)
        assert scene.seen[-1].result.reason is Reason.UNAVAILABLE
        assert scene.reuse.counters.required_unsupported == 1
        result = lane.run()
        assert (result.kind, result.reason, result.way) == (
            Kind.DECLINED, Reason.UNAVAILABLE, Way.STAGED,
        )  # fmt: skip
        assert published == []
        ownership.leave(other)
    assert published[0].is_accepted
    assert scene.reuse.counters.plan_unavailable == 2
    # the step through scratch memory was the warm-up, too
    assert lane.kinds(3)[1:] == [REPLAY, REPLAY]
    assert lane.kinds(3, draft_of(lane))[-1] is REPLAY


def test_a_manifest_replaced_from_another_thread_loses_no_step_and_replays_nothing_stale(
    graphcore_driver,
):
    scene = Scene(graphcore_driver)
    lane = scene.lane()
    steps = often(graphcore_driver, 1000, 200)
    done = []

    def has_done(count):
        return len(done) >= count

    def publish():
        while len(done) < steps:
            publication = scene.manifests.replace(scene.manifest, timeout=SOON)
            assert publication.is_accepted, publication
            enough = min(len(done) + 8, steps)
            until(partial(has_done, enough))

    with in_thread(publish) as result:
        for _ in range(steps):
            before = scene.manifests.current.generation
            step = lane.run()  # checks the bits
            captures = [each.state.capture for each in scene.reuse.variants if each.use]
            if step.way is Way.GRAPH:
                assert captures[0].generation >= before
            done.append(step)
    assert result == [None]
    assert len(done) == steps == scene.reuse.counters.calls
    assert scene.manifests.current.generation > 5
    kinds = {each.kind for each in done}
    assert {CAPTURE, REPLAY} <= kinds
    assert scene.reuse.counters.failed == 0
    assert scene.manifests.ownership.users() == {}


def test_two_reuses_in_two_threads_never_use_the_slots_together(graphcore_driver):
    scene = Scene(graphcore_driver)
    first, second = scene.lane(name="first"), scene.lane(name="second")
    other = graphcore.moe.GraphReuse(
        driver=graphcore_driver, pool=scene.pool, manifests=scene.manifests
    )
    count = often(graphcore_driver, 200, 30)
    first.choose()
    second.choose()
    beside = [other.run(second.step, stream=scene.stream).kind for _ in range(2)]

    def run_beside():
        stream = graphcore_driver.stream(blocking=True)
        return [other.run(second.step, stream=stream).kind for _ in range(count)]

    with in_thread(run_beside) as result:
        mine = [scene.reuse.run(first.step, stream=scene.stream).kind for _ in range(count)]
    assert not isinstance(result[0], BaseException), result
    assert beside == [DIRECT, CAPTURE]
    # who comes while the other is at it goes through scratch memory
    assert {*mine, *result[0]} <= {DIRECT, CAPTURE, REPLAY, Kind.DECLINED}
    assert scene.manifests.ownership.users() == {}
    assert first.run().way in Way
    other.close()


def test_a_lora_adapter_is_another_manifest_and_its_layer_runs_without_a_graph(graphcore_driver):
    scene = Scene(graphcore_driver)
    lane = scene.lane()
    assert lane.kinds(3) == WARM
    scene.publish(scene.manifest.adapted("lora", ["layers.1.down"]))
    for _ in range(3):
        result = lane.run()
        assert (result.kind, result.reason) == (Kind.DECLINED, Reason.COVERAGE)
        assert "a LoRA adapter is active on its bank" in result.detail
    with pytest.raises(LifecycleError, match="coverage is not complete"):
        lane.run(draft_of(lane), check=False)
    scene.publish(scene.manifest)
    assert lane.kinds(3)[-1] is REPLAY


def test_growth_waits_for_steps_and_its_graphs_are_not_replayed(graphcore_driver):
    scene = Scene(graphcore_driver)
    lane = scene.lane()
    assert lane.kinds(3) == WARM
    executable = lane.executable
    scene.pool.grow(SLOTS + 1)
    lane.replan()
    result = lane.run()
    assert result.kind in (Kind.DECLINED, DIRECT)
    assert executable.is_closed
    assert lane.kinds(2) == [CAPTURE, REPLAY]


# ---- routes and slots ---------------------------------------------------------------------------

TAMPERED = {
    "stride": {"strides": (2 * TOP_K, 1)},
    "data pointer": {"offset": 4},
    "dtype": {"dtype": "int64", "itemsize": 8},
    "usage": {"uses": 3},
    "node order": {"chain": ("ids", "router")},
}


@pytest.mark.parametrize("changes", TAMPERED.values(), ids=TAMPERED)
def test_t8_a_route_that_was_tampered_with_is_not_replayed(graphcore_driver, changes):
    scene = Scene(graphcore_driver)
    lane = scene.lane()
    assert lane.kinds(3) == WARM
    compiles = scene.reuse.counters.plan_compiles
    whole = lane.uses()
    lane.step.set_groups([tampered(whole[0], **changes), whole[1]])
    result = lane.run()
    assert (result.kind, result.reason) == (Kind.DECLINED, Reason.PROPERTIES)
    assert scene.reuse.counters.plan_compiles == compiles + 1
    lane.step.set_groups(lane.uses())
    assert lane.kinds(4)[-2:] == [REPLAY, REPLAY]


def test_t8_ids_of_other_extents_break_the_contract_of_their_group(graphcore_driver):
    scene = Scene(graphcore_driver)
    lane = scene.lane()
    assert lane.kinds(3) == WARM
    whole = lane.uses()
    lane.step.set_groups(
        [tampered(whole[0], pool=scene.pool, shape=(2, 1), strides=(1, 1)), whole[1]]
    )
    with pytest.raises(LifecycleError, match=r"top_k: expected 2, got 1.*nothing was launched"):
        lane.run(check=False)
    lane.step.set_groups(lane.uses())
    assert lane.kinds(4)[-2:] == [REPLAY, REPLAY]


def tampered(use, *, pool=None, offset=0, uses=1, chain=("router",), **changes):
    ref = use.ref
    fields = {
        "address": ref.address + offset, "shape": ref.shape, "strides": ref.strides,
        "dtype": ref.dtype, "itemsize": ref.itemsize, "device_kind": ref.device_kind,
        "device": ref.device, "owner": use.ids, **changes,
    }  # fmt: skip
    ids = TensorRef(**fields)
    made = use.admission if pool is None else SlotAdmission(pool, use.group, ids)
    return GroupUse(use.group, ids, admission=made, uses=uses, chain=chain)


def test_t9_eviction_and_refill_are_those_of_the_host_oracle(graphcore_driver):
    scene = Scene(graphcore_driver)
    lane = scene.lane()
    oracles = {name: SlotOracle(EXPERTS, SLOTS) for name in LAYERS}
    for _ in range(often(graphcore_driver, 300, 30)):
        lane.run()
        for name, oracle in oracles.items():
            oracle.plan(lane.ids[name].read().reshape(-1).tolist(), TOP_K)
        held = scene.pool.residents()
        assert held == {name: oracle.residents() for name, oracle in oracles.items()}
    assert scene.reuse.counters.replays > 20
    assert scene.pool.totals(LAYERS[0]).misses > SLOTS


def test_an_expert_that_does_not_exist_is_refused_by_the_device_and_the_next_step_is_right(
    graphcore_driver,
):
    scene = Scene(graphcore_driver)
    lane = scene.lane()
    assert lane.kinds(3) == WARM
    lane.choose()
    lane.ids[LAYERS[0]].write([[0, EXPERTS]] * 2)
    assert scene.reuse.run(lane.step, stream=scene.stream).kind is REPLAY
    graphcore_driver.synchronize()
    assert scene.pool.fault(LAYERS[0]).count == 1
    assert lane.run().kind is REPLAY


# ---- variants -----------------------------------------------------------------------------------


def lanes_of(scene):
    """Draft, verify, decode and prompt: (lane, certificate, options) of each."""
    decode, verify, prompt = scene.lane(), scene.lane(name="verify"), scene.lane(name="prompt")
    return {
        "draft": (decode, draft_of(decode), {}),
        "verify": (
            verify, draft_of(verify, Namespace.MAIN, RowSemantics.SPECULATIVE, 1), {},
        ),
        "decode": (decode, None, {}),
        "prompt": (prompt, None, {"prompt_rows": 2}),
    }  # fmt: skip


def test_rounds_of_draft_verify_decode_and_prompt_capture_each_variant_once(graphcore_driver):
    scene = Scene(graphcore_driver)
    variants = lanes_of(scene)
    rounds = often(graphcore_driver, 1000, 60)
    for number in range(rounds):
        for name, (lane, certificate, options) in variants.items():
            kind = lane.run(certificate, **options).kind
            assert kind is WARM[min(number, 2)], name
    counters = scene.reuse.counters
    assert counters.captures == len(variants) == len(scene.reuse.cache)
    assert counters.replays == len(variants) * (rounds - 2)
    assert scene.reuse.departures == ()


def test_over_budget_it_is_said_which_variant_went_and_why(graphcore_driver):
    scene = Scene(graphcore_driver, max_entries=2)
    variants = lanes_of(scene)
    for _ in range(4):
        for lane, certificate, options in variants.values():
            lane.run(certificate, **options)
    assert len(scene.reuse.cache) == 2
    assert scene.reuse.departures
    keys = {each.key for each in scene.reuse.variants}
    for gone in scene.reuse.departures:
        assert gone.departure.cause is Cause.COUNT
        assert gone.key in keys
        assert "the number of entries" in str(gone)
    assert scene.reuse.counters.failed == 0


def test_a_graph_that_does_not_fit_the_bytes_is_declined_with_its_reason(graphcore_driver):
    scene = Scene(graphcore_driver, max_bytes=1)
    lane = scene.lane()
    assert lane.run().kind is DIRECT
    for _ in range(3):
        result = lane.run()
        assert (result.kind, result.reason, result.way) == (
            Kind.DECLINED, Reason.NOT_CAPTURABLE, Way.DIRECT,
        )  # fmt: skip
        assert "max_bytes=1" in result.detail
    # it was captured once, to be measured, and not again
    assert scene.reuse.cache.counters.failures == 1


def test_what_lies_idle_goes_and_what_is_replayed_stays(graphcore_driver):
    now = [0.0]
    scene = Scene(graphcore_driver, idle_seconds=10, clock=lambda: now[0])
    busy, idle = scene.lane(name="busy"), scene.lane(name="idle")
    assert busy.kinds(3) == idle.kinds(3) == WARM
    for _ in range(8):
        now[0] += 4
        assert busy.run().kind is REPLAY
    (gone,) = scene.reuse.departures
    assert (gone.key.graph, gone.departure.cause) == ("idle", Cause.IDLE)
    assert idle.kinds(3) == WARM


def test_a_phase_change_declines_and_keeps_the_capture(graphcore_driver):
    scene = Scene(graphcore_driver)
    lane = scene.lane()
    assert lane.kinds(3) == WARM
    executable = lane.executable
    result = lane.run(phase=Phase.DECODE, prompt_rows=2)
    assert (result.kind, result.reason) == (Kind.DECLINED, Reason.PHASE)
    (variant,) = scene.reuse.variants
    # an old uid is not believed after that
    assert variant.state.properties.uid == 0
    assert lane.executable is executable
    assert lane.run().kind is REPLAY
    assert variant.state.properties.uid == lane.step.uid


@pytest.mark.parametrize(
    ("boundary", "overlap"),
    list(product([0, 1], [0, 1])),
    ids=["none", "overlap", "boundary", "both"],
)
def test_all_settings_of_the_options_give_the_same_bits(graphcore_driver, boundary, overlap):
    scene = Scene(graphcore_driver, decode_boundary_overlap=boundary, decode_overlap=overlap)
    lane, prompt = scene.lane(), scene.lane(name="prompt")
    draw = random.Random(3)
    for _ in range(often(graphcore_driver, 500, 25)):
        what = draw.random()
        if what < 0.2:
            lane.move_output()
        if what > 0.8:
            prompt.run(prompt_rows=2)
        lane.run()  # checks the bits
    counters = scene.reuse.counters
    assert (counters.updates > 0) == bool(boundary)
    assert counters.failed == 0


@pytest.mark.lengthy
@pytest.mark.timeout(400)
def test_boundary_updates_in_a_row_are_exact(graphcore_driver):
    scene = Scene(graphcore_driver, decode_boundary_overlap=1)
    lane = scene.lane()
    assert lane.kinds(3) == WARM
    executable, count = lane.executable, often(graphcore_driver, 2000, 100)
    outputs = [scene.buffer(2) for _ in range(3)]
    for number in range(count):
        lane.move_output(outputs[number % 3])
        assert lane.run().kind is Kind.UPDATE
    assert lane.executable is executable
    counters = scene.reuse.counters
    assert (counters.updates, counters.captures, counters.reinstantiations) == (count, 1, 0)


def test_a_boundary_looks_at_no_more_the_more_steps_there_were(graphcore_driver, monkeypatch):
    scene = Scene(graphcore_driver, decode_boundary_overlap=1)  # its list of results grows
    lane, outputs = scene.lane(), [scene.buffer(2) for _ in range(3)]
    lane.kinds(3)
    looked, enters = [], Walk.enters
    monkeypatch.setattr(Walk, "enters", lambda walk, obj: looked.append(1) or enters(walk, obj))
    counts = []
    for number in range(12):
        looked.clear()
        lane.move_output(outputs[number % 3])
        assert lane.run().kind is Kind.UPDATE
        counts.append(len(looked))
    assert counts[3] > 20
    assert counts[-1] == counts[3], "results of steps are looked into"


# ---- plain steps and other graphs ---------------------------------------------------------------


def plain_step(scene):
    x = Buffer.allocate((4,), "float32", driver=scene.driver)
    x.write([0.0] * 4)
    step = CallableStep(
        "plain",
        lambda: scene.driver.fill(
            graphcore.driver.records.MemsetParams(x.address, 7, 4, 4),
            graphcore.interop.current_stream(scene.driver),
        ),
        tensors={"x": x},
    )
    return step, x


def test_a_plain_capture_outlives_a_manifest(graphcore_driver):
    scene = Scene(graphcore_driver)
    step, x = plain_step(scene)
    run = scene.reuse.run
    assert [run(step, stream=scene.stream).kind for _ in range(3)] == WARM
    scene.publish(scene.manifest)
    x.write([0.0] * 4)
    assert run(step, stream=scene.stream).kind is REPLAY
    graphcore_driver.synchronize()
    assert x.read().view("int32").tolist() == [7] * 4


def test_graphs_of_others_are_never_touched(graphcore_driver):
    scene = Scene(graphcore_driver, max_entries=1)
    lane, x = scene.lane(), scene.buffer(2)
    with graphcore.capture(driver=graphcore_driver) as captured:
        graphcore_driver.fill(
            graphcore.driver.records.MemsetParams(x.address, 0, 4, 16), captured.stream.handle
        )
        captured.keep(x)
    with captured.graph as graph, graph.instantiate() as foreign:
        assert lane.kinds(3) == WARM
        scene.publish(scene.manifest)
        scene.lane(name="other").kinds(3)
        scene.reuse.close()
        x.write([[1.0] * 8] * 2)
        foreign.launch(scene.stream)
        graphcore_driver.synchronize()
        assert x.read().tolist() == [[0.0] * 8] * 2


@pytest.mark.gpu
def test_graphs_of_torch_are_never_touched():
    torch = pytest.importorskip("torch")
    driver = graphcore.open_driver("cuda")
    x = torch.zeros(8, device="cuda")
    x.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    scene = Scene(driver, decode_boundary_overlap=1, max_entries=1)
    lane = scene.lane()
    assert lane.kinds(3) == WARM
    graph.replay()
    lane.move_output()
    lane.run()
    scene.publish(scene.manifest)
    lane.kinds(3)
    scene.reuse.close()
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [3.0] * 8


@pytest.mark.gpu
def test_graphs_of_cupy_are_never_touched():
    cupy = pytest.importorskip("cupy")
    driver = graphcore.open_driver("cuda")
    x = cupy.zeros(8, cupy.float32)
    driver.synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x += 1
        stream.begin_capture()
        x += 1
        graph = stream.end_capture()
    scene = Scene(driver, decode_boundary_overlap=1, max_entries=1)
    lane = scene.lane()
    assert lane.kinds(3) == WARM
    graph.launch(stream)
    scene.publish(scene.manifest)
    lane.kinds(3)
    scene.reuse.close()
    graph.launch(stream)
    stream.synchronize()
    assert x.tolist() == [3.0] * 8


def test_what_was_closed_runs_no_step():
    scene = Scene(EmulatedDriver())
    lane = scene.lane()
    assert lane.kinds(3) == WARM
    scene.reuse.release()
    assert len(scene.reuse.cache) == 0
    assert lane.kinds(3) == WARM
    with scene.reuse as reuse:
        assert "3 of them replays" not in repr(reuse)
    reuse.close()
    assert repr(reuse) == "<GraphReuse closed>"
    for what in (lambda: lane.run(check=False), reuse.release):
        with pytest.raises(LifecycleError, match="closed"):
            what()
