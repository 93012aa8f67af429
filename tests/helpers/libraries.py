"""Array libraries behind one face, for tests that pass memory between them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from graphcore.driver import Driver


@dataclass(frozen=True)
class Library:
    """How a library makes, takes and reads arrays.

    Args:
        name: "torch", "numpy" or "cupy".
        make: (shape, dtype name) -> array of ones on the driver's device.
        take: Imports by DLPack.
        address: Of the first element.
        has_bfloat16: Whether it knows bfloat16.
    """

    name: str
    make: Callable[[tuple[int, ...], str], Any]
    take: Callable[[Any], Any]
    address: Callable[[Any], int]
    has_bfloat16: bool

    def dtype_of(self, array: Any) -> str:
        return str(array.dtype).removeprefix("torch.")

    def strides_of(self, array: Any) -> tuple[int, ...]:
        """In elements."""
        if self.name == "torch":
            return tuple(array.stride())
        return tuple(step // array.itemsize for step in array.strides)


def torch_library(driver: Driver) -> Library:
    device = "cpu" if driver.is_emulated else f"cuda:{driver.device}"
    return Library(
        "torch",
        lambda shape, dtype: torch.ones(shape, dtype=getattr(torch, dtype), device=device),
        torch.from_dlpack,
        lambda array: int(array.data_ptr()),
        has_bfloat16=True,
    )


def array_library(driver: Driver) -> Library:
    """NumPy on the emulated driver, CuPy on a device."""
    if driver.is_emulated:
        return Library(
            "numpy",
            numpy.ones,
            numpy.from_dlpack,
            lambda array: int(array.ctypes.data),
            has_bfloat16=False,
        )
    import cupy

    def make(shape: tuple[int, ...], dtype: str) -> Any:
        with cupy.cuda.Device(driver.device):
            return cupy.ones(shape, dtype)

    return Library(
        "cupy",
        make,
        cupy.from_dlpack,
        lambda array: int(array.data.ptr),
        # CuPy borrows the type from ml_dtypes
        has_bfloat16=importlib.util.find_spec("ml_dtypes") is not None,
    )
