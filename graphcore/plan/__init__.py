"""GraphPlan: a graph written down before it exists: checked, saved, then run or built."""

from graphcore.plan.compiled import CompiledPlan
from graphcore.plan.plan import GraphPlan
from graphcore.plan.records import (
    Condition,
    PlanBuffer,
    PlanEvent,
    PlanNode,
    PlanProblem,
    View,
)

__all__ = [
    "CompiledPlan",
    "Condition",
    "GraphPlan",
    "PlanBuffer",
    "PlanEvent",
    "PlanNode",
    "PlanProblem",
    "View",
]
