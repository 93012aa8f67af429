"""SlotsWait: exclusive use of groups for a step that has no other way, once it is to be had."""

from __future__ import annotations

import time
from collections.abc import Hashable

from graphcore.errors import LifecycleError
from graphcore.moe.decisions.decision import Decision
from graphcore.moe.manifests.ownership import Ownership, Refusal, RefusalReason, Transaction

_NEVER = frozenset({RefusalReason.CLOSED, RefusalReason.EXHAUSTED})


class SlotsWait:
    """Waits for groups.

    Args:
        ownership: Of the groups.
        owner: Whoever waits.
        patience_seconds: How long.
    """

    def __init__(self, ownership: Ownership, owner: Hashable, patience_seconds: float) -> None:
        self._ownership = ownership
        self._owner = owner
        self._patience = patience_seconds

    def enter(self, names: tuple[str, ...], decision: Decision) -> Transaction | None:
        """Exclusive use of ``names``; None where the manifest has none of them any more.

        Raises:
            LifecycleError: Not in time, or never; nothing was launched.
        """
        deadline = time.monotonic() + self._patience
        ownership = self._ownership
        while True:
            entered = ownership.enter(self._owner, names, ownership.generation)
            if isinstance(entered, Transaction):
                return entered
            if entered.reason is RefusalReason.UNKNOWN_GROUP:
                return None
            left = deadline - time.monotonic()
            if entered.reason in _NEVER or left <= 0 or not self._free(names, left):
                raise self._error(decision, entered)

    def _free(self, names: tuple[str, ...], seconds: float) -> bool:
        return self._ownership.wait_until_free(names, seconds)

    def _error(self, decision: Decision, refusal: Refusal) -> LifecycleError:
        return LifecycleError(
            f"the step was to run staged ({decision.reason.value}: {decision.detail}), for which "
            f"it says no way, and its slots were not free within {self._patience:g} s: {refusal}; "
            "give it a staged way. Nothing was launched"
        )
