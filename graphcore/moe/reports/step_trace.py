"""StepTrace: watches steps and writes down what took when, on the host and on the device.

Off unless somebody attaches one. Device times come from events around a step's work, put on the
clock of the host by events whose times both know; how well is written into the trace.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from graphcore.driver import Driver, Event, Stream
from graphcore.errors import CudaError, LifecycleError
from graphcore.executable.legacy_work import turn_on
from graphcore.moe.graph_reuse import GraphReuse
from graphcore.moe.manifests.names import Kind
from graphcore.moe.reports.device_clock import DeviceClock
from graphcore.moe.reports.report_facts import name_of
from graphcore.moe.reports.trace_events import DEVICE_LANE, Span, hidden_seconds, to_json
from graphcore.moe.steps.step_record import StepRecord

MOST_SPANS = 200_000


@dataclass(slots=True)
class _Run:
    """A step's work on the device: the events around it, and when the host launched it."""

    name: str
    step: int
    begin: Event
    end: Event
    launched: float | None = None
    record: StepRecord | None = None


class StepTrace:
    """Spans of the steps of a :class:`graphcore.moe.GraphReuse`, and of who runs them. Not locked.

    ``trace.attach(reuse)`` gives the host's; for the device's too, run steps in :meth:`device`, or
    give the trace to :class:`graphcore.moe.OverlappedDecode` as ``watch``.

    Args:
        driver: Where steps run.
        clock: Gives seconds; the clock of :class:`StepRecord`'s parts.
        most: Spans that are kept; older ones go, and are counted.

    Attributes:
        uncertainty: Seconds by which device times may be off against the host's.
        lost: Spans that went, or whose events the driver could not read.

    Raises:
        CudaError: The driver refused an event.
    """

    def __init__(
        self, driver: Driver, *, clock: Callable[[], float] = perf_counter, most: int = MOST_SPANS
    ) -> None:
        self.driver = driver
        self._clock = clock
        self._spans: deque[Span] = deque(maxlen=most)
        self._runs: deque[_Run] = deque()
        self._open: _Run | None = None
        self.lost = 0
        self._device_clock = DeviceClock(driver, clock)
        self.uncertainty = self._device_clock.uncertainty

    # ---- watching ------------------------------------------------------------------------------

    def attach(self, reuse: GraphReuse) -> StepTrace:
        """Watches ``reuse`` from now on; this trace."""
        reuse.observers.append(self)
        return self

    def detach(self, reuse: GraphReuse) -> None:
        """Watches it no longer; nothing where it did not."""
        with suppress(ValueError):
            reuse.observers.remove(self)

    def __call__(self, record: StepRecord) -> None:
        """Writes down the parts of a call."""
        result = record.result
        step = record.number if self._open is None else self._open.step
        facts = {
            "kind": result.kind.value,
            "reason": result.reason.value,
            "variant": name_of(result.key),
            "call": record.number,
        }
        for part in record.parts:
            name = f"{part.name}: {result.kind.value}" if part.name == "launch" else part.name
            self._add(Span(part.name, name, step, part.begin, part.end, facts))
        if self._open is not None:
            launches = (part.begin for part in record.parts if part.name == "launch")
            self._open.launched = next(launches, None)
            self._open.record = record

    @contextmanager
    def host(self, name: str, step: int) -> Iterator[None]:
        """A block of host work: "prepare" or "wait"."""
        begin = self._clock()
        try:
            yield
        finally:
            self._add(Span(name, name, step, begin, self._clock(), {}))

    @contextmanager
    def device(self, name: str, step: int, stream: Stream) -> Iterator[None]:
        """A block that puts one step's work on ``stream``; not inside a capture."""
        self._resolve()
        begin, end = self.driver.event(timing=True), self.driver.event(timing=True)
        with turn_on(stream.handle):
            stream.record(begin)
        run = self._open = _Run(name, step, begin, end)
        try:
            yield
        finally:
            self._open = None
        with turn_on(stream.handle):
            stream.record(end)
        self._runs.append(run)

    # ---- looking -------------------------------------------------------------------------------

    @property
    def spans(self) -> tuple[Span, ...]:
        """All of them; waits for the steps that run."""
        self._resolve(wait=True)
        return tuple(self._spans)

    @property
    def device_seconds(self) -> tuple[tuple[Kind, int, float], ...]:
        """(kind, steps, seconds) on the device, for a report; waits for the steps that run."""
        calls: Counter[Kind] = Counter()
        seconds: dict[Kind, float] = {}
        for span in self.spans:
            if span.is_device and "kind" in span.facts:
                kind = Kind(span.facts["kind"])
                calls[kind] += 1
                seconds[kind] = seconds.get(kind, 0.0) + span.seconds
        return tuple((kind, count, seconds[kind]) for kind, count in calls.items())

    @property
    def hidden(self) -> tuple[float, float]:
        """Host seconds of the steps, and those while the step before still ran."""
        return hidden_seconds(self.spans)

    def to_json(self) -> str:
        """All of it as JSON for Perfetto or chrome://tracing; waits for the steps that run."""
        spans = self.spans
        emulated = "the driver is emulated: times say nothing about a GPU"
        facts = {
            "driver": f"{self.driver.name}:{self.driver.device}",
            "device_clock_uncertainty_us": round(self.uncertainty * 1e6, 3),
            "lost_spans": self.lost,
            **({"note": emulated} if self.driver.is_emulated else {}),
        }
        return to_json(spans, facts)

    def write(self, path: str | Path) -> None:
        """Writes :meth:`to_json` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    # ---- helpers -------------------------------------------------------------------------------

    def _add(self, span: Span) -> None:
        self.lost += len(self._spans) == self._spans.maxlen
        self._spans.append(span)

    def _resolve(self, *, wait: bool = False) -> None:
        """Turns the runs that are over into spans."""
        while self._runs:
            run = self._runs[0]
            try:
                if wait:
                    run.end.synchronize()
                elif not run.end.query():
                    return
                span = self._span(run)
            except (CudaError, LifecycleError):
                self.lost += 1
            else:
                self._add(span)
            self._runs.popleft()

    def _span(self, run: _Run) -> Span:
        clock, launched = self._device_clock, run.launched
        clock.not_after(run.end, self._clock())
        if launched is not None:
            clock.not_before(run.end, launched)
        end = clock.time_of(run.end)
        begin = end - run.end.elapsed_ms_since(run.begin) / 1e3
        facts = {}
        if run.record is not None:
            result = run.record.result
            facts = {"kind": result.kind.value, "variant": name_of(result.key)}
        if launched is not None:
            # an idle device meets the first event before the host has anything to launch
            begin = min(max(begin, launched), end)
        return Span(DEVICE_LANE, run.name, run.step, begin, end, facts)
