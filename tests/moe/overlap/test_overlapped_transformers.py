"""A mixture of experts of transformers, accelerated, with its next step queued while one runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.moe_decode import SETTINGS
from helpers.moe_models import VOCABULARY, device_of, make_moe
from transformers import StaticCache

from graphcore.decode.transformers_compat import cache_keyword
from graphcore.driver import Driver
from graphcore.moe import (
    AcceleratedModel,
    CallableStep,
    DecodeLoop,
    DecodeRequest,
    Kind,
    OverlappedDecode,
    Row,
    StepTrace,
    accelerate,
)

CAPACITY, PROMPT, TOKENS, BUCKET = 40, 7, 18, 16
NAMES = [f"boundary {boundary}, overlap {overlap}" for boundary, overlap in SETTINGS]


class CachedModel:
    """One row of a model over a static cache; where it stands is what the inputs say."""

    rows = devices = 1
    embeddings_on_device = is_sampled_on_device = can_roll_back = True

    def __init__(self, handle: AcceleratedModel) -> None:
        self.model, device = handle.model, handle.device
        self.inputs = torch.zeros(1, 3, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(1, dtype=torch.int64, device=device)
        # a step that is another one from each bucket on writes its logits elsewhere
        self.logits = [torch.zeros(1, VOCABULARY, device=device) for _ in range(3)]
        self.bucket = 0
        self._cache = StaticCache(config=self.model.config, max_cache_len=CAPACITY)
        self._places = torch.arange(CAPACITY, device=device)
        self.read_prompt(torch.zeros(1, 1, dtype=torch.int64, device=device))
        self.step = handle.step(
            "token", self._run, rows=1,
            tensors={"inputs": self.inputs, "tokens": self.tokens, "logits": self.logits[0]},
        )  # fmt: skip

    def read_prompt(self, ids: torch.Tensor) -> int:
        """Fills the cache with ``ids`` [1, length], eagerly; the next token."""
        for layer in self._cache.layers:
            if layer.is_initialized:
                layer.cumulative_length.zero_()
        return int(self._forward(ids, self._places[: ids.shape[1], None]).argmax())

    def grows(self, rows: Sequence[Row]) -> bool:
        return False

    def prepare(self, rows: Sequence[Row]) -> CallableStep:
        bucket = rows[0].position // BUCKET
        if bucket != self.bucket:
            self.bucket = bucket
            self.step.set("logits", self.logits[bucket])
        return self.step

    def roll_back(self, row: Row) -> None: ...

    def _run(self) -> None:
        position, given, _ = self.inputs.unbind(1)
        token = torch.where(given >= 0, given, self.tokens)
        for layer in self._cache.layers:
            layer.cumulative_length.copy_(position.view_as(layer.cumulative_length))
        logits = self._forward(token[None], position[:, None])
        self.logits[self.bucket].copy_(logits)
        self.tokens.copy_(logits.argmax(-1))

    @torch.no_grad()
    def _forward(self, ids: torch.Tensor, ends: torch.Tensor) -> Any:
        seen = (self._places <= ends)[None, None]
        cache = {cache_keyword(self.model): self._cache}
        found = self.model(ids, attention_mask=seen, logits_to_keep=1, **cache)
        return found.logits[:, -1]


@pytest.mark.parametrize(("boundary", "overlap"), SETTINGS, ids=NAMES)
def test_every_setting_gives_the_tokens_of_generate(
    boundary: int, overlap: int, graphcore_driver: Driver
) -> None:
    model = make_moe(device=device_of(graphcore_driver))
    draw = torch.Generator().manual_seed(5)
    prompts = torch.randint(3, VOCABULARY, (2, PROMPT), generator=draw).to(model.device)
    expected = [
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                       max_new_tokens=TOKENS)[0, PROMPT:].tolist()
        for ids in prompts[:, None]
    ]  # fmt: skip
    options = {"decode_boundary_overlap": boundary, "decode_overlap": overlap}
    with (
        accelerate(model, 4, driver=graphcore_driver) as handle,
        handle.reuse(**options) as reuse,
    ):
        cached = CachedModel(handle)
        trace = StepTrace(graphcore_driver).attach(reuse)
        decode = OverlappedDecode(reuse, cached, watch=trace)
        for number, ids in enumerate(prompts):
            first = cached.read_prompt(ids[None])
            request = DecodeRequest(number, first, TOKENS - 1, position=PROMPT)
            steps = list(DecodeLoop(decode).run([request]))
            got = [first, *(step.tokens[number] for step in steps)]
            assert got == expected[number]
        assert handle.faults() == {}
        assert decode.totals.ahead == (len(prompts) * (TOKENS - 2) if overlap else 0)
        kinds = {kind: total.calls for kind, total in reuse.totals.items()}
        # a boundary in each request, and one back to the first bucket
        updates = kinds.get(Kind.UPDATE, 0) + kinds.get(Kind.REINSTANTIATE, 0)
        assert (updates, kinds.get(Kind.DECLINED, 0)) == ((3, 0) if boundary else (0, 3))
        report = reuse.report(decode=decode, trace=trace)
    assert report.hit_rate is not None
    assert 0 < report.hit_rate < 1
    assert sum(calls for _, calls, _ in report.device_seconds) == decode.totals.steps
