"""A whole Qwen3-MoE shape through CUDAGraphAR, its experts over all ranks: tokens of one GPU."""

from __future__ import annotations

import time
from typing import Any

import torch
from several_expert import config_of, model_of
from several_outcome import Outcome

from graphcore.decode import CUDAGraphAR
from graphcore.moe import accelerate
from graphcore.parallel import ExpertParallelAR, spread_experts

_ROOM = 32


def run(ranks: Any, *, small: bool, steps: int) -> Outcome:
    """Each rank's tokens equal one GPU's and eager ones, in float32; tokens per second."""
    count = steps or (8 if small else 128)
    config = config_of(small)
    length = 8 + ranks.rank  # another one on each rank
    draw = torch.Generator().manual_seed(ranks.rank)
    prompt = torch.randint(1, 100, (1, length), generator=draw).to(ranks.device)
    sizes = {"max_seq_len": count + _ROOM + ranks.size}
    found: dict[str, tuple[list[int], float]] = {}
    model = model_of(ranks, config)
    with accelerate(model, config.num_experts), CUDAGraphAR(model, **sizes) as runner:
        found["one GPU, captured"] = timed(ranks, runner, prompt, count)
    here = config.num_experts // ranks.size
    outcome = Outcome()
    with spread_experts(model, ranks, here) as handle:
        ways = {
            "ranks, eager": {"capture": False},
            "ranks, captured, agreed every 1": {},
            "ranks, captured, agreed every 16": {"agree_every": 16},
        }
        for name, options in ways.items():
            with ExpertParallelAR(handle, **sizes, **options) as runner:
                found[name] = timed(ranks, runner, prompt, count)
        outcome.expect(not handle.faults(), f"faults: {handle.faults()}")
    outcome.lines.append(
        f"Qwen3-MoE shape, {config.num_hidden_layers} layers, float32, {count} tokens, "
        f"{ranks.size} ranks with a prompt each, {here} experts a rank"
    )
    compare(outcome, found, count, of="a rank")
    return outcome


def compare(
    outcome: Outcome, found: dict[str, tuple[list[int], float]], count: int, of: str
) -> None:
    """A line and figures for each way; the tokens of all must be those of the first."""
    first = next(iter(found.values()))[0]
    for name, (ids, seconds) in found.items():
        is_equal = ids == first
        outcome.expect(is_equal, f"{name}: expected the tokens of one GPU {first}, got {ids}")
        rate = count / seconds
        figure = f"tokens_per_second {of}".strip().replace(" ", "_")
        outcome.figures[name] = {figure: round(rate, 2), "equal": is_equal}
        words = "equal" if is_equal else "other"
        outcome.lines.append(f"  {name}: {rate:.1f} tokens/s {of}".rstrip() + f", {words} tokens")


def timed(ranks: Any, runner: Any, prompt: Any, count: int) -> tuple[list[int], float]:
    for _ in range(2):  # the second prompt of a runner still costs 70 ms more, once
        runner.generate(prompt, 4)
    runner.driver.synchronize()
    ranks.agree("timing")
    begun = time.perf_counter()
    ids = runner.generate(prompt, count)[0, prompt.shape[1] :].tolist()
    return ids, time.perf_counter() - begun
