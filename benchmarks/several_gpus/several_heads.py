"""A Qwen3-MoE shape, its heads and its experts over all ranks, which decode one conversation."""

from __future__ import annotations

from typing import Any

import torch
from several_expert import config_of, model_of
from several_mixture import compare, timed
from several_outcome import Outcome
from several_tensor import parts_of

from graphcore.decode import CUDAGraphAR
from graphcore.moe import accelerate
from graphcore.parallel import TensorParallelAR, spread_experts

_ROOM = 32


def run(ranks: Any, *, small: bool, steps: int) -> Outcome:
    """The tokens equal one GPU's and eager ones, in float32; tokens per second."""
    count = steps or (8 if small else 128)
    config = config_of(small)
    prompt = torch.tensor([[1, 17, 42, 5, 9, 60, 33, 2]], device=ranks.device)
    sizes = {"max_seq_len": count + _ROOM}
    found: dict[str, tuple[list[int], float]] = {}
    whole = model_of(ranks, config)
    model = parts_of(ranks, whole, torch.float32, whole_experts=True)
    with accelerate(whole, config.num_experts), CUDAGraphAR(whole, **sizes) as runner:
        found["one GPU, captured"] = timed(ranks, runner, prompt, count)
    del whole
    here = config.num_experts // ranks.size
    outcome = Outcome()
    for slots in dict.fromkeys((here, max(1, here // 2))):
        ways = {
            f"ranks, eager, {slots} slots": {"capture": False},
            f"ranks, captured, {slots} slots, agreed every 1": {},
            f"ranks, captured, {slots} slots, agreed every 16": {"agree_every": 16},
        }
        with spread_experts(model, ranks, slots) as handle:
            for name, options in ways.items():
                with TensorParallelAR(model, ranks=ranks, **sizes, **options) as runner:
                    found[name] = timed(ranks, runner, prompt, count)
            outcome.expect(not handle.faults(), f"faults: {handle.faults()}")
            outcome.figures[f"hit rate, {slots} slots"] = round(handle.hit_rate, 4)
    outcome.lines.append(
        f"Qwen3-MoE shape, {config.num_hidden_layers} layers, float32, {count} tokens, "
        f"{ranks.size} ranks, {config.num_key_value_heads // ranks.size} heads of K and V and "
        f"{here} experts a rank"
    )
    compare(outcome, found, count, of="")
    return outcome
