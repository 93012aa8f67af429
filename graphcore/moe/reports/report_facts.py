"""What a ReuseReport is made of, gathered from a GraphReuse: counters, records, cache and pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from graphcore.moe.decisions.lookup_key import LookupKey
from graphcore.moe.decisions.reasons import Reason
from graphcore.moe.manifests.names import Kind
from graphcore.moe.reports.report import (
    BoundaryLine,
    DepartureLine,
    GroupLine,
    OutcomeLine,
    ReuseReport,
    VariantLine,
)
from graphcore.moe.slots.slot_pool import SlotPool
from graphcore.moe.steps.step_record import StepRecord, StepTotals
from graphcore.moe.steps.variant_table import Variant
from graphcore.reuse import Eviction

if TYPE_CHECKING:
    from graphcore.moe.graph_reuse import GraphReuse
    from graphcore.moe.layers.staged import StagedTotals
    from graphcore.moe.overlap.overlapped_decode import OverlappedDecode
    from graphcore.moe.reports.step_trace import StepTrace

_TOLD = frozenset({Kind.UPDATE, Kind.REINSTANTIATE, Kind.DECLINED, Kind.FAILED})
_CHANGES = frozenset({Reason.CHANGED, Reason.GENERATION, Reason.HOST_STAGED, Reason.NOT_READY})


def report_of(
    reuse: GraphReuse,
    decode: OverlappedDecode | None = None,
    trace: StepTrace | None = None,
    staged: Mapping[str, StagedTotals] | None = None,
) -> ReuseReport:
    """What ``reuse`` did since its start; waits for all work where it has a pool.

    Args:
        reuse: What ran.
        decode: Who ran it, for what was queued ahead.
        trace: That watched it, for device times.
        staged: What went through scratch memory, by group.

    Raises:
        CaptureError: Inside a capture.
    """
    pool = None if reuse.pool is None or reuse.pool.is_closed else reuse.pool
    return ReuseReport(
        driver=f"driver {reuse.driver.name}, device {reuse.driver.device}{_rank(reuse)}",
        options=str(reuse.options),
        refused=reuse.options_refused,
        counters=reuse.counters,
        totals=reuse.totals,
        outcomes=outcomes(reuse.reasons, reuse.totals),
        boundaries=boundaries(reuse.records),
        variants=tuple(map(_variant, reuse.variants)),
        departures=tuple(map(_departure, reuse.departures)),
        groups=() if pool is None else groups(pool),
        pool_bytes=0 if pool is None else pool.nbytes,
        device_seconds=() if trace is None else trace.device_seconds,
        overlap=None if decode is None else decode.totals,
        hidden=None if trace is None else trace.hidden,
        staged=tuple((staged or {}).items()),
        is_emulated=reuse.driver.is_emulated,
    )


def _rank(reuse: GraphReuse) -> str:
    return f", rank {reuse.rank} of {reuse.ranks}" if reuse.ranks > 1 else ""


def outcomes(
    reasons: Counter[tuple[Kind, Reason]], totals: dict[Kind, StepTotals]
) -> tuple[OutcomeLine, ...]:
    """Calls by kind and reason, most first.

    Args:
        reasons: Of the calls that were more than a replay of what is unchanged.
        totals: Of all calls.
    """
    counts = Counter(reasons)
    replays = totals.get(Kind.REPLAY, StepTotals()).calls
    told = sum(count for (kind, _), count in reasons.items() if kind is Kind.REPLAY)
    counts[Kind.REPLAY, Reason.UNCHANGED] += replays - told
    return tuple(OutcomeLine(*key, calls) for key, calls in counts.most_common() if calls)


def boundaries(records: Iterable[StepRecord]) -> tuple[BoundaryLine, ...]:
    """The calls that found a change or were refused a graph, equal ones together, newest first."""
    found: dict[tuple[object, ...], BoundaryLine] = {}
    for record in records:
        result = record.result
        if result.kind not in _TOLD and result.reason not in _CHANGES:
            continue
        about = name_of(result.key), result.kind, result.reason, result.detail, result.way
        before = found.pop(about, None)  # behind the others again
        calls = 1 if before is None else before.calls + 1
        found[about] = BoundaryLine(*about, calls, record.number)
    return tuple(reversed(found.values()))


def groups(pool: SlotPool) -> tuple[GroupLine, ...]:
    """The groups of a pool and what their steps came to; waits for all work."""
    return tuple(
        GroupLine(
            name,
            group.experts,
            group.slots,
            pool.totals(name),
            group.expert_nbytes,
            pool.fault(name),
        )
        for name, group in pool.groups.items()
    )


def name_of(key: object) -> str:
    """A variant in words."""
    if not isinstance(key, LookupKey):
        return repr(key)
    graph = key.graph if isinstance(key.graph, str) else repr(key.graph)
    rows = "" if key.rows is None else f", {key.rows} row{'' if key.rows == 1 else 's'}"
    namespace = "" if key.namespace is None else f", {key.namespace.value}"
    return f"{graph}: {key.phase.value}{namespace}{rows}"


def _variant(variant: Variant) -> VariantLine:
    use = variant.use
    name = name_of(variant.key)
    return VariantLine(name, None, None, 0) if use is None else VariantLine(name, *use.size)


def _departure(eviction: Eviction) -> DepartureLine:
    departure = eviction.departure
    detail = f": {departure.detail}" if departure.detail else ""
    waited = ", after its running launch" if eviction.waited else ""
    cause = f"{departure.cause.value}{detail}{waited}"
    return DepartureLine(name_of(eviction.key), cause, departure.bytes)
