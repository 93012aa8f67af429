"""Requests decoded by a small random model with experts in slots, under any options."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from graphcore.cli.moe_model import DecoderShape, RandomDecoder
from graphcore.driver import Driver
from graphcore.moe import (
    DecodedStep,
    DecodeLoop,
    DecodeRequest,
    GraphReuse,
    OverlappedDecode,
)

SHAPE = DecoderShape(
    layers=1, hidden=32, heads=2, experts=6, expert_width=16, vocabulary=61, positions=40, bucket=8
)
REQUESTS = (DecodeRequest(1, 5, 19), DecodeRequest(2, 9, 11), DecodeRequest(3, 11, 7))
SETTINGS = list(product((0, 1), (0, 1)))
"""(decode_boundary_overlap, decode_overlap)"""


@dataclass
class Decoding:
    """A model, what runs it, and what its requests got."""

    driver: Driver
    boundary: int = 0
    overlap: int = 0
    slots: int = 4
    shape: DecoderShape = SHAPE
    make_watch: Callable[[GraphReuse], Any] | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    steps: list[DecodedStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = RandomDecoder(self.shape, self.slots, self.driver, seed=3)
        self.reuse = GraphReuse(
            driver=self.driver, pool=self.model.pool, manifests=self.model.manifests,
            decode_boundary_overlap=self.boundary, decode_overlap=self.overlap,
        )  # fmt: skip
        self.watch = None if self.make_watch is None else self.make_watch(self.reuse)
        self.decode = OverlappedDecode(self.reuse, self.model, watch=self.watch)
        self.loop = DecodeLoop(self.decode)

    def run(
        self,
        requests: Iterable[DecodeRequest] = REQUESTS,
        after: Callable[[Decoding, DecodedStep], object] = lambda *_: None,
    ) -> dict[int, list[int]]:
        """What each request got; ``after`` is told of each step."""
        self.tokens = {}
        for step in self.loop.run(requests):
            self.steps.append(step)
            for number, token in step.tokens.items():
                self.tokens.setdefault(number, []).append(token)
            after(self, step)
        return self.tokens


def expected(driver: Driver, requests: Iterable[DecodeRequest] = REQUESTS) -> dict[int, list[int]]:
    """What requests get with no option on, each alone in the batch."""
    made: dict[int, list[int]] = {}
    decoding = Decoding(driver)
    for request in requests:
        made |= decoding.run([request])
    return made
