"""Steps of a model whose experts do not all fit: admitted on the device, judged by the oracle."""

from __future__ import annotations

import gc
import random
import weakref

import numpy
import pytest
from graphcore_kernels import RoutePolicy, RouteStatus, moe_grouped_gemm, route_plan
from helpers.every_fault import each_fault, interrupts_instead
from helpers.slot_pools import EXPERTS, ROWS, SLOTS, TOP_K, Model

import graphcore
from graphcore import GraphPlan
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import CapacityError, CaptureError, CudaError, LifecycleError
from graphcore.moe import AdmissionOutcome, SlotAdmission
from graphcore.resources.buffer import Buffer
from graphcore.testing import inject


@pytest.fixture(
    params=[RoutePolicy(), RoutePolicy(uses_frequency=False),
            RoutePolicy(clock_bound=40, step_bound=16)],
    ids=["frequency", "recency", "bounds soon reached"],
)  # fmt: skip
def model(graphcore_driver: Driver, request: pytest.FixtureRequest) -> Model:
    return Model(graphcore_driver, policy=request.param)


def test_t9_eviction_and_refill_in_a_replayed_graph_are_those_of_the_host_oracle(model):
    with graphcore.capture(driver=model.driver) as captured:
        model.launch()
    draw = random.Random(9)
    with captured.graph as graph, graph.instantiate() as made, model.driver.stream() as stream:
        assert len(graph.snapshot().nodes) == 4
        for _ in range(60):
            chosen = model.choose(draw)
            made.launch(stream)
            model.check(chosen)
    for name, oracle in model.oracles.items():
        assert oracle.misses > 2 * SLOTS
        totals = model.pool.totals(name)
        assert (totals.steps, totals.hits, totals.misses) == (60, oracle.hits, oracle.misses)


def test_steps_without_a_graph_and_replays_take_turns(model):
    with graphcore.capture(driver=model.driver) as captured:
        model.launch()
    draw = random.Random(3)
    with captured.graph as graph, graph.instantiate() as made, model.driver.stream() as stream:
        for index in range(20):
            chosen = model.choose(draw)
            if index % 3:
                made.launch(stream)
            else:
                model.launch(stream)
            model.check(chosen)


