"""The tensors of one case of suite copy, rotated past the caches, and what must come out.

Sources hold random bits (NaN with payloads, denormals and -0.0 among them), destinations poison
before a check. A copy is right where every word of the destination's storage is as it must be, the
words between the views too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from graphcore.bench.suites.copy_cases import CopyCase, bytes_touched
from graphcore.errors import GraphcoreError

Pair = tuple[torch.Tensor, torch.Tensor]
"""(destination, source) of a call."""

FEWEST_CALLS = 8
"""Of a graph, so that the gap between two launches of it does not count."""

_POISON = 0x7FC0DEAD  # NaN with a payload of its own
_BITS = 1 << 31


class CopyOperands:
    """Sources, destinations, and the pairs that calls copy in turn.

    Args:
        case: Which.
        device: Of torch.
        cached: Bytes that caches may hold: memory is used again after more than that. Cases that
            write many places of one storage, a few words each, stay smaller.
    """

    def __init__(self, case: CopyCase, device: str, cached: int) -> None:
        self.case = case
        first = self._make(device)
        views = case.destinations(first[1])
        moved = bytes_touched(views[0]) + bytes_touched(case.source(first[0]))
        sets = 1 if len(views) > 1 else max(1, -(-cached // moved))
        self._sets = [first, *(self._make(device) for _ in range(sets - 1))]
        self.bytes_moved = moved
        pairs = [
            (view, case.source(src)) for src, dst in self._sets for view in case.destinations(dst)
        ]
        self.pairs: list[Pair] = pairs * max(1, -(-FEWEST_CALLS // len(pairs)))

    def check(self, name: str, run: Callable[[], object]) -> None:
        """Poisons the destinations, runs all calls once, and looks at every word.

        Args:
            name: Of the arm.
            run: Runs the calls and waits for them.

        Raises:
            GraphcoreError: Words differ; says how many.
        """
        for _, dst in self._sets:
            dst.view(torch.int32).fill_(_POISON)
        _wait(self._sets[0][1])
        run()
        for src, dst in self._sets:
            expected = torch.full_like(dst, _POISON, dtype=torch.int32)
            for view in self.case.destinations(expected):
                view.copy_(self.case.source(src.view(torch.int32)))
            wrong = int((expected != dst.view(torch.int32)).sum())
            if wrong:
                raise GraphcoreError(
                    f"bench copy: {self.case.name}: arm {name}: expected a copy bit for bit and "
                    f"nothing else written, got {wrong} wrong words of {expected.numel()}"
                )

    def _make(self, device: str) -> Pair:
        return random_bits(self.case.src, device), random_bits(self.case.dst, device)


def random_bits(shape: tuple[int, ...], device: str) -> torch.Tensor:
    """float32 of random bits."""
    words = torch.randint(-_BITS, _BITS, shape, dtype=torch.int32, device=device)
    return words.view(torch.float32)


def _wait(tensor: torch.Tensor) -> None:
    """Until what torch's current stream does to ``tensor`` is done: arms run on another one."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
