"""Suite launch: what a launch costs the CPU, against a C loop over the same driver call and peers.

Plain and guarded: a guarded executable looks at its owners before it launches, for which its floor
is the C loop plus 0.2 us.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from graphcore.bench.cloop import LaunchLoop
from graphcore.bench.harness import Arm, Effort, measure, python_arm
from graphcore.bench.results import Row, row_of
from graphcore.bench.suites import Measured, Request
from graphcore.bench.suites.chain import Chain
from graphcore.bench.suites.launch_peers import EMULATED_PEERS, PEERS
from graphcore.driver import Driver
from graphcore.errors import ConfigurationError

Note = Mapping[str, Any]

SIZES = (1, 16, 128, 1024)
GUARD_SECONDS = 0.2e-6
OURS, GUARDED = "ours", "ours guarded"

_QUEUED_NODES = 4096  # a burst stays far below what the device's queue holds
_ONE_TIME_REPEATS = 5


def run(driver: Driver, request: Request) -> Measured:
    """Measures every size; on the emulated driver a few calls of each, which mean nothing.

    Raises:
        ConfigurationError: A peer to leave out that is none, or no peer is left.
    """
    request.check_peers([*PEERS, *EMULATED_PEERS])
    rows: list[Row] = []
    notes: list[Note] = []
    with driver.stream(blocking=True) as stream:
        for length in (1, 16) if driver.is_emulated else SIZES:
            chain = Chain(driver, stream, length)
            rows += _measure_chain(chain, request, notes)
            notes += _one_time_costs(chain)
    return Measured(rows, _once_each(notes))


def _measure_chain(chain: Chain, request: Request, notes: list[Note]) -> list[Row]:
    driver = chain.driver
    peers = _peer_arms(chain, request, notes)
    if not peers:
        raise ConfigurationError(f"peers: expected at least one, got none: {notes}")
    floor = _floor_arm(chain)
    plain, guarded = chain.graph.instantiate(), chain.graph.instantiate(guard="owners")
    ours = [
        _arm(chain, OURS, plain.launch, chain.stream),
        _arm(chain, GUARDED, guarded.launch, chain.stream),
    ]
    timings = measure([floor, *ours, *peers], _effort(chain, request), driver.synchronize)
    row = functools.partial(
        row_of, timings=timings, floor=floor.name, peers=[arm.name for arm in peers]
    )
    return [
        row(f"n={chain.length}", ours=OURS, allowance=0.0),
        row(f"n={chain.length} guarded", ours=GUARDED, allowance=GUARD_SECONDS),
    ]


def _effort(chain: Chain, request: Request) -> Effort:
    if chain.driver.is_emulated:
        return Effort(rounds=2, bursts=1, calls=2)
    calls = max(4, min(32, _QUEUED_NODES // chain.length))
    return Effort(rounds=request.rounds, bursts=20, calls=calls)


def _peer_arms(chain: Chain, request: Request, notes: list[Note]) -> list[Arm]:
    arms = []
    for name, build in (EMULATED_PEERS if chain.driver.is_emulated else PEERS).items():
        if name in request.without:
            notes.append({"left out": name, "reason": "asked for"})
            continue
        try:
            arms.append(_arm(chain, name, *build(chain)))
        except Exception as error:  # another library's: one broken peer must not cost the run
            notes.append({"left out": name, "reason": f"{type(error).__name__}: {error}"})
    return arms


def _arm(chain: Chain, name: str, call: Callable[..., object], *arguments: object) -> Arm:
    chain.check(name, functools.partial(call, *arguments))
    return python_arm(name, call, *arguments)


def _floor_arm(chain: Chain) -> Arm:
    driver, stream = chain.driver, chain.stream.handle
    executable = driver.instantiate(chain.graph.handle)
    if driver.is_emulated:
        return _arm(chain, "bound call", driver.bind_launch(executable, stream))
    loop = LaunchLoop()
    chain.check("C loop", lambda: loop.seconds(executable, stream, 1))
    return Arm("C loop", lambda calls: loop.seconds(executable, stream, calls))


def _one_time_costs(chain: Chain) -> list[Note]:
    """What is paid once, in us: instantiating, uploading, and the first launch after neither."""
    driver, stream, handle = chain.driver, chain.stream.handle, chain.graph.handle
    costs: dict[str, list[float]] = {"instantiate": [], "upload": [], "first launch": []}
    for _ in range(_ONE_TIME_REPEATS):
        for first in ("upload", "first launch"):
            start = time.perf_counter()
            executable = driver.instantiate(handle)
            costs["instantiate"].append(time.perf_counter() - start)
            act = driver.upload if first == "upload" else driver.launch_graph
            start = time.perf_counter()
            act(executable, stream)
            costs[first].append(time.perf_counter() - start)
            driver.synchronize()
            driver.destroy_exec(executable)
    return [
        {"case": f"{name} n={chain.length}", "unit": "us", "ours": round(median(times) * 1e6, 2)}
        for name, times in costs.items()
    ]


def _once_each(notes: list[Note]) -> list[Note]:
    """The notes without repetitions: a missing peer is missing at every size."""
    found: list[Note] = []
    for note in notes:
        if note not in found:
            found.append(note)
    return found
