"""Suite decode: tokens a second at batch 1, ours against transformers and graphs made by hand.

A case's row is our compiled step against every peer; a second one is the generation in one launch,
a third the plain step against the peers whose kernels are the model's own. The floor of a row is
the GPU time of its step's graph alone. What a token costs the host is a row by itself: the replay
call, and the CPU time of a generation in one launch.
"""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, TypeVar

from graphcore.bench.harness import Arm, Effort, measure
from graphcore.bench.results import Row, row_of
from graphcore.bench.suites import Measured, Request
from graphcore.bench.suites.decode_arms import submitting, warmed
from graphcore.bench.suites.decode_checks import agreement, read_bandwidth, step_bytes
from graphcore.bench.suites.decode_host import FLOOR as LOOP_FLOOR
from graphcore.bench.suites.decode_host import OneLaunchHost
from graphcore.bench.suites.decode_launches import FLOOR, Launches
from graphcore.bench.suites.decode_models import CASES, EXPERTS, Subject, subject_of
from graphcore.bench.suites.decode_ours import COMPILED, ONE_LAUNCH, PLAIN, OurWay
from graphcore.bench.suites.decode_peers import (
    BY_HAND,
    EMULATED_PEERS,
    PEERS,
    HandStep,
    eager_tokens,
)
from graphcore.bench.suites.decode_peers import COMPILED as COMPILED_PEERS
from graphcore.bench.suites.decode_ways import SUFFIX, compile_notes
from graphcore.bench.targets import Target
from graphcore.bench.timings import Timings
from graphcore.driver import Driver
from graphcore.interop.streams import current_stream

Note = Mapping[str, Any]
T = TypeVar("T")

_HOST_TARGET = Target(most=5.0)


def run(driver: Driver, request: Request) -> Measured:
    """Measures the cases asked for; on the emulated driver tiny models, whose times mean nothing.

    Raises:
        ConfigurationError: A peer to leave out, or a case, that is none.
    """
    request.check_peers([*PEERS, *EMULATED_PEERS])
    compared = [f"{name}{SUFFIX}" for name in CASES]
    request.check_cases([*CASES, *compared])
    rows: list[Row] = []
    notes: list[Note] = []
    for name in request.only.intersection(compared):
        notes += compile_notes(name, driver)
    for name in CASES:
        if request.wants(name):
            case = Case(subject_of(name, driver), driver, request)
            rows += case.rows()
            notes += case.notes
    return Measured(rows, notes)


