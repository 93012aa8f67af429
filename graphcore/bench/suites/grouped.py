"""Suite grouped: products of many experts in one launch, and whole layers of them, against peers.

The floor of a case is a streaming read of the weights of the experts that are hit, or a dense
product of as many flops, both measured in the same rounds. Times are the device's, of calls in a
graph. Every way is first compared with float64; one that is wrong is left out by name.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphcore.bench.harness import Arm, measure
from graphcore.bench.replays import (
    Call,
    Replayed,
    cached_bytes,
    host_seconds,
    replayed,
    torch_device,
)
from graphcore.bench.results import Row, row_of
from graphcore.bench.suites import Measured, Request
from graphcore.bench.suites.grouped_cases import OF_BALANCED, READ, Case, GroupedCase, cases
from graphcore.bench.suites.grouped_floors import Floors, effort_of
from graphcore.bench.suites.grouped_layers import (
    EAGER_EXPERTS,
    LAYER_PEERS,
    LayerCase,
    LayerOperands,
    layer_cases,
)
from graphcore.bench.suites.grouped_layers import ours as our_layer
from graphcore.bench.suites.grouped_operands import Banks, GroupedOperands
from graphcore.bench.suites.grouped_ways import (
    EMULATED_PEERS,
    OURS,
    PEERS,
    can_be_captured,
    ours,
)
from graphcore.driver import Driver, Stream
from graphcore.errors import ConfigurationError

Note = Mapping[str, Any]


def run(driver: Driver, request: Request) -> Measured:
    """Measures the cases asked for; on the emulated driver small ones, whose times mean nothing.

    Raises:
        ConfigurationError: A peer to leave out, or a case, that is none; no peer is left.
        GraphcoreError: Our product is wrong.
    """
    request.check_peers([*PEERS, *LAYER_PEERS])
    small = driver.is_emulated
    known: list[Case] = [*cases(small=small), *layer_cases(small=small)]
    request.check_cases(case.name for case in known)
    torch.manual_seed(31)
    torch.set_float32_matmul_precision("highest")  # peers and floors of float32 are IEEE's
    start = time.perf_counter()
    with driver.stream(blocking=True) as stream:
        suite = _Suite(driver, stream, request)
        for case in known:
            if request.wants(case.name):
                suite.measure(case)
    suite.note_skew()
    suite.note("wall time of the suite", "s", time.perf_counter() - start)
    return Measured(suite.rows, suite.notes)


class _Suite:
    """What all cases share: weights, floors, and what was measured so far."""

    def __init__(self, driver: Driver, stream: Stream, request: Request) -> None:
        self.driver, self.stream, self.request = driver, stream, request
        self.device = torch_device(driver)
        self.cached = 3 * cached_bytes(driver)
        self.banks = Banks(self.device)
        self.rows: list[Row] = []
        self.notes: list[Note] = []
        self.floors = Floors(driver, stream, self.note)

    def measure(self, case: Case) -> None:
        """One case, told as it comes on a device, where a run is dear."""
        start = time.perf_counter()
        self.rows.append(_Case(self, case).row())
        if not self.driver.is_emulated:
            torch.cuda.empty_cache()  # what plans allocate is not torch's
            self.notes.append(case.target.told(self.rows[-1]))
            print(f"{case.name}: {time.perf_counter() - start:.1f} s", flush=True)

    def note_skew(self) -> None:
        """What Zipf's routings reach of uniform ones, each against its own floor."""
        of_floor = {row.case: row.of_floor for row in self.rows}
        for name, found in of_floor.items():
            balanced = of_floor.get(name.removesuffix(" zipf"))
            if name.endswith(" zipf") and balanced:
                what = f"{name}: of uniform, target {OF_BALANCED}"
                self.note(what, "", found / balanced)

    def note(self, what: str, unit: str, value: float) -> None:
        """A figure beside the rows."""
        self.notes.append({"case": what, "unit": unit, "ours": round(value, 3)})


