"""StepLog: what calls came to: counters, times of each kind, the newest decisions, observers."""

from __future__ import annotations

import logging
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable

from graphcore.errors import GraphcoreWarning
from graphcore.moe.decisions.counters import MoECounting, Tally
from graphcore.moe.decisions.decision import Decision
from graphcore.moe.decisions.lookup_key import LookupKey
from graphcore.moe.decisions.reasons import Reason
from graphcore.moe.manifests.names import Kind, Way
from graphcore.moe.steps.device_times import DeviceTimes
from graphcore.moe.steps.step_record import StepRecord, StepSeconds, StepTotals

_log = logging.getLogger("graphcore")
_KEPT = 256
_UNSETTLED = 16  # calls in a row; a graph that grows step by step settles long before

Observer = Callable[[StepRecord], object]


class StepLog:
    """The books of one :class:`graphcore.moe.GraphReuse`. Not locked.

    Args:
        observers: Told of each call, after it.
        device: Times launches on the device; None: nobody asked.

    Attributes:
        counting: The counters.
        records: The newest calls but replays of what is unchanged, oldest first.
        reasons: Calls but replays of what is unchanged, by kind and reason.
    """

    def __init__(
        self, observers: Iterable[Observer] = (), device: DeviceTimes | None = None
    ) -> None:
        self.device = device
        self.observers: list[Observer] = list(observers)
        self.counting = MoECounting()
        self.records: deque[StepRecord] = deque(maxlen=_KEPT)
        self._noted = 0
        self.reasons: Counter[tuple[Kind, Reason]] = Counter()
        # calls, then seconds as StepSeconds has them
        self._sums = {kind: [0.0] * 5 for kind in Kind}
        self._changed_in_a_row: Counter[LookupKey] = Counter()
        self._tallies: dict[int, Tally] = {}

    @property
    def number(self) -> int:
        """How many calls there were."""
        return self._noted + sum(tally.times for tally in self._tallies.values())

    def next_number(self) -> int:
        """The number of one call more, which is none that a tally counts."""
        self._noted += 1
        return self.number

    @property
    def totals(self) -> dict[Kind, StepTotals]:
        """Calls and seconds of each kind that there was."""
        timed = {} if self.device is None else self.device.sums()
        sums = {kind: [*each] for kind, each in self._sums.items()}
        replays = sums[Kind.REPLAY]
        for tally in self._tallies.values():
            replays[0] += tally.times
            replays[3] += tally.seconds
        return {
            kind: StepTotals(int(calls), StepSeconds(*seconds), *timed.get(kind, (0, 0.0)))
            for kind, (calls, *seconds) in sums.items()
            if calls
        }

    def note(self, record: StepRecord, decision: Decision) -> None:
        """Writes down a call, logs it where it is more than a replay, and tells the observers."""
        self.counting.add(*decision.counters())
        plan = decision.plan
        if plan is not None and plan.outcome.is_grouped:
            has_run = decision.way in (Way.GRAPH, Way.DIRECT)
            names = ("ready", "completed") if has_run else ("ready",)
            self.counting.add(*names, count=len(plan.groups))
        sums = self._sums[record.result.kind]
        for index, value in enumerate((1.0, *record.result.seconds)):
            sums[index] += value
        if (decision.kind, decision.reason) != (Kind.REPLAY, Reason.UNCHANGED):
            self.records.append(record)
            self.reasons[decision.kind, decision.reason] += 1
            _log.info("moe step %d of %s: %s", record.number, record.result.key.graph, decision)
            self._look_whether_it_settles(record.result.key, decision)
        self.tell(record)

    def _look_whether_it_settles(self, key: LookupKey, decision: Decision) -> None:
        """Warns, once, of a variant whose nodes are others at every call."""
        if decision.reason is not Reason.CHANGED:
            self._changed_in_a_row.pop(key, None)
            return
        self._changed_in_a_row[key] += 1
        if self._changed_in_a_row[key] == _UNSETTLED:
            _log.warning(
                "moe steps of %s: %d calls in a row found other nodes than the one before and ran "
                "without a graph (%s); steps that take turns need an identity each, and what "
                "differs at every step is for decode_boundary_overlap=1",
                key.graph,
                _UNSETTLED,
                decision.detail,
            )

    def replay_tally(self, groups: int) -> Tally:
        """What counts replays of what is unchanged, of so many groups, and their launch seconds.

        Whoever makes one raises it; observers are told apart.
        """
        tally = self._tallies.get(groups)
        if tally is None:
            tally = self._tallies[groups] = self.counting.tally(
                {"calls": 1, "replays": 1, "plan_calls": 1, "plan_reuses": 1,
                 "ready": groups, "completed": groups}
            )  # fmt: skip
        return tally

    def tell(self, record: StepRecord) -> None:
        """Tells the observers; what one of them raises is a warning, for the step has run."""
        for observer in self.observers:
            try:
                observer(record)
            except Exception as error:
                warnings.warn(
                    f"step {record.number} has run; observer {observer!r} raised "
                    f"{type(error).__name__}: {error}",
                    GraphcoreWarning,
                    stacklevel=2,
                )
