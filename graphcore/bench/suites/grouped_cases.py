"""The cases of suite grouped: shapes, tokens, routings, and what each is to reach.

Routings are drawn on the host, once for each call of an arm: uniform ones choose among all experts
alike, those of Zipf's law the r-th most popular expert with a weight of 1/r.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from graphcore.bench.targets import Target

READ, DENSE = "streaming read", "dense product"
"""What bounds a case: reading the weights of the experts that are hit, or multiplying."""

OF_BALANCED = 0.92
"""What Zipf's routings are to reach of uniform ones, each against its own floor."""

_ITEMSIZES = {"bf16": 2, "ieee": 4, "tf32x3": 4, "tf32": 4}
_F32_TARGETS = {"ieee": Target(of_floor=0.9), "tf32x3": Target(of_floor=2.2, error=2e-6)}
_MOST_READ = 512  # tokens, up to which a case is bound by reading


@dataclass(frozen=True, slots=True)
class Shape:
    """Experts of one product: ``top_k`` of ``experts`` multiply a row by ``[columns, depth]``."""

    name: str
    experts: int
    top_k: int
    depth: int
    columns: int


class Case(Protocol):
    """What a case of one product and one of a whole layer have in common."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def tokens(self) -> int: ...
    @property
    def skew(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def target(self) -> Target: ...
    @property
    def bound(self) -> str: ...
    @property
    def flops(self) -> int: ...
    def weight_bytes(self, experts_hit: float) -> float: ...


@dataclass(frozen=True, slots=True)
class GroupedCase:
    """A product of a number of tokens.

    Args:
        shape: Of the weights.
        tokens: Of a call.
        skew: "uniform" or "zipf".
        precision: "bf16", or that of float32: "ieee", "tf32x3" or "tf32".
        target: On an H200.
    """

    shape: Shape
    tokens: int
    skew: str
    precision: str
    target: Target

    @property
    def name(self) -> str:
        parts = [self.shape.name, f"T={self.tokens}"]
        parts += [] if self.precision == "bf16" else [self.precision]
        parts += [] if self.skew == "uniform" else [self.skew]
        return " ".join(parts)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def bound(self) -> str:
        """READ or DENSE."""
        is_read = self.precision == "bf16" and self.tokens <= _MOST_READ
        return READ if is_read else DENSE

    @property
    def flops(self) -> int:
        """Of a call: a multiplication and an addition for each weight of each row."""
        shape = self.shape
        return 2 * self.tokens * shape.top_k * shape.depth * shape.columns

    def weight_bytes(self, experts_hit: float) -> float:
        """Of the experts that are hit; those of x and of the result do not count."""
        return experts_hit * self.shape.depth * self.shape.columns * _ITEMSIZES[self.precision]


@dataclass(frozen=True)
class Routing:
    """Which experts the tokens of one call chose.

    Args:
        ids: int64 ``[tokens, top_k]``, on the host; the experts of a token differ.
        experts: How many there are.
    """

    ids: torch.Tensor
    experts: int

    @cached_property
    def counts(self) -> torch.Tensor:
        """Rows of each expert."""
        return torch.bincount(self.ids.flatten(), minlength=self.experts)

    @cached_property
    def offsets(self) -> torch.Tensor:
        """int32 ``[experts + 1]``: where the rows of each begin."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.counts.cumsum(0)]).int()

    @property
    def rows(self) -> int:
        return self.ids.numel()

    @property
    def hit(self) -> int:
        """Experts with rows."""
        return int((self.counts > 0).sum())


def draw(case: Case, generator: torch.Generator) -> Routing:
    """A routing of the case, by Gumbel's trick: ``top_k`` without repetition in each row."""
    experts, top_k = case.shape.experts, case.shape.top_k
    noise = torch.rand(case.tokens, experts, generator=generator).clamp_min(1e-9)
    scores = -torch.log(-torch.log(noise))  # below 1 always, so that no logarithm is of 0
    if case.skew == "zipf":
        ranks = torch.randperm(experts, generator=generator) + 1
        scores -= torch.log(ranks)
    return Routing(scores.topk(top_k, dim=1).indices, experts)


_TABLE: Mapping[Shape, Mapping[int, float]] = {
    Shape("mixtral-up", 8, 2, 4096, 28672): {
        1: 0.90, 8: 0.93, 64: 0.93, 4096: 0.90, 16384: 0.90
    },
    Shape("qwen3-up", 128, 8, 2048, 1536): {
        1: 0.75, 8: 0.90, 64: 0.93, 512: 0.93, 4096: 0.70, 16384: 0.85
    },
    Shape("qwen3-down", 128, 8, 768, 2048): {1: 0.65, 8: 0.88, 64: 0.92, 512: 0.92},
    Shape("deepseek-up", 32, 8, 7168, 4096): {8: 0.93, 64: 0.93, 16384: 0.90},
}  # fmt: skip
"""Tokens -> share of the floor."""

_SMALL: Mapping[Shape, Mapping[int, float]] = {
    Shape("mixtral-up", 4, 2, 32, 48): {1: 0.9, 8: 0.9},
    Shape("qwen3-up", 8, 3, 24, 16): {5: 0.9},
}
_F32_TOKENS, _SMALL_F32_TOKENS = 4096, 5


def cases(*, small: bool = False) -> list[GroupedCase]:
    """All cases, those of a shape together; ``small``: for the emulated driver."""
    found: list[GroupedCase] = []
    for shape, targets in (_SMALL if small else _TABLE).items():
        for tokens, share in targets.items():
            found.append(GroupedCase(shape, tokens, "uniform", "bf16", Target(of_floor=share)))
            skewed = Target(of_floor=round(OF_BALANCED * share, 3))
            found.append(GroupedCase(shape, tokens, "zipf", "bf16", skewed))
        if shape.name == "qwen3-up":
            tokens = _SMALL_F32_TOKENS if small else _F32_TOKENS
            found += [
                GroupedCase(shape, tokens, "uniform", precision, target)
                for precision, target in _F32_TARGETS.items()
            ]
    return found
