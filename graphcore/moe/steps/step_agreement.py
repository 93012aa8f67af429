"""StepAgreement: what several ranks that share experts must do alike, asked before a launch.

One rank alone agrees with itself. How ranks ask each other stands above this package; here stands
what is asked, and what an answer means for a decision.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from graphcore.moe.decisions.decision import Decision
from graphcore.moe.decisions.reasons import Reason, Retention
from graphcore.moe.manifests.names import Kind, Way

EAGER = "without a graph"
CHOICES = (Kind.REPLAY.value, Kind.UPDATE.value, Kind.CAPTURE.value, EAGER)
"""What a call may come to on all ranks, from the boldest to the most cautious."""


class StepAgreement(Protocol):
    """Asks the other ranks; every rank asks the same questions in the same order.

    Each raises RankError where another rank failed or is missing; nothing was launched then.
    """

    def at_once(self, *, is_ready: bool) -> bool:
        """Whether all ranks would replay what they replayed before; asked once a step."""

    def choice(self, own: str, why: str) -> tuple[str, str]:
        """Which of :data:`CHOICES` all ranks take, and the reason where that is not ``own``."""

    def captured(self, problem: str) -> str:
        """Why some rank has no graph; "" where all captured, as this one did without a problem."""


def choice_of(decision: Decision) -> str:
    """What a decision means for the other ranks."""
    return decision.kind.value if decision.way is Way.GRAPH else EAGER


def agreed(decision: Decision, choice: str, why: str) -> Decision:
    """``decision``, or the one that does what all ranks do."""
    own = choice_of(decision)
    if choice == own:
        return decision
    if choice == EAGER:
        return decision.turned(Reason.RANKS, why)
    kind = Kind(choice)
    retention = decision.retention
    if kind is Kind.CAPTURE:  # the graph of before goes, as it does on the other rank
        retention = retention.with_at_least(Retention.DROP)
    return replace(decision, kind=kind, reason=Reason.RANKS, detail=why, retention=retention)
