"""Memory of the CUDA driver: allocation, copies, fills, and whose allocation an address is in."""

from __future__ import annotations

import ctypes
from typing import Any

from graphcore.driver.cuda.check import ask, error_of
from graphcore.driver.cuda.context import CudaCalls, in_context
from graphcore.driver.cuda.copies import check_fill, to_memcpy
from graphcore.driver.cuda.versions import cuda
from graphcore.driver.records import (
    Allocation,
    MemcpyParams,
    MemoryKind,
    MemsetParams,
    StreamHandle,
)

_attribute = cuda.CUpointer_attribute
_QUERIED = (
    _attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
    _attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
    _attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID,
    _attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    _attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    _attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED,
)
_HOST = int(cuda.CUmemorytype.CU_MEMORYTYPE_HOST)
_DIRECTED = {
    (MemoryKind.DEVICE, MemoryKind.DEVICE): cuda.cuMemcpyDtoDAsync,
    (MemoryKind.DEVICE, MemoryKind.HOST): cuda.cuMemcpyHtoDAsync,
    (MemoryKind.HOST, MemoryKind.DEVICE): cuda.cuMemcpyDtoHAsync,
}
_FILL_ROW = {1: cuda.cuMemsetD8Async, 2: cuda.cuMemsetD16Async, 4: cuda.cuMemsetD32Async}
_FILL_ROWS = {1: cuda.cuMemsetD2D8Async, 2: cuda.cuMemsetD2D16Async, 4: cuda.cuMemsetD2D32Async}


class MemoryCalls(CudaCalls):
    """The part of the driver that allocates, copies, fills and looks addresses up."""

    @in_context
    def memory_info(self) -> tuple[int, int]:
        free, total = ask(cuda.cuMemGetInfo)
        return int(free), int(total)

    @in_context
    def alloc(self, size: int) -> int:
        code, address = cuda.cuMemAlloc(size)
        if code:
            raise error_of(code, "cuMemAlloc", asked=size)
        return int(address)

    @in_context
    def free(self, address: int) -> None:
        ask(cuda.cuMemFree, address)

    @in_context
    def alloc_pinned(self, size: int) -> int:
        code, address = cuda.cuMemHostAlloc(size, 0)
        if code:
            raise error_of(code, "cuMemHostAlloc", asked=size)
        return int(address)

    @in_context
    def free_pinned(self, address: int) -> None:
        ask(cuda.cuMemFreeHost, address)

    @in_context
    def copy(self, params: MemcpyParams, stream: StreamHandle) -> None:
        if params.is_1d:
            # the directed forms give a captured node the memory types that were asked for
            call = _DIRECTED.get((params.dst.memory, params.src.memory), cuda.cuMemcpyAsync)
            ask(call, params.dst.address, params.src.address, params.width, stream)
        else:
            ask(cuda.cuMemcpy3DAsync, to_memcpy(params), stream)

    @in_context
    def fill(self, params: MemsetParams, stream: StreamHandle) -> None:
        check_fill(params)
        address, value, shape = params.address, params.value, (params.width, params.height)
        if params.height == 1:
            ask(_FILL_ROW[params.element_size], address, value, params.width, stream)
        else:
            ask(_FILL_ROWS[params.element_size], address, params.pitch, value, *shape, stream)

    @in_context
    def read(self, address: int, size: int) -> bytes:
        ask(cuda.cuCtxSynchronize)
        data = (ctypes.c_char * size)()
        if size:
            ask(cuda.cuMemcpyDtoH, ctypes.addressof(data), address, size)
        return bytes(data)

    @in_context
    def write(self, address: int, data: bytes) -> None:
        ask(cuda.cuCtxSynchronize)
        if data:
            source = ctypes.c_char_p(data)  # the bytes themselves: no copy, alive until the end
            start = ctypes.cast(source, ctypes.c_void_p).value
            ask(cuda.cuMemcpyHtoD, address, start, len(data))
            # from pageable memory the call returns before the last bytes have landed: work on a
            # non-blocking stream would overtake them
            ask(cuda.cuCtxSynchronize)

    @in_context
    def allocation_of(self, address: int) -> Allocation | None:
        code, values = cuda.cuPointerGetAttributes(len(_QUERIED), list(_QUERIED), address)
        if code or values is None:
            return None
        base, size, buffer_id, memory, device, managed = (_number(value) for value in values)
        if not memory or not size:  # pageable memory, freed, or no address at all
            return None
        kind = MemoryKind.HOST if memory == _HOST else MemoryKind.DEVICE
        if managed:
            kind = MemoryKind.UNIFIED
        return Allocation(base, size, buffer_id, kind, device)


def _number(value: Any) -> int:
    return 0 if value is None else int(value)
