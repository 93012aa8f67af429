"""StepRecord: what one call came to, for whoever asked for it and for those who watch."""

from __future__ import annotations

from typing import NamedTuple

from graphcore.moe.decisions.certificate import Certificate
from graphcore.moe.decisions.lookup_key import LookupKey
from graphcore.moe.decisions.reasons import Reason
from graphcore.moe.manifests.names import Kind, Phase, Way


class StepSeconds(NamedTuple):
    """Host seconds of one call, or of several together; launches return before they have run.

    Args:
        capture: Of the capture.
        update: Of the instantiation or the update behind it.
        launch: Of the launch, or of running without a graph.
        cleanup: Of giving back what the call replaced.
    """

    capture: float = 0.0
    update: float = 0.0
    launch: float = 0.0
    cleanup: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


class StepPart(NamedTuple):
    """A part of one call: ``name``, and when it began and ended, in seconds of ``perf_counter``.

    The names are those of :class:`StepSeconds`, and "prepare": all before the first of them.
    """

    name: str
    begin: float
    end: float


class StepResult(NamedTuple):
    """What a call came to.

    Args:
        kind: In one word.
        reason: Why.
        detail: What exactly, in words.
        way: How its work ran.
        seconds: What it took on the host.
        key: Of its variant.
    """

    kind: Kind
    reason: Reason
    detail: str
    way: Way
    seconds: StepSeconds
    key: LookupKey

    def __str__(self) -> str:
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.kind.value}: {self.reason.value}{detail} ({self.way.value})"


class StepRecord(NamedTuple):
    """A call as observers are told of it, after it.

    Args:
        result: What it came to; of kind FAILED where it raised.
        number: Of the call, from 1.
        uid: Of its graph.
        certificate: None where it carried none.
        phase: That it counted as.
        generation: Of the manifest.
        parts: Of the call, in the order in which they ended.
    """

    result: StepResult
    number: int
    uid: int
    certificate: Certificate | None
    phase: Phase
    generation: int
    parts: tuple[StepPart, ...] = ()


class StepTotals(NamedTuple):
    """Calls of one kind.

    Args:
        calls: How many.
        seconds: Of the host, all together.
        timed: How many of their launches the device was timed for and has run.
        device: Seconds of those on the device.
    """

    calls: int = 0
    seconds: StepSeconds = StepSeconds()
    timed: int = 0
    device: float = 0.0
