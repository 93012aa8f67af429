"""A kernel as graphcore knows it: a name, a typed signature, source, and a Python reference.

The same object serves both drivers: the CUDA driver compiles ``source``, the emulated one runs
``reference``. It guarantees that arguments are packed by the signature: a wrong count, width or
type is refused with the parameter's index before anything is launched.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphcore.errors import ConfigurationError

if TYPE_CHECKING:
    import numpy

    from graphcore.driver.api import Driver
    from graphcore.driver.records import FunctionHandle, LaunchConfig

# struct codes of the scalar types a signature may name
SCALARS = {
    "bool": "?",
    "i8": "b",
    "u8": "B",
    "i16": "h",
    "u16": "H",
    "i32": "i",
    "u32": "I",
    "i64": "q",
    "u64": "Q",
    "f16": "e",
    "f32": "f",
    "f64": "d",
}
_INTEGERS = frozenset({"i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"})
# what a pointer may point at, as NumPy names it; bf16 is seen as its 16 bits
_POINTEES = {
    "void": "uint8",
    "bool": "bool",
    "i8": "int8",
    "u8": "uint8",
    "i16": "int16",
    "u16": "uint16",
    "i32": "int32",
    "u32": "uint32",
    "i64": "int64",
    "u64": "uint64",
    "f16": "float16",
    "bf16": "uint16",
    "f32": "float32",
    "f64": "float64",
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One kernel parameter.

    Args:
        name: As in the source.
        type: A scalar ("i32", "u64", "f32", "bool" ...), a pointer ("f32*", "const i32*",
            "void*"), or "bytes:N" for a structure of N bytes passed by value.
    """

    name: str
    type: str

    def __post_init__(self) -> None:
        if not self.name.isidentifier():  # "f32 *x" would be a scalar called *x
            raise ConfigurationError(
                f"parameter {self.name!r}: expected a name as in C, after its type and any '*'"
            )
        if self.is_pointer:
            known = self.pointee in _POINTEES
        else:
            known = self.type in SCALARS or (self.type[:6] == "bytes:" and self.type[6:].isdigit())
        if known:
            return
        raise ConfigurationError(
            f"parameter {self.name!r}: unknown type {self.type!r}; expected one of "
            f"{', '.join(SCALARS)}, 'TYPE*', 'const TYPE*' or 'bytes:N'"
        )

    @property
    def is_pointer(self) -> bool:
        return self.type.endswith("*")

    @property
    def is_read_only(self) -> bool:
        return self.type.startswith("const ")

    @property
    def pointee(self) -> str:
        return self.type.removeprefix("const ").removesuffix("*").strip()

    @property
    def size(self) -> int:
        """Size in bytes as the kernel receives it."""
        if self.is_pointer:
            return 8
        if self.type.startswith("bytes:"):
            return int(self.type[6:])
        return struct.calcsize("=" + SCALARS[self.type])

    def pack(self, index: int, value: object) -> bytes:
        """The bytes of one argument; ConfigurationError naming ``index`` where it does not fit."""
        if self.is_pointer:
            return _pack_pointer(index, self, value)
        if self.type.startswith("bytes:"):
            if isinstance(value, (bytes, bytearray)) and len(value) == self.size:
                return bytes(value)
            raise _misfit(index, self, value, f"{self.size} bytes")
        return _pack_scalar(index, self, value)

    def unpack(self, data: bytes) -> object:
        """The Python value of one argument: int, float, bool, bytes, or :class:`Pointer`."""
        if self.is_pointer:
            return Pointer(int.from_bytes(data, "little"), _POINTEES[self.pointee])
        if self.type.startswith("bytes:"):
            return data
        return struct.unpack("=" + SCALARS[self.type], data)[0]


@dataclass(frozen=True, slots=True)
class Pointer:
    """An address with an element type, as a Python reference receives a pointer argument."""

    address: int
    dtype: str

    def array(
        self, shape: int | Sequence[int], strides: Sequence[int] | None = None
    ) -> numpy.ndarray[Any, Any]:
        """A writable NumPy view of the memory; ``strides`` in elements, may be 0 or negative.

        Nothing checks bounds beyond the view itself: the address is trusted, as on a device.
        """
        import numpy

        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if 0 in sizes:
            return numpy.empty(sizes, self.dtype)
        item = numpy.dtype(self.dtype).itemsize
        if strides is None:
            whole = (ctypes.c_ubyte * (math.prod(sizes) * item)).from_address(self.address)
            return numpy.frombuffer(memoryview(whole), self.dtype).reshape(sizes)
        steps = list(strides)
        low = sum(min(0, step * (size - 1)) for step, size in zip(steps, sizes, strict=True))
        high = sum(max(0, step * (size - 1)) for step, size in zip(steps, sizes, strict=True))
        count = (high - low + 1) * item
        memory = (ctypes.c_ubyte * count).from_address(self.address + low * item)
        raw = numpy.frombuffer(memoryview(memory), numpy.uint8)
        return numpy.ndarray(
            sizes, self.dtype, buffer=raw, offset=-low * item, strides=[s * item for s in steps]
        )


