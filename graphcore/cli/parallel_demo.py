"""``graphcore demo --parallel``: one model over several ranks, compared with one rank alone.

Started by torchrun, once for each rank. Exit status 1 on all ranks means that tokens differ on one.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from typing import Any

from graphcore.cli.demo import BANNER
from graphcore.cli.model import INSTALL_DEMO
from graphcore.cli.pages import say
from graphcore.driver import open_driver
from graphcore.errors import CapacityError, DriverUnavailable

POSITIONS = 2048
_ROOM = 64


@dataclass(frozen=True)
class ParallelDemoOptions:
    """What ``graphcore demo --parallel`` was asked for; names as on the command line."""

    parallel: str
    driver: str | None = None
    max_new_tokens: int = 64
    timeout: float = 60.0


@dataclass(frozen=True)
class Outcome:
    """What one rank came to: its tokens, those of one rank alone, and seconds of each."""

    ids: list[int]
    alone: list[int]
    seconds: float
    alone_seconds: float
    told: str


def parallel_demo(options: ParallelDemoOptions) -> int:
    """Runs the demo on this rank; rank 0 prints.

    Returns:
        0 where every rank's tokens equal those of one rank alone, else 1, on all ranks.

    Raises:
        CapacityError: More tokens than the model has positions.
        ConfigurationError: Not started by torchrun; a number of ranks that divides neither heads
            nor experts.
        DriverUnavailable: transformers, or the backend, is missing; ``--driver cuda`` without a
            usable device.
        RankError: Another rank failed or is missing.
    """
    if options.max_new_tokens > POSITIONS - _ROOM:
        raise CapacityError(
            f"max_new_tokens: expected at most {POSITIONS - _ROOM}, got {options.max_new_tokens}"
        )
    try:
        import transformers  # noqa: F401  (what decodes)

        from graphcore.parallel import Ranks
    except ImportError as error:
        raise DriverUnavailable(f"the demo needs {error.name}: {INSTALL_DEMO}") from error
    driver = open_driver(options.driver)
    backend = "gloo" if driver.is_emulated else "nccl"
    driver.close()
    run = _tensor if options.parallel == "tensor" else _expert
    with Ranks.join(backend=backend, timeout_seconds=options.timeout) as ranks:
        if ranks.rank == 0:
            say(f"{options.parallel}-parallel on {ranks.size} ranks, {backend}")
            if driver.is_emulated:
                say(f"*** {BANNER}")
        with ranks.together("demo"):
            outcome = run(ranks, options.max_new_tokens)
        equal = outcome.ids == outcome.alone
        verdicts = ranks.agree("demo", value=[equal, outcome.ids[:8]]).values
        if ranks.rank == 0:
            _report(outcome, verdicts, ranks)
    return 0 if all(each[0] for each in verdicts) else 1


def _tensor(ranks: Any, count: int) -> Outcome:
    """One conversation, decoded by all ranks together."""
    from graphcore.cli.parallel_models import random_llama, random_prompt, saved
    from graphcore.decode import CUDAGraphAR
    from graphcore.parallel import TensorParallelAR, load_sharded

    prompt = random_prompt(0, ranks.device)
    whole = random_llama()
    with tempfile.TemporaryDirectory() as folder:
        model = load_sharded(saved(whole, folder), ranks)
    whole = whole.to(ranks.device)
    with CUDAGraphAR(whole, max_seq_len=count + _ROOM) as runner:
        alone, alone_seconds = _timed(runner, prompt, count, ranks)
    with TensorParallelAR(model, ranks=ranks, max_seq_len=count + _ROOM) as runner:
        ids, seconds = _timed(runner, prompt, count, ranks)
        heads = runner.cache.layers[0].keys.shape[1]
        told = f"{runner.execution}, {runner.captures} capture, {heads} heads of K and V a rank"
    return Outcome(ids, alone, seconds, alone_seconds, told)


def _expert(ranks: Any, count: int) -> Outcome:
    """A conversation of its own on each rank, through the experts of all."""
    import torch

    from graphcore.cli.parallel_models import random_mixture, random_prompt
    from graphcore.decode import CUDAGraphAR
    from graphcore.parallel import spread_experts

    model = random_mixture().to(ranks.device)
    prompt = random_prompt(1 + ranks.rank, ranks.device)
    with CUDAGraphAR(model, max_seq_len=count + _ROOM) as runner:
        alone, alone_seconds = _timed(runner, prompt, count, ranks)
    here = model.config.num_experts // ranks.size
    slots = min(here, 2 * ranks.size)  # what a step of one row on each rank may need
    with (
        spread_experts(model, ranks, slots) as handle,
        CUDAGraphAR(model, max_seq_len=count + _ROOM, capture=False) as runner,
        handle.reuse() as reuse,
        torch.no_grad(),
    ):
        with ranks.together("prompt"):
            runner.capture(prompt)
        step = runner._step
        work = handle.step("decode", step.run, tensors=step.named_tensors(), rows=1)
        begun = time.perf_counter()
        found = []
        for _ in range(count):
            reuse.run(work)
            found.append(step.token.clone())
        handle.driver.synchronize()
        seconds = time.perf_counter() - begun
        counters = reuse.counters
        told = (
            f"{counters.replays} replays of {counters.captures} capture, {here} of "
            f"{model.config.num_experts} experts a rank in {slots} slots, hit rate "
            f"{handle.hit_rate:.0%}"
        )
    return Outcome([int(each) for each in found], alone, seconds, alone_seconds, told)


def _timed(runner: Any, prompt: Any, count: int, ranks: Any) -> tuple[list[int], float]:
    """New tokens behind ``prompt`` and their seconds, after a round that captures."""
    runner.generate(prompt, 1)
    runner.driver.synchronize()
    ranks.agree("timing")
    begun = time.perf_counter()
    ids = runner.generate(prompt, count)[0, prompt.shape[1] :].tolist()
    return ids, time.perf_counter() - begun


def _report(outcome: Outcome, verdicts: Any, ranks: Any) -> None:
    print(f"how:        {outcome.told}")
    print(f"together:   {len(outcome.ids) / outcome.seconds:.1f} tokens/s a rank")
    print(f"one alone:  {len(outcome.alone) / outcome.alone_seconds:.1f} tokens/s")
    print(f"agreeing:   {ranks.cost.mean_us:.0f} us a round, {ranks.cost.rounds} rounds")
    for rank, (equal, first) in enumerate(verdicts):
        words = "equal to one rank alone" if equal else "DIFFERENT from one rank alone"
        print(f"rank {rank}:     {words}: {' '.join(map(str, first))} ...", flush=True)
