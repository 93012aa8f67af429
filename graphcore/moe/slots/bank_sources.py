"""The experts of a manifest's banks as tensors that the device reads where they lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from graphcore.driver import Driver
from graphcore.errors import ConfigurationError
from graphcore.moe.manifests.manifest import ExpertBank, ExpertGroup
from graphcore.moe.manifests.names import BankStatus, Location
from graphcore.resources.dtypes import DTYPES
from graphcore.resources.tensors import TensorRef, contiguous_strides


def manifest_sources(
    groups: Iterable[ExpertGroup], owners: Mapping[str, object], driver: Driver
) -> dict[str, dict[str, TensorRef]]:
    """Group -> bank -> its experts, of the groups that have slots.

    Raises:
        ConfigurationError: A bank that is not active, lies in pageable memory, or has no owner.
    """
    return {
        group.name: {bank.name: bank_source(bank, owners, driver) for bank in group.banks}
        for group in groups
        if group.slots
    }


def bank_source(bank: ExpertBank, owners: Mapping[str, object], driver: Driver) -> TensorRef:
    """The bank's experts, which its owner keeps alive.

    Raises:
        ConfigurationError: It is not active, lies in pageable memory, or has no owner.
    """
    if not is_served(bank):
        raise ConfigurationError(
            f"bank {bank.name}: expected an active one that the device can read, got one in "
            f"{bank.location.value}, {bank.status.value}"
        )
    if bank.name not in owners:
        raise ConfigurationError(f"owners: expected one of bank {bank.name}, got none")
    return bank_tensor(bank, owners[bank.name], driver)


def is_served(bank: ExpertBank) -> bool:
    """Whether slots can serve it: no adapter is active on it, and the device can read it."""
    return bank.location is not Location.PAGEABLE and bank.status is BankStatus.ACTIVE


def bank_tensor(bank: ExpertBank, owner: object, driver: Driver) -> TensorRef:
    """The bank's experts as the manifest describes them.

    Raises:
        ConfigurationError: Its experts do not lie whole elements apart.
    """
    itemsize = DTYPES[bank.dtype].itemsize
    strides = contiguous_strides(bank.shape)
    if bank.expert_stride is not None:
        if bank.expert_stride % itemsize:
            raise ConfigurationError(
                f"bank {bank.name}: expected an expert_stride of whole elements of {itemsize} "
                f"bytes, got {bank.expert_stride}"
            )
        strides = (bank.expert_stride // itemsize, *strides[1:])
    on_device = bank.location is Location.DEVICE and not driver.is_emulated
    return TensorRef(
        address=bank.address,
        shape=bank.shape,
        strides=strides,
        dtype=bank.dtype,
        itemsize=itemsize,
        device_kind="cuda" if on_device else "cpu",
        device=bank.device or 0 if on_device else 0,
        owner=owner,
    )