class Case:
    """One model with all arms; what it measures, and what it could not."""

    def __init__(self, subject: Subject, driver: Driver, request: Request) -> None:
        self.subject, self.driver, self.request = subject, driver, request
        self.name = subject.name
        self.notes: list[Note] = [{"about": f"{self.name}: {subject.weights}"}]
        self.eager, self.end = eager_tokens(subject)
        self.ways: dict[str, OurWay] = {}

    def rows(self) -> list[Row]:
        """Measures everything."""
        experts = self._best_experts()
        with self.subject.experts(experts):
            self._try(PLAIN, self._way, PLAIN)
        self._try(COMPILED, self._way, COMPILED, compile=True)
        peers = self._peers(experts)
        if not self.ways or not peers:
            return []
        ours = [arm for way in self.ways.values() for arm in (way.arm(), way.step_arm())]
        best = self.ways[self._best()]
        ours.append(best.loop_arm())
        arm = self._try(ONE_LAUNCH, lambda: warmed(best.one_launch()))
        ours += [] if arm is None else [arm]
        timings = measure([*ours, *peers], self._effort(), self.driver.synchronize)
        made = self._token_rows(timings, [arm.name for arm in peers])
        self._note_steps(timings)
        for name in self.ways:
            host = self._try(f"{name}: host time of a replay", self._host_row, name)
            made += [] if host is None else [host]
        host = self._try(f"{ONE_LAUNCH}: host time of a token", self._one_launch_host_row)
        made += [] if host is None else [host]
        judged = (f"{self.name} host", f"{self.name} one launch host")
        self.notes += [_HOST_TARGET.told(row) for row in made if row.case in judged]
        return made

    # ---- arms ----------------------------------------------------------------------------------

    def _way(self, name: str, **options: Any) -> None:
        way = OurWay(name, self.subject, self.driver, self.end, **options)
        warmed(way.arm())
        self.ways[name] = way
        self.notes += way.one_time_notes(self.name)

    def _peers(self, experts: str) -> list[Arm]:
        arms: list[Arm] = []
        for name, build in (EMULATED_PEERS if self.driver.is_emulated else PEERS).items():
            if name in self.request.without:
                self.notes.append({"left out": f"{self.name} {name}", "reason": "asked for"})
                continue
            which = EXPERTS[0] if name in COMPILED_PEERS else experts
            start = time.perf_counter()
            with self.subject.experts(which):
                arm = self._try(name, build, self.subject, self.driver, self.end)
            if arm is not None:
                arms.append(arm)
                self._note(f"{name}: made ready", "ms", (time.perf_counter() - start) * 1e3)
        return arms

    def _best_experts(self) -> str:
        """The way of the experts whose plain step takes the least GPU time, told in notes."""
        if not self.subject.has_experts:
            return EXPERTS[0]
        times: dict[str, float] = {}
        for name in EXPERTS:
            with self.subject.experts(name):
                seconds = self._try(f"experts {name}", self._plain_step_seconds)
            if seconds is not None:
                self._note(f"plain step, experts {name}", "us", seconds * 1e6)
                times[name] = seconds
        best = min(times, key=lambda name: times[name], default=EXPERTS[0])
        what = f"{best} where steps are plain, {EXPERTS[0]} where inductor compiles them"
        self.notes.append({"about": f"{self.name}: experts {what}"})
        return best

    def _best(self) -> str:
        """The way that the case is judged by."""
        return COMPILED if COMPILED in self.ways else PLAIN

    def _plain_step_seconds(self) -> float:
        way = OurWay("probe", self.subject, self.driver, self.end)
        calls = self._effort().calls
        seconds = min(way.step_arm().burst(calls) for _ in range(3)) / calls
        way.close()
        return seconds

    def _effort(self) -> Effort:
        if self.driver.is_emulated:
            return Effort(rounds=1, bursts=1, calls=self.subject.tokens)
        return Effort(rounds=self.request.rounds, bursts=1, calls=self.subject.tokens)

    # ---- rows ----------------------------------------------------------------------------------

    def _token_rows(self, timings: Timings, peers: list[str]) -> list[Row]:
        row = functools.partial(row_of, timings=timings, allowance=0.0, unit="tokens/s")
        plain_peers = [name for name in peers if name not in COMPILED_PEERS]
        best = self._best()
        wanted = [(self.name, best, best, peers)]
        if best == COMPILED and PLAIN in self.ways:
            wanted.append((f"{self.name} plain", PLAIN, PLAIN, plain_peers))
        if ONE_LAUNCH in timings.rounds:
            wanted.append((f"{self.name} one launch", ONE_LAUNCH, best, peers))
        errors = self._errors()
        return [
            row(case, ours=ours, floor=f"{way}: step", peers=against, error=errors[way])
            for case, ours, way, against in wanted
            if against
        ]

    def _errors(self) -> dict[str, float | None]:
        """Of each way, with what it decoded beside eager in notes."""
        errors: dict[str, float | None] = {}
        for name, way in self.ways.items():
            runner = way.runner
            found = self._try(
                f"{name} against eager", agreement, runner, self.subject, self.eager, self.end
            )
            errors[name] = None if found is None else found.error
            if found is not None:
                out_of = f"of {found.steps}"
                self._note(f"{name}: tokens equal to eager", out_of, found.equal)
                self._note(f"{name}: choices equal, tokens forced", out_of, found.choices)
        return errors

    def _host_row(self, name: str) -> Row:
        """The replay call of a way, against the driver's call on its graph and torch's replay."""
        way, driver = self.ways[name], self.driver
        assert way.runner.graph is not None
        executable, stream = driver.instantiate(way.runner.graph.handle), current_stream(driver)
        launches = Launches(way, executable, stream, driver)
        peers = [launches.peer()]
        if name == PLAIN and not driver.is_emulated:
            step = HandStep(self.subject)
            step.capture(step.decode)
            peers.append(submitting(BY_HAND, step.begin, step.replay, driver))
        rounds = self._effort().rounds
        few = Effort(rounds, 1, 2) if driver.is_emulated else Effort(rounds, 8, 4)
        timings = measure([launches.floor(), way.host_arm(), *peers], few, driver.synchronize)
        paced = measure(
            [launches.floor_behind_a_step(), way.host_arm_behind_a_step()],
            Effort(rounds, 1, few.calls),
            driver.synchronize,
        )
        driver.destroy_exec(executable)
        for arm in ("ours", FLOOR):
            what = f"{name}: host, behind a running step, {arm}"
            self._note(what, "us", paced.seconds(arm).median * 1e6)
        case = f"{self.name} host" if name == self._best() else f"{self.name} {name[5:]} host"
        names = [arm.name for arm in peers]
        return row_of(case, timings, ours="ours", floor=FLOOR, peers=names, allowance=0.0)

    def _one_launch_host_row(self) -> Row:
        """CPU time of a generation in one launch by its tokens, the waiting in it."""
        host = OneLaunchHost(self.ways[self._best()], self.driver)
        arms = [host.ours(), host.floor(), host.peer()]
        timings = measure(arms, self._effort(), self.driver.synchronize)
        self._note(f"{ONE_LAUNCH}: the launching call", "us", median(host.launching) * 1e6)
        return row_of(
            f"{self.name} one launch host",
            timings,
            ours="ours",
            floor=LOOP_FLOOR,
            peers=[arms[-1].name],
            allowance=0.0,
        )

    # ---- notes ---------------------------------------------------------------------------------

    def _note_steps(self, timings: Timings) -> None:
        bandwidth = self._try("streaming read", read_bandwidth, self.driver)
        if bandwidth is not None:
            self._note("streaming read", "GB/s", bandwidth / 1e9)
        for name, way in self.ways.items():
            gpu = timings.seconds(f"{name}: step").median
            bytes_read = step_bytes(self.subject, way.runner.cache)
            self._note(f"{name}: GPU time of a step", "us", gpu * 1e6)
            self._note(f"{name}: wall over GPU time", "", 1 / self._of_step(timings, name))
            self._note(f"{name}: bytes of a step", "MB", bytes_read / 1e6)
            if bandwidth is not None:
                share = 100 * bytes_read / gpu / bandwidth
                self._note(f"{name}: of the read bandwidth", "%", share)
        best = self._best()
        found = 1 / timings.speed(f"{best}: loop", f"{best}: step").median
        self._note(f"{best}: loop, wall over GPU time", "", found)

    def _of_step(self, timings: Timings, name: str) -> float:
        return timings.speed(name, f"{name}: step").median

    def _note(self, what: str, unit: str, value: float) -> None:
        digits = 4 if unit == "" else 2
        self.notes.append(
            {"case": f"{self.name} {what}", "unit": unit, "ours": round(value, digits)}
        )

    def _try(self, what: str, act: Callable[..., T], *arguments: Any, **options: Any) -> T | None:
        """What ``act`` gives. What it raises becomes a note: one arm must not cost the case."""
        try:
            return act(*arguments, **options)
        except Exception as error:
            if not self.driver.is_emulated:
                traceback.print_exc()  # a run on a device is dear: it says all it knows
            first_line = str(error).strip().partition("\n")[0]
            reason = f"{type(error).__name__}: {first_line}"
            self.notes.append({"left out": f"{self.name} {what}", "reason": reason})
            return None
