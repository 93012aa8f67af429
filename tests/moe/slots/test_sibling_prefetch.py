"""Guessed experts copied beside earlier layers: right in every order, captured or not."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from helpers.every_fault import each_fault, interrupts_instead
from helpers.prefetch_layers import LAYERS, GuessingModel
from helpers.slot_pools import EXPERTS, ROWS, SLOTS, TOP_K, Model

import graphcore
from graphcore import GraphPlan
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import (
    CacheTypeError,
    CapacityError,
    CaptureError,
    ConfigurationError,
    CudaError,
    LifecycleError,
    PlanError,
)
from graphcore.moe import SiblingPrefetch
from graphcore.resources.buffer import Buffer
from graphcore.testing import inject


def test_eager_steps_with_guesses_are_what_the_oracle_says(graphcore_driver):
    model, draw = GuessingModel(graphcore_driver), random.Random(1)
    with graphcore_driver.stream() as stream:
        for _ in range(12):
            model.script_step(draw)
            model.run(stream)
            model.check_step()
    model.check_totals(12)


def test_replays_with_guesses_are_what_the_oracle_says(graphcore_driver):
    model, draw = GuessingModel(graphcore_driver), random.Random(2)
    with graphcore.capture(driver=graphcore_driver) as captured:
        model.run(captured.stream)
    with captured.graph as graph, graph.instantiate() as made, graphcore_driver.stream() as stream:
        for index in range(12):
            model.script_step(draw)
            if index % 4 == 3:
                model.run(stream)
            else:
                made.launch(stream)
            model.check_step()
    model.check_totals(12)


def replays(model: GuessingModel, without: tuple[str, ...], count: int) -> None:
    draw = random.Random(3)
    with graphcore.capture(driver=model.driver) as captured:
        model.run(captured.stream, without)
    with captured.graph as graph, graph.instantiate() as made:
        for _ in range(count):
            model.script_step(draw)
            made.launch()
            model.check_step()


def test_every_order_that_a_captured_step_allows_gives_the_same():
    model = GuessingModel(EmulatedDriver(order="adversarial"))
    replays(model, (), 60)
    model.check_totals(60)


def test_without_the_wait_for_the_stage_some_order_gives_another_result():
    model = GuessingModel(EmulatedDriver(order="adversarial"))
    with pytest.raises(AssertionError):
        replays(model, ("await_stage",), 60)


def test_copies_of_guesses_run_beside_the_layers_before_them(graphcore_driver):
    model = GuessingModel(graphcore_driver)
    with graphcore.capture(driver=graphcore_driver) as captured:
        model.run(captured.stream)
    with captured.graph as graph:
        snapshot = graph.snapshot()
        sources = Counter(source for source, _ in snapshot.edges)
        assert max(sources.values()) > 1
        # all of it has joined
        assert len(set(range(len(snapshot.nodes))) - set(sources)) == 1


def test_good_guesses_make_hits_of_misses_and_wrong_ones_change_no_result():
    rates = []
    for accuracy in (1.0, 0.0):
        model, draw = GuessingModel(EmulatedDriver()), random.Random(4)
        with model.driver.stream() as stream:
            for _ in range(20):
                model.script_step(draw, accuracy)
                model.run(stream)
                model.check_step()
        last = LAYERS[-1]
        rates.append(model.pool.totals(last).hit_rate)
        assert model.prefetch.totals(last).copied > 0
    plain, draw = GuessingModel(EmulatedDriver(), prefetches=False), random.Random(4)
    with plain.driver.stream() as stream:
        for _ in range(20):
            plain.script_step(draw)
            plain.run(stream)
            plain.check_step()
    assert rates[0] == 1.0 > plain.pool.totals(LAYERS[-1]).hit_rate
    assert rates[1] < 1.0
    # the first layer is guessed by nobody
    assert plain.pool.totals(LAYERS[0]).misses > 0


def test_a_guess_that_is_no_expert_copies_nothing_and_is_told_apart(graphcore_driver):
    model, draw = GuessingModel(graphcore_driver), random.Random(5)
    model.script_step(draw)
    for guesses in model.guess_script.values():
        for guess in guesses:
            guess.write([[0, EXPERTS], [-1, 1]])
    with graphcore_driver.stream() as stream:
        model.run(stream)
        stream.synchronize()
    for name in LAYERS[1:]:
        totals = model.prefetch.totals(name)
        assert (totals.guesses, totals.copied) == (0, 0)
        assert totals.refused == len(model.guess_script[name])
        assert model.pool.fault(name).count == 0
        assert model.admissions[name].outcome().is_ok
    model.check_rows()


def test_a_group_without_guesses_is_passed_by(graphcore_driver):
    model = GuessingModel(graphcore_driver)
    with graphcore_driver.stream() as stream, model.prefetch.step(stream) as step:
        step.await_stage(LAYERS[0], stream)
        step.computed(LAYERS[0], stream)
    assert model.prefetch.groups == LAYERS[1:]


def test_a_step_that_hands_off_and_never_arrives_is_joined_all_the_same(graphcore_driver):
    model = GuessingModel(graphcore_driver)
    model.script_step(random.Random(6))
    with (
        graphcore.capture(driver=graphcore_driver) as captured,
        model.prefetch.step(captured.stream) as step,
    ):
        step.hand_off(LAYERS[2], captured.stream, index=1)
    with captured.graph as graph, graph.instantiate() as made:
        made.launch()
        graphcore_driver.synchronize()
    assert model.prefetch.totals(LAYERS[2]).guesses == 1
    model.check_rows()


def test_products_noted_before_a_second_guess_of_the_step_come_before_its_copies():
    model = GuessingModel(EmulatedDriver(order="adversarial"))
    name = LAYERS[1]
    model.guessed[name][0].write([[0, 1], [2, 3]])
    model.script_step(random.Random(7))
    with graphcore.capture(driver=model.driver) as captured:
        stream = captured.stream
        with model.prefetch.step(stream) as step:
            model._layer(name, stream)
            step.computed(name, stream)
            step.hand_off(name, stream)
    with captured.graph as graph, graph.instantiate() as made:
        for seed in range(20):
            model.script_step(random.Random(seed))
            model.guessed[name][0].write([[seed % EXPERTS, (seed + 3) % EXPERTS]] * ROWS)
            made.launch()
            model._check_products(name)


# ---- a plan of the same order -------------------------------------------------------------------


def planned(model: GuessingModel, *, waits: bool) -> tuple[GraphPlan, dict[str, Buffer]]:
    """Two layers and the second one's guess, as a plan that derives its order from buffers.

    Without ``waits`` the second layer's admission is told to follow its router alone.
    """
    from graphcore_kernels import route_plan

    first, second = LAYERS[:2]
    plan, bound = GraphPlan(), {}

    def buffers(prefix: str, tensors: dict[str, Buffer]) -> dict[str, object]:
        bound.update({f"{prefix} {name}": each for name, each in tensors.items()})
        return {name: plan.buffer(f"{prefix} {name}", each.shape, each.dtype)
                for name, each in tensors.items()}  # fmt: skip

    tables = {name: buffers(name, dict(model.pool[name].tables.tensors)) for name in LAYERS[:2]}
    rows = {name: buffers(f"{name} rows", dict(model.pool[name].rows)) for name in LAYERS[:2]}
    counts = model.prefetch._groups[second].counts.tensors
    guess = model.prefetch._groups[second].admissions[0]
    steps = {
        "guess": (second, model.guessed[second][0], guess.outputs,
                  {**tables[second], **buffers("own", dict(counts))}),
        first: (first, model.ids[first], model.admissions[first].outputs, tables[first]),
        second: (second, model.ids[second], model.admissions[second].outputs, tables[second]),
    }  # fmt: skip
    for title, (name, ids, outputs, words) in steps.items():
        views = {**words, **buffers(title, {"ids": ids, **outputs})}
        own = {**model.pool[name].tables.tensors, **(counts if title == "guess" else {})}
        made = route_plan.plan(ids, own, outputs)
        after = [] if title == second and not waits else None
        plan.launch(made.kernel, made.config, *made.values(views), after=after,
                    name=f"{title} plan")  # fmt: skip
        gather = model.pool[name].gather
        plan.launch(
            gather.kernel, gather.config, *gather.values(views), writes=list(rows[name].values()),
            reads=[views[each] for each in ("miss_expert", "miss_slot", "miss_count")],
            name=f"{title} copy",
        )  # fmt: skip
    return plan, bound


def test_a_plan_of_the_same_kernels_has_no_race_and_lets_the_guess_run_beside_the_first_layer():
    model = GuessingModel(EmulatedDriver(order="adversarial"))
    plan, bound = planned(model, waits=True)
    plan.check()
    draw = random.Random(8)
    with plan.build(bound, driver=model.driver) as graph, graph.instantiate() as made:
        edges = graph.snapshot().edges
        assert len(edges) < 6  # not one chain
        for _ in range(20):
            model.script_step(draw)
            for name in LAYERS[:2]:
                model.ids[name].write([model.chosen[name][:TOP_K], model.chosen[name][TOP_K:]])
            guess = model.guesses[LAYERS[1]][0]
            model.guessed[LAYERS[1]][0].write([guess[:TOP_K], guess[TOP_K:]])
            made.launch()
            for name in LAYERS[:2]:
                if name == LAYERS[1]:
                    model.oracles[name].plan(guess, TOP_K)
                model.oracles[name].plan(model.chosen[name], TOP_K)
                assert model.pool.residents()[name] == model.oracles[name].residents()
            model.check_rows()


def test_a_plan_whose_layer_does_not_wait_for_the_stage_is_told_its_races():
    model = GuessingModel(EmulatedDriver())
    plan, _ = planned(model, waits=False)
    with pytest.raises(PlanError) as raised:
        plan.check()
    races = [problem for problem in raised.value.problems if problem.kind == "race"]
    assert {"guess plan", f"{LAYERS[1]} plan"} <= {name for race in races for name in race.nodes}


# ---- faults -------------------------------------------------------------------------------------


class Running:
    """A model in the middle of its life, and the stream of its steps."""

    def __init__(self, driver) -> None:
        self.model, self.stream = GuessingModel(driver), driver.stream()
        self.draw = random.Random(9)
        for _ in range(3):
            self.model.script_step(self.draw)
            self.model.run(self.stream)
        self.model.script_step(self.draw)

    def step(self) -> None:
        self.model.run(self.stream)

    def goes_on(self) -> None:
        """Every product of the steps that follow is right."""
        for _ in range(3):
            self.model.script_step(self.draw)
            self.step()
            self.model.driver.synchronize()
            for name in LAYERS:
                assert self.model.admissions[name].outcome().is_ok
                self.model._check_products(name)
            self.model.check_rows()


@pytest.mark.parametrize("interrupted", [False, True], ids=["refused", "ctrl-c"])
def test_a_fault_at_any_call_of_a_step_leaves_slots_that_are_right(monkeypatch, interrupted):
    if interrupted:
        interrupts_instead(monkeypatch)
    seen = set()
    for driver, fault in each_fault(Running, Running.step):
        assert isinstance(fault.error, KeyboardInterrupt if interrupted else CudaError), fault.where
        assert fault.leaves_nothing(driver), fault.where
        fault.state.goes_on()
        seen.add(fault.where.split()[0])
    assert {"launch", "record_event", "wait_event"} <= seen


def test_a_group_that_has_to_settle_refuses_a_captured_guess(graphcore_driver):
    if not graphcore_driver.is_emulated:
        pytest.skip("faults are injected into the emulated driver")
    running = Running(graphcore_driver)
    with inject(graphcore_driver, "launch", after=1), pytest.raises(CudaError):
        running.step()
    assert not running.model.pool.is_settled
    captured = graphcore.capture(driver=graphcore_driver)
    with pytest.raises(CaptureError, match="not while a graph is captured"), captured:
        running.model.run(captured.stream)
    running.model.pool.settle()
    with graphcore.capture(driver=graphcore_driver) as captured:
        running.model.run(captured.stream)
    captured.graph.close()
    running.goes_on()


# ---- what cannot be -----------------------------------------------------------------------------


def test_outside_of_a_step_nothing_is_handed_over(graphcore_driver):
    prefetch = GuessingModel(graphcore_driver).prefetch
    for action in (prefetch.hand_off, prefetch.await_stage, prefetch.computed):
        with pytest.raises(LifecycleError, match=r"inside of step\(\), got outside"):
            action(LAYERS[1])
    with (
        prefetch.step(),
        pytest.raises(LifecycleError, match="got it inside a step"),
        prefetch.step(),
    ):
        pass


def test_a_closed_prefetch_steps_no_more(graphcore_driver):
    with GuessingModel(graphcore_driver).prefetch as prefetch:
        assert not prefetch.is_closed
    prefetch.close()
    with pytest.raises(LifecycleError, match="got it closed"), prefetch.step():
        pass


def test_guesses_of_before_growth_are_refused(graphcore_driver):
    model = GuessingModel(graphcore_driver)
    model.pool.grow(EXPERTS)
    with (
        graphcore_driver.stream() as stream,
        model.prefetch.step(stream) as step,
        pytest.raises(LifecycleError, match="make another"),
    ):
        step.hand_off(LAYERS[1], stream)


def test_unknown_groups_and_guesses_are_refused(graphcore_driver):
    model = GuessingModel(graphcore_driver)
    with model.prefetch.step() as step:
        with pytest.raises(ConfigurationError, match=r"got 'layers\.0'"):
            step.hand_off(LAYERS[0])
        with pytest.raises(ConfigurationError, match=r"expected 0 to 0 for group layers\.1, got 1"):
            step.hand_off(LAYERS[1], index=1)
    with pytest.raises(ConfigurationError, match=r"got 'layers\.9'"):
        model.prefetch.totals("layers.9")


@pytest.mark.parametrize(
    ("guesses", "error", "says"),
    [
        ({}, ConfigurationError, "at least one group"),
        ({"first": []}, ConfigurationError, "at least one tensor"),
        ({"third": Buffer}, ConfigurationError, "expected one of"),
        ({"first": 3}, CacheTypeError, "expected a torch"),
    ],
    ids=["none", "no tensor", "unknown group", "a number"],
)
def test_guesses_that_cannot_be_are_refused(guesses, error, says):
    with pytest.raises(error, match=says):
        SiblingPrefetch(Model(EmulatedDriver()).pool, guesses)


def test_guesses_that_may_need_more_slots_than_there_are_are_refused(graphcore_driver):
    ids = Buffer.allocate((SLOTS + 1, 1), "int32", driver=graphcore_driver)
    with pytest.raises(CapacityError):
        SiblingPrefetch(Model(graphcore_driver).pool, {"first": ids})


def test_a_prefetch_is_made_outside_of_captures(graphcore_driver):
    model = Model(graphcore_driver)
    captured = graphcore.capture(driver=graphcore_driver)
    with pytest.raises(CaptureError, match="SiblingPrefetch: not while"), captured:
        SiblingPrefetch(model.pool, model.ids)
