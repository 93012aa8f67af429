"""Reasons: why a call does what it does. Each decision has exactly one."""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """Why a call runs as it runs."""

    # nothing is wrong
    FIRST = "first call: nothing to compare with"
    CHANGED = "changed since the last call"
    WARM = "unchanged since the last call"
    UNCHANGED = "unchanged since its capture"
    BOUNDARY = "changed outside the experts' resources"
    UPDATE_REFUSED = "the driver refuses the update"
    # no graph just now, and nothing is lost
    DISABLED = "GRAPHCORE_DISABLE=1"
    BACKEND = "backend"
    PHASE = "another phase than its capture"
    SEMANTICS = "another meaning than its capture: a variant of its own"
    HOST_STAGED = "required work that may need more experts than there are slots"
    # no graph, and what was captured does not hold any more
    CERTIFICATE = "malformed certificate"
    NO_CONTEXT = "cached experts without slots"
    UNAVAILABLE = "no plan is to be had"
    NOT_READY = "the plan is not grouped"
    PLAN_ERROR = "the plan is corrupt"
    COVERAGE = "coverage is not complete"
    NOT_NEEDED = "no cached experts any more"
    NOT_RETAINED = "another phase, and its capture cannot be retained"
    NOT_CAPTURABLE = "something in it cannot be captured"
    RANKS = "another rank"
    STREAMS_UNRESOLVED = "streams cannot be resolved"
    STREAMS_INCOHERENT = "groups on different streams"
    PROPERTIES = "changed, and no update is allowed"
    CAPTURE_INCOMPLETE = "its capture is not complete"
    NO_FINGERPRINT = "no fingerprint of its resources"
    FINGERPRINT = "other resources than at its capture"
    OWNERS = "other owners than at its capture"
    NO_WITNESSES = "its owners cannot be watched"
    DISPATCH = "the dispatch was refused"
    ACTIVATION = "its activation was refused"
    # it failed after it had begun
    DRIVER = "a driver call failed"
    EVALUATOR = "its work failed"
    FINISH = "its end failed"
    # not at a call
    GENERATION = "another manifest than at its capture"
    EVICTED = "its entry made room for others"


class Retention(Enum):
    """What becomes of what an entry holds, from the mildest to the strongest."""

    KEEP = "all is kept"
    RETAIN = "all is kept, and looked at the next time"
    DROP = "the capture goes"
    RESET = "the capture goes, and what is known of the nodes"

    @property
    def drops(self) -> bool:
        """Whether the capture goes."""
        return self in (Retention.DROP, Retention.RESET)

    def with_at_least(self, other: Retention) -> Retention:
        """The stronger of both."""
        order = list(Retention)
        return max(self, other, key=order.index)
