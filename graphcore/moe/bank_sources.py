"""The experts of a manifest's bank as a tensor that the device reads where it lies."""

from __future__ import annotations

from collections.abc import Mapping

from graphcore.driver import Driver
from graphcore.errors import ConfigurationError
from graphcore.moe.manifest import ExpertBank
from graphcore.moe.names import BankStatus, Location
from graphcore.resources.dtypes import DTYPES
from graphcore.resources.tensors import TensorRef, contiguous_strides


def bank_source(bank: ExpertBank, owners: Mapping[str, object], driver: Driver) -> TensorRef:
    """The bank's experts, which ``owners`` keeps alive.

    Raises:
        ConfigurationError: It is not active, lies in pageable memory, or has no owner.
    """
    if bank.location is Location.PAGEABLE or bank.status is not BankStatus.ACTIVE:
        raise ConfigurationError(
            f"bank {bank.name}: expected an active one that the device can read, got one in "
            f"{bank.location.value}, {bank.status.value}"
        )
    if bank.name not in owners:
        raise ConfigurationError(f"owners: expected one of bank {bank.name}, got none")
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
        owner=owners[bank.name],
    )
