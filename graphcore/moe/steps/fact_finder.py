"""FactFinder: finds out everything about a call of a step; decides nothing and launches nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

from graphcore.driver import Driver, as_stream, stream_handle
from graphcore.errors import GraphcoreError
from graphcore.moe.decisions.call_facts import CallFacts, Streams
from graphcore.moe.decisions.certificate import Certificate
from graphcore.moe.decisions.counters import MoECounting
from graphcore.moe.decisions.entry_state import EntryState
from graphcore.moe.decisions.expert_plan import ExpertPlan, PlanSubject, make_plan
from graphcore.moe.decisions.group_plan import GroupSighting
from graphcore.moe.decisions.lookup_key import LookupKey
from graphcore.moe.decisions.options import MoEOptions
from graphcore.moe.decisions.plan_binding import bind
from graphcore.moe.decisions.property_probe import Records, probe
from graphcore.moe.decisions.resource_fingerprint import (
    FingerprintReason,
    FingerprintRefusal,
    ResourceFingerprint,
    fingerprint_of,
    fingerprint_refusal,
)
from graphcore.moe.decisions.resources import Resources, ResourceState
from graphcore.moe.decisions.witnesses import OwnersMatch, Witnesses
from graphcore.moe.manifests.manifest_registry import ManifestRegistry, Published
from graphcore.moe.manifests.ownership import Transaction
from graphcore.moe.slots.slot_pool import SlotPool
from graphcore.moe.steps.pool_resources import Place, group_states, owners_of, pool_resources
from graphcore.moe.steps.step_facts import Seen, Step, StepFacts
from graphcore.moe.steps.step_sights import StepSights, products_of

# every step asks, and a name that is not set costs 1 us in os.environ: what CPython keeps in there
# is asked where it is to be had
_kept: Any = getattr(os.environ, "_data", None)
_environment, _DISABLE, OFF = (
    (os.environ, "GRAPHCORE_DISABLE", "1")
    if _kept is None
    else (_kept, os.environ.encodekey("GRAPHCORE_DISABLE"), os.environ.encodevalue("1"))
)
said_of_graphs: Callable[[], object] = partial(_environment.get, _DISABLE)
"""Tells what ``GRAPHCORE_DISABLE`` is, :data:`OFF` where that turns graphs off."""


class FactFinder:
    """Finds out facts for one :class:`graphcore.moe.GraphReuse`.

    Args:
        driver: Where steps run.
        manifests: What manifest holds.
        counting: Plans are counted here.
        owner: Whoever runs the steps.
        rank: Of the process among those that share the experts.
        ranks: How many those are.

    Attributes:
        sights: What was seen of each step.
    """

    def __init__(
        self,
        driver: Driver,
        manifests: ManifestRegistry,
        counting: MoECounting,
        owner: Hashable,
        rank: int,
        ranks: int = 1,
    ) -> None:
        self._driver = driver
        self._device = driver.device_info()
        self._manifests = manifests
        self._counting = counting
        self._owner = owner
        self._rank, self._ranks = rank, ranks
        self.sights = StepSights(manifests)

    def find(
        self,
        step: Step,
        key: LookupKey,
        entry: EntryState,
        pool: SlotPool | None,
        options: MoEOptions,
        obstacle: str = "",
    ) -> StepFacts:
        """All about ``step``.

        Args:
            step: The call.
            key: Of its variant.
            entry: What is known of the variant.
            pool: The slots.
            options: What is switched on.
            obstacle: Why the variant could not be captured as the step is now.

        Raises:
            ConfigurationError: A group that neither pool nor manifest has, or one without an
                admission although its routes fit its slots.
        """
        published = self._manifests.current
        admission = self._manifests.ownership.admission
        seen = self.sights.look(step.work, step.uid, pool, published)
        semantic_key = 0 if step.certificate is None else step.certificate.semantic_key()
        count = len(seen.look.nodes.nodes)
        probed = probe(
            entry.properties, step.uid, semantic_key, lambda: _per_node(step.work.records(), count)
        )
        subject = self._subject(step, seen, published)
        make = partial(_plan, seen, step.prompt_rows)
        binding = bind(entry.plan, probed.probe, admission, subject, make, self._counting)
        plan, streams = binding.plan, self._streams(step, seen)
        has_context = pool is not None and not pool.is_closed
        resources = None
        owners: tuple[object, ...] = ()
        fingerprint: ResourceFingerprint | FingerprintRefusal | None = None
        is_grouped = plan is not None and plan.outcome.is_grouped
        if plan is not None and is_grouped and streams is not Streams.UNRESOLVED and has_context:
            assert pool is not None
            place = Place(self._driver.device, self._rank, self._handles(step, seen), self._ranks)
            resources = _resources(pool, seen, plan, place, step.prompt_rows)
            owners = seen.once("owners", lambda: owners_of(pool, seen.groups))
            if not (probed.probe.is_same and entry.grouped):  # a replay is looked at later
                fingerprint = self._fingerprint(step, seen, plan, resources)
        witnesses = None if entry.capture is None else entry.capture.witnesses
        call = CallFacts(
            probed=probed,
            binding=binding,
            certificate=step.certificate,
            graph_uid=step.uid,
            generation=published.generation,
            has_products=bool(subject.products),
            has_context=has_context,
            obstacle=step.work.obstacle or obstacle,
            streams=streams,
            fingerprint=fingerprint,
            owners=OwnersMatch.NONE if witnesses is None else witnesses.compare(owners),
            can_watch_owners=Witnesses.of(owners) is not None,
            options=options,
            driver=self._driver.name,
            is_disabled=is_disabled(),
        )
        return StepFacts(step, key, call, seen, pool, resources, owners, published)

    def fingerprint(
        self, facts: StepFacts, mine: Transaction
    ) -> ResourceFingerprint | FingerprintRefusal | None:
        """The fingerprint of now, during the step's own use of its groups."""
        plan = facts.call.binding.plan
        if facts.resources is None or plan is None:
            return None
        assert facts.pool is not None
        if facts.pool.serial != facts.resources.groups[0].serial:
            detail = f"expected {facts.resources.groups[0].serial}, got {facts.pool.serial}"
            return FingerprintRefusal(FingerprintReason.SERIAL, detail)
        return self._fingerprint(facts.step, facts.seen, plan, facts.resources, mine)

    # ---- helpers -------------------------------------------------------------------------------

    def _subject(self, step: Step, seen: Seen, published: Published) -> PlanSubject:
        certificate = step.certificate
        if certificate is not None and certificate.flaws():
            certificate = None
        return PlanSubject(
            owner=self._owner,
            nodes=seen.look.nodes,
            products=products_of(seen),
            sightings=self._sightings(step, seen, certificate),
            coverage=self.sights.coverage(seen, published),
            published=published,
            certificate=step.certificate,
        )

    def _sightings(
        self, step: Step, seen: Seen, certificate: Certificate | None
    ) -> tuple[GroupSighting, ...]:
        semantics = None if certificate is None else certificate.row_semantics
        return seen.once(
            ("sightings", step.prompt_rows, semantics),
            lambda: tuple(
                sighted.sighting(step.prompt_rows, certificate, self._device)
                for sighted in seen.groups
                if sighted.group is not None
            ),
        )

    def _fingerprint(
        self,
        step: Step,
        seen: Seen,
        plan: ExpertPlan,
        resources: Resources,
        mine: Transaction | None = None,
    ) -> ResourceFingerprint | FingerprintRefusal:
        ownership = self._manifests.ownership
        state = ResourceState(
            outcome=plan.outcome,
            admission=ownership.admission,
            generation=ownership.generation,
            stream=int(step.stream.handle),
            groups=group_states(ownership, seen.groups, mine),
        )
        refusal = fingerprint_refusal(resources, state)
        if refusal is not None:
            return refusal
        return seen.once(("fingerprint", id(resources)), lambda: fingerprint_of(resources))

    def _streams(self, step: Step, seen: Seen) -> Streams:
        try:
            handles = set(self._handles(step, seen))
        except GraphcoreError:
            return Streams.UNRESOLVED
        return Streams.COHERENT if handles <= {int(step.stream.handle)} else Streams.INCOHERENT

    def _handles(self, step: Step, seen: Seen) -> tuple[int, ...]:
        own = step.stream.handle
        given = (sighted.use.stream for sighted in seen.groups)
        return tuple(
            int(own if each is None else stream_handle(as_stream(self._driver, each)))
            for each in given
        )


def is_disabled() -> bool:
    """Whether ``GRAPHCORE_DISABLE=1`` turns graphs off."""
    return said_of_graphs() == OFF


def _per_node(records: Records, count: int) -> Records:
    """As many records as nodes: nothing for the last ones, or the last for all that is left."""
    if len(records) <= count:
        return (*records, *[None] * (count - len(records)))
    return (*records[: count - 1], records[count - 1 :])


def _plan(seen: Seen, prompt_rows: int, subject: PlanSubject) -> ExpertPlan:
    """The plan of ``subject``; of groups that are what they were it says what it said."""
    key = ("plan", prompt_rows, subject.semantic_key, id(subject.coverage))
    made = seen.once(key, lambda: make_plan(subject))
    return made if made.subject is subject else replace(made, subject=subject)


def _resources(
    pool: SlotPool, seen: Seen, plan: ExpertPlan, place: Place, prompt_rows: int
) -> Resources:
    """What a step uses of the pool, the very object of the last call where nothing changed."""
    key = ("resources", plan.subject.semantic_key, place, prompt_rows)
    return seen.once(key, lambda: pool_resources(pool, seen.groups, plan, place))