def _misfit(index: int, parameter: Parameter, value: object, expected: str) -> ConfigurationError:
    return ConfigurationError(
        f"argument {index} ({parameter.name}: {parameter.type}): expected {expected}, "
        f"got {type(value).__name__} {value!r:.60}"
    )


def _pack_pointer(index: int, parameter: Parameter, value: object) -> bytes:
    address = getattr(value, "address", value)
    if isinstance(address, bool) or not isinstance(address, int) or not 0 <= address < 2**64:
        raise _misfit(index, parameter, value, "an address (int) or an object with .address")
    return address.to_bytes(8, "little")


def _pack_scalar(index: int, parameter: Parameter, value: object) -> bytes:
    # NumPy scalars carry a width of their own: it must be the signature's
    dtype = getattr(value, "dtype", None)
    if dtype is not None and hasattr(value, "item"):
        if getattr(dtype, "itemsize", parameter.size) != parameter.size:
            raise _misfit(index, parameter, value, f"a {parameter.size}-byte {parameter.type}")
        if (getattr(dtype, "kind", "") == "f") != parameter.type.startswith("f"):
            raise _misfit(index, parameter, value, f"a {parameter.type}")
        try:
            value = value.item()
        except (ValueError, RuntimeError, TypeError):  # not one element
            raise _misfit(index, parameter, value, f"a {parameter.type}, one value") from None
    wants_integer = parameter.type in _INTEGERS
    if parameter.type == "bool":
        fits = isinstance(value, bool)
    elif wants_integer:
        fits = isinstance(value, int) and not isinstance(value, bool)
    else:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not fits:
        raise _misfit(index, parameter, value, f"a {parameter.type}")
    try:
        return struct.pack("=" + SCALARS[parameter.type], value)
    except (struct.error, OverflowError):
        raise _misfit(
            index, parameter, value, f"a value that fits {parameter.size * 8} bits"
        ) from None


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel: what to compile on a device, what to run in its place without one.

    Args:
        name: The ``extern "C"`` name in ``source``.
        parameters: The signature, in order.
        source: CUDA C++ without includes (NVRTC has no headers on its path).
        reference: ``reference(config, *arguments)`` doing the whole launch in NumPy; pointers come
            as :class:`Pointer`. None: the kernel cannot run on the emulated driver.
        options: Compiler options, for example ``("-arch=sm_90a",)``.
        loader: Replaces the driver's own NVRTC route: ``loader(driver, kernel)`` returns the
            handle of a loaded function (graphcore_kernels compiles through CuPy this way).
    """

    name: str
    parameters: tuple[Parameter, ...]
    source: str
    reference: Callable[..., None] | None = None
    options: tuple[str, ...] = ()
    loader: Callable[[Driver, Kernel], FunctionHandle] | None = None

    def pack(self, *arguments: object) -> tuple[bytes, ...]:
        """Argument bytes by the signature; ConfigurationError on a wrong count, width or type."""
        if len(arguments) != len(self.parameters):
            raise ConfigurationError(
                f"kernel {self.name}: expected {len(self.parameters)} arguments "
                f"({', '.join(p.name for p in self.parameters)}), got {len(arguments)}"
            )
        pairs = zip(self.parameters, arguments, strict=True)
        return tuple(p.pack(index, value) for index, (p, value) in enumerate(pairs))

    def unpack(self, arguments: Sequence[bytes]) -> tuple[object, ...]:
        """The Python values of packed arguments, pointers as :class:`Pointer`."""
        return tuple(p.unpack(data) for p, data in zip(self.parameters, arguments, strict=True))

    def run_reference(self, config: LaunchConfig, arguments: Sequence[bytes]) -> None:
        """Does the launch in Python; ConfigurationError where the kernel has no reference."""
        if self.reference is None:
            raise ConfigurationError(
                f"kernel {self.name} has no Python reference: it cannot run on the emulated driver"
                "; graphcore.kernel takes one, GraphPlan.from_json kernels=[...] that have one"
            )
        self.reference(config, *self.unpack(arguments))


def kernel(
    name: str,
    signature: str,
    source: str,
    reference: Callable[..., None] | None = None,
    *,
    options: Sequence[str] = (),
    loader: Callable[[Driver, Kernel], FunctionHandle] | None = None,
) -> Kernel:
    """A :class:`Kernel` from a signature in one string, ``"const f32* x, f32* y, i32 n"``."""
    parameters = []
    for piece in filter(None, (part.strip() for part in signature.split(","))):
        kind, _, label = piece.rpartition(" ")
        parameters.append(Parameter(label, kind.replace(" *", "*")))
    return Kernel(name, tuple(parameters), source, reference, tuple(options), loader)
