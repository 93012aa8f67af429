"""How arms are timed against each other: one process, A B B A, bursts short enough for the queue.

It guarantees that every arm is sampled twice in every round, in an order that turns from round to
round and is mirrored within one, and that waiting for the device is never in a time: the queue is
drained before each burst. Garbage collection is off while a burst runs.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from graphcore.bench.timings import Timings
from graphcore.errors import ConfigurationError

Clock = Callable[[], float]

MIN_ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of doing the work. ``burst(calls)`` does it that often and returns the seconds."""

    name: str
    burst: Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Args:
        rounds: Rounds of A B B A.
        bursts: Bursts in one sample, whose median is the sample.
        calls: Calls in one burst; so few that a device queue never fills.
    """

    rounds: int = MIN_ROUNDS
    bursts: int = 20
    calls: int = 16

    def __post_init__(self) -> None:
        for field in ("rounds", "bursts", "calls"):
            if getattr(self, field) < 1:
                raise ConfigurationError(
                    f"effort: {field}: expected at least 1, got {getattr(self, field)}"
                )


def python_arm(
    name: str, call: Callable[..., object], *arguments: object, clock: Clock = time.perf_counter
) -> Arm:
    """An arm that is a Python call, made as its users write it.

    With one argument the loop says ``call(argument)``: binding it beforehand would make the
    interpreter enter a Python function from C, which costs more than the call users make.
    """
    if len(arguments) > 1:
        call, arguments = functools.partial(call, *arguments), ()

    def burst(calls: int) -> float:
        repeat = itertools.repeat(None, calls)
        start = clock()
        for _ in repeat:
            call()
        return clock() - start

    def burst_with_argument(calls: int) -> float:
        argument = arguments[0]
        repeat = itertools.repeat(None, calls)
        start = clock()
        for _ in repeat:
            call(argument)
        return clock() - start

    return Arm(name, burst_with_argument if arguments else burst)


def order(count: int, round_number: int) -> list[int]:
    """Positions of ``count`` arms in one round: rotated by its number, then mirrored (A B B A)."""
    first = [(position + round_number) % count for position in range(count)]
    return first + first[::-1]


def measure(arms: Sequence[Arm], effort: Effort, drain: Callable[[], None]) -> Timings:
    """Times ``arms`` against each other.

    Args:
        arms: With names that differ.
        effort: How much.
        drain: Waits until the work of all arms is done; called before every burst, never timed.
    """
    names = [arm.name for arm in arms]
    if len(set(names)) != len(names):
        raise ConfigurationError(f"arms: expected names that differ, got {names}")
    with _quiet():
        for arm in arms:  # first calls pay for what later ones find ready
            _sample(arm, Effort(1, 1, effort.calls), drain)
        rounds: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
        for number in range(effort.rounds):
            samples: dict[str, list[float]] = {name: [] for name in names}
            for position in order(len(arms), number):
                arm = arms[position]
                samples[arm.name].append(_sample(arm, effort, drain))
            for name, values in samples.items():
                rounds[name].append(tuple(values))
    drain()
    return Timings(rounds)


def _sample(arm: Arm, effort: Effort, drain: Callable[[], None]) -> float:
    bursts = []
    for _ in range(effort.bursts):
        drain()
        bursts.append(arm.burst(effort.calls) / effort.calls)
    return median(bursts)


@contextmanager
def _quiet() -> Iterator[None]:
    """No garbage collection, and one core for this thread where the system lets us choose."""
    collecting = gc.isenabled()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    gc.collect()
    gc.disable()
    try:
        if cores:
            os.sched_setaffinity(0, {max(cores)})
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, cores)
        if collecting:
            gc.enable()
