"""Whether memory that a caller gives lies where a driver can use it, and how it compares.

Pure but for the questions about an allocation; nothing is copied or synchronised.
"""

from __future__ import annotations

from typing import Any

from graphcore.driver import Driver
from graphcore.driver.records import MemoryKind
from graphcore.errors import CacheTypeError, ConfigurationError
from graphcore.interop.drivers import same_driver
from graphcore.resources.tensors import TensorRef, describe, is_tensor

# what vectorised loads of captured kernels rely on, at most
_ALIGNMENT = 16


def placed(
    obj: Any, driver: Driver, name: str, memory: MemoryKind = MemoryKind.DEVICE
) -> TensorRef:
    """Describes a tensor that ``driver`` can use as ``memory``.

    Raises:
        CacheTypeError: No tensor.
        ConfigurationError: Host memory where a device's is needed, or memory of another driver or
            device.
        LifecycleError: A closed buffer.
    """
    if not is_tensor(obj):
        raise CacheTypeError(f"{name}: expected a tensor or a Buffer, got {type(obj).__name__}")
    ref = describe(obj, name=name)
    check_placed(obj, ref, driver, name, memory)
    return ref


def check_placed(
    obj: Any, ref: TensorRef, driver: Driver, name: str, memory: MemoryKind = MemoryKind.DEVICE
) -> None:
    """Refuses memory that ``driver`` cannot use; raises as :func:`placed`."""
    theirs = getattr(obj, "driver", None)
    if isinstance(theirs, Driver) and theirs is not driver and not same_driver(theirs, driver):
        raise ConfigurationError(
            f"{name}: expected memory of driver {driver.name}:{driver.device}, got a "
            f"{type(obj).__name__} of {theirs.name}:{theirs.device}; where both read alike, two "
            "open_driver() calls made two drivers"
        )
    is_host = driver.is_emulated or memory is MemoryKind.HOST
    wanted = ("cpu", 0) if is_host else ("cuda", driver.device)
    found = (ref.device_kind, ref.device)
    if found != wanted:
        hint = "; copy it to the device first" if ref.device_kind == "cpu" else ""
        raise ConfigurationError(
            f"{name}: expected memory on {_place(*wanted)}, got {_place(*found)}{hint}"
        )


def check_like(old: TensorRef, new: TensorRef, name: str) -> None:
    """Refuses memory that cannot stand in for ``old`` in a graph: launch shapes stay as they are.

    Raises:
        ConfigurationError: Another element type, other steps, too small, read-only where the old
            was not, or less aligned.
    """
    if new.dtype != old.dtype:
        _misfit(name, "dtype", old.dtype, new.dtype)
    if len(new.shape) != len(old.shape):
        _misfit(name, "shape", old.shape, new.shape)
    if any(now < was for was, now in zip(old.shape, new.shape, strict=True)):
        _misfit(name, "shape", f"at least {old.shape}", new.shape)
    pairs = zip(old.shape, old.strides, new.strides, strict=True)
    if any(count > 1 and was != now for count, was, now in pairs):
        _misfit(name, "strides", f"{old.strides} elements", new.strides)
    if new.read_only and not old.read_only:
        _misfit(name, "access", "writable memory, as before", "read-only memory")
    check_alignment(old.address, new.address, name)


def check_alignment(old: int, new: int, name: str) -> None:
    """Refuses an address that is less aligned than the old one, up to 16 bytes."""
    wanted = min(old & -old or _ALIGNMENT, _ALIGNMENT)
    if new % wanted:
        _misfit(name, "address", f"a multiple of {wanted} bytes, as before", f"{new:#x}")


def _misfit(name: str, field: str, expected: object, actual: object) -> None:
    raise ConfigurationError(f"{name}: {field}: expected {expected}, got {actual}")


def _place(kind: str, device: int) -> str:
    return "the host" if kind == "cpu" else f"CUDA device {device}"
