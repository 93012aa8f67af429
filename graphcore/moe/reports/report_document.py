"""The document of a ReuseReport: which figures, in which order, under which names."""

from __future__ import annotations

from collections.abc import Iterator

from graphcore.drawing.document import Document, Part, Table, share
from graphcore.drawing.model import Section
from graphcore.executable.memory_report import in_words
from graphcore.moe.manifests.names import Kind
from graphcore.moe.reports.report import ReuseReport
from graphcore.moe.slots.slot_state import SlotFault
from graphcore.moe.steps.step_record import StepSeconds, StepTotals

TITLE = "Reuse of graphs with experts in slots"
# kind -> the kind of node whose colour it has in the bar
_COLOURS = {
    Kind.REPLAY: "kernel",
    Kind.UPDATE: "child",
    Kind.CAPTURE: "memcpy",
    Kind.REINSTANTIATE: "host",
    Kind.DIRECT: "memset",
    Kind.STAGED: "free",
    Kind.DECLINED: "conditional",
    Kind.FAILED: "other",
}
_MOST_LETTERS = 400
_SHOWN_FAILURES = (
    "required_unsupported", "prepare_error", "plan_unavailable", "finish_error", "fallback",
    "rollback", "strategy_switches",
)  # fmt: skip


def document(report: ReuseReport) -> Document:
    """The document of ``report``."""
    bar = [
        Part(kind.value, report.totals[kind].calls, colour)
        for kind, colour in _COLOURS.items()
        if kind in report.totals
    ]
    cards: list[Section] = [
        ("Steps", _steps(report)),
        ("Experts", _experts(report)),
        ("Graphs", _graphs(report)),
    ]
    if ahead := _ahead(report):
        cards.append(("Overlap", ahead))
    return Document(
        TITLE,
        f"{report.driver} · {report.counters.calls} steps · {report.options}",
        cards,
        bar,
        "Steps by what they did",
        [*_tables(report)],
    )


# ---- cards ---------------------------------------------------------------------------------------


def _steps(report: ReuseReport) -> dict[str, object]:
    counters = report.counters
    pairs: dict[str, object] = {"all": counters.calls}
    if counters.calls:
        launched = counters.captures + counters.replays + counters.updates
        launched += counters.reinstantiations
        pairs["through a graph"] = f"{launched} ({share(launched / counters.calls)})"
    pairs |= {
        "plans": f"{counters.plan_compiles} made, {counters.plan_reuses} times used again",
        "groups ready, completed": f"{counters.ready}, {counters.completed}",
    }
    for name in _SHOWN_FAILURES:
        if count := getattr(counters, name):
            pairs[name.replace("_", " ")] = count
    if report.refused:
        pairs["options"] = report.refused
    return pairs


def _experts(report: ReuseReport) -> dict[str, object] | str:
    if not report.groups:
        return "no pool of slots"
    rate = report.hit_rate
    return {
        "hit rate": "no expert was asked for" if rate is None else share(rate),
        "hits": report.hits,
        "admissions": report.admissions,
        "bytes moved": in_words(report.moved_bytes),
        "slots": _slots(report),
        "memory of the slots": in_words(report.pool_bytes),
        **({"moved through scratch": in_words(report.staged_bytes)} if report.staged else {}),
    }


def _slots(report: ReuseReport) -> str:
    slots = sum(group.slots for group in report.groups)
    experts = sum(group.experts for group in report.groups)
    groups = len(report.groups)
    return f"{slots} for {experts} experts in {groups} group{'' if groups == 1 else 's'}"


def _graphs(report: ReuseReport) -> dict[str, object]:
    captured = [variant for variant in report.variants if variant.is_captured]
    return {
        "variants": len(report.variants),
        "captured": len(captured),
        "memory of those": in_words(report.graph_bytes),
        "went": len(report.departures),
    }


def _ahead(report: ReuseReport) -> dict[str, object]:
    pairs: dict[str, object] = {}
    if report.overlap is not None:
        ahead, steps, rolled_back, _ = report.overlap
        pairs["steps queued ahead"] = f"{ahead} of {steps}"
        pairs["rows taken back"] = rolled_back
    if report.hidden is not None:
        host, hidden = report.hidden
        busy = f"{_ms(hidden)} ({share(hidden / host)})" if host else "-"
        pairs |= {"host time of steps": _ms(host), "of it while the step before ran": busy}
    return pairs


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


