"""ResourceFingerprint: what a graph of experts has baked in, as ordered typed fields and a number.

The fields are kept beside the number, so that a mismatch says what differs, field by field.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

from graphcore.moe.decisions.resources import (
    SLOT_TABLES,
    GroupResources,
    GroupState,
    Resources,
    ResourceState,
)
from graphcore.moe.decisions.slots_needed import slots_needed
from graphcore.moe.manifests.digest import number_of
from graphcore.moe.manifests.ownership import Admission


class ResourceField(NamedTuple):
    """One value that a graph depends on: ``where`` is "graph", "group 0" or "group 0, bank 1"."""

    where: str
    name: str
    value: object

    def __str__(self) -> str:
        return f"{self.where}: {self.name} = {_words(self.name, self.value)}"


class FingerprintReason(Enum):
    """Why there is no fingerprint, in the order in which it is looked at."""

    OUTCOME = "the plan is not grouped"
    ADMISSION = "expert caching is not open"
    GENERATION = "the manifest is of another generation"
    SIZES = "its parts do not fit each other"
    STREAM = "a group runs on another stream"
    ROUTES = "more experts than slots"
    SERIAL = "a group has no memory"
    TRANSACTION = "another dispatch uses a group"
    REFRESHING = "a group is being made anew"
    REGISTRY = "a group is not what the manifest says"


@dataclass(frozen=True, slots=True)
class FingerprintRefusal:
    """Why there is no fingerprint, with what it is about."""

    reason: FingerprintReason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}" if self.detail else self.reason.value


@dataclass(frozen=True, slots=True, repr=False)
class ResourceFingerprint:
    """The fields in order, and a number of 64 bits made of them; the number is never 0."""

    number: int
    fields: tuple[ResourceField, ...]

    def __repr__(self) -> str:
        return f"<ResourceFingerprint {self.number:016x}, {len(self.fields)} fields>"

    def __str__(self) -> str:
        return f"{self.number:016x}"

    def compare(self, other: ResourceFingerprint) -> tuple[str, ...]:
        """What differs, one sentence a field; empty for equal ones."""
        if self is other or self == other:
            return ()
        old, new = self._by_place(), other._by_place()
        return tuple(_differences(old, new))

    def _by_place(self) -> dict[tuple[str, str], object]:
        return {(field.where, field.name): field.value for field in self.fields}


_PARTS = frozenset({"auxiliaries", "banks", "groups", "tables"})
_MISSING = object()


def _differences(
    old: dict[tuple[str, str], object], new: dict[tuple[str, str], object]
) -> Iterator[str]:
    for place in {**old, **new}:
        where, name = place
        before, after = old.get(place, _MISSING), new.get(place, _MISSING)
        if before is _MISSING:
            yield f"{where}: {name}: expected none, got {_words(name, after)}"
        elif after is _MISSING:
            yield f"{where}: {name}: expected {_words(name, before)}, got none"
        elif before != after:
            yield f"{where}: {name}: expected {_words(name, before)}, got {_words(name, after)}"


_ADDRESSES = frozenset(
    {
        "address", "auxiliary_array", "bank_descriptors", "plan_buffer", "pool", "resident",
        "semantic_key", "source", "stream", "transfer_counter",
    }
)  # fmt: skip


def _words(name: str, value: object) -> str:
    is_address = name in _ADDRESSES or name.startswith("table ")
    return f"{value:#x}" if is_address and isinstance(value, int) else str(value)


def resource_fingerprint(
    resources: Resources, state: ResourceState
) -> ResourceFingerprint | FingerprintRefusal:
    """The fingerprint of what a graph uses, or why there is none just now."""
    refusal = fingerprint_refusal(resources, state)
    return fingerprint_of(resources) if refusal is None else refusal


def fingerprint_of(resources: Resources) -> ResourceFingerprint:
    """The fingerprint of what a graph uses, whatever is going on with that just now."""
    found = tuple(_fields(resources))
    return ResourceFingerprint(number_of(tuple(map(tuple, found))), found)


def _fields(resources: Resources) -> Iterator[ResourceField]:
    yield from _of("graph", resources)
    yield ResourceField("graph", "groups", len(resources.groups))
    for at, group in enumerate(resources.groups):
        where = f"group {at}"
        yield from _of(where, group)
        yield from (ResourceField(where, f"table {name}", at) for name, at in group.tables)
        for number, auxiliary in enumerate(group.auxiliaries):
            yield from _of(f"{where}, auxiliary {number}", auxiliary)
        for number, bank in enumerate(group.banks):
            yield from _of(f"{where}, bank {number}", bank)
            yield from _of(f"{where}, bank {number}", bank.capability)


def _of(where: str, part: Any) -> Iterator[ResourceField]:
    """The plain fields of one part, in order of definition; parts within it come on their own."""
    for field in fields(part):
        value = getattr(part, field.name)
        if is_dataclass(value) or field.name in _PARTS:
            continue
        yield ResourceField(where, field.name, value.name if isinstance(value, Enum) else value)


def fingerprint_refusal(resources: Resources, state: ResourceState) -> FingerprintRefusal | None:
    """Why there is no fingerprint just now; None where there is."""
    if not state.outcome.is_grouped:
        return FingerprintRefusal(FingerprintReason.OUTCOME, state.outcome.value)
    if state.admission is not Admission.OPEN:
        return FingerprintRefusal(FingerprintReason.ADMISSION, state.admission.value)
    if state.generation != resources.generation:
        detail = f"expected {state.generation}, got {resources.generation}"
        return FingerprintRefusal(FingerprintReason.GENERATION, detail)
    if len(resources.groups) != len(state.groups) or not resources.groups:
        detail = f"expected {len(resources.groups)} states of groups, got {len(state.groups)}"
        return FingerprintRefusal(FingerprintReason.SIZES, detail)
    pairs = zip(resources.groups, state.groups, strict=True)
    refusals = (_group_refusal(group, now, state.stream) for group, now in pairs)
    return next((each for each in refusals if each is not None), None)


def _group_refusal(
    group: GroupResources, state: GroupState, stream: int
) -> FingerprintRefusal | None:
    checks = (
        (FingerprintReason.SIZES, _size_problem(group)),
        (
            FingerprintReason.STREAM,
            f"expected {stream:#x}, got {group.stream:#x}" if group.stream != stream else "",
        ),
        (FingerprintReason.ROUTES, _route_problem(group)),
        (FingerprintReason.SERIAL, "serial 0" if not group.serial else ""),
        (FingerprintReason.TRANSACTION, "in use" if state.in_transaction else ""),
        (FingerprintReason.REFRESHING, "in the making" if state.is_refreshing else ""),
        (FingerprintReason.REGISTRY, "" if state.is_registered else "not registered"),
    )
    found = next(((reason, detail) for reason, detail in checks if detail), None)
    return found and FingerprintRefusal(found[0], f"group {group.name}: {found[1]}")


def _route_problem(group: GroupResources) -> str:
    """How many routes there are where their experts may need more slots than there are."""
    experts = [bank.capability.experts for bank in group.banks]
    is_too_much = slots_needed(group.routes, max(experts, default=0)) > group.slots
    return f"{group.routes} routes, {group.slots} slots" if is_too_much else ""


def _size_problem(group: GroupResources) -> str:
    """In which way the parts of a group do not fit each other; "" where they do."""
    if group.routes != group.rows * group.top_k:
        return f"expected {group.rows} x {group.top_k} routes, got {group.routes}"
    missing = sorted(set(SLOT_TABLES) - {name for name, _ in group.tables})
    if missing:
        return f"expected table {missing[0]}, got none"
    if group.auxiliary_count != len(group.auxiliaries):
        return f"expected {group.auxiliary_count} auxiliaries, got {len(group.auxiliaries)}"
    if not group.banks:
        return "expected banks, got none"
    wrong = [bank for bank in group.banks if bank.capability.slots != group.slots]
    return (
        f"expected banks of {group.slots} slots, got {wrong[0].capability.slots}" if wrong else ""
    )
