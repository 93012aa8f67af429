"""Suite copy: strided copies of float32 against the fastest plain copy of as many bytes, and peers.

Times are the device's, of calls in a graph. Every way is first checked word by word, with the
destination poisoned; one that is wrong is left out by name. Notes say what each case was to reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from graphcore_kernels import strided_copy

from graphcore.bench.harness import Arm, Effort, measure
from graphcore.bench.replays import (
    Replayed,
    cached_bytes,
    host_seconds,
    replayed,
    seconds_of,
    torch_device,
)
from graphcore.bench.results import Row, row_of
from graphcore.bench.suites import Measured, Request
from graphcore.bench.suites.copy_cases import CopyCase, cases
from graphcore.bench.suites.copy_operands import CopyOperands
from graphcore.bench.suites.copy_ways import (
    EMULATED_PEERS,
    OURS,
    PEERS,
    Floor,
    Way,
    calls_of,
    floors,
    ours,
)
from graphcore.driver import Driver, Stream
from graphcore.errors import ConfigurationError

Note = Mapping[str, Any]

_BURST_SECONDS = 5e-3


def run(driver: Driver, request: Request) -> Measured:
    """Measures the cases asked for; on the emulated driver small ones, whose times mean nothing.

    Raises:
        ConfigurationError: A peer to leave out, or a case, that is none; no peer is left.
        GraphcoreError: Our copy is wrong.
    """
    request.check_peers(PEERS)
    known = cases(small=driver.is_emulated)
    request.check_cases(case.name for case in known)
    rows: list[Row] = []
    notes: list[Note] = []
    torch.manual_seed(11)
    with driver.stream(blocking=True) as stream:
        for case in known:
            if request.wants(case.name):
                made = _Case(case, driver, stream, request)
                rows.append(made.row())
                notes += made.notes
                if not driver.is_emulated:
                    notes.append(case.target.told(rows[-1]))
        notes.append(_host_note(driver, stream))
    return Measured(rows, notes)


class _Case:
    """One case with its arms, and notes beside them."""

    def __init__(self, case: CopyCase, driver: Driver, stream: Stream, request: Request) -> None:
        self._case, self._driver, self._stream, self._request = case, driver, stream, request
        self._device = torch_device(driver)
        self._operands = CopyOperands(case, self._device, 3 * cached_bytes(driver))
        self.notes: list[Note] = []

    def row(self) -> Row:
        made = floors(self._driver, self._operands, self._device)
        beneath = [self._replayed(floor).arm() for floor in made]
        plan = seconds_of(self._driver, lambda: strided_copy.plan(*self._operands.pairs[0]))
        mine = self._checked(OURS, ours)
        assert mine is not None
        peers = self._peers()
        if not peers:
            raise ConfigurationError(f"peers: expected at least one, got none: {self.notes}")
        effort = self._effort(beneath[0], len(self._operands.pairs))
        timings = measure([*beneath, mine, *peers], effort, self._driver.synchronize)
        floor = timings.fastest([arm.name for arm in beneath])
        assert floor is not None
        row = row_of(
            self._case.name,
            timings,
            ours=OURS,
            floor=floor,
            peers=[arm.name for arm in peers],
            allowance=0.0,
            error=0.0,  # whatever differs in one word is no arm
        )
        rate = self._operands.bytes_moved / timings.seconds(OURS).median / 1e9
        times = {arm.name: round(timings.seconds(arm.name).median * 1e6, 2) for arm in beneath}
        self.notes.append({"about": f"{self._case.name}: the floor is {floor}", **times})
        self._note("bytes moved", "GB/s", rate)
        self._note("first plan", "ms", plan * 1e3)
        return row

    def _replayed(self, floor: Floor) -> Replayed:
        return replayed(
            floor.name, self._driver, self._stream, floor.calls, is_captured=floor.is_captured
        )

    def _peers(self) -> list[Arm]:
        arms = []
        for name, way in (EMULATED_PEERS if self._driver.is_emulated else PEERS).items():
            if name in self._request.without:
                self._leave_out(name, "asked for")
                continue
            try:
                arm = self._checked(name, way)
            except Exception as error:  # another library's: one broken peer must not cost the run
                self._leave_out(name, f"{type(error).__name__}: {error}")
            else:
                arms += [] if arm is None else [arm]
        return arms

    def _checked(self, name: str, way: Way) -> Arm | None:
        """The arm of a way whose result is right; None where the way has no such copy."""
        calls = calls_of(way, self._driver, self._operands.pairs)
        if calls is None:
            return None
        made = replayed(name, self._driver, self._stream, calls)
        self._operands.check(name, lambda: _run(made))
        return made.arm()

    def _effort(self, floor: Arm, calls: int) -> Effort:
        if self._driver.is_emulated:
            return Effort(rounds=1, bursts=1, calls=1)
        turns = max(1, round(_BURST_SECONDS / floor.burst(calls)))
        return Effort(rounds=self._request.rounds, bursts=1, calls=turns * calls)

    def _note(self, what: str, unit: str, value: float) -> None:
        self.notes.append(
            {"case": f"{self._case.name}: {what}", "unit": unit, "ours": round(value, 2)}
        )

    def _leave_out(self, name: str, reason: str) -> None:
        self.notes.append({"left out": f"{self._case.name} {name}", "reason": reason})


def _run(made: Replayed) -> None:
    made.run()
    made.driver.synchronize()


def _host_note(driver: Driver, stream: Stream) -> Note:
    """What a planned copy costs the host to launch."""
    dst, src = (torch.rand(64, 64, device=torch_device(driver)) for _ in range(2))
    cost = host_seconds(driver, stream, strided_copy.plan(dst, src.t()).launch)
    return {"case": "host time of a planned copy", "unit": "us", "ours": round(cost * 1e6, 2)}