class _Case:
    """One case with its arms."""

    def __init__(self, suite: _Suite, case: Case) -> None:
        self._suite, self._case = suite, case
        self._operands: Any
        self._ours: Any = our_layer if isinstance(case, LayerCase) else ours
        self._ways: Mapping[str, Any] = LAYER_PEERS
        if isinstance(case, LayerCase):
            self._operands = LayerOperands(case, suite.device, suite.cached)
        else:
            assert isinstance(case, GroupedCase)
            self._operands = GroupedOperands(case, suite.banks, suite.device, suite.cached)
            self._ways = EMULATED_PEERS if suite.driver.is_emulated else PEERS
        self._errors: dict[str, float] = {}

    def row(self) -> Row:
        suite, case = self._suite, self._case
        floor, work, unit = self._floor()
        mine = self._checked(OURS, self._ours)
        peers = self._peers()
        if not peers:
            raise ConfigurationError(f"peers: expected at least one, got none: {suite.notes}")
        calls = len(self._operands.calls)
        effort = effort_of(suite.driver, suite.request.rounds, floor, calls)
        timings = measure([floor, mine, *peers], effort, suite.driver.synchronize)
        suite.notes.append({"about": f"{case.name}: the floor is {floor.name}"})
        suite.note(f"{case.name}: {OURS}", unit, work / timings.seconds(OURS).median / 1e12)
        errors = ", ".join(f"{name} {error:.1e}" for name, error in self._errors.items())
        suite.notes.append({"about": f"{case.name}: errors against float64: {errors}"})
        return row_of(
            case.name,
            timings,
            ours=OURS,
            floor=floor.name,
            peers=[arm.name for arm in peers],
            allowance=0.0,
            error=self._errors[OURS],
        )

    def _floor(self) -> tuple[Arm, float, str]:
        """(the arm, what a call has to do, its unit a second, in 1e12)."""
        if self._case.bound == READ:
            work = self._case.weight_bytes(self._operands.experts_hit)
            return self._suite.floors.read(work), work, "TB/s"
        return self._suite.floors.dense(self._case), float(self._case.flops), "TFLOP/s"

    def _peers(self) -> list[Arm]:
        arms = []
        for name, way in self._ways.items():
            if name in self._suite.request.without:
                self._leave_out(name, "asked for")
                continue
            try:
                arms.append(self._checked(name, way))
            except Exception as error:  # another library's: one broken peer must not cost the run
                self._leave_out(name, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return arms

    def _checked(self, name: str, way: Any) -> Arm:
        """The arm of a way whose results are right."""
        suite = self._suite
        start = time.perf_counter()
        products = way(suite.driver, suite.stream, self._operands.calls)
        if name == OURS:
            self._note_host((time.perf_counter() - start) / len(products), products[0])
        is_captured = name != EAGER_EXPERTS and can_be_captured(name, self._case.precision)
        made = replayed(name, suite.driver, suite.stream, products, is_captured=is_captured)
        if not is_captured and not suite.driver.is_emulated:
            suite.notes.append({"about": f"{self._case.name}: {name} cannot be captured: called"})
        outs = [product.out for product in products]
        self._errors[name] = self._operands.check(name, outs, lambda: _run(made, products, outs))
        for product in products:
            product.check()
        return made.arm()

    def _note_host(self, plan: float, launch: Call) -> None:
        """What ours costs the host: a plan, and a launch where these are what is waited for."""
        suite, name = self._suite, self._case.name
        suite.note(f"{name}: a plan, with what is compiled first", "ms", plan * 1e3)
        if self._case.bound == READ:
            cost = host_seconds(suite.driver, suite.stream, launch)
            suite.note(f"{name}: host time of a planned launch", "us", cost * 1e6)

    def _leave_out(self, name: str, reason: str) -> None:
        self._suite.notes.append({"left out": f"{self._case.name} {name}", "reason": reason})


def _run(made: Replayed, products: Sequence[Any], outs: list[torch.Tensor]) -> None:
    """Runs the calls once and waits; ways that are called may give new results."""
    made.run()
    made.driver.synchronize()
    outs[:] = [product.out for product in products]
