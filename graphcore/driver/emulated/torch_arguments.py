"""The arguments of one aten call as a kernel node has them: bytes, and back again.

A :class:`Call` splits a call into tensors, each with the place it stands at, and plain values.
Encoded, every tensor is its data address (8 bytes) and every plain value that is not None some
bytes, so that a changed scalar shows in a fingerprint; :func:`encode_forms` adds the sizes. The way
back, to the same call on other tensors and scalars: :meth:`Call.with_tensors` and
:meth:`Call.with_values`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch

from graphcore.driver.codes import cuda_error
from graphcore.driver.emulated.torch_schema import Place

_INT64 = range(-(2**63), 2**63)


class Call:
    """Positional and keyword arguments of an aten call, with the places of its tensors."""

    __slots__ = ("args", "kwargs", "tensor_places", "tensors", "value_places", "values")

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.args = list(args)
        self.kwargs = dict(kwargs)
        self.tensors: list[torch.Tensor] = []
        self.tensor_places: list[tuple[Place, int | None]] = []
        self.values: list[Any] = []
        self.value_places: list[Place] = []
        for position, value in enumerate(args):
            self._take(position, value)
        for name, value in kwargs.items():
            self._take(name, value)

    def _take(self, place: Place, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            self.tensor_places.append((place, None))
        elif isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            for index, each in enumerate(value):
                if each is not None:
                    self.tensors.append(each)
                    self.tensor_places.append((place, index))
            if any(each is None for each in value):
                self.values.append(tuple(v is None for v in value))
                self.value_places.append(place)
        elif value is not None and value != []:
            self.values.append(value)
            self.value_places.append(place)

    def at(self, place: Place) -> Any:
        """The argument at ``place``; None where the call leaves it out."""
        if isinstance(place, str):
            return self.kwargs.get(place)
        return self.args[place] if place < len(self.args) else None

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Call:
        """The same call on other tensors, given in the order of ``tensors``."""
        other = Call.__new__(Call)
        other.args = [list(v) if isinstance(v, (list, tuple)) else v for v in self.args]
        other.kwargs = {
            k: list(v) if isinstance(v, (list, tuple)) else v for k, v in self.kwargs.items()
        }
        other.tensors = list(tensors)
        other.tensor_places = self.tensor_places
        other.values = self.values
        other.value_places = self.value_places
        for (place, index), tensor in zip(self.tensor_places, tensors, strict=True):
            if index is not None:
                other.at(place)[index] = tensor
            else:
                other._put(place, tensor)
        return other

    def _put(self, place: Place, value: Any) -> None:
        if isinstance(place, str):
            self.kwargs[place] = value
        else:
            self.args[place] = value

    def signature(self) -> tuple[Any, ...]:
        """Everything that the shapes of the results depend on, hashable."""
        tensors = tuple(
            (t.shape, t.stride(), t.dtype, t.device, t.is_conj(), t.is_neg()) for t in self.tensors
        )
        values = tuple((type(v), tuple(v) if isinstance(v, list) else v) for v in self.values)
        return (tensors, tuple(self.tensor_places), values, tuple(self.value_places))

    def encode_values(self) -> list[bytes]:
        """The plain values as node arguments."""
        return [encode_value(value) for value in self.values]

    def with_values(self, encoded: Sequence[bytes]) -> Call:
        """The same call with changed plain values; INVALID_VALUE where one cannot be changed."""
        other = self.with_tensors(self.tensors)
        values = []
        for place, value, data in zip(self.value_places, self.values, encoded, strict=True):
            changed = value
            if data != encode_value(value):
                changed = decode_value(data, value)
                other._put(place, changed)
            values.append(changed)
        other.values = values
        return other


def encode_value(value: Any) -> bytes:
    """Bytes of a plain argument: bool 1, int and float 8, lists of these packed, else its text."""
    if isinstance(value, bool):
        return struct.pack("<?", value)
    if isinstance(value, int) and value in _INT64:
        return struct.pack("<q", value)
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, (list, tuple)) and all(isinstance(v, (bool, int, float)) for v in value):
        return b"".join(encode_value(v) for v in value)
    return str(value).encode() or b"\0"


def decode_value(data: bytes, like: Any) -> Any:
    """The value in ``data``, of the type and length of ``like``."""
    if isinstance(like, list) and like:
        size = len(encode_value(like[0]))
        if len(data) == size * len(like):
            pieces = [data[i * size : (i + 1) * size] for i in range(len(like))]
            return [decode_value(p, v) for p, v in zip(pieces, like, strict=True)]
    form = {bool: "<?", int: "<q", float: "<d"}.get(type(like))
    if form is None or struct.calcsize(form) != len(data):
        raise refuse_arguments(f"the argument {like!r} of a recorded torch call cannot be changed")
    return struct.unpack(form, data)[0]


def encode_address(tensor: torch.Tensor) -> bytes:
    """The address of the tensor's first element; 0 where it has none."""
    return tensor.data_ptr().to_bytes(8, "little")


def encode_forms(tensors: Sequence[torch.Tensor], constant: torch.Tensor | None) -> bytes:
    """What addresses do not tell, as text: dtype and sizes of each tensor, strides if they matter.

    Where a device's launch shape would differ this does. ``constant``, contiguous, is told by a
    digest of its contents.
    """
    text = " ".join(map(_form, tensors))
    if constant is not None:
        size = constant.numel() * constant.element_size()
        data = ctypes.string_at(constant.data_ptr(), size) if size else b""
        text += f" constant {blake2b(data, digest_size=8).hexdigest()}"
    return f"({text})".encode()


def _form(tensor: torch.Tensor) -> str:
    marks = ("conj " if tensor.is_conj() else "") + ("neg " if tensor.is_neg() else "")
    sizes = ",".join(map(str, tensor.shape))
    strides = "" if tensor.is_contiguous() else f"/{','.join(map(str, tensor.stride()))}"
    return f"{marks}{str(tensor.dtype).removeprefix('torch.')}[{sizes}{strides}]"


def view_of_memory(address: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor over raw memory at ``address`` with the dtype, sizes and strides of ``like``.

    It does not own the memory, and nothing checks that the memory is there.
    """
    if like.numel() == 0:
        return like
    reach = sum((size - 1) * step for size, step in zip(like.shape, like.stride(), strict=True)) + 1
    raw = (ctypes.c_ubyte * (reach * like.element_size())).from_address(address)
    view = torch.frombuffer(raw, dtype=like.dtype).as_strided(like.shape, like.stride())
    if like.is_conj():
        view = view.conj()
    return torch._neg_view(view) if like.is_neg() else view


def refuse_arguments(why: str) -> Exception:
    """The error of a launch whose arguments do not fit the recorded call."""
    return cuda_error("CUDA_ERROR_INVALID_VALUE", "cuLaunchKernel", hint=why)
