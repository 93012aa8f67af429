"""Binding: whether the plan of the last call still holds for this one, or is made anew.

Where the nodes are known to be unchanged, little is compared; where they are not known, every
product and every route is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from graphcore.moe.decisions.counters import MoECounting
from graphcore.moe.decisions.expert_plan import ExpertPlan, PlanSubject
from graphcore.moe.decisions.group_plan import GroupSighting
from graphcore.moe.decisions.property_probe import Probe
from graphcore.moe.manifests.names import Bind
from graphcore.moe.manifests.ownership import Admission


@dataclass(frozen=True, slots=True)
class Binding:
    """The plan of a call.

    Args:
        result: Where it comes from.
        plan: None where it is unavailable.
        reason: Why an older plan was not used again, or why there is none.
    """

    result: Bind
    plan: ExpertPlan | None
    reason: str = ""

    def __str__(self) -> str:
        return f"plan {self.result.value}: {self.reason}" if self.reason else self.result.value


def bind(
    plan: ExpertPlan | None,
    probe: Probe,
    admission: Admission,
    subject: PlanSubject,
    make: Callable[[PlanSubject], ExpertPlan],
    counters: MoECounting,
) -> Binding:
    """The plan for ``subject``: ``plan`` again where it holds, else one made by ``make``.

    Args:
        plan: Of the last call of the same entry; None: there was none.
        probe: What a look at the nodes found.
        admission: Whether expert caching is open.
        subject: What the plan is to be about.
        make: :func:`graphcore.moe.decisions.expert_plan.make_plan`; what it raises is counted and
            passed on.
        counters: What happens is counted here.
    """
    counters.add("plan_calls")
    if admission is not Admission.OPEN:
        counters.add("plan_unavailable")
        return Binding(Bind.UNAVAILABLE, None, admission.value)
    why = "no plan yet" if plan is None else refusal(plan, probe, subject)
    if plan is not None and not why:
        counters.add("plan_reuses")
        return Binding(Bind.REUSED, plan)
    try:
        made = make(subject)
    except BaseException:
        counters.add("prepare_error")
        raise
    counters.add("plan_compiles")
    return Binding(Bind.COMPILED, made, why)


def refusal(plan: ExpertPlan, probe: Probe, subject: PlanSubject) -> str:
    """Why ``plan`` does not hold for ``subject``; "" where it does."""
    return next(_refusals(plan.subject, probe, subject), "")


def _refusals(old: PlanSubject, probe: Probe, new: PlanSubject) -> Iterator[str]:
    if not probe.is_same and probe is not Probe.FIRST:
        yield f"properties: {probe.value}"
    if old.semantic_key != new.semantic_key:
        yield f"semantic key: expected {old.semantic_key:#x}, got {new.semantic_key:#x}"
    if old.owner != new.owner:
        yield f"owner: expected {old.owner!r}, got {new.owner!r}"
    if old.nodes.nodes[:1] != new.nodes.nodes[:1] or old.nodes.identity != new.nodes.identity:
        yield "nodes: another list"
    if len(old.nodes.nodes) != len(new.nodes.nodes):
        yield f"nodes: expected {len(old.nodes.nodes)}, got {len(new.nodes.nodes)}"
    if old.published.generation != new.published.generation:
        yield f"generation: expected {old.published.generation}, got {new.published.generation}"
    if old.coverage != new.coverage:
        yield "coverage: another one"
    # whose rows they are is a fact of the call, which no uid of a graph tells
    before, after = ([each.prompt_rows for each in subject.sightings] for subject in (old, new))
    if len(before) == len(after) and before != after:
        yield f"rows of prompts: expected {before}, got {after}"
    if probe is not Probe.SAME_UID:
        yield from _differences(old, new)


def _differences(old: PlanSubject, new: PlanSubject) -> Iterator[str]:
    """What differs in products and routes; looked at where the nodes are not known by uid."""
    if old.products != new.products:
        yield "products: others than it was made for"
    if len(old.sightings) != len(new.sightings):
        yield f"groups: expected {len(old.sightings)}, got {len(new.sightings)}"
        return
    for before, after in zip(old.sightings, new.sightings, strict=True):
        yield from _group_differences(before, after)


def _group_differences(before: GroupSighting, after: GroupSighting) -> Iterator[str]:
    where = f"group {before.group}"
    if before.route is not None and after.route is not None:
        yield from (f"{where}: route: {each}" for each in before.route.differences(after.route))
    for name in GroupSighting.__slots__:
        mine, theirs = getattr(before, name), getattr(after, name)
        if mine != theirs and not (name == "route" and mine is not None and theirs is not None):
            yield f"{where}: {name}: expected {mine!r}, got {theirs!r}"