# ---- tables --------------------------------------------------------------------------------------


def _tables(report: ReuseReport) -> Iterator[Table]:
    calls = max(report.counters.calls, 1)
    yield Table(
        "Outcomes",
        ("kind", "reason", "calls", "of all"),
        tuple(
            (line.kind.value, line.reason.value, line.calls, line.calls / calls)
            for line in report.outcomes
        ),
    )
    yield _times(report)
    yield _boundaries(report)
    yield Table(
        "Variants",
        ("variant", "nodes", "memory", "uses"),
        tuple(
            (line.name, "-", "-", "-")
            if line.bytes is None
            else (line.name, line.nodes or 0, in_words(line.bytes), line.uses)
            for line in report.variants
        ),
        "A variant without numbers is not captured now.",
    )
    yield Table(
        "Graphs that went, and why",
        ("variant", "memory", "cause"),
        tuple((line.name, in_words(line.bytes), line.cause) for line in report.departures),
    )
    if report.overlap is not None:
        yield Table(
            "Why steps were not queued ahead",
            ("not so", "steps"),
            tuple((rule.value, count) for rule, count in report.overlap.obstacles),
            "A step may have several reasons.",
        )
    yield _groups(report)
    yield Table(
        "Experts through scratch memory",
        ("group", "passes", "routes", "experts copied", "moved"),
        tuple(
            (name, totals.passes, totals.routes, totals.experts, in_words(totals.nbytes))
            for name, totals in report.staged
        ),
        is_folded=len(report.staged) > 16,
    )


def _boundaries(report: ReuseReport) -> Table:
    return Table(
        "Boundaries and refusals, newest first",
        ("graph", "kind", "steps", "last", "why"),
        tuple(
            (
                line.graph,
                line.kind.value,
                line.calls,
                line.last,
                _shortened(f"{line.reason.value}{': ' if line.detail else ''}{line.detail}"),
            )
            for line in report.boundaries
        ),
        "Of the newest calls that were more than a replay; the outcomes count all.",
    )


def _shortened(words: str) -> str:
    """A reason of many layers says the same of each; the whole is in ``report.boundaries``."""
    more = len(words) - _MOST_LETTERS
    return words if more <= 0 else f"{words[:_MOST_LETTERS]}... and {more} more characters"


def _times(report: ReuseReport) -> Table:
    """Host times of a call; the device's where a trace measured them."""
    device = {kind: seconds / calls for kind, calls, seconds in report.device_seconds if calls}
    columns = ("kind", "calls", *StepSeconds._fields, *(("device",) if device else ()))
    rows = [
        (
            kind.value,
            *_per_call(report.totals[kind]),
            *((_us(device[kind]) if kind in device else "-",) if device else ()),
        )
        for kind in _COLOURS
        if kind in report.totals
    ]
    note = "Means in microseconds of host time, but device: from a step's first work to its last."
    if not device:
        note = "Means in microseconds of host time; launches return before they have run."
    if report.is_emulated:
        note += " The driver is emulated: they say nothing about a GPU."
    return Table("Time of a call", columns, tuple(rows), note)


def _per_call(totals: StepTotals) -> tuple[int | str, ...]:
    return totals.calls, *(_us(seconds / totals.calls) for seconds in totals.seconds)


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def _refused(fault: SlotFault) -> str:
    """Steps of a group that gave zeros; with the status of the first."""
    return f"{fault.count} ({fault.status.reason})" if fault.count else "0"


def _groups(report: ReuseReport) -> Table:
    return Table(
        "Experts by group",
        ("group", "slots", "experts", "steps", "refused", "admissions", "moved", "hit rate"),
        tuple(
            (
                line.name,
                line.slots,
                line.experts,
                line.totals.steps,
                _refused(line.fault),
                line.totals.misses,
                in_words(line.moved_bytes),
                line.totals.hit_rate,
            )
            for line in report.groups
        ),
        is_folded=len(report.groups) > 16,
    )
