"""A cache as a table of text: one line a key, most recently used first, and what it all takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphcore.executable.memory_report import in_words

if TYPE_CHECKING:
    from graphcore.reuse.counters import CacheCounters
    from graphcore.reuse.holding import Holding

_ROWS = 20
_KEY_WIDTH = 40


def table(holding: Holding, counters: CacheCounters, now: float) -> str:
    """The table of what ``holding`` has; asks no driver anything."""
    lines = [_summary(holding), _counts(counters)]
    entries = list(reversed(holding.entries.values()))
    rows = [("key", "nodes", "memory", "uses", "idle", "")]
    for entry in entries[:_ROWS]:
        words = [f"family {entry.family!r}"] if entry.family is not None else []
        words += ["pinned"] if entry.pins else []
        words += ["closed"] if entry.executable.is_closed else []
        words += ["stale"] if not entry.executable.is_closed and entry.executable.marked else []
        rows.append(
            (
                _shortened(repr(entry.identity.key)),
                str(entry.nodes),
                in_words(entry.bytes),
                str(entry.uses),
                f"{now - entry.last_time:.0f} s",
                ", ".join(words),
            )
        )
    if entries:
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines += [_row(row, widths) for row in rows]
    if len(entries) > _ROWS:
        lines.append(f"  ... and {len(entries) - _ROWS} more")
    return "\n".join(lines)


def _summary(holding: Holding) -> str:
    limits = holding.limits
    most = "" if limits.max_entries is None else f" of {limits.max_entries}"
    budget = "" if limits.max_bytes is None else f" of {in_words(limits.max_bytes)}"
    pool = f", {in_words(holding.pool_bytes)} of it shared" if holding.pool_bytes else ""
    count = len(holding.entries)
    plural = "y" if count == 1 else "ies"
    return f"<GraphCache {count}{most} entr{plural}, {in_words(holding.bytes)}{budget}{pool}>"


def _counts(counters: CacheCounters) -> str:
    return (
        f"  {counters.hits} hits, {counters.misses} misses, {counters.recaptures} re-captures, "
        f"{counters.evicted} evicted, {counters.updated} updated, "
        f"{counters.reinstantiated} re-instantiated"
    )


def _row(row: tuple[str, ...], widths: list[int]) -> str:
    key, *numbers, words = row
    cells = [key.ljust(widths[0])]
    cells += [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
    return ("  " + "  ".join([*cells, words])).rstrip()


def _shortened(text: str) -> str:
    return text if len(text) <= _KEY_WIDTH else text[: _KEY_WIDTH - 3] + "..."
