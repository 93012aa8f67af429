"""What is wrong with a manifest, before anything is closed, waited for or allocated.

Every rule names the place, what it expected and what it found. Two of the rejections come later:
``ALLOCATION`` and ``GENERATION_EXHAUSTED`` are the registry's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from graphcore.moe.manifests.manifest import (
    MANIFEST_VERSION,
    ExpertBank,
    ExpertGroup,
    Manifest,
    ManifestFlag,
)
from graphcore.moe.manifests.names import BankStatus, Layout, Location, Rejection, Role

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Element types that the kernels read, and their bytes."""

_MOST_BYTES = 2**63 - 1
_MOST_COUNT = 2**31 - 1


class Rejected(NamedTuple):
    """One rule that a manifest breaks; ``where`` is "manifest", "group g" or "group g, bank b"."""

    rejection: Rejection
    where: str
    expected: str
    actual: object

    def __str__(self) -> str:
        return (
            f"{self.where}: {self.rejection.value}: expected {self.expected}, got {self.actual!r}"
        )


def examine(manifest: Manifest) -> tuple[Rejected, ...]:
    """Every rule that ``manifest`` breaks; of rules that build on each other only the first."""
    found = list(_of_manifest(manifest))
    if found:
        return tuple(found)
    for group in manifest.groups:
        broken = list(_of_group(group)) or list(_of_banks(group)) or list(_of_shapes(group))
        found += broken
    return tuple(found) or tuple(_of_names(manifest))


def _is_a(value: object, kind: type) -> bool:
    """``isinstance`` of what may be anything in spite of its annotation."""
    return isinstance(value, kind)


def _is_count(value: object, least: int = 0, most: int = _MOST_COUNT) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _of_manifest(manifest: Manifest) -> Iterator[Rejected]:
    if manifest.version != MANIFEST_VERSION:
        yield Rejected(Rejection.VERSION, "manifest", str(MANIFEST_VERSION), manifest.version)
        return
    if manifest.flags not in (0, ManifestFlag.DISABLED):
        yield Rejected(Rejection.FLAGS, "manifest", "0 or DISABLED (1)", manifest.flags)
    if not _is_count(manifest.ranks, 1):
        yield Rejected(Rejection.COUNT, "manifest", "ranks of at least 1", manifest.ranks)
    elif not _is_count(manifest.rank, 0, manifest.ranks - 1):
        expected = f"a rank below {manifest.ranks}"
        yield Rejected(Rejection.COUNT, "manifest", expected, manifest.rank)


def _of_group(group: ExpertGroup) -> Iterator[Rejected]:
    where = f"group {group.name}"
    if not _is_a(group.layout, Layout):
        yield Rejected(Rejection.LAYOUT, where, "a Layout", group.layout)
    if group.order not in ("nk", "kn"):
        yield Rejected(Rejection.LAYOUT, where, "order 'nk' or 'kn'", group.order)
    if not _is_count(group.device):
        yield Rejected(Rejection.DEVICE, where, "the ordinal of a device", group.device)
    counts = {
        "experts": (group.experts, 1, _MOST_COUNT),
        "routed_experts": (group.router_size, 1, _MOST_COUNT),
        "first_expert": (group.first_expert, 0, _MOST_COUNT),
    }
    broken = [name for name, (value, *ends) in counts.items() if not _is_count(value, *ends)]
    for name in broken:
        value, least, _ = counts[name]
        yield Rejected(Rejection.COUNT, where, f"{name} of at least {least}", value)
    if not broken:
        yield from _of_counts(group, where)


def _of_counts(group: ExpertGroup, where: str) -> Iterator[Rejected]:
    last = group.first_expert + group.experts
    if last > group.router_size:
        expected = f"at most {group.router_size} experts, the router's, from {group.first_expert}"
        yield Rejected(Rejection.COUNT, where, expected, group.experts)
    if not _is_count(group.slots, 0, group.experts):
        expected = f"slots from 0 to {group.experts}, its experts"
        yield Rejected(Rejection.COUNT, where, expected, group.slots)
    if not _is_count(group.top_k, 1, group.router_size):
        expected = f"top_k from 1 to {group.router_size}, the router's experts"
        yield Rejected(Rejection.COUNT, where, expected, group.top_k)


def _of_banks(group: ExpertGroup) -> Iterator[Rejected]:
    yield from _of_roles(group)
    for bank in group.banks:
        yield from _of_bank(bank, group)


def _of_roles(group: ExpertGroup) -> Iterator[Rejected]:
    where = f"group {group.name}"
    base = {role.name for role in group.layout.roles}
    for bank in group.banks:
        if not _is_a(bank.role, Role):
            yield Rejected(Rejection.ROLE, _where(group, bank), "a Role", bank.role)
            return
    for role, count in Counter(bank.role for bank in group.banks).items():
        if role.base not in group.layout.roles:
            rejection = Rejection.UNSUPPORTED_ROLE if role.is_auxiliary else Rejection.ROLE
            yield Rejected(rejection, where, f"roles of {sorted(base)}", role.name)
        elif count > 1:
            yield Rejected(Rejection.DUPLICATE_ROLE, where, f"{role.name} once", count)
    present = {bank.role for bank in group.banks}
    for role in sorted(group.layout.roles - present, key=lambda role: role.name):
        yield Rejected(Rejection.ROLE, where, f"a bank of role {role.name}", None)


def _where(group: ExpertGroup, bank: ExpertBank) -> str:
    return f"group {group.name}, bank {bank.name}"


