"""ReverseMap: from the weights of a product back to the bank of the manifest that they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphcore.moe.manifests.manifest import ExpertBank, ExpertGroup, Manifest
from graphcore.moe.manifests.names import BankStatus, CoverageReason


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The weights that a product of a graph reads, as the graph has them."""

    name: str
    address: int
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, bank: ExpertBank) -> WeightSource:
        """Those of ``bank``, where the manifest has them."""
        return cls(bank.name, bank.address, bank.shape, bank.dtype)


_STATUS = {
    BankStatus.DORMANT: CoverageReason.DORMANT_LAYOUT,
    BankStatus.ADAPTED: CoverageReason.ACTIVE_LORA,
    BankStatus.OVERRIDDEN: CoverageReason.TENSOR_OVERRIDE,
    BankStatus.NOT_ROUTED: CoverageReason.NON_ROUTED_BASE,
    BankStatus.EXCLUDED: CoverageReason.EXCLUDED,
    BankStatus.UNCLASSIFIED: CoverageReason.UNCLASSIFIED,
    BankStatus.UNSUPPORTED: CoverageReason.UNSUPPORTED_DESCRIPTOR,
}


class ReverseMap:
    """Finds the bank of a product's weights.

    Args:
        manifest: Whose banks they may be.
        places: Name of a bank -> (index of its group, index in the group); None: read from the
            manifest. A map that was kept from elsewhere may be wrong, and is found out.
    """

    def __init__(
        self, manifest: Manifest, places: Mapping[str, tuple[int, int]] | None = None
    ) -> None:
        self._manifest = manifest
        self._places = dict(_places(manifest) if places is None else places)

    def find(self, source: WeightSource) -> tuple[ExpertGroup, ExpertBank] | None:
        """The group and the bank of ``source``; None where the map has none that points back."""
        place = self._places.get(source.name)
        if place is None:
            return None
        groups = self._manifest.groups
        at, number = place
        if not 0 <= at < len(groups) or not 0 <= number < len(groups[at].banks):
            return None
        group = groups[at]
        bank = group.banks[number]
        return (group, bank) if bank.name == source.name else None

    def classify(self, source: WeightSource) -> CoverageReason:
        """How the weights stand to the manifest; the first reason that holds."""
        if source.name not in self._places:
            return CoverageReason.NOT_IN_REVERSE_MAP
        found = self.find(source)
        if found is None:
            return CoverageReason.INVALID_REVERSE_MAP
        group, bank = found
        if source != WeightSource.of(bank):
            return CoverageReason.SOURCE_CHANGED
        if bank.status is not BankStatus.ACTIVE:
            return _STATUS[bank.status]
        if not group.slots:
            return CoverageReason.EXCLUDED
        if any(other.status is not BankStatus.ACTIVE for other in group.banks):
            return CoverageReason.INCOMPLETE
        return CoverageReason.REGISTERED


def _places(manifest: Manifest) -> dict[str, tuple[int, int]]:
    return {
        bank.name: (at, number)
        for at, group in enumerate(manifest.groups)
        for number, bank in enumerate(group.banks)
    }
