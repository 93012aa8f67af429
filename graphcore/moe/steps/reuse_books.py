"""ReuseBooks: what a GraphReuse has done and holds, for whoever looks."""

from __future__ import annotations

from collections import Counter

from graphcore.moe.decisions.counters import MoECounters
from graphcore.moe.decisions.reasons import Reason
from graphcore.moe.manifests.names import Kind
from graphcore.moe.steps.step_log import Observer, StepLog
from graphcore.moe.steps.step_record import StepRecord, StepTotals
from graphcore.moe.steps.variant_table import Variant, VariantTable
from graphcore.reuse import Eviction, GraphCache


class ReuseBooks:
    """The half of :class:`graphcore.moe.GraphReuse` that is looked at."""

    _log: StepLog
    _table: VariantTable

    @property
    def counters(self) -> MoECounters:
        """What was done since the start."""
        return self._log.counting.snapshot()

    @property
    def totals(self) -> dict[Kind, StepTotals]:
        """Calls and seconds of each kind, on the host and, where it was asked for, the device."""
        return self._log.totals

    @property
    def records(self) -> tuple[StepRecord, ...]:
        """The newest 256 calls but replays of what is unchanged, oldest first."""
        return tuple(self._log.records)

    @property
    def reasons(self) -> Counter[tuple[Kind, Reason]]:
        """Calls but replays of what is unchanged, by kind and reason."""
        return Counter(self._log.reasons)

    @property
    def observers(self) -> list[Observer]:
        """Called with each :class:`StepRecord`; add and remove at will."""
        return self._log.observers

    @property
    def departures(self) -> tuple[Eviction, ...]:
        """The newest graphs that made room, lay idle or were asked for, with the reasons."""
        return tuple(self._table.departures)

    @property
    def cache(self) -> GraphCache:
        """Holds the graphs; its ``repr`` is a table of them."""
        return self._table.cache

    @property
    def variants(self) -> tuple[Variant, ...]:
        """What is known of each variant."""
        return tuple(self._table)
