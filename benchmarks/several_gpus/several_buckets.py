"""A Qwen3-MoE shape in buckets of several lengths, its experts over ranks: tokens of one GPU."""

from __future__ import annotations

import time
from typing import Any

import torch
from several_expert import config_of, model_of
from several_mixture import compare, timed
from several_outcome import Outcome

from graphcore.decode import CUDAGraphAR
from graphcore.moe import accelerate
from graphcore.parallel import ExpertParallelBuckets, spread_experts


def run(ranks: Any, *, small: bool, steps: int) -> Outcome:
    """Each rank's tokens equal one GPU's, whole and through all buckets; tokens per second."""
    count = steps or (8 if small else 128)
    config = config_of(small)
    length = 8 + ranks.rank  # another one on each rank
    draw = torch.Generator().manual_seed(ranks.rank)
    prompt = torch.randint(1, 100, (1, length), generator=draw).to(ranks.device)
    shortest = 8 + ranks.size
    lengths = [shortest + count // 4, shortest + count // 2, shortest + count]
    found: dict[str, tuple[list[int], float]] = {}
    model = model_of(ranks, config)
    with (
        accelerate(model, config.num_experts),
        CUDAGraphAR(model, max_seq_len=lengths[-1]) as runner,
    ):
        found["one GPU, captured"] = timed(ranks, runner, prompt, count)
    here = config.num_experts // ranks.size
    outcome = Outcome()
    with (
        spread_experts(model, ranks, here) as handle,
        ExpertParallelBuckets(handle, lengths, progress=False) as buckets,
    ):
        for name, grow in (("ranks, in the largest bucket", False), ("ranks, growing", True)):
            buckets.generate(prompt, count, grow=grow)
            buckets.driver.synchronize()
            ranks.agree("timing")
            begun = time.perf_counter()
            result = buckets.generate(prompt, count, grow=grow)
            found[name] = result.new_ids[0].tolist(), time.perf_counter() - begun
            path = [each.max_seq_len for each in result.path]
            wanted = lengths if grow else lengths[-1:]
            outcome.expect(path == wanted, f"{name}: expected the buckets {wanted}, got {path}")
        outcome.expect(not handle.faults(), f"faults: {handle.faults()}")
        outcome.figures["memory"] = str(buckets.memory_report())
    outcome.lines.append(
        f"Qwen3-MoE shape, {config.num_hidden_layers} layers, float32, {count} tokens in buckets "
        f"of {lengths}, {ranks.size} ranks with a prompt each, {here} experts a rank"
    )
    compare(outcome, found, count, of="a rank")
    return outcome
