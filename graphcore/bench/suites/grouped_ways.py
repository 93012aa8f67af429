"""How a product of suite grouped is done: by our kernel, by torch, by a loop, by Triton.

A way is a function of a case's calls that plans, and makes what it needs, before it is timed. It
gives a product for each call. Peers are told on the host what ours reads on the device: which rows
belong to whom; that is in nobody's time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from graphcore_kernels import moe_grouped_gemm

from graphcore.bench.suites.grouped_operands import GroupedCall
from graphcore.driver import Driver, Stream
from graphcore.errors import ConfigurationError, GraphcoreError

OURS = "ours"
GROUPED_MM, LOOP, TRITON = "torch grouped_mm", "torch loop", "Triton"


class Product:
    """One product of one way.

    Args:
        launch: Puts it on the stream, which is torch's current one; may give the result.
        out: The result, where it is the same at each launch.
        check: Raises where the device has reported something.
    """

    def __init__(
        self,
        launch: Callable[[Stream], torch.Tensor | None],
        out: torch.Tensor | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._launch, self._out, self.check = launch, out, check

    def __call__(self, stream: Stream) -> None:
        found = self._launch(stream)
        if found is not None:
            self._out = found

    @property
    def out(self) -> torch.Tensor:
        """What the newest launch, or the newest capture's replays, write."""
        assert self._out is not None
        return self._out


Way = Callable[[Driver, Stream, Sequence[GroupedCall]], list[Product]]
"""(driver, stream, calls) -> their products."""


def ours(
    driver: Driver, stream: Stream, calls: Sequence[GroupedCall], form: str | None = None
) -> list[Product]:
    """A planned ``moe_grouped_gemm``; slots in order, read on the device all the same.

    Args:
        driver: Where.
        stream: Of the products.
        calls: What they multiply.
        form: Of the product; None: what suits it.
    """
    return [_ours(driver, call, form) for call in calls]


def _ours(driver: Driver, call: GroupedCall, form: str | None) -> Product:
    routed, out = call.routed, call.new_out()
    slots = torch.arange(call.case.shape.experts, dtype=torch.int32, device=out.device)
    precision = "ieee" if call.case.precision == "bf16" else call.case.precision
    plan = moe_grouped_gemm.plan(
        routed.x, call.weights, routed.offsets, slots, out, precision=precision, form=form,
        driver=driver,
    )  # fmt: skip

    def check() -> None:
        fault = plan.read_fault()
        if fault is not None:
            raise GraphcoreError(f"bench grouped: {call.case.name}: {fault}")

    return Product(plan.launch, out, check)


def grouped_mm(driver: Driver, stream: Stream, calls: Sequence[GroupedCall]) -> list[Product]:
    """``F.grouped_mm``, or ``torch._grouped_mm`` where torch has no public one yet."""
    del driver, stream
    functional: Any = torch.nn.functional
    multiply: Any = getattr(functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if multiply is None:
        raise ConfigurationError("torch: expected one with grouped_mm")

    def product(call: GroupedCall) -> Product:
        x, ends, weights = call.routed.x, call.routed.ends, call.weights.transpose(1, 2)
        return Product(lambda stream: multiply(x, weights, offs=ends))

    return [product(call) for call in calls]


def loop(driver: Driver, stream: Stream, calls: Sequence[GroupedCall]) -> list[Product]:
    """A product of torch for each expert that has rows."""
    del driver, stream

    def product(call: GroupedCall) -> Product:
        out, parts = call.new_out(), []
        starts = call.routed.routing.offsets.tolist()
        for expert, (start, end) in enumerate(pairwise(starts)):
            if end > start:
                rows = slice(start, end)
                parts.append((call.routed.x[rows], call.weights[expert].t(), out[rows]))

        def launch(stream: Stream) -> None:
            for x, weights, part in parts:
                torch.mm(x, weights, out=part)

        return Product(launch, out)

    return [product(call) for call in calls]


def triton(driver: Driver, stream: Stream, calls: Sequence[GroupedCall]) -> list[Product]:
    """A kernel in Triton, with the fastest of a few tile sizes."""
    module = importlib.import_module("graphcore.bench.suites.grouped_triton")
    made: list[Product] = module.fastest(driver, stream, calls)
    return made


PEERS: Mapping[str, Way] = {GROUPED_MM: grouped_mm, LOOP: loop, TRITON: triton}
EMULATED_PEERS: Mapping[str, Way] = {GROUPED_MM: grouped_mm, LOOP: loop}


def can_be_captured(name: str, precision: str) -> bool:
    """Whether a way reads nothing back: torch's grouped product of float32 reads the offsets."""
    return name != GROUPED_MM or precision == "bf16"
