"""Buffer: device memory with a shape and an element type, owned or viewed, shared by DLPack.

Memory that a buffer owns is given back once the buffer is closed (or dropped) *and* nobody else
holds it: views, exported tensors and graphs keep it. On the emulated driver device memory is host
memory, so a buffer is exported as a CPU tensor there.
"""

from __future__ import annotations

import math
import operator
import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, SupportsIndex

from graphcore.advice import advises
from graphcore.driver import active
from graphcore.errors import (
    CacheTypeError,
    ConfigurationError,
    GraphcoreError,
    GraphcoreWarning,
    LifecycleError,
)
from graphcore.resources.contents import as_contents
from graphcore.resources.dlpack import device_of, make_capsule
from graphcore.resources.driver_argument import checked_driver
from graphcore.resources.dtypes import DTYPES, find_dtype
from graphcore.resources.tensors import TensorRef, contiguous_strides, describe

if TYPE_CHECKING:
    from graphcore.driver.api import Driver


class _Storage:
    """One allocation of a driver, given back when the last who holds it lets go."""

    def __init__(self, driver: Driver, size: int) -> None:
        self.address = driver.alloc(max(size, 1))
        release = weakref.finalize(self, _free_when_idle, driver, self.address)
        release.atexit = False  # the process's end gives everything back


def _free_when_idle(driver: Driver, address: int) -> None:
    # freeing waits for the device, which a capture does not allow
    active.when_idle(partial(_free, driver, address))


def _free(driver: Driver, address: int) -> None:
    try:
        driver.free(address)
    except GraphcoreError as error:
        warnings.warn(f"while freeing a buffer: {error}", GraphcoreWarning, stacklevel=2)


class Rings(Protocol):
    """What a buffer tells that it was closed."""

    def ring(self) -> None: ...


