"""What no product of suite grouped can beat: reading its weights, and multiplying as much densely.

Both are measured on sizes of their own, in the rounds of the products that are held against them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from graphcore.bench.harness import Arm, Effort
from graphcore.bench.replays import Replayed, replayed, torch_device
from graphcore.bench.streaming_read import StreamingRead
from graphcore.bench.suites.grouped_cases import DENSE, Case
from graphcore.driver import Driver, Stream

_TURNS = 4
_SIDES = {"bf16": 8192, "ieee": 4096, "tf32x3": 4096, "tf32": 8192}
_SMALL_SIDE = 64
_BURST_SECONDS = 5e-3


class Floors:
    """The floors of all cases, each made when it is first wanted.

    Args:
        driver: Where.
        stream: A blocking stream of ours.
        note: Is told (what, unit, value) of each floor as it is made.
    """

    def __init__(
        self, driver: Driver, stream: Stream, note: Callable[[str, str, float], None]
    ) -> None:
        self._driver, self._stream, self._note = driver, stream, note
        self._read = StreamingRead(driver, stream)
        note("streaming read", "TB/s", self._read.bytes_a_second / 1e12)
        self._dense: dict[str, tuple[Replayed, float]] = {}

    def read(self, nbytes: float) -> Arm:
        """Reading ``nbytes`` of memory once."""
        return self._read.replayed.arm(share=nbytes / self._read.nbytes, turns=_TURNS)

    def dense(self, case: Case) -> Arm:
        """A dense product of torch of as many flops as a call of ``case`` has.

        Of "tf32x3", which torch has not, it is that of float32 in IEEE's arithmetic.
        """
        made, flops = self._product(case.precision)
        return made.arm(share=case.flops / flops, turns=_TURNS)

    def _product(self, precision: str) -> tuple[Replayed, float]:
        """(the product, its flops)."""
        if precision not in self._dense:
            side = _SMALL_SIDE if self._driver.is_emulated else _SIDES[precision]
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            device = torch_device(self._driver)
            a, b, out = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(3))
            with _products_of_float32("high" if precision == "tf32" else "highest"):
                calls = [lambda stream: torch.mm(a, b, out=out)]
                made = replayed(DENSE, self._driver, self._stream, calls)
            seconds = min(made.arm().burst(_TURNS) for _ in range(3)) / _TURNS
            flops = 2.0 * side**3
            self._dense[precision] = made, flops
            what = "bf16" if precision == "bf16" else "float32"
            rate = flops / seconds / 1e12
            self._note(f"dense product, {what} (for {precision})", "TFLOP/s", rate)
        return self._dense[precision]


@contextmanager
def _products_of_float32(precision: str) -> Iterator[None]:
    """Torch's products of float32 that are captured inside are of this precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def effort_of(driver: Driver, rounds: int, floor: Arm, calls: int) -> Effort:
    """So many turns of ``calls`` calls that a burst at the floor's speed takes milliseconds."""
    if driver.is_emulated:
        return Effort(rounds=1, bursts=1, calls=1)
    turns = max(1, round(_BURST_SECONDS / floor.burst(calls)))
    return Effort(rounds=rounds, bursts=1, calls=turns * calls)
