"""Suite inspect: what it costs to look at a graph: snapshot, fingerprint, diff, check.

Nothing else offers this, so that every figure is a note; what a guarded launch costs beyond a plain
one is measured against it in the same rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from graphcore.bench.harness import Effort, measure, python_arm
from graphcore.bench.suites import Measured, Request
from graphcore.bench.suites.chain import Chain
from graphcore.driver import Driver, Stream
from graphcore.graph import diff

Note = Mapping[str, Any]

SIZES = (100, 1024, 10000)

_REPEATS = 7


def run(driver: Driver, request: Request) -> Measured:
    """Measures every size; on the emulated driver two small ones, which mean nothing."""
    notes: list[Note] = []
    with driver.stream(blocking=True) as stream:
        for length in (10, 40) if driver.is_emulated else SIZES:
            notes += _looks(driver, stream, length)
        notes.append(_owners_check(driver, stream, request))
    return Measured([], notes)


def _looks(driver: Driver, stream: Stream, length: int) -> list[Note]:
    one, other = Chain(driver, stream, length), Chain(driver, stream, length)
    names = {"x": one.buffer}
    executable = one.graph.instantiate()
    before, after = one.graph.snapshot(), other.graph.snapshot()
    looks: dict[str, Callable[[], object]] = {
        "snapshot": one.graph.snapshot,
        "fingerprint": lambda: one.graph.fingerprint(names),
        "diff": lambda: diff(before, after),
        "check": executable.check,
    }
    return [_note(f"{name} n={length}", look) for name, look in looks.items()]


def _note(case: str, look: Callable[[], object]) -> Note:
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        look()
        times.append(time.perf_counter() - start)
    return {"case": case, "unit": "us", "ours": round(median(times) * 1e6, 1)}


def _owners_check(driver: Driver, stream: Stream, request: Request) -> Note:
    """The guard's part of a launch: a guarded launch less a plain one of the same round."""
    chain = Chain(driver, stream, 1)
    plain, guarded = chain.graph.instantiate(), chain.graph.instantiate(guard="owners")
    arms = [
        python_arm("plain", plain.launch, stream),
        python_arm("guarded", guarded.launch, stream),
    ]
    effort = Effort(2, 1, 2) if driver.is_emulated else Effort(rounds=request.rounds, calls=32)
    timings = measure(arms, effort, driver.synchronize)
    cost = timings.beyond("guarded", "plain").median
    return {"case": "owners check of a launch", "unit": "us", "ours": round(cost * 1e6, 3)}
