"""What suite memory measures: buckets of ours and of torch, executables of ours and of torch.

An arrangement loads and warms up everything, waits for its turn, and reads the device before and
after. It needs a device's memory to itself: on a device it runs in a process of its own
(``python -m graphcore.bench.suites.memory_arrangements NAME DEVICE``), since the driver gives
executables memory that earlier ones of the process left, and torch keeps workspaces.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from graphcore import capture_function
from graphcore.bench.suites.decode_models import Subject, subject_of
from graphcore.bench.suites.decode_peers import HandStep
from graphcore.bench.suites.memory_readings import Reading
from graphcore.bench.turns import Turn
from graphcore.decode import DecodeBuckets
from graphcore.driver import Driver, open_driver
from graphcore.executable.calibration import slope
from graphcore.interop.streams import current_stream

Found = dict[str, Any]
Wait = Callable[[], None]

MODEL = "llama-1b"
CAPACITIES, TINY_CAPACITIES = (128, 256, 512, 1024), (8, 16, 24, 48)
# a device takes memory in steps of MiBs, of which a hundred MiB see little
_EXECUTABLES_ON_A_DEVICE, _EXECUTABLES_EMULATED = 64, 4


def our_buckets(driver: Driver, subject: Subject, wait: Wait, *, share_pool: bool = True) -> Found:
    """Bytes taken by part, what the library's report says of them, what close() leaves."""
    _warm_up(driver, subject)
    keep = _one_graph(driver, subject)
    wait()
    before = Reading.of(driver)
    with _our_buckets(driver, subject, share_pool=share_pool) as buckets:
        taken = Reading.of(driver).since(before)
        report = buckets.memory_report()  # after the readings: it measures executables of its own
        found = {
            "taken": taken,
            "predicted": dict(report.parts),
            "buckets": {each.name: each.own_bytes for each in report.buckets},
            "nodes": sum(graph.nodes for each in report.buckets for graph in each.graphs),
        }
        del report
    del buckets
    found["left"] = Reading.of(driver).since(before)
    del keep
    return found


def our_private_buckets(driver: Driver, subject: Subject, wait: Wait) -> Found:
    """As :func:`our_buckets` with a pool for each."""
    return our_buckets(driver, subject, wait, share_pool=False)


def torch_buckets(driver: Driver, subject: Subject, wait: Wait) -> Found:
    """Bytes taken by graphs of torch with a static cache each, in one pool of torch."""
    sizes = [replace(subject, capacity=each) for each in reversed(_capacities(driver))]
    with torch.no_grad():
        for each in sizes:
            HandStep(each).decode()
    keep = _one_graph(driver, subject)
    wait()
    before = Reading.of(driver)
    pool = torch.cuda.graph_pool_handle()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    steps = []
    for each in sizes:
        step = HandStep(each)
        step.capture(step.decode, pool=pool, side=side)
        step.replay()
        steps.append(step)
    taken = Reading.of(driver).since(before)
    del steps, keep
    return {"taken": taken}


def our_executable(driver: Driver, subject: Subject, wait: Wait) -> Found:
    """Bytes that one executable more of a step takes, what the report says, what is left."""
    _warm_up(driver, subject)
    wait()
    with _our_buckets(driver, subject, _capacities(driver)[-1:]) as buckets:
        graph = buckets.runner(buckets.buckets[0]).graph
        assert graph is not None
        made: list[Any] = []

        def another() -> None:
            made.append(driver.instantiate(graph.handle))
            driver.upload(made[-1], current_stream(driver))

        readings = _readings(driver, another)
        for executable in made:
            driver.destroy_exec(executable)
        left = readings[0] - _free(driver)
        report = graph.memory_report()
        return {
            **_each(readings),
            "left": left,
            "nodes": report.nodes,
            "predicted": report.node_bytes,
            "bytes_per_node": report.bytes_per_node,
        }


def torch_executable(driver: Driver, subject: Subject, wait: Wait) -> Found:
    """Bytes that one graph more of a step takes, in a pool of torch that has room for it."""
    step = HandStep(replace(subject, capacity=_capacities(driver)[-1]))
    pool = torch.cuda.graph_pool_handle()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    step.capture(step.decode, pool=pool, side=side)
    kept: list[Any] = []

    def another() -> None:
        kept.append(step.graph)
        step.capture(step.decode, pool=pool, side=side, warm_ups=0)
        step.replay()

    another()
    wait()
    return _each(_readings(driver, another))


ARRANGEMENTS: Mapping[str, Callable[[Driver, Subject, Wait], Found]] = {
    "buckets": our_buckets,
    "private buckets": our_private_buckets,
    "torch buckets": torch_buckets,
    "executable": our_executable,
    "torch executable": torch_executable,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the arrangement ``NAME`` on ``DEVICE`` ("emulated": the emulated driver) in its turn."""
    name, device = sys.argv[1:] if argv is None else argv
    turn = Turn()
    is_emulated = device == "emulated"
    chosen = open_driver("emulated") if is_emulated else open_driver("cuda", device=int(device))
    if not is_emulated:
        torch.cuda.set_device(chosen.device)
    subject = subject_of(MODEL, chosen)
    turn.give({**ARRANGEMENTS[name](chosen, subject, turn.wait), "weights": subject.weights})


# ---- parts of them -----------------------------------------------------------------------------


def _capacities(driver: Driver) -> tuple[int, ...]:
    return TINY_CAPACITIES if driver.is_emulated else CAPACITIES


@contextmanager
def _our_buckets(
    driver: Driver, subject: Subject, capacities: Sequence[int] = (), **options: Any
) -> Any:
    """Buckets that have each decoded."""
    with DecodeBuckets(
        subject.model,
        list(capacities or _capacities(driver)),
        driver=driver,
        progress=False,
        **options,
    ) as buckets:
        for bucket in buckets.buckets:
            buckets.runner(bucket).generate(subject.prompt[:, :4], 2, ())
        yield buckets


def _warm_up(driver: Driver, subject: Subject) -> None:
    """Loads every kernel by decoding eagerly in the same buckets: no executable, no workspace."""
    with _our_buckets(driver, subject, capture=False):
        pass


def _one_graph(driver: Driver, subject: Subject) -> object:
    """An executable, launched, to be kept: what the driver needs for the first one is there."""
    count = torch.zeros((1,), device=subject.prompt.device)
    executable = capture_function(count.neg_, driver=driver).instantiate()
    executable.launch()
    return executable


def _free(driver: Driver) -> int:
    driver.synchronize()
    return driver.memory_info()[0]


def _readings(driver: Driver, act: Callable[[], None]) -> list[int]:
    """Free bytes before, and after each of many ``act``."""
    count = _EXECUTABLES_EMULATED if driver.is_emulated else _EXECUTABLES_ON_A_DEVICE
    readings = [_free(driver)]
    for _ in range(count):
        act()
        readings.append(_free(driver))
    return readings


def _each(readings: Sequence[int]) -> Found:
    """Bytes that one takes: the median slope. Readings far apart see little of the steps."""
    falls = [before - after for before, after in itertools.pairwise(readings)]
    return {
        "taken": slope(readings, len(readings) // 2),
        "count": len(falls),
        "smallest step": min((fall for fall in falls if fall > 0), default=0),
        "largest step": max(falls),
    }


if __name__ == "__main__":
    main()
