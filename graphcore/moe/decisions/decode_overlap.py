"""Decode overlap: may the host prepare the next step while one runs? Else decoding is ordinary.

The next step is prepared before the tokens of the running one are known on the host: they stay on
the device, and each finds its sequence and position there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from graphcore.moe.decisions.options import MoEOptions

INPUT_BUFFERS = 2
"""Pinned buffers of inputs that take turns, each with an event behind its last reader."""


class OverlapRule(Enum):
    """What must hold, in the order in which it is looked at."""

    OPTION = "the option decode_overlap is on"
    SAMPLED_ON_DEVICE = "tokens are chosen on the device"
    ONE_DEVICE = "the model lies on one device"
    EMBEDDINGS = "so do its embeddings"
    SINGLE_ROWS = "each sequence has one row"
    ROLLBACK = "one token of a sequence can be taken back"
    OUTSTANDING = "no sequence has a token outstanding already"
    MATCHED = "every row follows the outstanding token of its sequence and position"
    REQUESTS = "every slot holds the request that it held"
    NO_GROWTH = "no buffer has to grow"
    INPUT_BUFFER = "an input buffer is free"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a step: whose it is. ``request`` is another one for a slot that was used again."""

    request: int
    sequence: int
    position: int


@dataclass(frozen=True, slots=True)
class OverlapFacts:
    """The running step and the next one.

    Args:
        options: What is switched on.
        running: Rows of the running step.
        following: Rows of the next one.
        outstanding: Tokens of each (sequence, count) that were queued and not read.
        is_sampled_on_device: Whether tokens are chosen there.
        devices: On which the model lies.
        embeddings_on_device: Whether they do.
        can_roll_back: Whether one token of a sequence can be taken back.
        grows: Whether a buffer has to grow first.
        free_buffers: Input buffers whose last reader is done.
    """

    options: MoEOptions
    running: tuple[Row, ...]
    following: tuple[Row, ...]
    outstanding: tuple[tuple[int, int], ...] = ()
    is_sampled_on_device: bool = True
    devices: int = 1
    embeddings_on_device: bool = True
    can_roll_back: bool = True
    grows: bool = False
    free_buffers: int = 1


def overlap_obstacles(facts: OverlapFacts) -> tuple[OverlapRule, ...]:
    """What forbids to prepare the next step now, in order; empty where it is allowed."""
    return tuple(_obstacles(facts))


def _obstacles(facts: OverlapFacts) -> Iterator[OverlapRule]:
    sequences = [row.sequence for row in facts.following]
    running = {row.sequence: row for row in facts.running}
    before = [running.get(row.sequence) for row in facts.following]
    pairs = [
        (old, new) for old, new in zip(before, facts.following, strict=True) if old is not None
    ]
    checks = {
        OverlapRule.OPTION: facts.options.decode_overlap,
        OverlapRule.SAMPLED_ON_DEVICE: facts.is_sampled_on_device,
        OverlapRule.ONE_DEVICE: facts.devices == 1,
        OverlapRule.EMBEDDINGS: facts.embeddings_on_device,
        OverlapRule.SINGLE_ROWS: len(set(sequences)) == len(sequences) > 0
        and len(running) == len(facts.running),
        OverlapRule.ROLLBACK: facts.can_roll_back,
        OverlapRule.OUTSTANDING: all(count == 0 for _, count in facts.outstanding),
        OverlapRule.MATCHED: len(pairs) == len(facts.following)
        and all(new.position == old.position + 1 for old, new in pairs),
        OverlapRule.REQUESTS: all(new.request == old.request for old, new in pairs),
        OverlapRule.NO_GROWTH: not facts.grows,
        OverlapRule.INPUT_BUFFER: 0 < facts.free_buffers <= INPUT_BUFFERS,
    }
    return (rule for rule in OverlapRule if not checks[rule])