def _of_bank(bank: ExpertBank, group: ExpertGroup) -> Iterator[Rejected]:
    where = _where(group, bank)
    is_shape = (
        _is_a(bank.shape, tuple)
        and len(bank.shape) in (1, 2, 3)
        and all(_is_count(extent, 1, _MOST_BYTES) for extent in bank.shape)
    )
    if not is_shape:
        yield Rejected(Rejection.INVALID_TENSOR, where, "one to three extents above 0", bank.shape)
    if not bank.name:
        yield Rejected(Rejection.INVALID_TENSOR, where, "a name", bank.name)
    if not _is_count(bank.address, 1, 2**64 - 1):
        yield Rejected(Rejection.INVALID_TENSOR, where, "an address other than 0", bank.address)
    if not _is_a(bank.status, BankStatus):
        yield Rejected(Rejection.INVALID_TENSOR, where, "a BankStatus", bank.status)
    if bank.dtype not in ELEMENT_BYTES:
        expected = f"an element type of {sorted(ELEMENT_BYTES)}"
        yield Rejected(Rejection.UNSUPPORTED_TYPE, where, expected, bank.dtype)
    elif is_shape:
        yield from _of_bytes(bank, where)
    yield from _of_place(bank, group, where)


def _of_place(bank: ExpertBank, group: ExpertGroup, where: str) -> Iterator[Rejected]:
    if not _is_a(bank.location, Location) or not bank.is_readable:
        actual = "unreadable" if _is_a(bank.location, Location) else bank.location
        yield Rejected(Rejection.INACCESSIBLE_SOURCE, where, "memory that can be read", actual)
        return
    expected = group.device if bank.location is Location.DEVICE else None
    if bank.device != expected:
        text = f"device {expected}, its group's" if expected is not None else "no device: host"
        yield Rejected(Rejection.DEVICE, where, text, bank.device)


def _of_bytes(bank: ExpertBank, where: str) -> Iterator[Rejected]:
    one = prod(bank.shape[1:]) * ELEMENT_BYTES[bank.dtype]
    stride = one if bank.expert_stride is None else bank.expert_stride
    if not _is_a(stride, int) or stride < one:
        expected = f"an expert stride of at least {one} bytes, one expert"
        yield Rejected(Rejection.BOUNDS, where, expected, bank.expert_stride)
        return
    needed = (bank.shape[0] - 1) * stride + one
    if needed > _MOST_BYTES:
        yield Rejected(Rejection.OVERFLOW, where, f"at most {_MOST_BYTES} bytes", needed)
    elif not _is_count(bank.nbytes, needed, _MOST_BYTES):
        yield Rejected(Rejection.BOUNDS, where, f"at least {needed} bytes", bank.nbytes)


def _of_shapes(group: ExpertGroup) -> Iterator[Rejected]:
    for bank in group.banks:
        if bank.shape[0] != group.experts:
            expected = f"{group.experts} experts, its group's"
            yield Rejected(Rejection.SHAPE, _where(group, bank), expected, bank.shape[0])
            return
    base = {bank.role: bank for bank in group.banks if not bank.role.is_auxiliary}
    for bank in base.values():
        if len(bank.shape) != 3:
            expected = "three extents: experts and a matrix"
            yield Rejected(Rejection.SHAPE, _where(group, bank), expected, bank.shape)
            return
    yield from _of_matrices(group, base)
    for bank in group.banks:
        if bank.role.is_auxiliary:
            outputs = _matrix(group, base[bank.role.base])[0]
            if bank.shape not in ((group.experts,), (group.experts, outputs)):
                expected = f"({group.experts},) or ({group.experts}, {outputs})"
                yield Rejected(Rejection.SHAPE, _where(group, bank), expected, bank.shape)


def _matrix(group: ExpertGroup, bank: ExpertBank) -> tuple[int, int]:
    """(outputs, inputs) of one expert."""
    _, first, second = bank.shape
    return (first, second) if group.order == "nk" else (second, first)


def _of_matrices(group: ExpertGroup, base: dict[Role, ExpertBank]) -> Iterator[Rejected]:
    hidden, inter = _matrix(group, base[Role.DOWN])
    for role, bank in base.items():
        outputs = 2 * inter if role is Role.GATE_UP else inter
        found = _matrix(group, bank)
        if role is not Role.DOWN and found != (outputs, hidden):
            expected = f"{outputs} outputs of {hidden} inputs, as its down bank has them"
            yield Rejected(Rejection.SHAPE, _where(group, bank), expected, found)
        if bank.dtype != base[Role.DOWN].dtype:
            expected = f"{base[Role.DOWN].dtype}, as its down bank"
            yield Rejected(Rejection.SHAPE, _where(group, bank), expected, bank.dtype)


def _of_names(manifest: Manifest) -> Iterator[Rejected]:
    # two groups of one name are one group that has its roles twice
    for name, count in Counter(group.name for group in manifest.groups).items():
        if count > 1:
            yield Rejected(Rejection.DUPLICATE_ROLE, f"group {name}", "one group", count)
    banks = [bank for _, bank in manifest.banks()]
    for name, count in Counter(bank.name for bank in banks).items():
        if count > 1:
            yield Rejected(Rejection.DUPLICATE_TENSOR, f"bank {name}", "one bank", count)
    by_address: dict[int, str] = {}
    for bank in banks:
        other = by_address.setdefault(bank.address, bank.name)
        if other != bank.name:
            expected = f"other memory than bank {other}"
            yield Rejected(Rejection.DUPLICATE_TENSOR, f"bank {bank.name}", expected, bank.address)
