"""Tensors of torch's that move in place: a step that is told, or sees it, reads where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.tensors import device_of, filled

from graphcore import CacheTypeError, GraphPlan
from graphcore.driver import Driver
from graphcore.moe import CallableStep, GraphReuse, Kind, PlanStep


def _exchange(x: torch.Tensor) -> None:
    x.data = torch.full_like(x, 5.0)


def _resize(x: torch.Tensor) -> None:
    x.resize_(1 << 16)
    x.resize_(4).fill_(5.0)


def _set(x: torch.Tensor) -> None:
    x.set_(torch.full_like(x, 5.0))


MOVES: dict[str, Callable[[torch.Tensor], object]] = {
    "data": _exchange, "resize_": _resize, "set_": _set,
}  # fmt: skip


def callable_step(x: torch.Tensor, out: torch.Tensor, driver: Driver) -> CallableStep:
    return CallableStep("twice", lambda: out.copy_(x), tensors={"x": x, "out": out}, driver=driver)


def plan_step(x: torch.Tensor, out: torch.Tensor, driver: Driver) -> PlanStep:
    plan = GraphPlan("copy")
    source, target = (plan.buffer(name, (4,), "float32") for name in ("x", "out"))
    plan.memcpy(target, source)
    return PlanStep("copy", plan, {"x": x, "out": out}, driver=driver)


@pytest.mark.parametrize("make", [callable_step, plan_step])
@pytest.mark.parametrize("move", MOVES)
def test_a_step_whose_tensor_moved_in_place_reads_where_it_is_now(
    graphcore_driver: Driver, make: Any, move: str
) -> None:
    driver = graphcore_driver
    x, out = filled(driver, 1.0), filled(driver, 0.0)
    step = make(x, out, driver)

    def run() -> tuple[Kind, list[float]]:
        out.fill_(float("nan"))
        kind = reuse.run(step).kind
        driver.synchronize()
        return kind, out.tolist()

    with GraphReuse(driver=driver) as reuse:
        kinds = [run()[0] for _ in range(4)]
        assert kinds == [Kind.DIRECT, Kind.CAPTURE, Kind.REPLAY, Kind.REPLAY]
        before = step.uid
        MOVES[move](x)
        if make is callable_step:
            step.changed()
        assert step.uid != before
        assert [run() for _ in range(2)] == [(Kind.DIRECT, [5.0] * 4), (Kind.UPDATE, [5.0] * 4)]
        assert step.uid == step.uid != before
        assert run() == (Kind.REPLAY, [5.0] * 4)
        x.fill_(7.0)
        assert run() == (Kind.REPLAY, [7.0] * 4)


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_a_step_that_is_told_of_a_change_and_finds_another_kind_of_tensor_stays_what_it_was(
    graphcore_driver: Driver,
) -> None:
    x, out = filled(graphcore_driver, 1.0), filled(graphcore_driver, 0.0)
    step = callable_step(x, out, graphcore_driver)
    before = step.uid, step.records()
    x.data = torch.zeros(4, device=device_of(graphcore_driver), dtype=torch.complex32)
    with pytest.raises(CacheTypeError, match=r"x\.dtype"):
        step.changed()
    assert (step.uid, step.records()) == before
