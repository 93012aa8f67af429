"""Memory of a recording: the aliases by which operations hold tensors, and the fresh outputs.

Outputs are poisoned when they are made: NaN in every float format, an integer far out of range as
an index, True as a bool. A read before the first replay shows.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch

from graphcore.driver.emulated.torch_shapes import TensorMeta
from graphcore.errors import CaptureError

_NAN_BYTE = 0xFF
_FAR_BYTE = 0xA5


class MadeMemory:
    """The storages that a recording made, held so that none of them is taken for a later one."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Notes the memory of ``tensor`` as made here, and gives the tensor back."""
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage
        return tensor

    def among(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.UntypedStorage, ...]:
        """The storages of ``tensors`` that were made here, in order."""
        keys = dict.fromkeys(tensor.untyped_storage()._cdata for tensor in tensors)
        return tuple(self._storages[key] for key in keys if key in self._storages)


class Aliases:
    """Our own tensors on the memory of the caller's: no history, out of reach of ``.data =``."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The alias of ``tensor`` as it is now."""
        known = self._known.get(id(tensor))
        if known is None or not known.is_current():
            known = self._known[id(tensor)] = _Known(tensor)
        return known.alias


class _Known:
    """A tensor that was seen, kept so that its id stays its own, and its alias."""

    __slots__ = ("alias", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.alias = _as_normal(tensor) if tensor.is_inference() else tensor.detach()

    def is_current(self) -> bool:
        """False once the tensor got other memory or another shape (``.data =``, ``t_()``)."""
        tensor, alias = self.tensor, self.alias
        return (
            tensor.data_ptr() == alias.data_ptr()
            and tensor.shape == alias.shape
            and tensor.stride() == alias.stride()
            and tensor.dtype == alias.dtype
        )


def _as_normal(tensor: torch.Tensor) -> torch.Tensor:
    """An alias that may be written outside inference mode, unlike a view of an inference tensor."""
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype)
        alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        alias = alias.conj()
    return torch._neg_view(alias) if tensor.is_neg() else alias


def allocate(meta: TensorMeta) -> torch.Tensor:
    """A poisoned tensor of this shape, strides and dtype."""
    tensor = torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype)
    _poison(tensor)
    return tensor


def resize_written(name: str, tensors: Sequence[torch.Tensor], after: Sequence[TensorMeta]) -> None:
    """Gives out= tensors of the wrong shape the right one, as torch would when running.

    Raises:
        CaptureError: One would have to move; nothing was resized.
    """
    wrong = [
        (tensor, meta)
        for tensor, meta in zip(tensors, after, strict=True)
        if tuple(tensor.shape) != meta.shape
    ]
    for tensor, meta in wrong:
        check_room(name, tensor, math.prod(meta.shape))
    for tensor, meta in wrong:
        was_empty = not tensor.untyped_storage().nbytes()
        tensor.resize_(meta.shape).as_strided_(meta.shape, meta.strides)
        if was_empty:
            _poison(tensor)


def check_room(name: str, tensor: torch.Tensor, count: int) -> None:
    """Refuses to grow memory to ``count`` elements; memory that has no byte yet may grow.

    Raises:
        CaptureError: The tensor would move, and its old address stay in the nodes recorded so far.
    """
    needed = (tensor.storage_offset() + count) * tensor.element_size()
    available = tensor.untyped_storage().nbytes()
    if available and needed > available:
        raise CaptureError(
            f"{name}: expected a tensor whose memory holds the new size ({needed} bytes), got "
            f"{available} bytes; growing it would move it while its address is being recorded"
        )


def _poison(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    if tensor.dtype is torch.bool:
        byte = 1
    elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        byte = _NAN_BYTE
    else:
        byte = _FAR_BYTE
    if storage.nbytes():
        ctypes.memset(storage.data_ptr(), byte, storage.nbytes())
