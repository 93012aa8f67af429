"""Random steps of torch, with branches: captured, launched and updated they do what eager does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.decode_models import device_of
from helpers.garbage import bounded
from hypothesis import given
from hypothesis import strategies as st

import graphcore
from graphcore import UpdateStatus
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver

COUNT, TENSORS = 6, 6
Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Operation:
    """One operation of torch: what it does to ``target``, from ``first`` and ``second``."""

    name: str
    target: int
    first: int
    second: int

    def run(self, tensors: Tensors) -> None:
        target, a, b = (tensors[at] for at in (self.target, self.first, self.second))
        if self.name == "add":
            target.copy_(a + b)
        elif self.name == "scaled":
            target.add_(a, alpha=3)
        elif self.name == "where":
            target.copy_(torch.where(a > b, a, b - 1))
        elif self.name == "fill":
            target.fill_(float(self.first))
        elif self.name == "outer":
            target.copy_((a[:, None] * b[None, :]).sum(dim=0))
        else:
            target.copy_(a.flip(0))
        target.remainder_(97)  # small whole numbers: no way of rounding can differ


@dataclass(frozen=True)
class Branch:
    """Two parts that touch no tensor of each other, on streams of their own."""

    side: Sequence[Operation]
    main: Sequence[Operation]


Program = Sequence[Operation | Branch]
NAMES = ["add", "scaled", "where", "fill", "outer", "flip"]


def operations(low: int, high: int) -> st.SearchStrategy[Operation]:
    """Over the tensors from ``low`` up to ``high``."""
    at = st.integers(low, high - 1)
    return st.builds(Operation, st.sampled_from(NAMES), at, at, at)


_halves = st.builds(
    Branch,
    st.lists(operations(0, TENSORS // 2), min_size=1, max_size=3),
    st.lists(operations(TENSORS // 2, TENSORS), min_size=1, max_size=3),
)
programs = st.lists(operations(0, TENSORS) | _halves, min_size=1, max_size=5)


def run_eagerly(program: Program, tensors: Tensors) -> None:
    for step in program:
        parts = (step,) if isinstance(step, Operation) else (*step.side, *step.main)
        for each in parts:
            each.run(tensors)


def capture(program: Program, tensors: Tensors, driver: Driver) -> graphcore.Graph:
    with graphcore.capture(driver=driver) as capturing:
        for tensor in tensors:
            capturing.keep(tensor)
        for step in program:
            if isinstance(step, Operation):
                step.run(tensors)
                continue
            with capturing.fork(join=False) as side:
                for each in step.side:
                    each.run(tensors)
            for each in step.main:
                each.run(tensors)
            side.join()
    return capturing.graph


def begin(tensors: Tensors) -> None:
    for number, tensor in enumerate(tensors):
        tensor.copy_(torch.arange(COUNT) * (number + 1) % 7)


def expected(program: Program, times: int) -> list[list[float]]:
    tensors = [torch.zeros(COUNT) for _ in range(TENSORS)]
    begin(tensors)
    for _ in range(times):
        run_eagerly(program, tensors)
    return [tensor.tolist() for tensor in tensors]


def launched(executable: Any, tensors: Tensors, driver: Driver, times: int) -> list[list[float]]:
    begin(tensors)
    driver.synchronize()
    for _ in range(times):
        executable.launch()
    driver.synchronize()
    return [tensor.tolist() for tensor in tensors]


def check(driver: Driver, written: Sequence[Program]) -> None:
    tensors = [torch.zeros(COUNT, device=device_of(driver)) for _ in range(TENSORS)]
    # a library's first call is no business of the captures
    run_eagerly([Operation(name, 0, 1, 2) for name in NAMES], tensors)
    executable = None
    for program in written:
        graph = capture(program, tensors, driver)
        if executable is None:
            executable = graph.instantiate()
        else:
            possible = graphcore.diff(executable.snapshot(), graph.snapshot()).update_possible
            outcome = executable.update(graph)
            assert (outcome.status is UpdateStatus.UPDATED) == possible
        assert launched(executable, tensors, driver, 2) == expected(program, 2)


@bounded(60)
@given(written=st.lists(programs, min_size=1, max_size=4), seed=st.integers(0, 99))
def test_random_captures_in_any_order_of_their_nodes_and_updates_between_them_do_what_eager_does(
    written: list[Program], seed: int
) -> None:
    check(EmulatedDriver(order="adversarial", seed=seed), written)


@pytest.mark.gpu
@bounded(25)
@given(written=st.lists(programs, min_size=1, max_size=4))
def test_random_captures_and_updates_between_them_do_on_a_device_what_eager_does(
    written: list[Program],
) -> None:
    check(graphcore.open_driver("cuda"), written)
