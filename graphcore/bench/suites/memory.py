"""Suite memory: what captured decode steps take of the device, predicted and measured.

Four capacities of one model: ours over one storage and one pool, against a pool for each, and
against graphs of torch with a cache for each in one torch pool. The floor of a row is what the
library predicts, so that 1.00 means that the report tells what the device gave.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from graphcore.bench.results import Row
from graphcore.bench.suites import Measured, Request
from graphcore.bench.suites.decode_models import Subject, subject_of
from graphcore.bench.suites.decode_peers import HandStep
from graphcore.decode import DecodeBuckets
from graphcore.driver import Driver
from graphcore.executable.calibration import slope
from graphcore.interop.streams import current_stream

Note = Mapping[str, Any]

MODEL = "llama-1b"
PRIVATE, TORCH = "private pools", "torch graphs"

_CAPACITIES = (128, 256, 512, 1024)
_TINY_CAPACITIES = (8, 16, 24, 48)
_EXECUTABLES = 16
_MIB = 1 << 20


def run(driver: Driver, request: Request) -> Measured:
    """Measures buckets and executables; on the emulated driver executables alone have a size.

    Raises:
        ConfigurationError: A peer to leave out that is none.
    """
    request.check_peers([PRIVATE, TORCH])
    memory = _Memory(driver, subject_of(MODEL, driver))
    rows = [memory.buckets_row(request.without), memory.executable_row(request.without)]
    return Measured([row for row in rows if row is not None], memory.notes)


class _Memory:
    """The measurements, and notes beside them."""

    def __init__(self, driver: Driver, subject: Subject) -> None:
        self._driver, self._subject = driver, subject
        self._capacities = _TINY_CAPACITIES if driver.is_emulated else _CAPACITIES
        self.notes: list[Note] = [{"about": f"{MODEL}: {subject.weights}"}]

    # ---- buckets -------------------------------------------------------------------------------

    def buckets_row(self, without: frozenset[str]) -> Row | None:
        """Bytes of all buckets, against those of others' ways; None where there are none."""
        if not self._driver.is_emulated:
            with self._taken(share_pool=True):
                pass  # modules, workspaces and the prompt's memory are there from now on
        with self._taken(share_pool=True) as (ours, report):
            predicted = self._predicted(report)
            for bucket in report.buckets:
                self._note(f"bucket {bucket.name}: alone", "MiB", bucket.own_bytes / _MIB)
            self._note("pool of all buckets", "MiB", report.pool_bytes / _MIB)
            self._note("K and V, stored once", "MiB", report.kv_bytes / _MIB)
        peers: dict[str, float] = {}
        if PRIVATE not in without:
            with self._taken(share_pool=False) as (taken, report):
                peers[PRIVATE] = taken
                self._note("private pools of all buckets", "MiB", report.pool_bytes / _MIB)
        if TORCH not in without and not self._driver.is_emulated:
            peers[TORCH] = self._torch_buckets()
        return self._row(f"k={len(self._capacities)} buckets", ours, predicted, peers)

    @contextmanager
    def _taken(self, *, share_pool: bool) -> Iterator[tuple[float, Any]]:
        """(bytes that the device gave for our buckets, their report), which go at the end."""
        before = self._free_before()
        capacities = list(self._capacities)
        with DecodeBuckets(
            self._subject.model,
            capacities,
            driver=self._driver,
            share_pool=share_pool,
            progress=False,
        ) as buckets:
            for bucket in buckets.buckets:
                buckets.runner(bucket).generate(self._subject.prompt[:, :4], 2, ())
            yield before - self._free(), buckets.memory_report()

    def _predicted(self, report: Any) -> float:
        # the emulated driver's device is host memory, of which it gives out graphs alone
        return float(report.node_bytes if self._driver.is_emulated else report.total_bytes)

    def _torch_buckets(self) -> float:
        before = self._free_before()
        pool = torch.cuda.graph_pool_handle()
        steps = []
        for capacity in reversed(self._capacities):
            step = HandStep(replace(self._subject, capacity=capacity))
            step.capture(step.decode, pool=pool)
            step.replay()
            steps.append(step)
        taken = before - self._free()
        del steps
        return float(taken)

    # ---- executables ---------------------------------------------------------------------------

    def executable_row(self, without: frozenset[str]) -> Row | None:
        """Bytes of one executable of a step."""
        capacity = self._capacities[-1]
        with DecodeBuckets(
            self._subject.model, [capacity], driver=self._driver, progress=False
        ) as buckets:
            graph = buckets.runner(buckets.buckets[0]).graph
            assert graph is not None
            report = graph.memory_report()
            made: list[Any] = []

            def another() -> None:
                executable = self._driver.instantiate(graph.handle)
                made.append(executable)
                self._driver.upload(executable, current_stream(self._driver))

            ours = self._of_each(another)
            for executable in made:
                self._driver.destroy_exec(executable)
        self._note("nodes of a step", "nodes", report.nodes)
        self._note("bytes of a node, predicted", "bytes", report.bytes_per_node)
        self._note("bytes of a node, measured", "bytes", ours / report.nodes)
        peers: dict[str, float] = {}
        if TORCH not in without and not self._driver.is_emulated:
            peers[TORCH] = self._torch_executable()
        return self._row("executable", ours, float(report.node_bytes), peers)

    def _torch_executable(self) -> float:
        """Of one graph more of a step into a pool that has room for it."""
        pool = torch.cuda.graph_pool_handle()
        step = HandStep(replace(self._subject, capacity=self._capacities[-1]))
        step.capture(step.decode, pool=pool)
        kept: list[Any] = []

        def another() -> None:
            kept.append(step.graph)
            step.capture(step.decode, pool=pool)
            step.replay()

        return self._of_each(another)

    def _of_each(self, act: Callable[[], None]) -> float:
        """Bytes that one ``act`` takes: the median slope of readings between them."""
        readings = [self._driver.memory_info()[0]]
        for _ in range(_EXECUTABLES):
            act()
            self._driver.synchronize()
            readings.append(self._driver.memory_info()[0])
        # a device takes memory in steps: readings far apart tell more
        return slope(readings, _EXECUTABLES // 2)

    # ---- both ----------------------------------------------------------------------------------

    def _free_before(self) -> int:
        """As :meth:`_free`, while no graph lives that works in a workspace of a library."""
        gc.collect()
        if not self._driver.is_emulated:
            torch._C._cuda_clearCublasWorkspaces()
        return self._free()

    def _free(self) -> int:
        """Free bytes of the device, those counted that torch holds for its next tensors."""
        gc.collect()
        self._driver.synchronize()
        if self._driver.is_emulated:
            return self._driver.memory_info()[0]
        torch.cuda.empty_cache()
        return self._driver.memory_info()[0] + _spare()

    def _row(
        self, case: str, ours: float, predicted: float, peers: Mapping[str, float]
    ) -> Row | None:
        """``of_floor``: prediction over measurement; ``vs_best_peer``: theirs over ours."""
        if not peers:
            self._note(f"{case}: measured", "MiB", ours / _MIB)
            self._note(f"{case}: predicted", "MiB", predicted / _MIB)
            return None
        ratios = predicted / ours, min(peers.values()) / ours
        return Row(
            case=case,
            unit="MiB",
            ours=ours / _MIB,
            floor=predicted / _MIB,
            peers={name: taken / _MIB for name, taken in peers.items()},
            of_floor=ratios[0],
            vs_best_peer=ratios[1],
            spread={"of_floor": _one(ratios[0]), "vs_best_peer": _one(ratios[1])},
        )

    def _note(self, what: str, unit: str, value: float) -> None:
        self.notes.append({"case": what, "unit": unit, "ours": round(value, 3)})


def _spare() -> int:
    """Bytes of torch's own pool that no tensor has: segments are given out in large pieces."""
    snapshot: Any = torch.cuda.memory_snapshot
    segments = snapshot()
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in segments
        if not any(segment.get("segment_pool_id") or ())
    )


def _one(value: float) -> Sequence[float]:
    """Bounds of a figure that was measured once: memory does not vary as time does."""
    return [round(value, 4)] * 2
