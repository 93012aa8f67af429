"""Element types by name: size in bytes, DLPack code, and the NumPy type that stands in for each.

Names are those of torch and NumPy without prefix: "float32", "bfloat16", "bool".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphcore.errors import CacheTypeError


@dataclass(frozen=True, slots=True)
class DType:
    """One element type: ``itemsize`` in bytes, ``code`` of DLPack's ``DLDataTypeCode``.

    ``numpy`` names a NumPy type of the same size; the same type where NumPy has it (``is_numpy``).
    """

    name: str
    itemsize: int
    code: int
    numpy: str

    @property
    def is_numpy(self) -> bool:
        return self.numpy == self.name


_PLAIN = {
    "bool": (1, 6),
    "int8": (1, 0),
    "int16": (2, 0),
    "int32": (4, 0),
    "int64": (8, 0),
    "uint8": (1, 1),
    "uint16": (2, 1),
    "uint32": (4, 1),
    "uint64": (8, 1),
    "float16": (2, 2),
    "float32": (4, 2),
    "float64": (8, 2),
    "complex64": (8, 5),
    "complex128": (16, 5),
}
_WITHOUT_NUMPY = {
    "bfloat16": (2, 4),
    "float8_e4m3fn": (1, 10),
    "float8_e4m3fnuz": (1, 11),
    "float8_e5m2": (1, 12),
    "float8_e5m2fnuz": (1, 13),
    "float8_e8m0fnu": (1, 14),
}

DTYPES: dict[str, DType] = {
    **{name: DType(name, size, code, name) for name, (size, code) in _PLAIN.items()},
    **{
        name: DType(name, size, code, f"uint{8 * size}")
        for name, (size, code) in _WITHOUT_NUMPY.items()
    },
}
_BY_DLPACK = {(dtype.code, 8 * dtype.itemsize): dtype for dtype in DTYPES.values()}


def find_dtype(dtype: Any, field: str = "dtype") -> DType:
    """The element type that a name, a torch dtype or a NumPy dtype speaks of.

    Raises:
        CacheTypeError: It is none we know (structured, quantised, sub-byte, byte-swapped ...).
    """
    if getattr(dtype, "isnative", True) is False:
        raise CacheTypeError(f"{field}: expected native byte order, got {dtype.str}")
    if isinstance(dtype, str):
        name = dtype
    elif type(dtype).__module__ == "torch":
        name = str(dtype)
    else:
        name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or repr(dtype)
    found = DTYPES.get(name.removeprefix("torch."))
    if found is None:
        raise CacheTypeError(f"{field}: expected one of {', '.join(DTYPES)}; got {dtype}")
    return found


def dtype_of_dlpack(code: int, bits: int, lanes: int, field: str) -> DType:
    """The element type of a DLPack tensor; CacheTypeError where it is none we know."""
    found = _BY_DLPACK.get((code, bits)) if lanes == 1 else None
    if found is None:
        raise CacheTypeError(
            f"{field}: expected one of {', '.join(DTYPES)}; got DLPack type code {code}, "
            f"{bits} bits, {lanes} lanes"
        )
    return found
