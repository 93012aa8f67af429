"""Expert-parallel steps of a Qwen3-MoE's shape, prompts in turns: held to one GPU alone."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch
from several_outcome import Outcome
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from graphcore.moe import accelerate
from graphcore.parallel import spread_experts

_PROMPT = 16


def run(ranks: Any, *, small: bool, steps: int) -> Outcome:
    """Steps equal one GPU's within float32's rounding, updates on all ranks; lines of a table."""
    count = steps or (24 if small else 2000)
    config = config_of(small)
    here = config.num_experts // ranks.size
    slots = min(here, max(ranks.size * config.num_experts_per_tok, here // 2))
    kinds: Counter[str] = Counter()
    worst, seconds = 0.0, 0.0
    alone = model_of(ranks, config)
    with (
        accelerate(alone, config.num_experts, staging=False),
        spread_experts(model_of(ranks, config), ranks, slots) as handle,
        handle.reuse(decode_boundary_overlap=1) as reuse,
    ):
        decode, prompt = _Rows(ranks, handle, 1), _Rows(ranks, handle, _PROMPT)
        for number in range(count):
            if number % 10 == 9:
                decode.move()
            decode.fill(number)
            begun = time.perf_counter()
            kinds[reuse.run(decode.step).kind.value] += 1
            handle.driver.synchronize()
            seconds += time.perf_counter() - begun
            worst = max(worst, decode.difference(alone))
            if number % 16 == 15:
                prompt.fill(number)
                result = reuse.run(prompt.step, prompt_rows=prompt.step.rows)
                kinds[f"prompt {result.way.value}"] += 1
                worst = max(worst, prompt.difference(alone))
        outcome = Outcome()
        outcome.expect(not handle.faults(), f"faults: {handle.faults()}")
        outcome.expect(worst < 1e-4, f"difference from one GPU: {worst:.2e}")
        told = ranks.agree("kinds", value=dict(kinds)).values
        outcome.expect(all(each == told[0] for each in told), f"kinds by rank: {told}")
        updates = count // 10 - 2
        outcome.expect(kinds["update"] >= updates, f"updates: expected {updates}, got {kinds}")
        hits = ranks.agree("hits", value=handle.hit_rate).values
        name = f"rank {ranks.rank} of {ranks.size}"
        outcome.expect(name in str(reuse.report()), f"report: expected {name} in it")
    by_rank = ranks.agree("worst", value=worst).values
    outcome.lines = [
        f"Qwen3-MoE shape, {config.num_hidden_layers} layers, float32, {count} steps, "
        f"{ranks.size} ranks, {slots} slots for {here} experts a rank",
        f"  kinds on every rank: {dict(kinds)}",
        f"  greatest difference from one GPU alone by rank: "
        f"{' '.join(f'{each:.2e}' for each in by_rank)}",
        f"  hit rate by rank: {' '.join(f'{each:.0%}' for each in hits)}",
        f"  {seconds / count * 1e6:.0f} us a step, looked at one by one",
    ]
    outcome.figures = {
        "steps": count, "slots": slots, "experts_a_rank": here, "kinds_by_rank": list(told),
        "difference_by_rank": list(by_rank), "hit_rate_by_rank": list(hits),
        "us_a_step": round(seconds / count * 1e6, 1),
    }  # fmt: skip
    return outcome


def config_of(small: bool) -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "intermediate_size": 6144,
    }  # fmt: skip
    if small:
        sizes |= {
            "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
            "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "intermediate_size": 48,
        }  # fmt: skip
    return Qwen3MoeConfig(
        **sizes, vocab_size=128, num_hidden_layers=2, norm_topk_prob=True, eos_token_id=None,
        initializer_range=0.2 if small else 0.03,
    )  # fmt: skip


def model_of(ranks: Any, config: Any) -> Any:
    torch.manual_seed(4321)
    with ranks.device:
        model = Qwen3MoeForCausalLM(config).eval()
    model.set_experts_implementation("batched_mm")
    return model


class _Rows:
    """The layers over static rows of this rank; the output has two places, which take turns."""

    def __init__(self, ranks: Any, handle: Any, rows: int) -> None:
        self.handle, self.rank, self.rows = handle, ranks.rank, rows
        self.x = torch.zeros(1, rows, handle.model.config.hidden_size, device=ranks.device)
        self.places = [torch.zeros_like(self.x) for _ in range(2)]
        hidden = torch.ones(rows, rows, dtype=torch.bool, device=ranks.device).triu(1)
        none = torch.zeros(1, 1, rows, rows, device=ranks.device)
        self.mask = none.masked_fill(hidden, torch.finfo(torch.float32).min)
        tensors = {"x": self.x, "out": self.places[0]}
        self.step = handle.step("layers", self.run, tensors=tensors, rows=rows)

    def run(self) -> None:
        self.places[0].copy_(self._of(self.handle.model))

    def move(self) -> None:
        self.places.reverse()
        self.step.set("out", self.places[0])

    def fill(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(1000 * seed + self.rank)
        self.x.copy_(torch.randn(self.x.shape, generator=draw))
        for each in self.places:
            each.fill_(float("nan"))

    def difference(self, alone: Any) -> float:
        """The greatest difference from what one GPU alone computes, of the greatest value."""
        wanted = self._of(alone)
        found = (self.places[0] - wanted).abs().max() / wanted.abs().max()
        return float("inf") if bool(found.isnan()) else float(found)

    @torch.no_grad()
    def _of(self, model: Any) -> torch.Tensor:
        out = model.model(inputs_embeds=self.x, attention_mask=self.mask, use_cache=False)
        found: torch.Tensor = out.last_hidden_state
        return found
