"""One rank: every collective inside a captured graph, and a process that exits with them open."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from several_outcome import Outcome

import graphcore
from graphcore.errors import CaptureError
from graphcore.parallel import warm_up

_kept: list[Any] = []
"""Graphs that nobody closes: the end of the process has to."""


def run(ranks: Any, *, small: bool, steps: int) -> Outcome:
    """Replays equal eager results, new communicators are refused; lines of a table."""
    size, device = ranks.size, ranks.device
    count = (64 if small else 1 << 20) * size
    x = torch.randn(count, device=device)
    gathered = torch.zeros(count * size, device=device)
    swapped, reduced = torch.zeros_like(x), torch.zeros(count // size, device=device)
    total = torch.zeros_like(x)

    def step() -> None:
        total.copy_(x)
        dist.all_reduce(total)
        dist.all_gather_into_tensor(gathered, x)
        dist.reduce_scatter_tensor(reduced, x)
        dist.all_to_all_single(swapped, x)

    results = (total, gathered, reduced, swapped)
    graph = graphcore.capture_function(step, warmup=2)
    executable = graph.instantiate()
    labels = [each for each in graph.owners.labels() if "communicator" in each]
    assert labels, f"expected a graph that keeps its communicator, got {graph.owners}"
    for _ in range(3):
        x.normal_()
        for each in results:
            each.fill_(float("nan"))
        executable.launch()
        _wait(device)
        replayed = [each.clone() for each in results]
        step()
        _wait(device)
        for name, mine, eager in zip(
            ("sum", "all", "part", "swap"), replayed, results, strict=True
        ):
            assert torch.equal(mine, eager), name
    group = dist.new_group()
    refused = _refusal(total, group)
    assert "has run a collective before" in refused, refused
    warm_up(group)
    with graphcore.capture() as capture:
        dist.all_reduce(total, group=group)
    _kept.extend((graph, executable, capture.graph, capture.graph.instantiate()))
    _kept[-1].launch()
    rounds = steps or 200
    title = f"{size} rank, {dist.get_backend()}, {device}: replays equal eager, {labels[0]}"
    outcome = Outcome([title])
    _time({"replay": executable.launch, "eager": step}, rounds, device, outcome)
    for _ in range(rounds):
        ranks.agree("round")
    outcome.lines.append("the process now ends with its graphs open")
    return outcome


def _time(
    works: dict[str, Callable[[], object]], rounds: int, device: Any, outcome: Outcome
) -> None:
    for name, work in works.items():
        cost = _us(work, rounds, device)
        outcome.lines.append(f"{name}: {cost:.1f} us a step")
        outcome.figures[f"{name}_us"] = round(cost, 1)


def _refusal(total: torch.Tensor, group: Any) -> str:
    """What capturing a communicator that has run nothing says."""
    try:
        with graphcore.capture():
            dist.all_reduce(total, group=group)
    except CaptureError as error:
        return str(error)
    return "captured"


def _us(work: Callable[[], object], rounds: int, device: Any) -> float:
    _wait(device)
    begun = time.perf_counter()
    for _ in range(rounds):
        work()
    _wait(device)
    return (time.perf_counter() - begun) / rounds * 1e6


def _wait(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
