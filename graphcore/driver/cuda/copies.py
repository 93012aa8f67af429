"""Copy and fill parameters, between our records and CUDA's structures, both ways.

Rules of our side, so that both drivers read the same: pitch and rows of a copy are 0 where it has
one row or one slice, offsets into an operand are added to its address, a fill of one row has pitch
0.
"""

from __future__ import annotations

from typing import Any

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
    """``CUDA_MEMSET_NODE_PARAMS``."""
    fill = cuda.CUDA_MEMSET_NODE_PARAMS()
    fill.dst, fill.pitch, fill.value = params.address, params.pitch, params.value
    fill.elementSize, fill.width, fill.height = params.element_size, params.width, params.height
    return fill


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
    setattr(copy, f"{side}Pitch", operand.pitch or params.width)
    setattr(copy, f"{side}Height", operand.rows or params.height)


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
