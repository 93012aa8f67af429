"""The words of expert caching: how many there are, in which order, what they say of themselves."""

from __future__ import annotations

from enum import Enum

import pytest

from graphcore.moe.manifests import names
from graphcore.moe.manifests.names import (
    BankStatus,
    CoverageReason,
    GroupReason,
    Kind,
    Layout,
    Namespace,
    PlanOutcome,
    Rejection,
    Role,
    RowSemantics,
)

ENUMERATIONS = [
    value
    for value in vars(names).values()
    if isinstance(value, type) and issubclass(value, Enum) and value is not Enum
]


@pytest.mark.parametrize("kind", ENUMERATIONS, ids=lambda kind: kind.__name__)
def test_every_word_says_something_of_its_own_in_a_message(kind: type[Enum]) -> None:
    values = [member.value for member in kind]
    assert len(set(values)) == len(values) == len(kind.__members__)
    assert all(isinstance(value, str) and value for value in values)


COUNTS = {
    Namespace: 3,
    RowSemantics: 3,
    Rejection: 18,
    CoverageReason: 12,
    GroupReason: 16,
    Kind: 8,
    BankStatus: 8,
    PlanOutcome: 7,
}


@pytest.mark.parametrize(("kind", "count"), COUNTS.items(), ids=[each.__name__ for each in COUNTS])
def test_no_word_is_missing_from(kind: type[Enum], count: int) -> None:
    assert len(kind) == count


def test_the_reasons_of_a_group_stand_in_order_of_priority() -> None:
    assert [reason.name for reason in GroupReason] == [
        "DESCRIPTOR", "SOURCE", "GEOMETRY", "EXECUTION", "CAPABILITY", "CONSUMER_EQUIVALENCE",
        "ROUTE", "DUPLICATE_ROLE", "MIXED_IDS", "AUXILIARY", "EXTERNAL_CONSUMER", "MISSING_ROLE",
        "UNPROVEN", "PREFILL", "MATERIALISATION", "ELIGIBLE",
    ]  # fmt: skip


SOFT = {"EXECUTION", "CONSUMER_EQUIVALENCE", "MATERIALISATION"}
FINE = {"PREFILL", "ELIGIBLE"}


@pytest.mark.parametrize("reason", GroupReason, ids=lambda reason: reason.name)
def test_a_reason_is_soft_or_fine_or_a_broken_contract(reason: GroupReason) -> None:
    assert reason.is_soft is (reason.name in SOFT)
    assert reason.is_fine is (reason.name in FINE)


BASES = {"GATE_UP", "GATE", "UP", "DOWN"}


@pytest.mark.parametrize("role", Role, ids=lambda role: role.name)
def test_a_scale_or_a_bias_knows_the_weights_it_belongs_to(role: Role) -> None:
    base = role.name.removesuffix("_SCALE").removesuffix("_BIAS")
    assert role.base is Role[base]
    assert role.is_auxiliary is (role.name not in BASES)


@pytest.mark.parametrize(
    ("layout", "roles"),
    [
        (Layout.FUSED, {Role.GATE_UP, Role.DOWN}),
        (Layout.SEPARATE, {Role.GATE, Role.UP, Role.DOWN}),
        (Layout.UNGATED, {Role.UP, Role.DOWN}),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else "",
)
def test_a_layout_has_each_of_its_base_roles_once(layout: Layout, roles: set[Role]) -> None:
    assert layout.roles == roles
    assert not any(role.is_auxiliary for role in layout.roles)


GROUPED = {"DECODE_GROUPED", "PROMPT_GROUPED"}
PROMPTS = {"PROMPT_GROUPED", "PROMPT_STAGED"}


@pytest.mark.parametrize("outcome", PlanOutcome, ids=lambda outcome: outcome.name)
def test_an_outcome_knows_whether_it_is_grouped_and_whether_a_prompt_is_in_it(
    outcome: PlanOutcome,
) -> None:
    assert outcome.is_grouped is (outcome.name in GROUPED)
    assert outcome.is_prompt is (outcome.name in PROMPTS)
