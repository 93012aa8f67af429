"""Spans of host and device on one clock, and their form for trace viewers. Pure.

The form is the JSON of Chrome's trace events, which Perfetto and chrome://tracing open.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

HOST_LANES = ("prepare", "capture", "update", "launch", "cleanup", "wait")
"""Lanes of the host, top to bottom."""
DEVICE_LANE = "device"
_HOST, _DEVICE = 1, 2


class Span(NamedTuple):
    """What took from ``begin`` to ``end``, in seconds of one clock.

    Args:
        lane: One of the host's, or the device's.
        name: What it was.
        step: Number of the step: of the decode step where there is one, else of the call.
        begin: In seconds.
        end: In seconds.
        facts: What else there is to say.
    """

    lane: str
    name: str
    step: int
    begin: float
    end: float
    facts: Mapping[str, object]

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def is_device(self) -> bool:
        return self.lane == DEVICE_LANE

    def lies_within(self, other: Span) -> bool:
        """Whether it begins and ends while ``other`` lasts."""
        return other.begin <= self.begin and self.end <= other.end


def hidden_seconds(spans: Iterable[Span]) -> tuple[float, float]:
    """Host seconds of all steps but their waiting, and those while the step before still ran."""
    host: dict[int, list[Span]] = {}
    device: dict[int, list[Span]] = {}
    for span in spans:
        if span.lane in HOST_LANES[:-1]:
            host.setdefault(span.step, []).append(span)
        elif span.is_device:
            device.setdefault(span.step, []).append(span)
    total = hidden = 0.0
    for step, work in host.items():
        busy = _union(work)
        total += sum(end - begin for begin, end in busy)
        hidden += _common(busy, _union(device.get(step - 1, ())))
    return total, hidden


def _common(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> float:
    """Seconds that lie in both; neither has overlaps."""
    return sum(
        max(0.0, min(end, until) - max(begin, since))
        for begin, end in first
        for since, until in second
    )


def _union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted((span.begin, span.end) for span in spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def to_json(spans: Iterable[Span], facts: Mapping[str, object]) -> str:
    """The spans as one JSON document; times count from the first of them.

    Args:
        spans: In any order.
        facts: What there is to say of all of them.
    """
    listed = sorted(spans, key=lambda span: (span.begin, -span.end))
    origin = listed[0].begin if listed else 0.0
    document = {
        "displayTimeUnit": "ms",
        "otherData": dict(facts),
        "traceEvents": [*_names(), *(_event(span, origin) for span in listed)],
    }
    return json.dumps(document, separators=(",", ":"), default=str)


def _names() -> Iterator[dict[str, object]]:
    for process, name in ((_HOST, "host"), (_DEVICE, "device")):
        yield _about("process_name", process, 0, {"name": name})
    for thread, lane in enumerate(HOST_LANES, start=1):
        yield _about("thread_name", _HOST, thread, {"name": lane})
        yield _about("thread_sort_index", _HOST, thread, {"sort_index": thread})
    yield _about("thread_name", _DEVICE, 1, {"name": "steps"})


def _about(name: str, process: int, thread: int, arguments: object) -> dict[str, object]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": arguments}


def _event(span: Span, origin: float) -> dict[str, object]:
    process, thread = (_DEVICE, 1) if span.is_device else (_HOST, 1 + HOST_LANES.index(span.lane))
    return {
        "name": span.name,
        "cat": span.lane,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": round((span.begin - origin) * 1e6, 3),
        "dur": round(max(span.seconds, 0.0) * 1e6, 3),
        "args": {"step": span.step, **span.facts},
    }
