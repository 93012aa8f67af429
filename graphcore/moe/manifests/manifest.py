"""Manifest: which experts there are, where they lie, and how they make up groups. Frozen data.

A manifest says what is true at one time. Whatever changes (a LoRA adapter, other weights, another
number of slots) is another manifest, published in place of the old one by a
:class:`graphcore.moe.ManifestRegistry`; graphs over the old one are never replayed again.

Shape legend: E experts of this process, H hidden size, I expert size, N outputs of a product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntFlag

from graphcore.errors import ConfigurationError
from graphcore.moe.manifests.names import BankStatus, Layout, Location, Role

MANIFEST_VERSION = 1


class ManifestFlag(IntFlag):
    """What a manifest says as a whole."""

    DISABLED = 1
    """Expert caching is off: every graph takes the ordinary path, and none is an error."""


@dataclass(frozen=True, slots=True)
class ExpertBank:
    """One tensor that holds the same weights of all experts of a group.

    Args:
        name: Of the tensor, in the model's words; unique in a manifest.
        role: What it is in its group.
        dtype: "bfloat16", "float16" or "float32".
        shape: Elements. Base roles [E, N, K] or [E, K, N], as the group's order says; scales and
            biases [E] or [E, N].
        address: Of its first byte.
        nbytes: From there to the end of its memory.
        location: What memory that is.
        device: Ordinal, where it is device memory; else None.
        expert_stride: Bytes from one expert to the next; None: packed.
        status: Only an active bank is served from slots.
        is_readable: Whether its memory can be read at all.
    """

    name: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    address: int
    nbytes: int
    location: Location = Location.PINNED
    device: int | None = None
    expert_stride: int | None = None
    status: BankStatus = BankStatus.ACTIVE
    is_readable: bool = True

    @property
    def is_mappable(self) -> bool:
        """Whether the device can read it where it lies."""
        return self.location is not Location.PAGEABLE


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """The banks of one routed feed-forward network, which share slots.

    Args:
        name: Of the network, unique in a manifest.
        layout: Its base roles.
        banks: Each base role once, scales and biases at will.
        experts: E, those whose weights this process has.
        slots: Rows on the device for each bank; 0: none of it is cached.
        top_k: Experts for a row.
        order: "nk": weights are [N, K] as torch's linear layers have them, or "kn".
        device: Ordinal of the device its slots lie on.
        first_expert: The router's number of the first expert here.
        routed_experts: How many the router chooses from; None: those that are here.
    """

    name: str
    layout: Layout
    banks: tuple[ExpertBank, ...]
    experts: int
    slots: int
    top_k: int
    order: str = "nk"
    device: int = 0
    first_expert: int = 0
    routed_experts: int | None = None

    @property
    def router_size(self) -> int:
        """How many experts the router chooses from."""
        return self.experts if self.routed_experts is None else self.routed_experts

    def bank(self, role: Role) -> ExpertBank | None:
        """The bank of ``role``; None where there is none."""
        return next((bank for bank in self.banks if bank.role is role), None)

    @property
    def is_mappable(self) -> bool:
        """Whether the device can read every bank where it lies."""
        return all(bank.is_mappable for bank in self.banks)


@dataclass(frozen=True, slots=True)
class Manifest:
    """All groups of a process.

    Args:
        groups: In the order of the model; none at all is a deliberate "no cached experts".
        rank: Of this process among those that share the experts.
        ranks: How many those are.
        adapters: Names of the LoRA adapters that are active.
        flags: :class:`ManifestFlag`.
        version: Of this form.
    """

    groups: tuple[ExpertGroup, ...] = ()
    rank: int = 0
    ranks: int = 1
    adapters: tuple[str, ...] = ()
    flags: int = 0
    version: int = MANIFEST_VERSION

    @property
    def is_enabled(self) -> bool:
        """Whether any expert is cached; where none is, graphs take the ordinary path."""
        disabled = bool(self.flags & ManifestFlag.DISABLED)
        return not disabled and any(group.slots > 0 for group in self.groups)

    def group(self, name: str) -> ExpertGroup | None:
        """The group called ``name``; None where there is none."""
        return next((group for group in self.groups if group.name == name), None)

    def banks(self) -> Iterator[tuple[ExpertGroup, ExpertBank]]:
        """Every bank with its group, in order."""
        return ((group, bank) for group in self.groups for bank in group.banks)

    def with_banks(self, banks: Mapping[str, ExpertBank]) -> Manifest:
        """The same with some banks replaced, by name.

        Raises:
            ConfigurationError: A name that no bank has.
        """
        unknown = sorted(set(banks) - {bank.name for _, bank in self.banks()})
        if unknown:
            raise ConfigurationError(f"banks: expected names of banks, got {unknown}")
        groups = (
            replace(group, banks=tuple(banks.get(bank.name, bank) for bank in group.banks))
            for group in self.groups
        )
        return replace(self, groups=tuple(groups))

    def adapted(self, adapter: str, banks: Iterable[str]) -> Manifest:
        """The same with a LoRA adapter active on ``banks``: they are not served from slots.

        Raises:
            ConfigurationError: The adapter is active already, or a name that no bank has.
        """
        if adapter in self.adapters:
            raise ConfigurationError(
                f"adapter: expected one that is not active, got {adapter!r} of {self.adapters}"
            )
        changed = self._with_status(banks, BankStatus.ADAPTED)
        return replace(changed, adapters=(*self.adapters, adapter))

    def _with_status(self, banks: Iterable[str], status: BankStatus) -> Manifest:
        names = set(banks)
        known = {bank.name: bank for _, bank in self.banks()}
        unknown = sorted(names - set(known))
        if unknown:
            raise ConfigurationError(f"banks: expected names of banks, got {unknown}")
        return self.with_banks({name: replace(known[name], status=status) for name in names})
