"""The source of route_plan, run on the host thread by thread, against the oracle."""

from __future__ import annotations

import random
from collections import Counter

import numpy
import pytest
from graphcore_kernels import RoutePlan, RoutePolicy, RouteStatus
from graphcore_kernels.route_layout import MOST_FREQUENCY
from graphcore_kernels.route_plan import route_plan_i32, route_plan_i64
from helpers.host_block import HostBlocks
from helpers.route_steps import RouteSteps


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    kernels = route_plan_i32, route_plan_i64
    return HostBlocks(route_plan_i32.source, kernels, tmp_path_factory.mktemp("route_plan"))


@pytest.fixture(params=[False, True], ids=["forwards", "backwards"])
def launch(host, request):
    """Launches with blocks of two warps, threads in the one order or in the other."""

    def run(plan: RoutePlan) -> None:
        host.launch(plan.kernel, plan.config, plan.arguments, threads=64, backwards=request.param)

    return run


def random_steps(launch, draw: random.Random, count: int) -> Counter[RouteStatus]:
    experts = draw.choice([1, 2, 5, 16, 40, 130])
    policy = RoutePolicy(
        draw.random() < 0.7, draw.choice([2**62, 1, 50]), draw.choice([2**34, 16, 20])
    )
    steps = RouteSteps(experts, draw.randint(1, min(experts, 70) + 2), policy, launch)
    seen: Counter[RouteStatus] = Counter()
    for _ in range(count):
        top_k = draw.choice([1, 2, 3, 8])
        rows = draw.randint(0, max(steps.slots // top_k, 1) if draw.random() < 0.8 else 12)
        popular = draw.randint(1, experts)
        ids = [draw.randrange(popular) for _ in range(rows * top_k)]
        if ids and draw.random() < 0.05:
            ids[draw.randrange(len(ids))] = draw.choice([-1, experts, 10**6])
        if draw.random() < 0.1:
            steps.pin(draw.randrange(experts), draw.randint(0, 2))
        steps.open(draw.random() > 0.03)
        seen[steps.step(ids, top_k, draw.choice(["int32", "int64"])).status] += 1
    return seen


def test_random_steps_leave_what_the_oracle_says(launch):
    draw = random.Random(5)
    seen = sum((random_steps(launch, draw, 40) for _ in range(20)), Counter())
    assert seen[RouteStatus.OK] > 300
    for status in set(RouteStatus) - {RouteStatus.OK, RouteStatus.INVALID_STATE}:
        assert seen[status] > 5, status


def test_blocks_of_the_launched_size_do_the_same(host):
    def run(plan: RoutePlan) -> None:
        host.launch(plan.kernel, plan.config, plan.arguments)

    steps, draw = RouteSteps(256, 256, RoutePolicy(), run), random.Random(3)
    for rows in (1, 32, 0, 33, 700):
        steps.step([min(int(draw.expovariate(0.02)), 255) for _ in range(rows * 8)], 8)


def test_experts_beyond_a_prompt_are_evicted_in_a_large_pool(launch):
    steps, draw = RouteSteps(200, 96, RoutePolicy(), launch), random.Random(4)
    for _ in range(12):
        steps.step([draw.randrange(200) for _ in range(96)], 8)
    assert steps.oracle.misses > 400


def test_ids_beyond_32_bits_are_no_experts(launch):
    steps = RouteSteps(8, 4, RoutePolicy(), launch)
    assert steps.step([3, 2**32 + 1], 1, "int64").detail == 1
    assert steps.step([-(2**40)], 1, "int64").status is RouteStatus.INVALID_ROUTE


def test_counters_stop_at_their_end(launch):
    steps = RouteSteps(8, 2, RoutePolicy(), launch)
    steps.step([0])
    steps.step([0, 1])
    steps.tables["frequency"][0] = steps.oracle.frequency[0] = MOST_FREQUENCY
    steps.step([0])
    steps.step([2, 3])


@pytest.mark.parametrize("name", ["slot_for_expert", "expert_for_slot", "pending", "pending_slot",
                                  "pending_expert"])  # fmt: skip
def test_damaged_tables_are_refused_as_the_reference_refuses_them(launch, name):
    draw, seen = random.Random(name), set()
    for _ in range(80):
        pair = [RouteSteps(6, 4, RoutePolicy(), each) for each in (launch, None)]
        pair[1].launch = lambda plan: plan.kernel.run_reference(plan.config, plan.arguments)
        place, value = draw.randrange(4), draw.randint(-2, 7)
        second = draw.choice([[1, 3], [4, 5]])
        for steps in pair:
            steps.step([0, 1, 2])
            steps.step(second)
            steps.tables[name][place] = value
            steps.run([0, 4], 2)
        ours, theirs = pair
        for kind in ("tables", "outputs"):
            for each, values in getattr(ours, kind).items():
                assert (values == getattr(theirs, kind)[each]).all(), (each, place, value)
        seen.add(int(ours.outputs["report"][0]))
    assert RouteStatus.INVALID_STATE in seen


FINITE = numpy.arange(2**16, dtype=numpy.uint16)
FINITE = FINITE[numpy.isfinite(FINITE.view(numpy.float16))]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_weights_are_converted_exactly_and_follow_their_rows(launch, dtype):
    steps = RouteSteps(8, 8, RoutePolicy(), launch)
    draw = numpy.random.default_rng(2)
    values = draw.choice(FINITE, 640).view(numpy.float16).astype(dtype).reshape(80, 8)
    values[0, :4] = [0.0, -0.0, numpy.inf, -numpy.inf]
    steps.run(draw.integers(0, 8, 640).tolist(), 8, weights=values)
    expected = values.reshape(-1)[steps.outputs["scatter"]].astype(numpy.float32)
    assert (steps.outputs["scale"].view(numpy.uint32) == expected.view(numpy.uint32)).all()


def test_weights_of_bfloat16_are_converted_exactly(launch):
    torch = pytest.importorskip("torch", reason="NumPy has no bfloat16")
    steps = RouteSteps(8, 8, RoutePolicy(), launch)
    values = torch.randn(16, 8).bfloat16()
    steps.run(numpy.random.default_rng(1).integers(0, 8, 128).tolist(), 8, weights=values)
    expected = values.float().numpy().reshape(-1)[steps.outputs["scatter"]]
    assert (steps.outputs["scale"] == expected).all()
