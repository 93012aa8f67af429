"""MoECounters: what steps with experts in slots did, as numbers that add up."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from graphcore.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class MoECounters:
    """What was done since the start, as the host knows it: looking waits for nothing.

    Which experts are copied into slots is decided on the device, and counted there:
    ``SlotPool.totals`` and ``SlotPool.copied_nbytes`` of a group, ``GraphReuse.report`` of all of
    them, both after all work.

    ``plan_calls == plan_compiles + plan_reuses + plan_unavailable + prepare_error``;
    ``calls == direct + staged + captures + replays + updates + reinstantiations + declined +
    failed``.

    Args:
        plan_calls: Plans asked for.
        plan_compiles: Plans made.
        plan_reuses: Plans used again.
        plan_unavailable: Plans that were not to be had: a manifest was being replaced.
        prepare_error: Plans that could not be made because of an error.
        calls: Steps.
        direct: Steps without a graph that were not refused one.
        staged: Steps through scratch memory that were not refused a graph.
        captures: Steps that captured and instantiated.
        replays: Steps that launched what was captured.
        updates: Steps that updated an executable.
        reinstantiations: Steps whose update the driver refused.
        declined: Steps that were refused a graph and ran without.
        failed: Steps that raised.
        required_unsupported: Of those, required work that was refused before it began.
        fallback: Steps that ran staged because slots did not serve them.
        rollback: Steps before which admissions of an earlier one, which had failed, were undone.
        finish_error: Steps that failed when their work was done, at giving their slots back.
        strategy_switches: Times that a group changed between direct and staged.
        ready: Groups that were ready to run from their slots, once a step.
        completed: Those that ran from their slots to their end.
    """

    plan_calls: int = 0
    plan_compiles: int = 0
    plan_reuses: int = 0
    plan_unavailable: int = 0
    prepare_error: int = 0
    calls: int = 0
    direct: int = 0
    staged: int = 0
    captures: int = 0
    replays: int = 0
    updates: int = 0
    reinstantiations: int = 0
    declined: int = 0
    failed: int = 0
    required_unsupported: int = 0
    fallback: int = 0
    rollback: int = 0
    finish_error: int = 0
    strategy_switches: int = 0
    ready: int = 0
    completed: int = 0


_NAMES = frozenset(field.name for field in fields(MoECounters))


class MoECounting:
    """The numbers while they grow; safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = dict.fromkeys(_NAMES, 0)
        self._tallies: list[Tally] = []

    def add(self, *names: str, count: int = 1) -> None:
        """Adds ``count`` to each of ``names``, all or none.

        Raises:
            ConfigurationError: A name that no counter has.
        """
        _check(names)
        with self._lock:
            self._numbers.update({name: self._numbers[name] + count for name in names})

    def tally(self, counts: Mapping[str, int]) -> Tally:
        """What adds ``counts`` to the numbers as often as it says: for what every step counts.

        One thread at a time may count there.

        Raises:
            ConfigurationError: A name that no counter has.
        """
        _check(counts)
        tally = Tally(dict(counts))
        with self._lock:
            self._tallies.append(tally)
        return tally

    def snapshot(self) -> MoECounters:
        """The numbers of now, together."""
        with self._lock:
            numbers = dict(self._numbers)
            for tally in self._tallies:
                for name, count in tally.counts.items():
                    numbers[name] += tally.times * count
        return MoECounters(**numbers)


class Tally:
    """What is counted together: how often it was and what it took, for its user to raise.

    Attributes:
        counts: Name -> by how much it grows each time.
        times: How often.
        seconds: All together.
    """

    __slots__ = ("counts", "seconds", "times")

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = counts
        self.times = 0
        self.seconds = 0.0


def _check(names: Iterable[str]) -> None:
    unknown = sorted(set(names) - _NAMES)
    if unknown:
        raise ConfigurationError(f"names: expected counters, got {unknown}")
