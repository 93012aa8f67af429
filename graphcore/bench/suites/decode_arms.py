"""Arms of suite decode: what "seconds a token" means, the same for ours and for every peer.

A token's time is wall time of a run of them divided by their number, the device waited for at both
ends. The prompt's forward is in no arm's time: it is taken off, or done before the clock starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import torch

from graphcore.bench.harness import Arm
from graphcore.driver import Driver
from graphcore.errors import GraphcoreError

_SMALLEST = 1e-9  # a difference of two times may come out below nothing where both are tiny


def generating(
    name: str,
    generate: Callable[[int], torch.Tensor],
    driver: Driver,
    *,
    share: int = 1,
) -> Arm:
    """An arm of a whole ``generate``: a run of n + 1 tokens less a run of one.

    Args:
        name: Of the arm.
        generate: Decodes so many new tokens behind the prompt; gives prompt and new ids.
        driver: Whose device is waited for.
        share: Only every ``share``-th of the tokens asked for is decoded: for arms so slow that
            they would take most of a run's time.
    """

    def timed(tokens: int) -> tuple[float, int]:
        driver.synchronize()
        start = time.perf_counter()
        ids = generate(tokens)
        driver.synchronize()
        return time.perf_counter() - start, ids.shape[1]

    def burst(calls: int) -> float:
        tokens = max(1, calls // share)
        one, first = timed(1)
        many, last = timed(tokens + 1)
        if last - first != tokens:
            raise GraphcoreError(
                f"bench decode: arm {name}: expected {tokens} tokens more, got {last - first}"
            )
        return max(many - one, _SMALLEST) * calls / tokens

    return Arm(name, burst)


def looping(
    name: str, begin: Callable[[], object], step: Callable[[], object], driver: Driver
) -> Arm:
    """An arm of one call a token, behind ``begin``, which puts everything at the prompt's end."""

    def burst(calls: int) -> float:
        begin()
        driver.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            step()
        driver.synchronize()
        return time.perf_counter() - start

    return Arm(name, burst)


def submitting(
    name: str, begin: Callable[[], object], step: Callable[[], object], driver: Driver
) -> Arm:
    """As :func:`looping`, but the clock stops when the last call returns: host time alone.

    For a few calls at a time: a full queue would show the device's time.
    """

    def burst(calls: int) -> float:
        begin()
        driver.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            step()
        taken = time.perf_counter() - start
        driver.synchronize()
        return taken

    return Arm(name, burst)


def behind_a_step(
    name: str, begin: Callable[[], object], seconds: Callable[[], float], driver: Driver
) -> Arm:
    """Host time of calls that say themselves how long they took, each made while a step runs.

    So it is where every token is looked at: the host has waited for a step before each call, and
    what the call needs is no longer in the caches of the processor.
    """

    def burst(calls: int) -> float:
        begin()
        driver.synchronize()
        taken, before = 0.0, _behind(driver)
        for _ in range(calls):
            taken += seconds()
            newest = _behind(driver)
            before()
            before = newest
        driver.synchronize()
        return taken

    return Arm(name, burst)


def clocked(step: Callable[[], object]) -> Callable[[], float]:
    """Calls ``step`` and gives the seconds that took."""

    def seconds() -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    return seconds


def _behind(driver: Driver) -> Callable[[], object]:
    """What waits for all that is queued on the current stream now."""
    if driver.is_emulated:
        return driver.synchronize
    make: Any = torch.cuda.Event
    event = make()
    event.record()
    return cast("Callable[[], object]", event.synchronize)


def on_device(
    name: str, begin: Callable[[], object], launch: Callable[[], object], driver: Driver
) -> Arm:
    """GPU time of a launch, by events around launches back to back; wall time where emulated."""
    if driver.is_emulated:
        return looping(name, begin, launch, driver)
    event: Any = torch.cuda.Event
    before, after = (event(enable_timing=True) for _ in range(2))

    def burst(calls: int) -> float:
        begin()
        driver.synchronize()
        before.record()
        for _ in range(calls):
            launch()
        after.record()
        driver.synchronize()
        return float(before.elapsed_time(after)) / 1e3

    return Arm(name, burst)


def warmed(arm: Arm) -> Arm:
    """``arm``, after two short bursts: what they raise is raised before anything is measured."""
    for _ in range(2):
        arm.burst(3)
    return arm
