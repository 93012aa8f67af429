"""Outputs overwritten by the next replay, and inputs left over from the last: as users met them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.tensors import device_of, filled, poisoned, replay

import graphcore
from graphcore import (
    ConfigurationError,
    GraphExec,
    LifecycleError,
    OutputGuard,
    OverwrittenOutputError,
    StaticInputs,
)
from graphcore.driver import Driver


class Doubling:
    """``y = 2 x`` as a graph that is called like a function, as users write it."""

    def __init__(self, driver: Driver) -> None:
        self.x = filled(driver, 0.0)
        self.inputs = StaticInputs({"x": self.x}, driver=driver)
        graph = graphcore.capture_function(lambda given: given * 2, self.x, driver=driver)
        self.y: torch.Tensor = graph.outputs
        self.executable: GraphExec = graph.instantiate()

    def run(self, value: float) -> None:
        self.inputs.copy_(x=[value] * 4)
        replay(self.executable)

    def __call__(self, value: float) -> OutputGuard:
        self.run(value)
        return OutputGuard(self.executable, self.y, "y")


# ---- outputs ------------------------------------------------------------------------------------


def test_the_bug_without_a_guard_y1_holds_what_y2_should(graphcore_driver: Driver) -> None:
    doubling = Doubling(graphcore_driver)
    doubling.run(1.0)
    y1 = doubling.y
    doubling.run(5.0)
    assert y1.tolist() == [10.0] * 4, "the control: nothing says so"


def test_y1_read_after_g_of_x2_is_refused_with_the_remedy(graphcore_driver: Driver) -> None:
    g = Doubling(graphcore_driver)
    y1 = g(1.0)
    kept = y1.clone()
    y2 = g(5.0)
    with pytest.raises(OverwrittenOutputError, match=r"y: .*clone\(\) the output before the next"):
        y1.get()
    assert (kept.tolist(), y2.get().tolist()) == ([2.0] * 4, [10.0] * 4)


@pytest.mark.parametrize("alias", ["to", "view", "slice", "detach"])
def test_what_aliases_the_output_is_the_output_and_a_clone_is_not(
    graphcore_driver: Driver, alias: str
) -> None:
    g = Doubling(graphcore_driver)
    g.run(1.0)
    made: dict[str, Any] = {
        "to": lambda y: y.to(torch.float32),
        "view": lambda y: y.view(2, 2),
        "slice": lambda y: y[1:],
        "detach": lambda y: y.detach(),
    }
    aliased = made[alias](g.y)
    guard = OutputGuard(g.executable, aliased, alias)
    copied = guard.clone()
    assert copied.data_ptr() != aliased.data_ptr()
    g.run(5.0)
    assert aliased.flatten().tolist() == [10.0] * aliased.numel(), "the control: it is an alias"
    assert copied.flatten().tolist() == [2.0] * aliased.numel()
    with pytest.raises(OverwrittenOutputError, match=f"{alias}: "):
        guard.get()


def test_the_second_pass_of_guidance_may_not_be_mixed_with_an_overwritten_first(
    graphcore_driver: Driver,
) -> None:
    model = Doubling(graphcore_driver)
    conditional = model(3.0)
    unconditional = model(1.0)
    with pytest.raises(OverwrittenOutputError):
        unconditional.get() + 7.5 * (conditional.get() - unconditional.get())
    first = model(3.0).clone()
    second = model(1.0).get()
    assert (second + 7.5 * (first - second)).tolist() == [2.0 + 7.5 * 4.0] * 4


def test_a_cache_born_inside_the_capture_belongs_to_a_run_like_any_output(
    graphcore_driver: Driver,
) -> None:
    # the encoder's keys are made in the captured step: each run of it writes them again
    encoder, decoded = Doubling(graphcore_driver), poisoned(graphcore_driver)
    cross_keys = encoder.y
    decoder = graphcore.capture_function(
        lambda keys: decoded.copy_(keys + 1), cross_keys, driver=graphcore_driver
    ).instantiate()
    born = OutputGuard(encoder.executable, cross_keys, "cross keys")
    with pytest.raises(LifecycleError, match=r"cross keys: .*has not run yet"):
        born.get()
    mine = encoder(1.0)
    replay(decoder)
    assert decoded.tolist() == [3.0] * 4
    mine.get()
    encoder.run(9.0)  # another request's prompt
    with pytest.raises(OverwrittenOutputError):
        mine.get()
    replay(decoder)
    assert decoded.tolist() == [19.0] * 4, "the control: the decoder reads another request's keys"


def test_a_cache_made_before_the_capture_is_written_into_and_stays_its_owners(
    graphcore_driver: Driver,
) -> None:
    x, keys = filled(graphcore_driver, 1.0), poisoned(graphcore_driver)
    graph = graphcore.capture_function(lambda: keys.copy_(x * 2), driver=graphcore_driver)
    other = poisoned(graphcore_driver)
    with graph.instantiate(guard="full") as executable:
        replay(executable)
        kept = OutputGuard(executable, keys).clone()
        replay(executable)
    assert keys.tolist() == kept.tolist() == [2.0] * 4
    assert torch.isnan(other).all()


# ---- inputs -------------------------------------------------------------------------------------


class Lookup:
    """Rows of a table by index, plus an optional bias: the padded tail is looked up too."""

    def __init__(self, driver: Driver) -> None:
        device = device_of(driver)
        self.driver = driver
        self.table = torch.tensor([0.0, 10.0, 20.0, 30.0], device=device)
        self.ids = torch.zeros(4, dtype=torch.int64, device=device)
        self.bias = torch.zeros(4, device=device)
        graph = graphcore.capture_function(self.step, driver=driver)
        self.out: torch.Tensor = graph.outputs
        self.executable = graph.instantiate()

    def step(self) -> torch.Tensor:
        return self.table[self.ids] + self.bias

    def run(self) -> list[float]:
        self.out.fill_(float("nan"))
        replay(self.executable)
        values: list[float] = self.out.tolist()
        return values


def test_rows_behind_the_real_ones_do_not_keep_old_indices(graphcore_driver: Driver) -> None:
    lookup = Lookup(graphcore_driver)
    lookup.ids.fill_(3)
    lookup.ids[:2].copy_(torch.tensor([1, 2]))
    assert lookup.run() == [10.0, 20.0, 30.0, 30.0], "the control: by hand the tail keeps them"
    inputs = StaticInputs({"ids": lookup.ids}, fill={"ids": 0}, driver=graphcore_driver)
    inputs.copy_(ids=[1, 2])
    assert lookup.run() == [10.0, 20.0, 0.0, 0.0]


def test_an_input_left_out_is_refused_or_reset_and_never_the_last_one(
    graphcore_driver: Driver,
) -> None:
    lookup = Lookup(graphcore_driver)
    tensors = {"ids": lookup.ids, "bias": lookup.bias}
    strict = StaticInputs(tensors, fill={"ids": 0, "bias": 0.0}, driver=graphcore_driver)
    strict.copy_(ids=[1] * 4, bias=[5.0] * 4)
    assert lookup.run() == [15.0] * 4
    with pytest.raises(ConfigurationError, match="missing: bias"):
        strict.copy_(ids=[2] * 4)
    assert lookup.run() == [15.0] * 4, "nothing was written"
    relaxed = StaticInputs(
        tensors, fill={"ids": 0, "bias": 0.0}, optional=["bias"], driver=graphcore_driver
    )
    relaxed.copy_(ids=[2] * 4)
    assert lookup.run() == [20.0] * 4


def test_a_poisoned_fill_value_shows_who_reads_the_tail(graphcore_driver: Driver) -> None:
    lookup = Lookup(graphcore_driver)
    inputs = StaticInputs(
        {"ids": lookup.ids, "bias": lookup.bias},
        fill={"ids": 0, "bias": float("nan")},
        driver=graphcore_driver,
    )
    inputs.copy_(ids=[1], bias=[1.0])
    first, *tail = lookup.run()
    assert first == 11.0
    assert all(value != value for value in tail)
