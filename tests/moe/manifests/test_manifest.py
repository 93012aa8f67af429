"""What a manifest may say: each rejection by its smallest cause; what an adapter makes of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.moe_manifests import EXPERTS, HIDDEN, INTER, bank, fused, manifest, separate, ungated

from graphcore import ConfigurationError
from graphcore.moe.manifests.manifest import ExpertGroup, Manifest, ManifestFlag
from graphcore.moe.manifests.manifest_check import examine
from graphcore.moe.manifests.names import BankStatus, Layout, Location, Rejection, Role

R = Rejection


def changed(index: int = 0, group: ExpertGroup | None = None, **fields: Any) -> Manifest:
    """One bank of one group changed."""
    group = group or fused()
    banks = list(group.banks)
    banks[index] = replace(banks[index], **fields)
    return Manifest((replace(group, banks=tuple(banks)),))


def of(group: ExpertGroup, **fields: Any) -> Manifest:
    return Manifest((replace(group, **fields),))


def with_bank(group: ExpertGroup, *banks: Any) -> Manifest:
    return of(group, banks=(*group.banks, *banks))


ACCEPTED: dict[str, Manifest] = {
    "nothing at all": Manifest(),
    "switched off": Manifest((fused(),), flags=ManifestFlag.DISABLED),
    "fused": Manifest((fused(),)),
    "separate with scale and bias": Manifest((separate(),)),
    "ungated": Manifest((ungated(),)),
    "no slot": Manifest((fused(slots=0),)),
    "a slot for every expert": Manifest((fused(slots=EXPERTS),)),
    "layers on two devices": Manifest((fused(0), fused(1, device=1))),
    "a shard of the experts": Manifest(
        (fused(first_expert=8, routed_experts=32),), rank=1, ranks=4,
    ),
    "more routes for a row than experts here": Manifest((fused(top_k=10, routed_experts=32),)),
    "kn": of(
        fused(), order="kn",
        banks=(
            bank(Role.GATE_UP, EXPERTS, HIDDEN, 2 * INTER),
            bank(Role.DOWN, EXPERTS, INTER, HIDDEN),
        ),
    ),
    "pageable experts": changed(location=Location.PAGEABLE),
    "experts on the device": changed(location=Location.DEVICE, device=0),
    "experts apart from each other": changed(expert_stride=4096, nbytes=8 * 4096),
    "an adapter is active": manifest().adapted("lora", ["layers.0.experts.down"]),
    "half precision": of(
        fused(),
        banks=tuple(replace(each, dtype="bfloat16") for each in fused().banks),
    ),
}  # fmt: skip


@pytest.mark.parametrize("given", ACCEPTED.values(), ids=ACCEPTED)
def test_nothing_is_wrong_with(given: Manifest) -> None:
    assert examine(given) == ()


SCALE = bank(Role.GATE_SCALE, EXPERTS)
REJECTED: dict[str, tuple[Manifest, Rejection, str]] = {
    "another version": (replace(manifest(), version=2), R.VERSION, "manifest"),
    "an unknown flag": (replace(manifest(), flags=2), R.FLAGS, "manifest"),
    "no rank": (replace(manifest(), ranks=0), R.COUNT, "manifest"),
    "a rank beyond the ranks": (replace(manifest(), rank=1), R.COUNT, "manifest"),
    "no experts": (of(fused(), experts=0), R.COUNT, "group layers.0"),
    "experts are no int": (of(fused(), experts=8.0), R.COUNT, "group layers.0"),
    "the first expert below 0": (of(fused(), first_expert=-1), R.COUNT, "group layers.0"),
    "experts beyond the router's": (of(fused(), routed_experts=7), R.COUNT, "group layers.0"),
    "a shard beyond the router's": (
        of(fused(), first_expert=25, routed_experts=32), R.COUNT, "group layers.0",
    ),
    "slots below 0": (of(fused(), slots=-1), R.COUNT, "group layers.0"),
    "more slots than experts": (of(fused(), slots=9), R.COUNT, "group layers.0"),
    "no expert for a row": (of(fused(), top_k=0), R.COUNT, "group layers.0"),
    "more experts for a row than there are": (of(fused(), top_k=9), R.COUNT, "group layers.0"),
    "a layout that is none": (of(fused(), layout="fused"), R.LAYOUT, "group layers.0"),
    "an order that is none": (of(fused(), order="mn"), R.LAYOUT, "group layers.0"),
    "a role that is none": (
        changed(role="down"), R.ROLE, "group layers.0, bank layers.0.experts.gate_up",
    ),
    "a role of another layout": (
        with_bank(fused(), bank(Role.GATE, EXPERTS, INTER, HIDDEN)), R.ROLE, "group layers.0",
    ),
    "a role is missing": (of(fused(), banks=fused().banks[:1]), R.ROLE, "group layers.0"),
    "a role twice": (
        with_bank(fused(), replace(fused().banks[1], name="again", address=1)),
        R.DUPLICATE_ROLE, "group layers.0",
    ),
    "two groups of one name": (
        Manifest((fused(), replace(fused(1), name="layers.0"))), R.DUPLICATE_ROLE, "group layers.0",
    ),
    "two banks of one name": (
        Manifest((fused(0), of(fused(1), banks=tuple(
            replace(one, name=other.name)
            for one, other in zip(fused(1).banks, fused(0).banks, strict=True)
        )).groups[0])),
        R.DUPLICATE_TENSOR, "bank layers.0.experts.gate_up",
    ),
    "two banks in one place": (
        changed(1, address=fused().banks[0].address),
        R.DUPLICATE_TENSOR, "bank layers.0.experts.down",
    ),
    "no extents": (
        changed(shape=()), R.INVALID_TENSOR, "group layers.0, bank layers.0.experts.gate_up",
    ),
    "an extent of 0": (
        changed(shape=(8, 0, 16)), R.INVALID_TENSOR,
        "group layers.0, bank layers.0.experts.gate_up",
    ),
    "extents that are no tuple": (
        changed(shape=[8, 48, 16]), R.INVALID_TENSOR,
        "group layers.0, bank layers.0.experts.gate_up",
    ),
    "no address": (
        changed(address=0), R.INVALID_TENSOR, "group layers.0, bank layers.0.experts.gate_up",
    ),
    "no name": (changed(name=""), R.INVALID_TENSOR, "group layers.0, bank "),
    "a status that is none": (
        changed(status="active"), R.INVALID_TENSOR, "group layers.0, bank layers.0.experts.gate_up",
    ),
    "an element type that no kernel reads": (
        changed(dtype="int8"), R.UNSUPPORTED_TYPE, "group layers.0, bank layers.0.experts.gate_up",
    ),
    "a scale of weights that the layout has not": (
        with_bank(fused(), SCALE), R.UNSUPPORTED_ROLE, "group layers.0",
    ),
    "memory that cannot be read": (
        changed(is_readable=False), R.INACCESSIBLE_SOURCE,
        "group layers.0, bank layers.0.experts.gate_up",
    ),
    "memory of no known kind": (
        changed(location="pinned"), R.INACCESSIBLE_SOURCE,
        "group layers.0, bank layers.0.experts.gate_up",
    ),
    "memory that ends a byte too early": (
        changed(nbytes=8 * 48 * 16 * 4 - 1), R.BOUNDS,
        "group layers.0, bank layers.0.experts.gate_up",
    ),
    "experts that overlap": (
        changed(expert_stride=48 * 16 * 4 - 4), R.BOUNDS,
        "group layers.0, bank layers.0.experts.gate_up",
    ),
    "a stride that is no int": (
        changed(expert_stride="packed"), R.BOUNDS, "group layers.0, bank layers.0.experts.gate_up",
    ),
    "experts apart and a byte too few": (
        changed(expert_stride=4096, nbytes=7 * 4096 + 3071), R.BOUNDS,
        "group layers.0, bank layers.0.experts.gate_up",
    ),
    "another number of experts than its group": (
        changed(shape=(7, 48, 16)), R.SHAPE, "group layers.0, bank layers.0.experts.gate_up",
    ),
    "weights that are no matrix": (
        changed(shape=(8, 768)), R.SHAPE, "group layers.0, bank layers.0.experts.gate_up",
    ),
    "gate_up of another inner size than down": (
        changed(shape=(8, 46, 16)), R.SHAPE, "group layers.0, bank layers.0.experts.gate_up",
    ),
    "gate_up of another hidden size than down": (
        changed(shape=(8, 48, 15)), R.SHAPE, "group layers.0, bank layers.0.experts.gate_up",
    ),
    "up of another inner size than down": (
        changed(0, ungated(), shape=(8, 12, 16)), R.SHAPE,
        "group layers.0, bank layers.0.experts.up",
    ),
    "a bank of another element type": (
        changed(dtype="float16"), R.SHAPE, "group layers.0, bank layers.0.experts.gate_up",
    ),
    "a bias of another length than its outputs": (
        changed(4, separate(), shape=(8, 12)), R.SHAPE,
        "group layers.0, bank layers.0.experts.down_bias",
    ),
    "the other order of a matrix": (
        of(fused(), order="kn"), R.SHAPE, "group layers.0, bank layers.0.experts.gate_up",
    ),
    "more bytes than can be counted": (
        changed(shape=(8, 2**40, 2**40)), R.OVERFLOW,
        "group layers.0, bank layers.0.experts.gate_up",
    ),
    "a stride that cannot be counted": (
        changed(expert_stride=2**64), R.OVERFLOW, "group layers.0, bank layers.0.experts.gate_up",
    ),
    "a bank on another device": (
        changed(location=Location.DEVICE, device=1), R.DEVICE,
        "group layers.0, bank layers.0.experts.gate_up",
    ),
    "a bank in host memory with a device": (
        changed(device=0), R.DEVICE, "group layers.0, bank layers.0.experts.gate_up",
    ),
    "slots on no device": (of(fused(), device=-1), R.DEVICE, "group layers.0"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "rejection", "where"), REJECTED.values(), ids=REJECTED)
def test_a_manifest_is_rejected_for(given: Manifest, rejection: Rejection, where: str) -> None:
    first = examine(given)[0]
    assert (first.rejection, first.where) == (rejection, where)
    assert str(first).startswith(f"{where}: {rejection.value}: expected ")


def test_every_rejection_has_a_cause_but_those_that_come_when_a_manifest_is_published() -> None:
    seen = {rejection for _, rejection, _ in REJECTED.values()}
    assert set(Rejection) - seen == {R.ALLOCATION, R.GENERATION_EXHAUSTED, R.RANKS}


def test_what_is_wrong_in_several_groups_is_told_of_each() -> None:
    both = Manifest((of(fused(0), slots=9).groups[0], of(fused(1), slots=9).groups[0]))
    assert [each.where for each in examine(both)] == ["group layers.0", "group layers.1"]


def test_an_adapter_makes_another_manifest_and_leaves_the_old_one() -> None:
    before = manifest()
    after = before.adapted("lora", ["layers.0.experts.down"])
    assert (before.adapters, after.adapters) == ((), ("lora",))
    statuses = {bank.name: bank.status for _, bank in after.banks()}
    assert statuses.pop("layers.0.experts.down") is BankStatus.ADAPTED
    assert set(statuses.values()) == {BankStatus.ACTIVE}
    assert all(bank.status is BankStatus.ACTIVE for _, bank in before.banks())
    assert before != after


@pytest.mark.parametrize(
    ("adapter", "banks", "message"),
    [
        ("lora", ["layers.9.experts.down"], "banks: expected names of banks"),
        ("active", ["layers.0.experts.down"], "adapter: expected one that is not active"),
    ],
    ids=["unknown bank", "active already"],
)
def test_an_adapter_is_refused(adapter: str, banks: list[str], message: str) -> None:
    given = manifest().adapted("active", ["layers.1.experts.down"])
    with pytest.raises(ConfigurationError, match=message):
        given.adapted(adapter, banks)


def test_banks_are_replaced_by_name_and_unknown_names_refused() -> None:
    given = manifest()
    moved = replace(given.groups[1].banks[0], address=0x77)
    after = given.with_banks({moved.name: moved})
    assert after.groups[1].bank(Role.GATE_UP) == moved
    assert after.groups[0] == given.groups[0]
    with pytest.raises(ConfigurationError, match="nobody"):
        given.with_banks({"nobody": moved})


@pytest.mark.parametrize(
    ("given", "enabled"),
    [
        (Manifest(), False),
        (manifest(), True),
        (manifest(slots=0), False),
        (Manifest((fused(0, slots=0), fused(1))), True),
        (replace(manifest(), flags=1), False),
    ],
    ids=["empty", "slots", "no slots", "slots in one layer", "switched off"],
)
def test_experts_are_cached_where_there_are_slots(given: Manifest, enabled: bool) -> None:
    assert given.is_enabled is enabled


def test_a_group_is_found_by_name_and_a_bank_by_role() -> None:
    given = Manifest((separate(),))
    group = given.group("layers.0")
    assert group is given.groups[0]
    assert given.group("layers.9") is None
    assert group.bank(Role.UP_SCALE).name == "layers.0.experts.up_scale"
    assert group.bank(Role.GATE_UP) is None
    assert (group.layout, group.router_size) == (Layout.SEPARATE, EXPERTS)
    assert group.is_mappable
    assert not changed(location=Location.PAGEABLE).groups[0].is_mappable
