"""Tensor maps of the CUDA driver, encoded into memory that is aligned as it must be."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cached_property
from typing import Any

from graphcore.driver.codes import cuda_error
from graphcore.driver.cuda.context import CudaCalls
from graphcore.driver.cuda.versions import entry_point, result_of
from graphcore.driver.tensor_map import (
    TENSOR_MAP_BYTES,
    TensorMap,
    encoded_address,
    with_address,
)

# numbers of CUtensorMapDataType, by bytes; bits are copied, so that kinds of numbers are all one
_TYPES = {1: 0, 2: 1, 4: 2, 8: 4}
_NO_INTERLEAVE, _SWIZZLE_128, _PROMOTE_256, _FILL_ZEROS = 0, 3, 3, 0
_ALIGNMENT = 64
_ENCODE = "cuTensorMapEncodeTiled"
# addresses that a device may have: no bit of them is one in both, nor zero
_MOST_ADDRESS = 1 << 47
_SOMEWHERE, _ELSEWHERE = 0x2AAAAAAAAAA0, 0x555555555550


class TensorMapCalls(CudaCalls):
    """The part of the driver that encodes tensor maps."""

    @cached_property
    def _encode(self) -> Any:
        # the bindings hold a map at addresses that the driver refuses
        return entry_point(_ENCODE, 12000)

    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        address = tensor_map.address
        if address >= _MOST_ADDRESS:  # a place of a plan, which is filled in before a launch
            address = _SOMEWHERE
        encoded = self._encoded(replace(tensor_map, address=address))
        other = self._encoded(replace(tensor_map, address=_ELSEWHERE))
        if encoded_address(encoded) != address or other != with_address(encoded, _ELSEWHERE):
            raise cuda_error(
                "CUDA_ERROR_NOT_SUPPORTED", _ENCODE,
                description="the address is expected in the first word of a tensor map, and only "
                f"there; got {encoded[:16].hex()} for {address:#x}",
            )  # fmt: skip
        return with_address(encoded, tensor_map.address)

    def _encoded(self, tensor_map: TensorMap) -> bytes:
        axes = len(tensor_map.sizes)
        memory = (ctypes.c_ubyte * (TENSOR_MAP_BYTES + _ALIGNMENT))()
        address = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
        number = self._encode(
            ctypes.c_void_p(address), ctypes.c_int(_TYPES[tensor_map.element_bytes]),
            ctypes.c_uint32(axes), ctypes.c_void_p(tensor_map.address),
            (ctypes.c_uint64 * axes)(*tensor_map.sizes),
            (ctypes.c_uint64 * axes)(*tensor_map.steps),
            (ctypes.c_uint32 * axes)(*tensor_map.box), (ctypes.c_uint32 * axes)(*(1,) * axes),
            ctypes.c_int(_NO_INTERLEAVE), ctypes.c_int(_SWIZZLE_128), ctypes.c_int(_PROMOTE_256),
            ctypes.c_int(_FILL_ZEROS),
        )  # fmt: skip
        if number:
            code = result_of(number)
            raise cuda_error(
                str(getattr(code, "name", code)), _ENCODE, number=number,
                description=f"the driver refused {tensor_map}",
            )  # fmt: skip
        return ctypes.string_at(address, TENSOR_MAP_BYTES)
