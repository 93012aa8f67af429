"""Plans turned into work with a fault at every call: nothing is left, and the next time works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphcore_kernels import strided_copy
from helpers.every_fault import each_fault, interrupts_instead
from helpers.kernels import (
    ONE_BLOCK,
    add_one,
    axpy,
    count_down,
    fill_value,
    scale,
    set_value,
)

from graphcore import GraphPlan
from graphcore.driver.emulated import EmulatedDriver

ROWS, COLUMNS = 4, 6
COUNT = ROWS * COLUMNS


def everything() -> GraphPlan:
    """A plan with a node of each kind that all ways take."""
    plan = GraphPlan("everything")
    x, y = plan.buffer("x", (ROWS, COLUMNS)), plan.buffer("y", (ROWS, COLUMNS))
    counter = plan.buffer("counter", (1,), "int32")
    plan.launch(add_one, ONE_BLOCK, x, COUNT)
    plan.memcpy(y[:, ::2], x[::-1, ::2])
    plan.memset(x[1], 2.0)
    scratch = plan.allocate("scratch", (COUNT,))
    plan.launch(fill_value, ONE_BLOCK, scratch, 3.0, COUNT)
    plan.launch(axpy, ONE_BLOCK, 1.0, scratch, y, COUNT)
    plan.deallocate(scratch)
    done = plan.event("done")
    plan.record(done)
    plan.wait(done)
    inner = GraphPlan("inner")
    inner.launch(scale, ONE_BLOCK, inner.buffer("z", (COUNT,)), 2.0, COUNT)
    plan.embed(inner, {"z": x.reshape(COUNT)})
    plan.memset(counter, 2)
    more = plan.condition("more", default=1)
    with plan.while_loop(more) as body:
        body.memcpy(x, y)
        chosen = plan.condition("chosen")
        body.launch(set_value, ONE_BLOCK, chosen, 1)
        with body.if_then(chosen) as taken:
            taken.launch(scale, ONE_BLOCK, y, 0.5, COUNT)
        body.launch(count_down, ONE_BLOCK, more, counter)
    plan.call(torch.Tensor.add_, x, 1.0)
    plan.callback(_nothing)
    return plan


def _nothing() -> None:
    """A host callback."""


class Site:
    """Buffers for the plan, and what they hold after its work."""

    def __init__(self, driver: EmulatedDriver) -> None:
        self.driver, self.plan = driver, everything()
        self.buffers = {
            "x": torch.zeros(ROWS, COLUMNS),
            "y": torch.zeros(ROWS, COLUMNS),
            "counter": torch.zeros(1, dtype=torch.int32),
        }
        self.begin()

    def begin(self) -> None:
        for number, tensor in enumerate(self.buffers.values()):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) * (number + 1))

    def contents(self) -> list[Any]:
        return [tensor.tolist() for tensor in self.buffers.values()]

    def make(self, way: str) -> Any:
        return getattr(self.plan, way)(self.buffers, driver=self.driver, copy_kernel=strided_copy)

    def run(self, way: str) -> list[Any]:
        """What a run of the plan leaves."""
        self.begin()
        made = self.make(way)
        if way == "compile":
            made.launch()
        elif way != "run":
            made.instantiate().launch()
        return self.contents()


@pytest.mark.parametrize("interrupted", [False, True], ids=["failure", "interrupt"])
@pytest.mark.parametrize("way", ["build", "capture", "compile", "run"])
@pytest.mark.filterwarnings("ignore::graphcore.GraphcoreWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_failure_at_any_call_leaves_nothing_and_the_next_time_works(
    way: str, interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Site(EmulatedDriver()).run("build")
    untouched = Site(EmulatedDriver()).contents()
    assert right != untouched
    if interrupted:
        interrupts_instead(monkeypatch)
    failed = 0
    for driver, faulted in each_fault(Site, lambda site: site.make(way)):
        site = faulted.state
        if faulted.error is not None:
            failed += 1
            is_given_back = interrupted and "destroy" in faulted.where
            assert is_given_back or faulted.leaves_nothing(driver), faulted.where
            if way != "run":
                assert site.contents() == untouched, faulted.where
        assert site.run(way) == right, faulted.where
    assert failed > 5