def test_the_grouped_product_of_admitted_experts_is_that_of_all_experts(graphcore_driver):
    model, draw = Model(graphcore_driver, ["layer"]), random.Random(5)
    weights = model.experts["layer"]["gate_up"]
    rows = ROWS * TOP_K
    x = Buffer.allocate((ROWS, 4), "float32", driver=graphcore_driver)
    out = Buffer.allocate((rows, 8), "float32", driver=graphcore_driver)
    error = Buffer.allocate(1, "int32", driver=graphcore_driver)
    error.write(0)
    values = numpy.random.default_rng(8).standard_normal((ROWS, 4), numpy.float32)
    x.write(values)
    admission = model.admissions["layer"]
    given = admission.outputs
    product = moe_grouped_gemm.plan(
        x, model.pool["layer"].rows["gate_up"], given["offsets"], given["slots"], out,
        gather=given["gather"], error=error,
    )  # fmt: skip
    with graphcore.capture(driver=graphcore_driver) as captured:
        admission.launch()
        product.launch()
    with captured.graph as graph, graph.instantiate() as made, graphcore_driver.stream() as stream:
        for _ in range(12):
            chosen = model.choose(draw)
            out.write(float("nan"))
            made.launch(stream)
            model.check(chosen)
            order = numpy.argsort(chosen["layer"], kind="stable")
            expected = [weights[chosen["layer"][route]] @ values[route // TOP_K]
                        for route in order]  # fmt: skip
            numpy.testing.assert_allclose(out.read(), expected, rtol=1e-5, atol=1e-6)
    assert error.read() == [0]


def test_steps_of_several_shapes_share_the_slots_of_a_group(graphcore_driver):
    model, draw = Model(graphcore_driver, ["layer"]), random.Random(11)
    oracle, steps = model.oracles["layer"], {}
    for rows in (1, 2, 5):
        ids = Buffer.allocate((rows, 1), "int64", driver=graphcore_driver)
        admission = SlotAdmission(model.pool, "layer", ids)
        with graphcore.capture(driver=graphcore_driver) as captured:
            admission.launch()
        steps[rows] = ids, admission, captured.graph, captured.graph.instantiate()
    for _ in range(40):
        rows = draw.choice([1, 2, 5])
        ids, admission, _, made = steps[rows]
        chosen = [draw.randrange(EXPERTS) for _ in range(rows)]
        ids.write(numpy.reshape(chosen, (rows, 1)))
        made.launch()
        expected = oracle.plan(chosen)
        assert admission.outputs["slots"].read().tolist() == list(expected.slots)
        assert model.pool.residents()["layer"] == oracle.residents()
        model.check_rows()
    for _, _, graph, made in steps.values():
        made.close()
        graph.close()


def test_a_graph_plan_launches_both_kernels_in_their_order(graphcore_driver):
    model, draw = Model(graphcore_driver, ["layer"]), random.Random(12)
    group, admission = model.pool["layer"], model.admissions["layer"]
    bound = {"ids": model.ids["layer"], **group.tables.tensors, **admission.outputs,
             **{f"rows {bank}": rows for bank, rows in group.rows.items()}}  # fmt: skip
    planned = route_plan.plan(model.ids["layer"], group.tables.tensors, admission.outputs)
    plan = GraphPlan()
    held = {name: plan.buffer(name, each.shape, each.dtype) for name, each in bound.items()}
    plan.launch(planned.kernel, planned.config, *planned.values(held))
    gather = group.gather
    plan.launch(
        gather.kernel, gather.config, *gather.values(held),
        writes=[held[f"rows {bank}"] for bank in group.rows],
        reads=[held[name] for name in ("miss_expert", "miss_slot", "miss_count")],
    )  # fmt: skip
    with plan.build(bound, driver=graphcore_driver) as graph, graph.instantiate() as made:
        assert len(graph.snapshot().edges) == 1
        for _ in range(8):
            chosen = model.choose(draw)
            made.launch()
            model.check(chosen)


def test_a_refused_step_copies_nothing_and_the_next_one_is_right(model):
    draw = random.Random(4)
    chosen = model.choose(draw)
    model.launch()
    model.check(chosen)
    before = model.pool.residents()
    model.ids["first"].write([[0, EXPERTS], [1, 2]])
    model.admissions["first"].launch()
    outcome = model.admissions["first"].outcome()
    assert outcome == AdmissionOutcome(RouteStatus.INVALID_ROUTE, 0, 0, 1)
    assert not outcome.is_ok
    assert outcome.reason == "an expert that does not exist (route 1)"
    assert model.pool.residents() == before
    assert model.pool.fault("first").count == 1
    model.pool.clear_fault("first")
    assert model.pool.fault("first").status is RouteStatus.OK
    chosen = model.choose(draw)
    model.launch()
    model.check(chosen)


def test_closed_admission_refuses_steps_until_it_is_opened(model):
    model.choose(random.Random(1))
    model.pool.close_admission("first")
    model.launch()
    assert model.admissions["first"].outcome().status is RouteStatus.CLOSED
    assert model.admissions["second"].outcome().is_ok
    model.pool.open_admission("first")
    model.launch()
    assert model.admissions["first"].outcome().is_ok


def test_pinned_experts_stay_through_replays(model):
    draw = random.Random(2)
    model.ids["first"].write([[0, 1], [2, 3]])
    model.admissions["first"].launch()
    model.pool.pin("first", [0, 1])
    with graphcore.capture(driver=model.driver) as captured:
        model.admissions["first"].launch()
    with captured.graph as graph, graph.instantiate() as made, model.driver.stream() as stream:
        for _ in range(20):
            model.ids["first"].write([draw.sample(range(2, EXPERTS), 2) for _ in range(ROWS)])
            made.launch(stream)
            residents = model.pool.residents()["first"]
            assert (residents[0], residents[1]) == (0, 1)
            model.check_rows()
    assert model.pool.fault("first").count > 0  # four other experts, and three slots for them


def test_a_graph_keeps_the_memory_that_it_works_on(graphcore_driver):
    model = Model(graphcore_driver, ["layer"])
    with graphcore.capture(driver=graphcore_driver) as captured:
        model.launch()
    chosen = model.choose(random.Random(6))
    held = weakref.ref(model.sources["layer"]["down"].owner)
    rows = weakref.ref(model.pool["layer"].rows["down"].owner)
    report = model.admissions["layer"].outputs["report"]
    address = report.address
    model.pool.close()
    del model, report
    gc.collect()
    with captured.graph as graph, graph.instantiate() as made, graphcore_driver.stream() as stream:
        assert held() is not None
        assert rows() is not None
        made.launch(stream)
        stream.synchronize()
        status, unique, *_ = memoryview(graphcore_driver.read(address, 16)).cast("i")
        assert (status, unique) == (RouteStatus.OK, len(set(chosen["layer"])))
    del captured, graph, made
    gc.collect()
    assert held() is None
    assert rows() is None


def test_more_routes_than_slots_are_refused_before_anything_is_launched(model):
    ids = Buffer.allocate((SLOTS + 1, 1), "int32", driver=model.driver)
    with pytest.raises(CapacityError, match=f"at most {SLOTS} routes"):
        SlotAdmission(model.pool, "first", ids)


def test_an_admission_of_before_growth_or_of_a_closed_pool_refuses(model):
    model.choose(random.Random(1))
    model.launch()
    model.pool.grow(SLOTS + 1)
    with pytest.raises(LifecycleError, match="make another"):
        model.launch()
    model.admit()
    model.launch()
    model.pool.close()
    with pytest.raises(LifecycleError, match="make another"):
        model.launch()


def test_an_admission_is_made_outside_of_captures(model):
    with (
        pytest.raises(CaptureError, match="not while a graph is captured"),
        graphcore.capture(driver=model.driver),
    ):
        SlotAdmission(model.pool, "first", model.ids["first"])


# ---- faults -------------------------------------------------------------------------------------


def warmed_up(driver: Driver) -> Model:
    model, draw = Model(driver, ["layer"]), random.Random(7)
    for _ in range(4):
        model.choose(draw)
        model.launch()
    model.choose(draw)
    return model


def goes_on(model: Model) -> None:
    """Steps are right from here: every route finds its expert's very bits."""
    draw = random.Random(8)
    for _ in range(6):
        chosen = model.choose(draw)
        model.launch()
        assert model.admissions["layer"].outcome().is_ok
        slots = model.admissions["layer"].outputs["route_slots"].read().reshape(-1).tolist()
        residents = model.pool.residents()["layer"]
        assert [residents[expert] for expert in chosen["layer"]] == slots
        model.check_rows()


def test_a_fault_at_any_call_of_a_launch_leaves_slots_that_are_right():
    seen = []
    for _, fault in each_fault(warmed_up, Model.launch):
        assert isinstance(fault.error, CudaError), fault.where
        goes_on(fault.state)
        seen.append(fault.where)
    assert any(where.startswith("launch after 1") for where in seen)


def test_ctrl_c_at_any_call_of_a_launch_leaves_slots_that_are_right(monkeypatch):
    interrupts_instead(monkeypatch)
    for _, fault in each_fault(warmed_up, Model.launch):
        assert isinstance(fault.error, KeyboardInterrupt), fault.where
        goes_on(fault.state)


def test_a_plan_whose_copy_was_refused_is_undone_outside_of_captures_only(model):
    draw = random.Random(1)
    model.choose(draw)
    model.launch()
    model.driver.synchronize()
    if not model.driver.is_emulated:
        pytest.skip("faults are injected into the emulated driver")
    with inject(model.driver, "launch", after=1), pytest.raises(CudaError):
        model.admissions["first"].launch()
    with (
        pytest.raises(CaptureError, match="not while a graph is captured"),
        graphcore.capture(driver=model.driver),
    ):
        model.admissions["first"].launch()
    model.pool.settle("first")
    model.check_rows()
    with graphcore.capture(driver=model.driver) as captured:
        model.admissions["first"].launch()
    captured.graph.close()


def refused_copy(model: Model) -> None:
    """A step whose plan ran and whose copy did not."""
    model.ids["layer"].write([[6, 7], [8, 9]])
    with inject(model.driver, "launch", after=1), pytest.raises(CudaError):
        model.launch()
    assert not model.pool.is_settled


@pytest.mark.parametrize("settles", [True, False], ids=["settled", "not settled"])
def test_a_graph_launched_after_a_refused_copy_is_right_once_the_pool_was_settled(settles):
    model = Model(EmulatedDriver(), ["layer"])
    with graphcore.capture(driver=model.driver) as captured:
        model.launch()
    with captured.graph as graph, graph.instantiate() as made:
        model.ids["layer"].write([[0, 1], [2, 3]])
        made.launch()
        refused_copy(model)
        if settles:
            model.pool.settle()
            assert model.pool.is_settled
        model.ids["layer"].write([[6, 7], [0, 1]])
        made.launch()
        if settles:
            model.check_rows()
        else:  # its own admission takes the doubtful slots for good ones
            with pytest.raises(AssertionError):
                model.check_rows()


def test_settling_leaves_the_experts_of_the_steps_before():
    model = Model(EmulatedDriver(), ["layer"])
    model.ids["layer"].write([[0, 1], [2, 3]])
    model.launch()
    model.launch()
    before = model.pool.residents()["layer"]
    refused_copy(model)
    model.pool.settle()
    after = model.pool.residents()["layer"]
    # slots that were given away are empty, since nobody knows what the copy wrote there
    assert after
    assert after.items() < before.items()
    model.check_rows()
    goes_on(model)


def test_a_fault_at_any_call_of_settling_leaves_it_to_be_settled():
    def prepare(driver: Driver) -> Model:
        model = warmed_up(driver)
        with inject(driver, "launch", after=1), pytest.raises(CudaError):
            model.launch()
        return model

    seen = set()
    for _, fault in each_fault(prepare, lambda model: model.pool.settle()):
        assert isinstance(fault.error, CudaError), fault.where
        assert not fault.state.pool.is_settled, fault.where
        fault.state.pool.settle()
        fault.state.check_rows()
        goes_on(fault.state)
        seen.add(fault.where.split()[0])
    assert seen == {"read", "write"}


def test_a_settled_pool_asks_the_driver_for_nothing():
    model = warmed_up(EmulatedDriver())
    for call in ("read", "write"):
        inject(model.driver, call)
    assert model.pool.is_settled
    model.pool.settle()
    model.pool.settle("layer")
    model.driver.faults.clear()
