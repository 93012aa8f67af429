"""Tensors of any library as one description: address, shape, strides, element type, device.

The only place where another library's tensor comes in (and, with dlpack.py, where ours go out).
Describing copies nothing, synchronises nothing and is allowed inside a capture; the order of work
on the memory is the caller's, as always with streams. torch tensors, NumPy and CuPy arrays are
read by their own attributes, everything else through ``__cuda_array_interface__`` or DLPack.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from graphcore.errors import CacheTypeError, ConfigurationError
from graphcore.resources.dtypes import find_dtype

DeviceKind = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where a tensor lies and how it is laid out.

    Args:
        address: Of the first element, in bytes; 0 is possible where there are no elements.
        shape: Sizes.
        strides: Steps in elements, one per axis; may be 0 or negative.
        dtype: "float32", "bfloat16", "bool" ...
        itemsize: Bytes of one element.
        device_kind: "cuda", or "cpu" (which is the emulated driver's device memory).
        device: Ordinal; 0 for "cpu".
        read_only: Whether the memory must not be written.
        owner: The object whose memory this is; the description keeps it alive.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    device_kind: DeviceKind
    device: int = 0
    read_only: bool = False
    owner: object = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements (a strided view reaches further)."""
        return self.size * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie densely in C order; true where there are none."""
        return not self.size or all(
            count == 1 or step == dense
            for count, step, dense in zip(
                self.shape, self.strides, contiguous_strides(self.shape), strict=True
            )
        )


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Steps in elements of a dense C-ordered tensor."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def describe(obj: Any, *, writable: bool = False, name: str = "tensor") -> TensorRef:
    """Describes a tensor without copying or synchronising anything.

    Args:
        obj: A torch tensor (CPU or CUDA; one that requires grad is taken detached), a NumPy or
            CuPy array, a :class:`Buffer`, a :class:`TensorRef`, or any object with
            ``__cuda_array_interface__`` or ``__dlpack__``.
        writable: Whether it will be written.
        name: What errors call it.

    Raises:
        CacheTypeError: Not a tensor, or of a kind without plain memory (sparse, quantised, meta,
            lazily conjugated or negated, unknown element type).
        ConfigurationError: ``writable`` and the memory is read-only.
    """
    ref = _describe(obj, name)
    if writable and ref.read_only:
        raise ConfigurationError(
            f"{name}: expected writable memory for an operand that is written, got a read-only "
            f"{type(obj).__name__}"
        )
    return ref


def is_tensor(obj: Any) -> bool:
    """Whether :func:`describe` takes this for a tensor (it may still refuse its kind)."""
    return _is_tensor_type(type(obj))  # type: ignore[arg-type]  # mypy: no type is hashable


@lru_cache(maxsize=4096)  # walks through objects ask of thousands
def _is_tensor_type(kind: type) -> bool:
    return issubclass(kind, TensorRef) or any(
        hasattr(kind, protocol)
        for protocol in ("__dlpack__", "__cuda_array_interface__", "__graphcore_tensor__")
    )


def _describe(obj: Any, name: str) -> TensorRef:
    if isinstance(obj, TensorRef):
        return obj
    if isinstance(obj, type):
        raise CacheTypeError(f"{name}: expected a tensor, got the class {obj.__name__}")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        return _describe_torch(torch, obj, name)
    ours = getattr(obj, "__graphcore_tensor__", None)
    if ours is not None:
        ref: TensorRef = ours()
        return ref
    library = type(obj).__module__.partition(".")[0]
    if library == "numpy" and hasattr(obj, "__array_interface__"):
        return _describe_numpy(obj, name)
    interface = getattr(obj, "__cuda_array_interface__", None)
    if interface is not None:
        return _describe_interface(obj, interface, name)
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        from graphcore.resources.dlpack import read_tensor

        return read_tensor(obj, name)
    raise CacheTypeError(
        f"{name}: expected a torch, NumPy or CuPy tensor, a Buffer, or an object with __dlpack__ "
        f"or __cuda_array_interface__; got {type(obj).__name__}"
    )


def _describe_torch(torch: Any, tensor: Any, name: str) -> TensorRef:
    kind = _kind_without_memory(torch, tensor)
    if kind is not None:
        raise CacheTypeError(f"{name}: expected a tensor with plain strided memory, got {kind}")
    dtype = find_dtype(tensor.dtype, f"{name}.dtype")
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:
        raise CacheTypeError(f"{name}: the tensor has no memory: {error}") from error
    if not address and tensor.numel():
        raise CacheTypeError(f"{name}: {type(tensor).__name__} has no memory of its own")
    device = tensor.device
    return TensorRef(
        address=address,
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        dtype=dtype.name,
        itemsize=dtype.itemsize,
        device_kind="cuda" if device.type == "cuda" else "cpu",
        device=device.index or 0 if device.type == "cuda" else 0,
        # detached: a result's own object would keep the whole autograd graph alive
        owner=tensor if tensor.grad_fn is None else tensor.detach(),
    )


def _kind_without_memory(torch: Any, tensor: Any) -> str | None:
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None and isinstance(tensor, fake.FakeTensor):
        return "a fake tensor, which has no memory"
    if tensor.is_quantized:
        return "a quantised tensor (use int_repr())"
    if tensor.is_nested:
        return "a nested tensor (use its parts)"
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout} (use to_dense(), or its parts)"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"a tensor on device {tensor.device}"
    if tensor.is_conj():
        return "a lazily conjugated view (use resolve_conj())"
    if tensor.is_neg():
        return "a lazily negated view (use resolve_neg())"
    return None


def _describe_numpy(array: Any, name: str) -> TensorRef:
    import numpy

    if not isinstance(array, numpy.ndarray):  # a scalar hands out the address of a passing copy
        raise CacheTypeError(
            f"{name}: expected an array, got the scalar numpy.{type(array).__name__}, which has no "
            "memory of its own; use numpy.asarray"
        )
    if isinstance(array, numpy.ma.MaskedArray):
        raise CacheTypeError(
            f"{name}: expected plain memory, got a MaskedArray (use filled(), or its data)"
        )
    address, read_only = array.__array_interface__["data"]
    return _from_bytes(array, address, array.shape, array.strides, array.dtype, name, read_only)


def _describe_interface(obj: Any, interface: dict[str, Any], name: str) -> TensorRef:
    address, read_only = interface["data"]
    dtype = getattr(obj, "dtype", None)
    if dtype is None:
        import numpy

        dtype = numpy.dtype(interface["typestr"])
    return _from_bytes(
        obj, address, interface["shape"], interface.get("strides"), dtype, name, read_only, "cuda"
    )


def _from_bytes(
    obj: Any,
    address: int,
    shape: tuple[int, ...],
    byte_strides: tuple[int, ...] | None,
    dtype: Any,
    name: str,
    read_only: bool,
    kind: DeviceKind = "cpu",
) -> TensorRef:
    known = find_dtype(dtype, f"{name}.dtype")
    if byte_strides is None:
        strides = contiguous_strides(shape)
    else:
        if any(step % known.itemsize for step in byte_strides):
            raise CacheTypeError(
                f"{name}.strides: expected multiples of the element size {known.itemsize}, got "
                f"{byte_strides} bytes"
            )
        strides = tuple(step // known.itemsize for step in byte_strides)
    return TensorRef(
        address=int(address),
        shape=tuple(shape),
        strides=strides,
        dtype=known.name,
        itemsize=known.itemsize,
        device_kind=kind,
        device=_device_of_array(obj) if kind == "cuda" else 0,
        read_only=bool(read_only),
        owner=obj,
    )


def _device_of_array(obj: Any) -> int:
    """Ordinal of a device array: CuPy says ``device.id``, DLPack producers say it themselves."""
    number = getattr(getattr(obj, "device", None), "id", None)
    if isinstance(number, int):
        return number
    if hasattr(obj, "__dlpack_device__"):
        return int(obj.__dlpack_device__()[1])
    return 0
