"""Decision: what a call does, why, and what becomes of what its entry holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphcore.errors import LifecycleError
from graphcore.moe.decisions.decline_table import ruling
from graphcore.moe.decisions.expert_plan import ExpertPlan
from graphcore.moe.decisions.reasons import Reason, Retention
from graphcore.moe.manifests.names import Kind, Way


@dataclass(frozen=True, slots=True)
class Decision:
    """What a call does.

    Args:
        kind: In one word.
        reason: Why.
        detail: What exactly, in words.
        way: How its work runs.
        retention: What becomes of what its entry holds, before anything is done.
        is_required: Whether a shortfall is an error.
        plan: That it runs by; None where there is none.
    """

    kind: Kind
    reason: Reason
    detail: str
    way: Way
    retention: Retention
    is_required: bool
    plan: ExpertPlan | None = None

    def __str__(self) -> str:
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.kind.value}: {self.reason.value}{detail} ({self.way.value})"

    @property
    def uses_graph(self) -> bool:
        """Whether a graph is launched."""
        return self.way is Way.GRAPH

    def error(self) -> LifecycleError:
        """What a failed call raises."""
        work = "required work" if self.is_required else "the step"
        detail = f": {self.detail}" if self.detail else ""
        launched = "" if self.reason in _BEGUN else "; nothing was launched"
        return LifecycleError(f"{work} failed: {self.reason.value}{detail}{launched}")

    def counters(self) -> tuple[str, ...]:
        """Names of the counters that it adds to."""
        names = ["calls", _COUNTERS[self.kind]]
        if self.way is Way.STAGED:
            names.append("fallback")
        if self.kind is Kind.FAILED and self.is_required and self.reason not in _BEGUN:
            names.append("required_unsupported")
        if self.reason is Reason.FINISH:
            names.append("finish_error")
        return tuple(names)

    def turned(self, reason: Reason, detail: str = "") -> Decision:
        """The decision after ``reason`` came between; what went already does not come back."""
        found = refuse(reason, detail, self.plan, is_required=self.is_required)
        return replace(found, retention=found.retention.with_at_least(self.retention))


_BEGUN = frozenset({Reason.DRIVER, Reason.EVALUATOR, Reason.FINISH})

_COUNTERS = {
    Kind.DIRECT: "direct",
    Kind.STAGED: "staged",
    Kind.CAPTURE: "captures",
    Kind.REPLAY: "replays",
    Kind.UPDATE: "updates",
    Kind.REINSTANTIATE: "reinstantiations",
    Kind.DECLINED: "declined",
    Kind.FAILED: "failed",
}


def refuse(reason: Reason, detail: str, plan: ExpertPlan | None, *, is_required: bool) -> Decision:
    """The decision that the table of declines has for ``reason``."""
    found = ruling(reason, is_required=is_required)
    way = found.way
    if way is None:
        way = Way.STAGED if plan is None else plan.fallback
    elif way is Way.DIRECT and plan is not None:
        way = plan.fallback  # direct where slots can serve it
    kind = found.kind
    if kind is Kind.DECLINED and reason is Reason.NOT_READY and plan and plan.outcome.is_prompt:
        # a prompt that does not fit the slots is refused nothing
        kind = Kind.STAGED if way is Way.STAGED else Kind.DIRECT
    return Decision(kind, reason, detail, way, found.retention, is_required, plan)
