"""Copy and fill parameters, between our records and CUDA's structures, both ways.

Rules of our side, so that both drivers read the same: pitch and rows of a copy are 0 where it has
one row or one slice, offsets into an operand are added to its address, a fill of one row has pitch
0.
"""

from __future__ import annotations

from typing import Any

from graphcore.driver.codes import cuda_error
from graphcore.driver.cuda.versions import cuda
from graphcore.driver.records import (
    CopyOperand,
    MemcpyParams,
    MemoryKind,
    MemsetParams,
    NodeKind,
    OpaqueParams,
)

_TYPES = {
    MemoryKind.DEVICE: cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE,
    MemoryKind.HOST: cuda.CUmemorytype.CU_MEMORYTYPE_HOST,
    MemoryKind.UNIFIED: cuda.CUmemorytype.CU_MEMORYTYPE_UNIFIED,
}
_KINDS = {int(number): kind for kind, number in _TYPES.items()}


def to_memcpy(params: MemcpyParams) -> Any:
    """``CUDA_MEMCPY3D`` of a copy of any number of dimensions."""
    copy = cuda.CUDA_MEMCPY3D()
    copy.WidthInBytes, copy.Height, copy.Depth = params.width, params.height, params.depth
    _set_operand(copy, "dst", params.dst, params)
    _set_operand(copy, "src", params.src, params)
    return copy


def from_memcpy(copy: Any) -> MemcpyParams | OpaqueParams:
    """Our record of a copy; opaque where an operand is a CUDA array."""
    height, depth = int(copy.Height), int(copy.Depth)
    sides = [_operand(copy, side, height, depth) for side in ("dst", "src")]
    dst, src = sides
    if dst is None or src is None:
        return OpaqueParams(NodeKind.MEMCPY)
    return MemcpyParams(dst, src, int(copy.WidthInBytes), height, depth)


def to_memset(params: MemsetParams) -> Any:
    """``CUDA_MEMSET_NODE_PARAMS``; CudaError as :func:`check_fill`."""
    check_fill(params)
    fill = cuda.CUDA_MEMSET_NODE_PARAMS()
    fill.dst, fill.pitch, fill.value = params.address, params.pitch, params.value
    fill.elementSize, fill.width, fill.height = params.element_size, params.width, params.height
    return fill


def check_fill(params: MemsetParams) -> None:
    """Refuses an element size or value that CUDA has no fill for.

    Raises:
        CudaError: INVALID_VALUE.
    """
    size, value = params.element_size, params.value
    if size not in (1, 2, 4):
        expected, got = "element_size: expected 1, 2 or 4", size
    elif not 0 <= value < 1 << (8 * size):
        expected, got = f"value: expected {size} unsigned bytes", value
    else:
        return
    raise cuda_error(
        "CUDA_ERROR_INVALID_VALUE", "cuMemset", description=f"fill: {expected}, got {got}"
    )


def from_memset(fill: Any) -> MemsetParams:
    height = int(fill.height)
    return MemsetParams(
        address=int(fill.dst),
        value=int(fill.value),
        element_size=int(fill.elementSize),
        width=int(fill.width),
        height=height,
        pitch=int(fill.pitch) if height > 1 else 0,
    )


def _set_operand(copy: Any, side: str, operand: CopyOperand, params: MemcpyParams) -> None:
    is_host = operand.memory is MemoryKind.HOST
    setattr(copy, f"{side}MemoryType", _TYPES[operand.memory])
    # UNIFIED addresses go in the device field too
    setattr(copy, f"{side}Host" if is_host else f"{side}Device", operand.address)
    # where they do not matter CUDA still looks at them; elsewhere it refuses what is too small
    pitch = params.width if params.is_1d else operand.pitch
    setattr(copy, f"{side}Pitch", pitch)
    setattr(copy, f"{side}Height", params.height if params.depth == 1 else operand.rows)


def _operand(copy: Any, side: str, height: int, depth: int) -> CopyOperand | None:
    memory = _KINDS.get(int(getattr(copy, f"{side}MemoryType")))
    if memory is None:
        return None
    field = f"{side}Host" if memory is MemoryKind.HOST else f"{side}Device"
    pitch, rows = int(getattr(copy, f"{side}Pitch")), int(getattr(copy, f"{side}Height"))
    start = int(getattr(copy, field)) + int(getattr(copy, f"{side}XInBytes"))
    start += (int(getattr(copy, f"{side}Y")) + int(getattr(copy, f"{side}Z")) * rows) * pitch
    if height == 1 and depth == 1:
        pitch = rows = 0
    elif depth == 1:
        rows = 0
    return CopyOperand(start, memory, pitch, rows)
