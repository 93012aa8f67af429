"""Agreement: what several ranks do together, made of what each of them proposes.

Pure: the same proposals give every rank the same answer, so that nobody has to be asked twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from graphcore.errors import ConfigurationError, RankError

_MOST_TEXT = 2000


class State(Enum):
    """How a rank comes to a round."""

    READY = "ready"
    FAILED = "failed"
    """It cannot go on with this round; it may take part in the next."""
    CLOSED = "closed"
    """It has left for good."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one rank brings to a round.

    Args:
        subject: What the round is about; the same for all.
        choice: What it would do.
        detail: Why.
        facts: Name -> value that must be the same on all ranks.
        value: Whatever else is told, as JSON has it.
        state: Whether it can go on.
    """

    subject: str
    choice: str = ""
    detail: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    value: Any = None
    state: State = State.READY

    def encoded(self) -> bytes:
        """As bytes, for a store."""
        said = asdict(self) | {"state": self.state.value, "detail": self.detail[:_MOST_TEXT]}
        return json.dumps(said).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Proposal:
        """The way back."""
        said = json.loads(data)
        return cls(**{**said, "state": State(said["state"])})


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks do.

    Attributes:
        choice: One of those that were proposed.
        reason: Whose choice it was, and why; "" where all proposed the same.
        values: What each rank told, in the order of ranks.
    """

    choice: str
    reason: str
    values: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.choice}: {self.reason}" if self.reason else self.choice


def agree(proposals: Sequence[Proposal], order: Sequence[str] = ()) -> Agreed:
    """What the ranks do together.

    Args:
        proposals: One of each rank, in the order of ranks.
        order: Choices from the boldest to the most cautious one; the most cautious that anybody
            proposed is agreed on. Empty: there is nothing to choose.

    Raises:
        RankError: A rank failed, or has left; or the ranks are not at the same point.
        ConfigurationError: A fact differs; names it, and the ranks.
    """
    _check_states(proposals)
    _check_subjects(proposals)
    _check_facts(proposals)
    values = tuple(each.value for each in proposals)
    ranking = {choice: place for place, choice in enumerate(order)}
    choices = [each.choice for each in proposals]
    unknown = [choice for choice in choices if choice and choice not in ranking]
    if unknown:
        raise ConfigurationError(f"choice: expected one of {list(order)}, got {unknown[0]!r}")
    if not order:
        return Agreed("", "", values)
    chosen = max(choices, key=ranking.__getitem__)
    if choices.count(chosen) == len(choices):
        return Agreed(chosen, "", values)
    rank = choices.index(chosen)
    detail = proposals[rank].detail
    return Agreed(chosen, f"rank {rank}" + (f": {detail}" if detail else ""), values)


def _check_states(proposals: Sequence[Proposal]) -> None:
    gone = {rank: each for rank, each in enumerate(proposals) if each.state is not State.READY}
    if gone:
        told = "; ".join(telling(rank, each) for rank, each in gone.items())
        raise RankError(told, failed=tuple(gone))


def telling(rank: int, proposal: Proposal) -> str:
    """What a rank that cannot go on has said, in words."""
    if proposal.state is State.CLOSED:
        return (
            f"rank {rank} has left: {proposal.detail}"
            if proposal.detail
            else (f"rank {rank} has left")
        )
    return f"rank {rank} failed at {proposal.subject}: {proposal.detail}"


def _check_subjects(proposals: Sequence[Proposal]) -> None:
    subjects = [each.subject for each in proposals]
    if len(set(subjects)) > 1:
        told = ", ".join(f"rank {rank} at {each!r}" for rank, each in enumerate(subjects))
        raise RankError(
            f"ranks: expected all at the same point, got {told}; every rank must make the same "
            "calls in the same order",
            failed=[rank for rank, each in enumerate(subjects) if each != subjects[0]],
        )


def _check_facts(proposals: Sequence[Proposal]) -> None:
    names = dict.fromkeys(name for each in proposals for name in each.facts)
    for name in names:
        values = [each.facts.get(name, "none") for each in proposals]
        if len(set(values)) > 1:
            told = ", ".join(f"rank {rank} has {each}" for rank, each in enumerate(values))
            raise ConfigurationError(f"{name}: expected the same on all ranks, but {told}")
