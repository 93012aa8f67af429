"""RankReuse: a GraphReuse whose every step the ranks that share experts agree on."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from graphcore.moe.graph_reuse import GraphReuse
from graphcore.moe.steps.step_agreement import CHOICES
from graphcore.moe.steps.step_record import StepResult
from graphcore.moe.steps.step_work import StepWork
from graphcore.parallel.ranks import Ranks

_AT_ONCE, _LOOK = "at once", "look"
_CAPTURED, _REFUSED = "captured", "not captured"


class RankAgreement:
    """Asks the other ranks; see :class:`graphcore.moe.steps.step_agreement.StepAgreement`.

    A replay of what is unchanged costs one round, any other step two, a capture three.

    Args:
        ranks: That share the experts.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._name = ""
        self._was_asked = False

    @contextmanager
    def step(self, identity: Hashable) -> Iterator[None]:
        """A block for one step; an error in it is told to the others."""
        self._name = f"step {identity}"
        self._was_asked = False
        with self._ranks.together(self._name):
            yield

    def at_once(self, *, is_ready: bool) -> bool:
        """Whether all would replay what they replayed before; False the second time in a step."""
        if self._was_asked:
            return False
        self._was_asked = True
        choice = _AT_ONCE if is_ready else _LOOK
        return self._ranks.agree(self._name, choice, among=(_AT_ONCE, _LOOK)).choice == _AT_ONCE

    def choice(self, own: str, why: str) -> tuple[str, str]:
        """What all do, and whose choice that was."""
        found = self._ranks.agree(f"{self._name}: decision", own, among=CHOICES, detail=why)
        return found.choice, found.reason

    def captured(self, problem: str) -> str:
        """Why some rank has no graph; "" where all have one."""
        found = self._ranks.agree(
            f"{self._name}: capture",
            _REFUSED if problem else _CAPTURED,
            among=(_CAPTURED, _REFUSED),
            detail=problem,
        )
        return (problem or found.reason) if found.choice == _REFUSED else ""


class RankReuse(GraphReuse):
    """The :class:`GraphReuse` of one rank; every rank makes the same calls in the same order.

    Args:
        ranks: That share the experts.
        options: As of :class:`GraphReuse`, but ``rank``, ``ranks`` and ``agreement``.
    """

    def __init__(self, ranks: Ranks, **options: Any) -> None:
        self._asking = RankAgreement(ranks)
        super().__init__(rank=ranks.rank, ranks=ranks.size, agreement=self._asking, **options)

    def run(self, work: StepWork, *rest: Any, **options: Any) -> StepResult:
        """As :meth:`GraphReuse.run`, on all ranks; what one raises the others are told."""
        with self._asking.step(work.identity):
            return super().run(work, *rest, **options)
