"""The notes of suite update on whole steps: how much longer they take where each is changed first.

Wall time of a run of steps, the device always busy, over one of the same steps that nobody changes.
Executables are used as users use them: made, changed, launched.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from graphcore.bench.suites.chain import Chain
from graphcore.bench.suites.update_nodes import NodeChanges
from graphcore.bench.suites.update_pairs import Step
from graphcore.driver import Driver, Stream
from graphcore.executable import Graph
from graphcore.graph import diff

Note = Mapping[str, Any]

FEW = 3
"""A decode boundary: KV extent, output address and row count sit in three of a step's nodes."""

CHAINS = ((415, 1000), (700, 0))
"""(nodes, nanoseconds a node) of steps of about 700 us: like a decode step, and of empty nodes."""

_STEPS = 200


def chain_steps(driver: Driver, stream: Stream) -> list[Note]:
    """Steps that are chains of equal kernels: every node changed, a few, or another executable."""
    notes: list[Note] = []
    for length, nanoseconds in ((16, 0),) if driver.is_emulated else CHAINS:
        one, other = (Chain(driver, stream, length, nanoseconds=nanoseconds) for _ in range(2))
        ways = {
            **whole_steps((one.graph, other.graph), stream),
            f"changing {FEW} nodes": NodeChanges((one, other), FEW).step,
        }
        notes += compare(driver, f"{length} nodes", ways)
    return notes


def whole_steps(graphs: Sequence[Graph], stream: Stream) -> dict[str, Step]:
    """Steps of the first of two graphs, of both by updates, and of both by an executable each."""
    plain, changing, *each = (graph.instantiate() for graph in (graphs[0], graphs[0], *graphs))
    changed, total = _changed(*graphs)
    others, turns = itertools.cycle(reversed(graphs)), itertools.cycle(each)

    def launch() -> None:
        plain.launch(stream)

    def update() -> None:
        changing.update(next(others))
        changing.launch(stream)

    def take_turns() -> None:
        next(turns).launch(stream)

    what = "every node" if changed == total else f"{changed} of {total} nodes"
    return {"": launch, f"changing {what}": update, "two executables in turn": take_turns}


def _changed(before: Graph, after: Graph) -> tuple[int, int]:
    """How many nodes an update changes, and of how many."""
    snapshots = before.snapshot(), after.snapshot()
    return len(diff(*snapshots).changed), len(snapshots[0].nodes)


def compare(
    driver: Driver, shape: str, ways: Mapping[str, Step], begin: Callable[[], object] | None = None
) -> list[Note]:
    """How much longer the ``ways`` take than the first of them.

    Args:
        driver: Whose device does them.
        shape: What a step is, in words.
        ways: A step each, by what it does besides running.
        begin: Called before each run of steps, which are at most 200.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    rounds = 1 if driver.is_emulated else 3
    for name in (*ways, *reversed([*ways])) * rounds:
        if begin is not None:
            begin()
        times[name].append(_seconds_a_step(driver, ways[name]))
    plain, *others = times
    base = median(times[plain])
    return [
        {
            "case": f"{name} at every step of {shape}, {base * 1e6:.0f} us",
            "unit": "% longer",
            "ours": round((median(times[name]) / base - 1) * 100, 2),
        }
        for name in others
    ]


def _seconds_a_step(driver: Driver, step: Step) -> float:
    steps = 2 if driver.is_emulated else _STEPS - 1
    step()
    driver.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    driver.synchronize()
    return (time.perf_counter() - start) / steps
