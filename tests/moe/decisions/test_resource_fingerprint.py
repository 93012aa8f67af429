"""What a graph of experts has baked in: every field changes the fingerprint, and says so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from helpers.moe_cases import fingerprint, group_resources, resource_state, resources

from graphcore.moe.decisions.resource_fingerprint import (
    FingerprintReason,
    FingerprintRefusal,
    ResourceFingerprint,
    resource_fingerprint,
)
from graphcore.moe.decisions.resources import (
    SLOT_TABLES,
    AuxiliaryResources,
    BankResources,
    GroupResources,
    GroupState,
    Resources,
)
from graphcore.moe.manifests.capability import Capability
from graphcore.moe.manifests.names import PlanOutcome
from graphcore.moe.manifests.ownership import Admission

PARTS = {
    Resources: "graph",
    GroupResources: "group 1",
    AuxiliaryResources: "group 1, auxiliary 0",
    BankResources: "group 1, bank 1",
    Capability: "group 1, bank 1",
}
INNER = {"groups", "banks", "auxiliaries", "capability", "tables"}


def other(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, Enum):
        members = list(type(value))
        return members[(members.index(value) + 1) % len(members)]
    if isinstance(value, tuple):
        return (value[0] + 1, *value[1:])
    return f"{value}x" if isinstance(value, str) else value + 1


def changed(kind: type, field: str) -> Resources:
    """The resources with one field of one part of ``kind`` changed; what must fit it, does."""

    def change(part: Any) -> Any:
        return replace(part, **{field: other(getattr(part, field))})

    before = resources()
    if kind is Resources:
        return change(before)
    group = before.groups[1]
    bank = group.banks[1]
    if kind is GroupResources:
        group = change(group)
    elif kind is AuxiliaryResources:
        group = replace(group, auxiliaries=(change(group.auxiliaries[0]),))
    elif kind is BankResources:
        group = replace(group, banks=(group.banks[0], change(bank)))
    else:
        bank = replace(bank, capability=change(bank.capability))
        group = replace(group, banks=(group.banks[0], bank))
    return replace(before, groups=(before.groups[0], group))


# changed alone these do not fit the rest, so that there is no fingerprint at all
BOUND = {
    (GroupResources, "top_k"),
    (GroupResources, "rows"),
    (GroupResources, "routes"),
    (GroupResources, "slots"),
    (GroupResources, "auxiliary_count"),
    (GroupResources, "stream"),
    (Capability, "slots"),
    (Resources, "generation"),
}
FIELDS = [(kind, field.name) for kind in PARTS for field in fields(kind) if field.name not in INNER]
FREE = [each for each in FIELDS if each not in BOUND]


@pytest.mark.parametrize(("kind", "field"), FREE, ids=[f"{k.__name__}-{f}" for k, f in FREE])
def test_a_fingerprint_holds(kind: type, field: str) -> None:
    before = fingerprint()
    after = resource_fingerprint(changed(kind, field), resource_state())
    assert isinstance(after, ResourceFingerprint)
    assert after != before
    assert after.number not in (0, before.number)
    (difference,) = before.compare(after)
    assert difference.startswith(f"{PARTS[kind]}: {field}: expected ")


def test_what_does_not_fit_when_it_changes_alone_is_held_too() -> None:
    group = group_resources(1)

    def banks(**more: int) -> tuple[BankResources, ...]:
        return tuple(
            replace(bank, capability=replace(bank.capability, **more)) for bank in group.banks
        )

    first = group_resources()
    more_slots = replace(group, slots=9, banks=banks(slots=9))
    cases = {
        ("top_k", "routes"): replace(group, top_k=1, routes=4),
        ("rows", "routes"): replace(group, rows=3, routes=6),
        ("slots",): more_slots,
        ("auxiliary_count",): replace(group, auxiliary_count=0, auxiliaries=()),
    }
    for names, second in cases.items():
        differences = fingerprint().compare(fingerprint(groups=(first, second)))
        told = {each.split(": ")[1] for each in differences if each.startswith("group 1: ")}
        assert told == set(names)
    stream = tuple(replace(each, stream=0x6000) for each in resources().groups)
    moved = resource_fingerprint(resources(groups=stream), resource_state(stream=0x6000))
    assert fingerprint().compare(moved) == (
        "group 0: stream: expected 0x5000, got 0x6000",
        "group 1: stream: expected 0x5000, got 0x6000",
    )
    later = resource_fingerprint(resources(generation=6), resource_state(generation=6))
    assert fingerprint().compare(later) == ("graph: generation: expected 5, got 6",)


TABLES = [name for name, _ in group_resources(1).tables]


@pytest.mark.parametrize("name", TABLES)
def test_a_fingerprint_holds_where_a_table_lies(name: str) -> None:
    tables = tuple(
        (each, address + 8 * (each == name)) for each, address in group_resources(1).tables
    )
    moved = fingerprint(groups=(group_resources(0), group_resources(1, tables=tables)))
    (difference,) = fingerprint().compare(moved)
    assert difference.startswith(f"group 1: table {name}: expected 0x")


def test_a_table_more_is_another_fingerprint() -> None:
    more = group_resources(1, tables=(*group_resources(1).tables, ("totals", 64)))
    assert fingerprint().compare(fingerprint(groups=(group_resources(0), more))) == (
        "group 1: table totals: expected none, got 0x40",
    )


def test_equal_resources_have_equal_fingerprints() -> None:
    assert fingerprint() == fingerprint()
    assert fingerprint().compare(fingerprint()) == ()
    assert fingerprint().number == fingerprint().number != 0


def test_the_number_of_groups_and_banks_is_held() -> None:
    fewer = resource_fingerprint(
        resources(groups=(group_resources(0),)), resource_state(groups=(GroupState(),))
    )
    assert isinstance(fewer, ResourceFingerprint)
    differences = fingerprint().compare(fewer)
    assert differences[0] == "graph: groups: expected 2, got 1"
    assert "group 1: name: expected layers.1, got none" in differences
    assert "group 1: name: expected none, got layers.1" in fewer.compare(fingerprint())
    group = group_resources(1)
    one_bank = fingerprint(groups=(group_resources(0), replace(group, banks=group.banks[:1])))
    assert one_bank != fingerprint()


def test_the_order_of_groups_is_held() -> None:
    turned = fingerprint(groups=tuple(reversed(resources().groups)))
    assert turned.number != fingerprint().number


def test_no_content_of_memory_is_a_field() -> None:
    # the state of the moment decides only whether there is a fingerprint
    plain = {field.name for kind in PARTS for field in fields(kind)} - INNER
    assert plain == {field for _, field in FIELDS}
    values = {field.value for field in fingerprint().fields if not isinstance(field.value, tuple)}
    assert not any(is_dataclass(value) for value in values)
    asked_twice = resource_fingerprint(
        resources(), resource_state(outcome=PlanOutcome.PROMPT_GROUPED)
    )
    assert asked_twice == fingerprint()


def test_a_field_reads_as_a_person_would_say_it() -> None:
    texts = list(map(str, fingerprint().fields))
    assert "graph: generation = 5" in texts
    assert "group 0: stream = 0x5000" in texts
    assert "group 0, bank 0: compute_capability = 90" in texts
    assert "group 0, auxiliary 0: role = DOWN_SCALE" in texts
    assert repr(fingerprint()) == f"<ResourceFingerprint {fingerprint()}, {len(texts)} fields>"


def test_the_number_is_the_same_in_another_process() -> None:
    script = "from helpers.moe_cases import fingerprint; print(fingerprint().number)"
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    ).stdout
    assert int(found) == fingerprint().number


# ---- when there is none -------------------------------------------------------------------------

R = FingerprintReason


def groups(**more: Any) -> Resources:
    return resources(groups=(group_resources(0), group_resources(1, **more)))


def now(**more: bool) -> Any:
    return resource_state(groups=(GroupState(), GroupState(**more)))


MANY = tuple(
    replace(bank, capability=replace(bank.capability, experts=9))
    for bank in group_resources(1).banks
)
"""Of one expert more than there are slots."""


def test_where_every_expert_has_a_slot_there_may_be_any_number_of_routes() -> None:
    found = resource_fingerprint(groups(rows=500, routes=1000), resource_state())
    assert isinstance(found, ResourceFingerprint)
    few = resource_fingerprint(groups(rows=4, routes=8, banks=MANY), resource_state())
    assert isinstance(few, ResourceFingerprint)


REFUSED: dict[str, tuple[Resources, Any, FingerprintReason]] = {
    **{
        f"outcome {outcome.name.lower()}": (resources(), resource_state(outcome=outcome), R.OUTCOME)
        for outcome in PlanOutcome
        if not outcome.is_grouped
    },
    **{
        f"admission {admission.name.lower()}": (
            resources(), resource_state(admission=admission), R.ADMISSION,
        )
        for admission in Admission
        if admission is not Admission.OPEN
    },
    "another generation": (resources(generation=4), resource_state(), R.GENERATION),
    "no group": (resources(groups=()), resource_state(groups=()), R.SIZES),
    "a state is missing": (resources(), resource_state(groups=(GroupState(),)), R.SIZES),
    "routes are not rows times top k": (groups(routes=7), resource_state(), R.SIZES),
    "another number of auxiliaries": (groups(auxiliary_count=2), resource_state(), R.SIZES),
    **{
        f"no table {name}": (
            groups(tables=tuple(each for each in group_resources(1).tables if each[0] != name)),
            resource_state(), R.SIZES,
        )
        for name in SLOT_TABLES
    },
    "no bank": (groups(banks=()), resource_state(), R.SIZES),
    "banks of other slots": (groups(slots=9), resource_state(), R.SIZES),
    "another stream": (groups(stream=0x6000), resource_state(), R.STREAM),
    "more experts than slots": (groups(rows=5, routes=10, banks=MANY), resource_state(), R.ROUTES),
    "no memory": (groups(serial=0), resource_state(), R.SERIAL),
    "a dispatch under way": (resources(), now(in_transaction=True), R.TRANSACTION),
    "being made anew": (resources(), now(is_refreshing=True), R.REFRESHING),
    "not as registered": (resources(), now(is_registered=False), R.REGISTRY),
}  # fmt: skip


@pytest.mark.parametrize(("given", "state", "reason"), REFUSED.values(), ids=REFUSED)
def test_there_is_no_fingerprint_of(
    given: Resources, state: Any, reason: FingerprintReason
) -> None:
    refusal = resource_fingerprint(given, state)
    assert isinstance(refusal, FingerprintRefusal)
    assert refusal.reason is reason
    assert str(refusal).startswith(f"{reason.value}: ")


def test_every_refusal_is_tested() -> None:
    assert {reason for *_, reason in REFUSED.values()} == set(FingerprintReason)


CAUSES: dict[str, Callable[[], Any]] = {
    "group layers.1: expected 0x5000, got 0x6000": lambda: groups(stream=0x6000),
    "group layers.1: 10 routes, 8 slots": lambda: groups(rows=5, routes=10, banks=MANY),
}


@pytest.mark.parametrize(("text", "given"), CAUSES.items(), ids=["stream", "routes"])
def test_a_refusal_names_the_group(text: str, given: Callable[[], Resources]) -> None:
    assert str(resource_fingerprint(given(), resource_state())).endswith(text)
