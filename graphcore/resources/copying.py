"""Copies of a tensor of any library, in memory of their own, on the current stream."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from graphcore.driver.records import CopyOperand, MemcpyParams, StreamHandle
from graphcore.errors import CacheTypeError
from graphcore.resources.buffer import Buffer
from graphcore.resources.tensors import TensorRef, describe

if TYPE_CHECKING:
    from graphcore.driver.api import Driver


def copy_of(tensor: Any, driver: Driver, stream: StreamHandle) -> Any:
    """A copy of the same kind: torch's clone, NumPy's or CuPy's copy, else a :class:`Buffer`.

    Args:
        tensor: Memory of ``driver``.
        driver: Where the copy of a buffer goes.
        stream: The current stream: torch and CuPy copy there too.

    Raises:
        CacheTypeError: A strided tensor of a library that has no copy of its own.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return tensor.detach().clone()
    if type(tensor).__module__.partition(".")[0] in ("numpy", "cupy"):
        return tensor.copy()
    ref = describe(tensor)
    if not ref.is_contiguous:
        raise _strided(tensor, ref)
    copy = Buffer.allocate(ref.shape, ref.dtype, driver=driver)
    if ref.size:
        params = MemcpyParams(CopyOperand(copy.address), CopyOperand(ref.address), ref.nbytes)
        driver.copy(params, stream)
    return copy


def dense(tensor: Any) -> TensorRef:
    """``tensor`` in contiguous memory: as it is, else a copy that the description keeps alive.

    Raises:
        CacheTypeError: A strided tensor of a library that has no copy of its own.
    """
    ref = describe(tensor)
    if ref.is_contiguous:
        return ref
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return describe(tensor.detach().contiguous())
    library = type(tensor).__module__.partition(".")[0]
    if library in ("numpy", "cupy"):
        return describe(sys.modules[library].ascontiguousarray(tensor))
    raise _strided(tensor, ref)


def _strided(tensor: Any, ref: TensorRef) -> CacheTypeError:
    return CacheTypeError(
        f"expected contiguous memory of a {type(tensor).__name__}, got strides {ref.strides} for "
        f"shape {ref.shape}; take it as a tensor of torch or CuPy"
    )
