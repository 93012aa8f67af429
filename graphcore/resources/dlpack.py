"""DLPack capsules: reading those of others and making ours. Nothing else handles a capsule.

Reading never consumes a capsule: it stays with the description, and frees what it holds when it is
dropped. Making one borrows NumPy's: a NumPy array is laid over the address (NumPy never touches the
memory), exported by NumPy, and device and element type in the capsule are then set right. So the
capsule's destructor and the tensor's deleter are NumPy's compiled ones, which are right without the
GIL, while an exception is in flight and after the interpreter has shut down; a deleter written in
Python is none of these.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from graphcore.errors import CacheTypeError
from graphcore.resources.dtypes import DTYPES, dtype_of_dlpack

if TYPE_CHECKING:
    from graphcore.resources.tensors import TensorRef

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
"""DLPack's device types: host, device, page-locked host, unified memory."""

_VERSION = (1, 0)
_READ_ONLY = 1


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


def _bind(name: str, result: Any) -> Any:
    # a private copy: argument types set on ctypes.pythonapi's own are everybody's
    prototype = ctypes.PYFUNCTYPE(result, ctypes.py_object, ctypes.c_char_p)
    return prototype((name, ctypes.pythonapi))


_is_valid = _bind("PyCapsule_IsValid", ctypes.c_int)
_get_pointer = _bind("PyCapsule_GetPointer", ctypes.c_void_p)


def read_tensor(producer: Any, field: str) -> TensorRef:
    """Describes the memory of an object with ``__dlpack__``; the description keeps the capsule.

    Never synchronises: device producers are given the stream -1, which asks for no order.

    Raises:
        CacheTypeError: The producer cannot export, or exports a device or type we do not know.
    """
    kind, number = (int(part) for part in producer.__dlpack_device__())
    # CPU producers refuse any stream but None; device ones may synchronise with None
    stream = -1 if kind in (CUDA, CUDA_MANAGED) else None
    try:
        capsule = _export(producer, stream)
    except (BufferError, RuntimeError, ValueError) as error:
        raise CacheTypeError(
            f"{field}: {type(producer).__name__} gives no DLPack: {error}"
        ) from error
    tensor, read_only = _open(capsule, field)
    return _describe(tensor, (producer, capsule), field, number, read_only)


def _export(producer: Any, stream: int | None) -> object:
    try:
        return producer.__dlpack__(stream=stream, max_version=_VERSION)
    except TypeError:  # a producer of the protocol before 1.0
        return producer.__dlpack__(stream=stream)


def _open(capsule: object, field: str) -> tuple[_Tensor, bool]:
    if _is_valid(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
        if managed.major != _VERSION[0]:
            raise CacheTypeError(
                f"{field}: expected DLPack {_VERSION[0]}.x, got {managed.major}.{managed.minor}"
            )
        return managed.tensor, bool(managed.flags & _READ_ONLY)
    if _is_valid(capsule, b"dltensor"):
        return _Tensor.from_address(_get_pointer(capsule, b"dltensor")), False
    raise CacheTypeError(f"{field}: expected an unused DLPack capsule, got {capsule!r}")


def _describe(
    tensor: _Tensor, owner: object, field: str, number: int, read_only: bool
) -> TensorRef:
    from graphcore.resources.tensors import TensorRef, contiguous_strides

    if tensor.device_type not in (CPU, CUDA, CUDA_HOST, CUDA_MANAGED):
        raise CacheTypeError(
            f"{field}: expected memory of the CPU or of a CUDA device, got DLPack device type "
            f"{tensor.device_type}"
        )
    dtype = dtype_of_dlpack(tensor.code, tensor.bits, tensor.lanes, field)
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    if tensor.strides:
        strides = tuple(tensor.strides[axis] for axis in range(tensor.ndim))
    else:
        strides = contiguous_strides(shape)
    on_device = tensor.device_type in (CUDA, CUDA_MANAGED)
    return TensorRef(
        address=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        strides=strides,
        dtype=dtype.name,
        itemsize=dtype.itemsize,
        device_kind="cuda" if on_device else "cpu",
        device=number if on_device else 0,
        read_only=read_only,
        owner=owner,
    )


def make_capsule(ref: TensorRef, owner: object, max_version: tuple[int, int] | None) -> object:
    """A capsule over the memory of ``ref`` that keeps ``owner`` until its consumer lets go.

    Args:
        ref: What is exported.
        owner: Kept alive by the capsule, and by the consumer's tensor afterwards.
        max_version: The newest DLPack the consumer takes; None is the unversioned form.

    Raises:
        BufferError: Read-only memory for a consumer that cannot be told.
    """
    if ref.read_only and (max_version is None or max_version < _VERSION):
        raise BufferError(
            "read-only memory: expected a consumer of DLPack 1.0 or newer, got "
            + ("an unversioned request" if max_version is None else f"max_version={max_version}")
        )
    array = as_numpy(ref, owner)
    if max_version is not None and max_version >= _VERSION:
        capsule = _export(array, None)
    else:
        capsule = array.__dlpack__()
    tensor, _ = _open(capsule, "export")
    dtype = DTYPES[ref.dtype]
    tensor.code, tensor.bits, tensor.lanes = dtype.code, 8 * dtype.itemsize, 1
    tensor.device_type, tensor.device_id = device_of(ref)
    tensor.data, tensor.byte_offset = ref.address, 0
    return capsule


def device_of(ref: TensorRef) -> tuple[int, int]:
    """DLPack's (device type, device id) of a description."""
    return (CUDA, ref.device) if ref.device_kind == "cuda" else (CPU, 0)


class _ArraySource:
    """What a NumPy array is laid over: it becomes the array's base and so keeps ``owner``."""

    def __init__(self, ref: TensorRef, owner: object) -> None:
        import numpy

        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (ref.address, ref.read_only),
            "shape": ref.shape,
            "strides": tuple(step * ref.itemsize for step in ref.strides),
            "typestr": numpy.dtype(DTYPES[ref.dtype].numpy).str,
        }


def as_numpy(ref: TensorRef, owner: object) -> Any:
    """A NumPy array over the memory of ``ref``; types NumPy lacks as integers of their size.

    Only host memory may then be touched through it.
    """
    import numpy

    return numpy.asarray(_ArraySource(ref, owner))
