"""ExpertPlan: the proof that every expert product of one graph can run from slots, or why not.

A plan is made once and used again as long as everything that it was made from is the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from graphcore.errors import ConfigurationError
from graphcore.moe.decisions.certificate import Certificate
from graphcore.moe.decisions.coverage import Coverage, ExpertProduct, NodeList
from graphcore.moe.decisions.group_plan import GroupPlan, GroupSighting, plan_group
from graphcore.moe.manifests.manifest_registry import Published
from graphcore.moe.manifests.names import Phase, PlanOutcome, Way


@dataclass(frozen=True, slots=True)
class PlanSubject:
    """What a plan is about.

    Args:
        owner: Whoever runs the graph.
        nodes: Of the graph.
        products: Its expert products, in order.
        sightings: What was seen of each group, in the order of the model.
        coverage: How it stands to the manifest.
        published: The manifest and its generation.
        certificate: Of the step; a malformed one counts as none.
    """

    owner: Hashable
    nodes: NodeList
    products: tuple[ExpertProduct, ...]
    sightings: tuple[GroupSighting, ...]
    coverage: Coverage
    published: Published
    certificate: Certificate | None = None

    @property
    def semantic_key(self) -> int:
        """Of the certificate; 0 without a valid one."""
        return 0 if self.certificate is None else self.certificate.semantic_key()


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """What one graph comes to, and what that was decided from."""

    subject: PlanSubject
    outcome: PlanOutcome
    groups: tuple[GroupPlan, ...]

    @property
    def phase(self) -> Phase:
        """Whether rows of a prompt are in it."""
        return Phase.PROMPT if self.outcome.is_prompt else Phase.DECODE

    @property
    def is_device_direct(self) -> bool:
        """Whether every group can be part of a capture."""
        return all(group.is_device_direct for group in self.groups)

    @property
    def fallback(self) -> Way:
        """How the work runs without a graph: staged where the slots of a group cannot serve it."""
        staged = any(group.must_stage for group in self.groups)
        return Way.STAGED if staged else Way.DIRECT

    def why_not_direct(self) -> str:
        """Why it cannot be captured, group by group; "" where it can."""
        return "; ".join(why for group in self.groups if (why := group.why_not_direct()))

    def why(self) -> str:
        """The outcome and its causes, in words."""
        causes = [str(group) for group in self.groups if not group.reason.is_fine]
        if self.outcome is PlanOutcome.INCOMPLETE:
            causes = list(self.subject.coverage.shortfalls())
        return "; ".join([self.outcome.value, *causes])


def make_plan(subject: PlanSubject) -> ExpertPlan:
    """The plan of a graph.

    Raises:
        ConfigurationError: A group was seen that the manifest does not have; the coverage of such a
            graph cannot be complete, so nobody should have seen it.
    """
    manifest = subject.published.manifest
    groups = []
    for sighting in subject.sightings:
        group = manifest.group(sighting.group)
        if group is None:
            known = [each.name for each in manifest.groups]
            raise ConfigurationError(f"sightings: expected groups {known}, got {sighting.group!r}")
        groups.append(plan_group(group, sighting, subject.certificate))
    return ExpertPlan(subject, _outcome(subject, groups), tuple(groups))


def _outcome(subject: PlanSubject, groups: Sequence[GroupPlan]) -> PlanOutcome:
    if not subject.published.manifest.is_enabled or not subject.products:
        return PlanOutcome.ORDINARY
    is_complete = subject.coverage.is_complete
    is_fine = is_complete and bool(groups) and all(each.reason.is_fine for each in groups)
    rows = sum(each.sighting.rows for each in groups)
    prompt_rows = sum(each.sighting.prompt_rows for each in groups)
    if prompt_rows and prompt_rows == rows:
        # a prompt may always take the staged path, whatever is wrong with grouping it
        is_grouped = is_fine and all(each.is_mappable for each in groups)
        return PlanOutcome.PROMPT_GROUPED if is_grouped else PlanOutcome.PROMPT_STAGED
    if not is_complete:
        return PlanOutcome.INCOMPLETE
    acceptable = bool(groups) and all(each.reason.is_fine or each.reason.is_soft for each in groups)
    if not acceptable:
        return PlanOutcome.ERROR
    if prompt_rows:
        is_grouped = is_fine and all(each.is_mappable for each in groups)
        return PlanOutcome.PROMPT_GROUPED if is_grouped else PlanOutcome.PROMPT_STAGED
    return PlanOutcome.DECODE_GROUPED if is_fine else PlanOutcome.DECODE_STAGED
