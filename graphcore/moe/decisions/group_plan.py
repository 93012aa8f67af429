"""GroupPlan: how one group of a graph stands, decided from what was seen of it.

Reasons are looked at in their order of priority; the first that holds is the group's. Three of them
are soft: ordinary work falls back. The others are broken contracts, but for "prefill" and
"eligible".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

from graphcore.moe.decisions.certificate import Certificate
from graphcore.moe.decisions.reverse_map import WeightSource
from graphcore.moe.decisions.route_witness import Reader, RouteWitness
from graphcore.moe.decisions.slots_needed import slots_needed
from graphcore.moe.manifests.capability import Capability
from graphcore.moe.manifests.manifest import ExpertGroup
from graphcore.moe.manifests.names import GroupReason, Strategy


@dataclass(frozen=True, slots=True)
class GroupSighting:
    """What was seen of one group in a graph.

    Args:
        group: Its name.
        rows: Of the step.
        prompt_rows: How many of those belong to prompts.
        top_k: Experts for a row.
        routes: Choices of experts.
        route: Where the expert ids come from; None where that was not found.
        readers: Its products, in order of nodes.
        sources: The weights that they multiply by, as the graph has them, in the same order.
        capabilities: The kernels that serve them, in the same order; None where none does.
        auxiliaries: Names of the scales and biases that the graph reads.
        inner: Identities of the nodes between its products: activation, scale, bias, combine.
        equivalence: Why its consumer would see other bits; "" where it does not.
    """

    group: str
    rows: int
    prompt_rows: int
    top_k: int
    routes: int
    route: RouteWitness | None
    readers: tuple[Reader, ...]
    sources: tuple[WeightSource, ...]
    capabilities: tuple[Capability | None, ...]
    auxiliaries: tuple[str, ...] = ()
    inner: tuple[Hashable, ...] = ()
    equivalence: str = ""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """How one group stands.

    Args:
        sighting: What was seen.
        reason: The first that holds.
        detail: In words.
        strategy: How its routes reach the experts.
        is_mappable: Whether the device can read its experts where they lie.
        slots: Of the group.
    """

    sighting: GroupSighting
    reason: GroupReason
    detail: str
    strategy: Strategy
    is_mappable: bool
    slots: int

    @property
    def is_device_direct(self) -> bool:
        """Whether it can be part of a capture."""
        return self.reason.is_fine and self.strategy is Strategy.DEVICE_DIRECT and self.is_mappable

    @property
    def must_stage(self) -> bool:
        """Whether only chunks through scratch memory serve it, its kernels and slots do not."""
        return self.strategy is Strategy.HOST_STAGED or not self.is_mappable

    def why_not_direct(self) -> str:
        """Why it cannot be part of a capture, in words; "" where it can."""
        if self.is_device_direct:
            return ""
        if self.strategy is Strategy.HOST_STAGED:
            return f"group {self.sighting.group}: {self.sighting.routes} routes, {self.slots} slots"
        return str(self)

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"group {self.sighting.group}: {self.reason.value}{detail}"


def plan_group(
    group: ExpertGroup, sighting: GroupSighting, certificate: Certificate | None
) -> GroupPlan:
    """How ``group`` stands in a graph.

    Args:
        group: Of the manifest.
        sighting: What was seen of it.
        certificate: Of the step; a malformed one counts as none. Required work may need
            more slots than there are; it is staged then.
    """
    if certificate is not None and certificate.flaws():
        certificate = None
    is_direct = slots_needed(sighting.routes, group.experts) <= group.slots
    reason, detail = _reason(group, sighting, certificate)
    return GroupPlan(
        sighting,
        reason,
        detail,
        Strategy.DEVICE_DIRECT if is_direct else Strategy.HOST_STAGED,
        group.is_mappable,
        group.slots,
    )


def _reason(
    group: ExpertGroup, seen: GroupSighting, certificate: Certificate | None
) -> tuple[GroupReason, str]:
    details = {
        GroupReason.DESCRIPTOR: _descriptor(group, seen),
        GroupReason.SOURCE: _source(group, seen),
        GroupReason.GEOMETRY: _geometry(group, seen),
        GroupReason.EXECUTION: _execution(group, seen, certificate),
        GroupReason.CAPABILITY: _capability(seen),
        GroupReason.CONSUMER_EQUIVALENCE: seen.equivalence,
        GroupReason.ROUTE: _route(seen),
        GroupReason.DUPLICATE_ROLE: _duplicate_role(seen),
        GroupReason.MIXED_IDS: _mixed_ids(seen),
        GroupReason.AUXILIARY: _auxiliary(group, seen),
        GroupReason.EXTERNAL_CONSUMER: _external_consumer(seen),
        GroupReason.MISSING_ROLE: _missing_role(group, seen),
        GroupReason.UNPROVEN: _unproven(seen),
        GroupReason.PREFILL: (
            f"{seen.prompt_rows} of {seen.rows} rows" if seen.prompt_rows else ""
        ),
        GroupReason.MATERIALISATION: _materialisation(group),
    }
    held = ((reason, details.get(reason, "")) for reason in GroupReason)
    return next(((reason, text) for reason, text in held if text), (GroupReason.ELIGIBLE, ""))


def _descriptor(group: ExpertGroup, seen: GroupSighting) -> str:
    if len(seen.sources) != len(seen.readers) or len(seen.capabilities) != len(seen.readers):
        return (
            f"{len(seen.readers)} products, {len(seen.sources)} weights and "
            f"{len(seen.capabilities)} kernels"
        )
    banks = {bank.name: bank for bank in group.banks if not bank.role.is_auxiliary}
    for reader, source in zip(seen.readers, seen.sources, strict=True):
        bank = banks.get(reader.bank)
        if bank is None or source.name != reader.bank:
            return f"{reader.bank} is none of its banks"
        if (source.shape, source.dtype) != (bank.shape, bank.dtype):
            return (
                f"{bank.name}: expected {bank.dtype} {bank.shape}, got "
                f"{source.dtype} {source.shape}"
            )
    return ""


def _source(group: ExpertGroup, seen: GroupSighting) -> str:
    banks = {bank.name: bank for bank in group.banks}
    moved = (
        f"{source.name}: expected {banks[source.name].address:#x}, got {source.address:#x}"
        for source in seen.sources
        if source.name in banks and source.address != banks[source.name].address
    )
    return next(moved, "")


def _geometry(group: ExpertGroup, seen: GroupSighting) -> str:
    if seen.rows < 1:
        return f"rows: expected at least 1, got {seen.rows}"
    if seen.top_k != group.top_k:
        return f"top_k: expected {group.top_k}, got {seen.top_k}"
    if seen.routes != seen.rows * seen.top_k:
        return f"routes: expected {seen.rows} x {seen.top_k}, got {seen.routes}"
    if not 0 <= seen.prompt_rows <= seen.rows:
        return f"rows of prompts: expected 0 to {seen.rows}, got {seen.prompt_rows}"
    return ""


def _execution(group: ExpertGroup, seen: GroupSighting, certificate: Certificate | None) -> str:
    if certificate is None:
        return "no certificate"
    if certificate.rows != seen.rows:
        return f"rows: expected {certificate.rows} as certified, got {seen.rows}"
    if certificate.device != group.device:
        return f"device: expected {group.device}, got {certificate.device}"
    is_too_much = slots_needed(seen.routes, group.experts) > group.slots
    if is_too_much and not certificate.is_required:
        return f"{seen.routes} routes, {group.slots} slots"
    return ""


def _capability(seen: GroupSighting) -> str:
    lacking = (
        f"no kernel for {reader.bank}"
        for reader, capability in zip(seen.readers, seen.capabilities, strict=False)
        if capability is None
    )
    return next(lacking, "")


def _route(seen: GroupSighting) -> str:
    if seen.route is None:
        return "no router was found"
    return "" if seen.route.is_proven else f"ids {seen.route.ids!r} are not proven"


def _duplicate_role(seen: GroupSighting) -> str:
    counts = Counter(reader.bank for reader in seen.readers)
    return next((f"{bank}: {count} products" for bank, count in counts.items() if count > 1), "")


def _mixed_ids(seen: GroupSighting) -> str:
    if seen.route is None:
        return ""
    others = [reader.ids for reader in seen.readers if reader.ids != seen.route.ids]
    return f"expected ids {seen.route.ids!r}, got {others[0]!r}" if others else ""


def _auxiliary(group: ExpertGroup, seen: GroupSighting) -> str:
    expected = [bank.name for bank in group.banks if bank.role.is_auxiliary]
    if sorted(seen.auxiliaries) != sorted(expected):
        return f"expected {sorted(expected)}, got {sorted(seen.auxiliaries)}"
    return ""


def _external_consumer(seen: GroupSighting) -> str:
    inside = {*seen.inner, *(reader.node for reader in seen.readers)}
    strangers = (
        f"node {node!r} reads {reader.bank}"
        for reader in seen.readers
        for node, _ in reader.consumers
        if node not in inside
    )
    return next(strangers, "")


def _missing_role(group: ExpertGroup, seen: GroupSighting) -> str:
    read = {reader.bank for reader in seen.readers}
    missing = (
        f"no product of {bank.name}"
        for bank in group.banks
        if not bank.role.is_auxiliary and bank.name not in read
    )
    return next(missing, "")


def _unproven(seen: GroupSighting) -> str:
    for reader in seen.readers:
        if not reader.is_observed:
            return f"not every reader of {reader.bank} was seen"
        if not reader.consumers or any(uses < 1 for _, uses in reader.consumers):
            return f"nobody reads {reader.bank}"
    return ""


def _materialisation(group: ExpertGroup) -> str:
    pageable = (bank for bank in group.banks if not bank.is_mappable)
    return next((f"{bank.name} lies in {bank.location.value}" for bank in pageable), "")