@advises
class Buffer:
    """Device memory with a layout. Made by :meth:`allocate` or :meth:`view`. Not locked.

    Speaks ``__dlpack__``, and ``__cuda_array_interface__`` on a device or ``__array_interface__``
    on the emulated driver (element types NumPy lacks only through DLPack). Nothing is synchronised
    on export: the order of work is the caller's, as with any stream.
    """

    __slots__ = ("__weakref__", "_alarms", "_ref", "_shared", "driver")

    def __init__(self, ref: TensorRef, driver: Driver | None = None) -> None:
        if not isinstance(ref, TensorRef):
            raise CacheTypeError(
                f"ref: expected a TensorRef, got {type(ref).__name__}; Buffer.allocate makes "
                "memory, and Buffer.view shows that of a tensor"
            )
        self._ref: TensorRef | None = ref
        self._shared: object = None  # memory that array interfaces have given away
        self._alarms: weakref.WeakSet[Rings] | None = None
        self.driver = driver

    @classmethod
    def allocate(
        cls, shape: int | Sequence[int], dtype: Any = "float32", *, driver: Driver | None = None
    ) -> Buffer:
        """New memory; its contents are undefined (fill it, or :meth:`write` to it).

        Args:
            shape: Sizes; a plain int is one axis.
            dtype: A name ("float32", "bfloat16"), a torch or a NumPy dtype.
            driver: Where; None is what :func:`graphcore.open_driver` would open.

        Raises:
            ConfigurationError: A negative size, or ``driver`` is no driver.
            CacheTypeError: An unknown element type.
            CudaError: Out of memory, or inside a capture that does not allow it.
        """
        sizes = _sizes(shape)
        kind = find_dtype(dtype)
        if driver is None:
            from graphcore.driver.kept import default_driver

            driver = default_driver()
        driver = checked_driver(driver)
        storage = _Storage(driver, math.prod(sizes) * kind.itemsize)
        ref = TensorRef(
            address=storage.address,
            shape=sizes,
            strides=contiguous_strides(sizes),
            dtype=kind.name,
            itemsize=kind.itemsize,
            device_kind="cpu" if driver.is_emulated else "cuda",
            device=0 if driver.is_emulated else driver.device,
            owner=storage,
        )
        return cls(ref, driver)

    @classmethod
    def view(cls, obj: Any, *, driver: Driver | None = None) -> Buffer:
        """A buffer over another library's tensor, without a copy; keeps the tensor alive.

        Args:
            obj: Anything :func:`graphcore.resources.tensors.describe` takes.
            driver: The driver the memory belongs to, where known.

        Raises:
            CacheTypeError: As of ``describe``.
            ConfigurationError: ``driver`` is no driver.
        """
        if driver is None:
            return cls(describe(obj), obj.driver if isinstance(obj, Buffer) else None)
        return cls(describe(obj), checked_driver(driver))

    # ---- what it is ----------------------------------------------------------------------------

    @property
    def address(self) -> int:
        """Of the first element."""
        return self._live().address

    @property
    def shape(self) -> tuple[int, ...]:
        return self._live().shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Steps in elements."""
        return self._live().strides

    @property
    def dtype(self) -> str:
        """Name of the element type, for example "float32"."""
        return self._live().dtype

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self._live().itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._live().nbytes

    @property
    def read_only(self) -> bool:
        return self._live().read_only

    @property
    def owner(self) -> object:
        """Whose memory it is: the viewed tensor, or the allocation itself."""
        return self._live().owner

    @property
    def is_closed(self) -> bool:
        return self._ref is None

    def close(self) -> None:
        """Lets go of the memory; a second call does nothing. Exports and graphs still keep it.

        Executables with a guard whose graph uses the buffer refuse their next launch.
        """
        self._ref = None
        alarms, self._alarms = self._alarms, None
        for alarm in alarms or ():
            alarm.ring()

    def when_closed(self, alarm: Rings) -> None:
        """Rings ``alarm``, which is held weakly, when the buffer is closed."""
        if self._alarms is None:
            self._alarms = weakref.WeakSet()
        self._alarms.add(alarm)

    # ---- contents ------------------------------------------------------------------------------

    def read(self) -> Any:
        """A copy of the contents as a NumPy array, after all work; for tests and small reads.

        Element types NumPy lacks come as integers of their size.

        Raises:
            ConfigurationError: The buffer is strided, or a view without a driver.
        """
        import numpy

        ref, driver = self._contents("read")
        with active.outside_captures():
            data = driver.read(ref.address, ref.nbytes) if ref.size else b""
        array = numpy.frombuffer(data, DTYPES[ref.dtype].numpy).reshape(ref.shape)
        return array.copy()

    def write(self, values: Any) -> None:
        """Writes ``values`` (a NumPy array, a number, nested lists), after all work.

        Raises:
            ConfigurationError: Shapes do not fit, not numbers or numbers that the element type
                does not hold, the buffer is read-only, strided, or a view without a driver.
        """
        import numpy

        ref, driver = self._contents("write")
        if ref.read_only:
            raise ConfigurationError("buffer: expected writable memory, got a read-only view")
        array = as_contents(values, DTYPES[ref.dtype])
        try:
            data = numpy.ascontiguousarray(numpy.broadcast_to(array, ref.shape))
        except ValueError:
            raise ConfigurationError(
                f"values: expected shape {ref.shape} or one that broadcasts to it, got "
                f"{array.shape}"
            ) from None
        if ref.size:
            with active.outside_captures():
                driver.write(ref.address, data.tobytes())

    def _contents(self, what: str) -> tuple[TensorRef, Driver]:
        ref = self._live()
        if self.driver is None:
            raise ConfigurationError(
                f"buffer.{what}: this is a view of a foreign tensor without a driver; pass "
                "driver= to Buffer.view, or use the tensor"
            )
        if not ref.is_contiguous:
            raise ConfigurationError(
                f"buffer.{what}: expected contiguous memory, got strides {ref.strides} for shape "
                f"{ref.shape}"
            )
        return ref, self.driver

    # ---- sharing -------------------------------------------------------------------------------

    def __graphcore_tensor__(self) -> TensorRef:
        return self._live()

    def __dlpack_device__(self) -> tuple[int, int]:
        return device_of(self._live())

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """A DLPack capsule over this memory; never copies and never synchronises."""
        del stream  # no work of ours is pending that a consumer's stream could be told to wait for
        ref = self._live()
        if copy:
            raise BufferError("copy: expected False or None, got True; Buffer exports memory as is")
        if dl_device is not None and tuple(map(int, dl_device)) != device_of(ref):
            raise BufferError(f"dl_device: expected {device_of(ref)}, got {tuple(dl_device)}")
        return make_capsule(ref, ref.owner, max_version)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._interface("__cuda_array_interface__", "cuda")

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._interface("__array_interface__", "cpu")

    def _interface(self, protocol: str, kind: str) -> dict[str, Any]:
        ref = self._live()
        dtype = DTYPES[ref.dtype]
        if ref.device_kind != kind or not dtype.is_numpy:
            raise AttributeError(
                f"{protocol}: not for {ref.dtype} memory of kind {ref.device_kind}"
            )
        # a consumer of the interface holds this buffer only, and it may be closed before
        self._shared = ref.owner
        return {
            "version": 3,
            "data": (ref.address, ref.read_only),
            "shape": ref.shape,
            "strides": tuple(step * ref.itemsize for step in ref.strides),
            "typestr": _typestr(dtype.numpy),
        }

    # ---- the rest ------------------------------------------------------------------------------

    def _live(self) -> TensorRef:
        if self._ref is None:
            raise LifecycleError("buffer: expected an open buffer, got a closed one")
        return self._ref

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise CacheTypeError(
            "Buffer: cannot be copied or pickled, its memory is a driver's; Buffer.view shares it, "
            "read() copies the contents"
        )

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._ref is None:
            return "<Buffer closed>"
        ref = self._ref
        return f"<Buffer {ref.dtype}{list(ref.shape)} at {ref.address:#x} {ref.device_kind}>"


def _sizes(shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = (
            tuple(map(operator.index, shape))
            if isinstance(shape, Sequence)
            else (operator.index(shape),)
        )
    except TypeError:
        raise ConfigurationError(f"shape: expected integers, got {shape!r}") from None
    if any(size < 0 for size in sizes):
        raise ConfigurationError(f"shape: expected sizes of at least 0, got {sizes}")
    return sizes


def _typestr(name: str) -> str:
    import numpy

    return numpy.dtype(name).str
