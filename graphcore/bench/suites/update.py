"""Suite update: what it costs the CPU to change what an executable does, its next launch included.

Every call makes an executable run the same kernels on other memory and launches it. The floor is a
C loop over the same driver calls; a capture made anew and an executable made anew are what a user
without updates pays.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

from graphcore.bench.cloop import UpdateLoop
from graphcore.bench.harness import Arm, measure
from graphcore.bench.results import Row, row_of
from graphcore.bench.suites import Measured, Request
from graphcore.bench.suites.chain import Chain
from graphcore.bench.suites.update_decode import decode_steps
from graphcore.bench.suites.update_nodes import measure_nodes
from graphcore.bench.suites.update_pairs import Pair, Step, check_pair, effort, pair_arm
from graphcore.bench.suites.update_peers import EMULATED_PEERS, PEERS
from graphcore.bench.suites.update_steps import FEW, chain_steps
from graphcore.bench.timings import Timings
from graphcore.driver import Driver
from graphcore.errors import ConfigurationError

Note = Mapping[str, Any]

WHOLE = (128, 1024)
NODES = ((1, 1024), (8, 1024), (64, 1024))
BOUNDARY = (FEW, 415)

OURS = "ours"

_GROWTH_UPDATES = 1000


def run(driver: Driver, request: Request) -> Measured:
    """Measures every case; on the emulated driver a few calls of each, which mean nothing."""
    rows: list[Row] = []
    notes: list[Note] = []
    with driver.stream(blocking=True) as stream:
        for length in (16,) if driver.is_emulated else WHOLE:
            pair = Chain(driver, stream, length), Chain(driver, stream, length)
            rows += [_whole(pair, request, notes), _rebind(pair, request, notes)]
        for changed, length in ((2, 16),) if driver.is_emulated else (*NODES, BOUNDARY):
            pair = Chain(driver, stream, length), Chain(driver, stream, length)
            case = "boundary" if (changed, length) == BOUNDARY else f"nodes k={changed}"
            rows.append(measure_nodes(f"{case} n={length}", pair, changed, request))
        notes.append(_growth(pair))
        notes += [*chain_steps(driver, stream), *decode_steps(driver, stream)]
    return Measured(rows, notes)


def _whole(pair: Pair, request: Request, notes: list[Note]) -> Row:
    """Beside it, in the same rounds, an executable made anew, which a whole update replaces."""
    peers, anew = _peers(pair, request, notes), _anew(pair)
    row, timings = _measured("whole", pair, _ours(pair), peers, request, anew)
    length = pair[0].length
    notes += [
        _note(f"{anew.name} n={length}", "us", timings.seconds(anew.name).median * 1e6),
        _note(f"whole n={length}: its speed over that", "x", timings.speed(OURS, anew.name).median),
        _note(
            f"whole n={length}: the floor's speed over that",
            "x",
            timings.speed(_floor_name(pair), anew.name).median,
        ),
    ]
    return row


def _rebind(pair: Pair, request: Request, notes: list[Note]) -> Row:
    """The floor has a second graph captured already; others capture that graph at each call."""
    peers = _peers(pair, request, notes)
    captured_anew = [arm for arm in peers if "capture" in arm.name]
    row, _ = _measured("rebind", pair, _rebound(pair), captured_anew or peers, request)
    return row


def _measured(
    case: str, pair: Pair, ours: Step, peers: list[Arm], request: Request, *more: Arm
) -> tuple[Row, Timings]:
    """(a row, the times behind it and of ``more`` arms)."""
    floor = _floor(pair)
    arms = [floor, pair_arm(pair, OURS, ours), *peers, *more]
    driver = pair[0].driver
    timings = measure(arms, effort(driver, request), driver.synchronize)
    row = row_of(
        f"{case} n={pair[0].length}",
        timings,
        ours=OURS,
        floor=floor.name,
        peers=[arm.name for arm in peers],
        allowance=0.0,
    )
    return row, timings


def _ours(pair: Pair) -> Step:
    executable, stream = pair[0].graph.instantiate(), pair[0].stream
    graphs = itertools.cycle([chain.graph for chain in pair[::-1]])

    def call() -> None:
        executable.update(next(graphs))
        executable.launch(stream)

    return call


def _rebound(pair: Pair) -> Step:
    executable, stream = pair[0].graph.instantiate(), pair[0].stream
    one, other = (chain.buffer for chain in pair)
    turns = itertools.cycle([(one, other), (other, one)])

    def call() -> None:
        executable.rebind([next(turns)])
        executable.launch(stream)

    return call


def _floor_name(pair: Pair) -> str:
    return "driver calls" if pair[0].driver.is_emulated else "C loop"


def _floor(pair: Pair) -> Arm:
    driver, stream, name = pair[0].driver, pair[0].stream.handle, _floor_name(pair)
    if driver.is_emulated:
        return pair_arm(pair, name, EMULATED_PEERS["driver call"](pair))
    loop, executable = UpdateLoop(), driver.instantiate(pair[0].graph.handle)
    driver.upload_aside(executable)  # as ours: nothing is held against the floor
    graphs = itertools.cycle([chain.graph.handle for chain in pair[::-1]])
    check_pair(name, lambda: loop.seconds(executable, [next(graphs)], stream, 1), pair)
    handles = [chain.graph.handle for chain in pair[::-1]]
    return Arm(name, lambda calls: loop.seconds(executable, handles, stream, calls))


def _peers(pair: Pair, request: Request, notes: list[Note]) -> list[Arm]:
    arms = []
    for name, build in (EMULATED_PEERS if pair[0].driver.is_emulated else PEERS).items():
        if name in request.without:
            found: Note = {"left out": name, "reason": "asked for"}
        else:
            try:
                arms.append(pair_arm(pair, name, build(pair)))
                continue
            except Exception as error:  # another library's: one broken peer must not cost the run
                found = {"left out": name, "reason": f"{type(error).__name__}: {error}"}
        if found not in notes:
            notes.append(found)
    if not arms:
        raise ConfigurationError(f"peers: expected at least one, got none: {notes}")
    return arms


# ---- notes: what has no floor ------------------------------------------------------------------


def _anew(pair: Pair) -> Arm:
    """Executables made anew, each with its first launch; destroying them is not counted."""
    driver, chain = pair[0].driver, pair[0]

    def burst(calls: int) -> float:
        made = []
        start = time.perf_counter()
        for _ in range(calls):
            made.append(driver.instantiate(chain.graph.handle))
            driver.launch_graph(made[-1], chain.stream.handle)
        seconds = time.perf_counter() - start
        driver.synchronize()
        for executable in made:
            driver.destroy_exec(executable)
        return seconds

    return Arm("instantiate and first launch", burst)


def _growth(pair: Pair) -> Note:
    """Device memory after many updates less that before; other processes on the device disturb."""
    driver = pair[0].driver
    step = _ours(pair)
    updates = 20 if driver.is_emulated else _GROWTH_UPDATES
    for _ in range(4):
        step()
    driver.synchronize()
    before, _ = driver.memory_info()
    for _ in range(updates):
        step()
    driver.synchronize()
    after, _ = driver.memory_info()
    return _note(f"growth over {updates} updates", "bytes", before - after)


def _note(case: str, unit: str, value: float) -> Note:
    return {"case": case, "unit": unit, "ours": round(value, 2)}
