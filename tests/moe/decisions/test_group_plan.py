"""How a group stands: each reason by its smallest cause, and the order they are looked at in."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from helpers.moe_cases import CERTIFICATE, capability
from helpers.moe_manifests import fused, separate
from helpers.moe_plans import route, sighting

from graphcore.moe.decisions.certificate import Certificate, CertificateFlag
from graphcore.moe.decisions.group_plan import GroupPlan, GroupSighting, plan_group
from graphcore.moe.manifests.manifest import ExpertGroup
from graphcore.moe.manifests.names import GroupReason, Location, Namespace, Strategy

R = GroupReason
GROUP = fused(slots=8)
SEEN = sighting(GROUP)
GATE_UP, DOWN = SEEN.readers
FEW = fused(slots=4)
PAGEABLE = replace(
    GROUP, banks=(GROUP.banks[0], replace(GROUP.banks[1], location=Location.PAGEABLE))
)
REQUIRED = replace(CERTIFICATE, namespace=Namespace.DRAFT, flags=CertificateFlag.REQUIRED)


def readers(first: dict[str, Any] | None = None, second: dict[str, Any] | None = None) -> Any:
    return {"readers": (replace(GATE_UP, **(first or {})), replace(DOWN, **(second or {})))}


# name: (group, what is seen otherwise, certificate, reason, what the detail begins with)
STANDS: dict[str, tuple[ExpertGroup, dict[str, Any], Certificate | None, GroupReason, str]] = {
    "nothing wrong": (GROUP, {}, CERTIFICATE, R.ELIGIBLE, ""),
    "weights without a product": (
        GROUP, {"sources": SEEN.sources[:1]}, CERTIFICATE, R.DESCRIPTOR, "2 products, 1 weights",
    ),
    "kernels without a product": (
        GROUP, {"capabilities": ()}, CERTIFICATE, R.DESCRIPTOR, "2 products, 2 weights and 0",
    ),
    "a bank of another group": (
        GROUP, readers({"bank": "lm_head"}), CERTIFICATE, R.DESCRIPTOR, "lm_head is none",
    ),
    "a bank and weights of another group": (
        GROUP,
        {
            **readers({"bank": "lm_head"}),
            "sources": (replace(SEEN.sources[0], name="lm_head"), SEEN.sources[1]),
        },
        CERTIFICATE, R.DESCRIPTOR, "lm_head is none of its banks",
    ),
    "weights of another bank": (
        GROUP, {"sources": SEEN.sources[::-1]}, CERTIFICATE, R.DESCRIPTOR, "layers.0.experts.gate",
    ),
    "weights of another shape": (
        GROUP, {"sources": (replace(SEEN.sources[0], shape=(8, 16, 48)), SEEN.sources[1])},
        CERTIFICATE, R.DESCRIPTOR, "layers.0.experts.gate_up: expected float32 (8, 48, 16), got",
    ),
    "weights of another type": (
        GROUP, {"sources": (replace(SEEN.sources[0], dtype="float16"), SEEN.sources[1])},
        CERTIFICATE, R.DESCRIPTOR, "layers.0.experts.gate_up: expected float32",
    ),
    "weights elsewhere": (
        GROUP, {"sources": (replace(SEEN.sources[0], address=16), SEEN.sources[1])},
        CERTIFICATE, R.SOURCE, "layers.0.experts.gate_up: expected 0x10000000, got 0x10",
    ),
    "no row": (GROUP, {"rows": 0, "routes": 0}, CERTIFICATE, R.GEOMETRY, "rows: expected"),
    "other experts for a row": (
        GROUP, {"top_k": 1, "routes": 4}, CERTIFICATE, R.GEOMETRY, "top_k: expected 2, got 1",
    ),
    "routes are not rows times top k": (
        GROUP, {"routes": 7}, CERTIFICATE, R.GEOMETRY, "routes: expected 4 x 2, got 7",
    ),
    "more rows of prompts than rows": (
        GROUP, {"prompt_rows": 5}, CERTIFICATE, R.GEOMETRY, "rows of prompts: expected 0 to 4",
    ),
    "rows of prompts below 0": (
        GROUP, {"prompt_rows": -1}, CERTIFICATE, R.GEOMETRY, "rows of prompts: expected 0 to 4",
    ),
    "no certificate": (GROUP, {}, None, R.EXECUTION, "no certificate"),
    "a malformed certificate": (
        GROUP, {}, replace(CERTIFICATE, reserved=1), R.EXECUTION, "no certificate",
    ),
    "other rows than certified": (
        GROUP, {"rows": 3, "routes": 6}, CERTIFICATE, R.EXECUTION, "rows: expected 4 as certified",
    ),
    "another device than certified": (
        GROUP, {}, replace(CERTIFICATE, device=1), R.EXECUTION, "device: expected 0, got 1",
    ),
    "more routes than slots": (FEW, {}, CERTIFICATE, R.EXECUTION, "8 routes, 4 slots"),
    "more routes than slots, required": (FEW, {}, REQUIRED, R.ELIGIBLE, ""),
    "no kernel": (
        GROUP, {"capabilities": (capability(), None)}, CERTIFICATE, R.CAPABILITY,
        "no kernel for layers.0.experts.down",
    ),
    "other bits": (
        GROUP, {"equivalence": "another order of sums"}, CERTIFICATE, R.CONSUMER_EQUIVALENCE,
        "another order of sums",
    ),
    "no router": (GROUP, {"route": None}, CERTIFICATE, R.ROUTE, "no router was found"),
    "ids from nowhere": (
        GROUP, {"route": route(chain=())}, CERTIFICATE, R.ROUTE, "ids 'ids0' are not proven",
    ),
    "ids that nobody reads": (
        GROUP, {"route": route(uses=0)}, CERTIFICATE, R.ROUTE, "ids 'ids0' are not proven",
    ),
    "a role twice": (
        GROUP,
        {
            "readers": (GATE_UP, GATE_UP, DOWN),
            "sources": (SEEN.sources[0], *SEEN.sources),
            "capabilities": (capability(),) * 3,
        },
        CERTIFICATE, R.DUPLICATE_ROLE, "layers.0.experts.gate_up: 2 products",
    ),
    "other ids": (
        GROUP, readers(second={"ids": "ids9"}), CERTIFICATE, R.MIXED_IDS,
        "expected ids 'ids0', got 'ids9'",
    ),
    "a scale that is none of its own": (
        GROUP, {"auxiliaries": ("scale",)}, CERTIFICATE, R.AUXILIARY, "expected [], got ['scale']",
    ),
    "a stranger reads what lies between": (
        GROUP, readers({"consumers": (("decode3", 1), ("probe", 1))}), CERTIFICATE,
        R.EXTERNAL_CONSUMER, "node 'probe' reads layers.0.experts.gate_up",
    ),
    "a product is missing": (
        GROUP,
        {
            "readers": (GATE_UP,), "sources": SEEN.sources[:1],
            "capabilities": SEEN.capabilities[:1],
        },
        CERTIFICATE, R.MISSING_ROLE, "no product of layers.0.experts.down",
    ),
    "a reader was not seen": (
        GROUP, readers({"is_observed": False}), CERTIFICATE, R.UNPROVEN, "not every reader of",
    ),
    "nobody reads a product": (
        GROUP, readers(second={"consumers": ()}), CERTIFICATE, R.UNPROVEN, "nobody reads",
    ),
    "a reader that reads nothing": (
        GROUP, readers(second={"consumers": (("decode5", 0),)}), CERTIFICATE, R.UNPROVEN,
        "nobody reads layers.0.experts.down",
    ),
    "rows of a prompt": (GROUP, {"prompt_rows": 4}, CERTIFICATE, R.PREFILL, "4 of 4 rows"),
    "a row of a prompt among others": (
        GROUP, {"prompt_rows": 1}, CERTIFICATE, R.PREFILL, "1 of 4 rows",
    ),
    "pageable experts": (
        PAGEABLE, {}, CERTIFICATE, R.MATERIALISATION,
        "layers.0.experts.down lies in pageable host memory",
    ),
}  # fmt: skip


def standing(
    group: ExpertGroup, changes: dict[str, Any], certificate: Certificate | None
) -> GroupPlan:
    return plan_group(group, sighting(group, **changes), certificate)


@pytest.mark.parametrize(
    ("group", "changes", "certificate", "reason", "detail"), STANDS.values(), ids=STANDS
)
def test_a_group_stands_as(
    group: ExpertGroup,
    changes: dict[str, Any],
    certificate: Certificate | None,
    reason: GroupReason,
    detail: str,
) -> None:
    found = standing(group, changes, certificate)
    assert found.reason is reason
    assert found.detail.startswith(detail)
    assert bool(found.detail) is (reason is not R.ELIGIBLE)
    assert str(found).startswith(f"group layers.0: {reason.value}")


def test_every_reason_is_tested() -> None:
    assert {reason for *_, reason, _ in STANDS.values()} == set(GroupReason)


# one cause of each reason, such that any two can hold at once
TOGETHER: dict[GroupReason, dict[str, Any]] = {
    R.DESCRIPTOR: {"dtype": "float16"},
    R.SOURCE: {"address": 16},
    R.GEOMETRY: {"prompt_rows": 5},
    R.EXECUTION: {"certificate": None},
    R.CAPABILITY: {"capabilities": (None, None)},
    R.CONSUMER_EQUIVALENCE: {"equivalence": "other bits"},
    R.ROUTE: {"uses": 0},
    R.DUPLICATE_ROLE: {"twice": True},
    R.MIXED_IDS: {"ids": "ids9"},
    R.AUXILIARY: {"auxiliaries": ("scale",)},
    R.EXTERNAL_CONSUMER: {"consumer": "probe"},
    R.MISSING_ROLE: {"without_down": True},
    R.UNPROVEN: {"is_observed": False},
    R.PREFILL: {"prompt_rows": 4},
    R.MATERIALISATION: {"pageable": True},
}


def both(causes: dict[str, Any]) -> GroupPlan:
    """How the group stands where all of ``causes`` hold."""
    group = PAGEABLE if causes.get("pageable") else GROUP
    first = replace(
        GATE_UP,
        ids=causes.get("ids", GATE_UP.ids),
        is_observed=causes.get("is_observed", True),
        consumers=((causes.get("consumer", "decode3"), 1),),
    )
    source = replace(
        SEEN.sources[0],
        dtype=causes.get("dtype", "float32"),
        address=causes.get("address", SEEN.sources[0].address),
    )
    rows: list[Any] = [(first, source, capability())]
    if causes.get("twice"):
        rows.append((first, source, capability()))
    if not causes.get("without_down"):
        rows.append((DOWN, SEEN.sources[1], capability()))
    found, sources, capabilities = zip(*rows, strict=True)
    given: GroupSighting = sighting(
        group,
        readers=found,
        sources=sources,
        capabilities=(None,) * len(rows) if "capabilities" in causes else capabilities,
        prompt_rows=causes.get("prompt_rows", 0),
        equivalence=causes.get("equivalence", ""),
        route=route(uses=causes.get("uses", 2)),
        auxiliaries=causes.get("auxiliaries", ()),
    )
    return plan_group(group, given, causes.get("certificate", CERTIFICATE))


ORDER = [reason for reason in GroupReason if reason is not R.ELIGIBLE]
# rows of prompts are two causes of one number: the larger one breaks geometry
PAIRS = [
    (one, other)
    for index, one in enumerate(ORDER)
    for other in ORDER[index + 1 :]
    if (one, other) != (R.GEOMETRY, R.PREFILL)
]


@pytest.mark.parametrize(
    ("one", "other"), PAIRS, ids=[f"{one.name}-{other.name}" for one, other in PAIRS]
)
def test_of_two_reasons_the_one_of_higher_priority_is_told(
    one: GroupReason, other: GroupReason
) -> None:
    assert both(TOGETHER[one]).reason is one
    assert both(TOGETHER[other]).reason is other
    assert both({**TOGETHER[one], **TOGETHER[other]}).reason is one


def test_causes_of_neighbours_were_compared() -> None:
    assert set(pairwise(ORDER)) <= set(PAIRS)
    assert both({}).reason is R.ELIGIBLE


# ---- what follows -------------------------------------------------------------------------------

FOLLOWS = {
    "eligible": (GROUP, {}, CERTIFICATE, Strategy.DEVICE_DIRECT, True, False),
    "a prompt": (GROUP, {"prompt_rows": 4}, CERTIFICATE, Strategy.DEVICE_DIRECT, True, False),
    "as many routes as slots": (
        fused(slots=8), {}, CERTIFICATE, Strategy.DEVICE_DIRECT, True, False,
    ),
    "a slot for every expert, more routes": (
        fused(slots=8), {"rows": 6, "routes": 12}, replace(CERTIFICATE, rows=6, sequences=6),
        Strategy.DEVICE_DIRECT, True, False,
    ),
    "a slot too few for all experts, more routes": (
        fused(slots=7), {"rows": 6, "routes": 12}, replace(CERTIFICATE, rows=6, sequences=6),
        Strategy.HOST_STAGED, False, True,
    ),
    "a slot too few": (fused(slots=7), {}, CERTIFICATE, Strategy.HOST_STAGED, False, True),
    "a slot too few, required": (fused(slots=7), {}, REQUIRED, Strategy.HOST_STAGED, False, True),
    "no certificate": (GROUP, {}, None, Strategy.DEVICE_DIRECT, False, False),
    "other bits": (GROUP, {"equivalence": "x"}, CERTIFICATE, Strategy.DEVICE_DIRECT, False, False),
    "pageable experts": (PAGEABLE, {}, CERTIFICATE, Strategy.DEVICE_DIRECT, False, True),
    "pageable experts in a prompt": (
        PAGEABLE, {"prompt_rows": 4}, CERTIFICATE, Strategy.DEVICE_DIRECT, False, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("group", "changes", "certificate", "strategy", "direct", "staged"),
    FOLLOWS.values(),
    ids=FOLLOWS,
)
def test_how_a_group_is_served(
    group: ExpertGroup,
    changes: dict[str, Any],
    certificate: Certificate | None,
    strategy: Strategy,
    direct: bool,
    staged: bool,
) -> None:
    found = standing(group, changes, certificate)
    assert found.strategy is strategy
    assert (found.is_device_direct, found.must_stage) == (direct, staged)


def test_scales_and_biases_of_the_manifest_must_be_read() -> None:
    group = separate(slots=8)
    bare = replace(group, banks=group.banks[:3])
    names = [bank.name for bank in group.banks[3:]]

    def seen(auxiliaries: tuple[str, ...]) -> GroupSighting:
        found = tuple(replace(GATE_UP, bank=bank.name) for bank in bare.banks)
        sources = tuple(type(SEEN.sources[0]).of(bank) for bank in bare.banks)
        return replace(
            SEEN,
            readers=found,
            sources=sources,
            capabilities=(capability(),) * 3,
            auxiliaries=auxiliaries,
        )

    assert plan_group(group, seen(tuple(names)), CERTIFICATE).reason is R.ELIGIBLE
    assert plan_group(group, seen(tuple(names[::-1])), CERTIFICATE).reason is R.ELIGIBLE
    assert plan_group(group, seen(tuple(names[:1])), CERTIFICATE).reason is R.AUXILIARY
    assert plan_group(bare, seen(()), CERTIFICATE).reason is R.ELIGIBLE
