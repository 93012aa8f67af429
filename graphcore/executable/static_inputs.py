"""StaticInputs: the static input tensors of a graph, as one object that writes them whole.

A graph reads its inputs where they were captured. Each call of :meth:`StaticInputs.copy_` leaves
every element of every input defined: real values in front, the fill value behind them. Nothing of
the step before is left in a padded tail, or in an optional input that is left out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from graphcore.driver import Driver, active, as_stream
from graphcore.driver.records import MemoryKind, StreamHandle
from graphcore.errors import CapacityError, ConfigurationError, StaleGraphError
from graphcore.executable.legacy_work import refuse_legacy_work
from graphcore.interop import choose_driver, current_stream, use_stream
from graphcore.resources.contents import as_contents
from graphcore.resources.copying import copy_of, dense
from graphcore.resources.corner import fill as fill_memory
from graphcore.resources.corner import pattern_of, write_corner
from graphcore.resources.driver_argument import checked_driver
from graphcore.resources.dtypes import DTYPES
from graphcore.resources.spans import extent
from graphcore.resources.tensors import TensorRef, contiguous_strides, describe, is_tensor


@dataclass(frozen=True, slots=True)
class _Write:
    """One input of one call: where it goes, what is written, and what must live until then."""

    target: TensorRef
    source: TensorRef | None
    pattern: bytes | None
    memory: MemoryKind
    keep: object


class StaticInputs(Mapping[str, Any]):
    """Static input tensors by name. A mapping, so that ``capture.keep(inputs)`` keeps them all.

    Args:
        tensors: Name -> static tensor (torch, NumPy, CuPy, :class:`Buffer`): contiguous, writable,
            of one driver, none over another's memory. Their contents are left as they are.
        fill: Name -> value of padded elements. An input without one must always come whole.
        optional: Names that a call may leave out; they are reset to their fill value then.
        driver: Whose memory the tensors are; None is what the tensors say.

    Raises:
        CacheTypeError: A tensor that is none, or of a kind without plain memory.
        ConfigurationError: A tensor that is read-only, strided, of another driver or over another
            one's memory; a fill value that does not fit; a name that is not there; an optional
            input without a fill value.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        *,
        fill: Mapping[str, Any] | None = None,
        optional: Iterable[str] = (),
        driver: Driver | None = None,
    ) -> None:
        self._tensors = dict(_mapping("tensors", tensors))
        chosen = choose_driver(*self._tensors.values()) if driver is None else driver
        self.driver = checked_driver(chosen)
        self._refs = {
            name: _static(self.driver, name, tensor) for name, tensor in self._tensors.items()
        }
        _refuse_overlap(self._refs)
        values = _mapping("fill", {} if fill is None else fill)
        names = [optional] if isinstance(optional, str) else list(optional)
        self._refuse_unknown("fill", values)
        self._refuse_unknown("optional", names)
        self._patterns = {
            name: pattern_of(value, self._refs[name].dtype, f"fill[{name!r}]")
            for name, value in values.items()
        }
        for name in names:
            if name not in self._patterns:
                raise ConfigurationError(
                    f"optional: expected a fill value for {name!r}, to which it is reset where it "
                    "is left out, got none"
                )
        self.optional = frozenset(names)
        self._sources: list[object] = []

    def copy_(
        self, inputs: Mapping[str, Any] | None = None, /, *, stream: Any = None, **named: Any
    ) -> None:
        """Writes the inputs of the next run: real values, and the fill value in what they leave.

        Everything is checked before anything is written. Goes to ``stream`` without waiting for
        it: a launch on the same stream comes after. Sources on the host may be changed as soon as
        this returns; those on the device are kept until the next call.

        Args:
            inputs: Name -> values: a tensor of any library on the host or the same device, with
                the static tensor's element type and rank and nowhere longer, or numbers.
            stream: Where; None is the current stream.
            named: The same, by keyword.

        Raises:
            CapacityError: An input is longer than its static tensor.
            ConfigurationError: An input that is missing, unknown, given twice, of another element
                type, rank or device, or shorter without a fill value.
            CacheTypeError: Not a tensor and not numbers, or of a kind without plain memory.
            StaleGraphError: A static tensor has moved: graphs read its old memory.
            CaptureError: The stream is the legacy one, where work would break a capture of another
                thread; nothing was written.
        """
        given = dict(_mapping("inputs", {} if inputs is None else inputs))
        for name, value in named.items():
            if name in given:
                raise ConfigurationError(f"{name}: expected it once, got it twice")
            given[name] = value
        self._refuse_unknown("inputs", given)
        missing = [name for name in self._refs if name not in given and name not in self.optional]
        if missing:
            raise ConfigurationError(
                f"inputs: expected {', '.join(self._refs)}; missing: {', '.join(missing)}. What is "
                "left out would keep its last value; name it in optional= to have it reset"
            )
        self._refuse_moved()
        where = self._stream(stream)
        writes = [
            self._write(name, given.get(name), where, is_given=name in given) for name in self._refs
        ]
        for write in writes:
            self._run(write, where)
        self._sources = [write.keep for write in writes]

    def reset(self, stream: Any = None) -> None:
        """Writes the fill value everywhere, in every input that has one."""
        self._refuse_moved()
        where = self._stream(stream)
        for name, pattern in self._patterns.items():
            ref = self._refs[name]
            fill_memory(self.driver, where, ref.address, ref.size, pattern)

    # ---- inside --------------------------------------------------------------------------------

    def _write(self, name: str, value: Any, stream: StreamHandle, *, is_given: bool) -> _Write:
        target = self._refs[name]
        pattern = self._patterns.get(name)
        if not is_given:
            return _Write(target, None, pattern, MemoryKind.DEVICE, None)
        if not is_tensor(value):
            value = as_contents(value, DTYPES[target.dtype])
        source = describe(value, name=name)
        self._check(name, source, target, pattern)
        if source.device_kind == "cpu" and target.device_kind == "cuda":
            # the host may change its memory while the copy waits for its turn
            data = ctypes.string_at(dense(value).address, source.nbytes) if source.size else b""
            start = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
            return _Write(
                target, replace(_plain(source), address=start), pattern, MemoryKind.HOST, data
            )
        if source == target:
            return _Write(target, source, pattern, MemoryKind.DEVICE, value)
        plain = self._settled(value, source, stream)
        return _Write(target, plain, pattern, MemoryKind.DEVICE, plain.owner)

    def _settled(self, value: Any, source: TensorRef, stream: StreamHandle) -> TensorRef:
        """``value`` in contiguous memory that no write of this call changes before it is read."""
        start, size = extent("value", source)
        is_ours = any(
            start < ref.address + ref.nbytes and ref.address < start + size
            for ref in self._refs.values()
        )
        if source.is_contiguous and not is_ours:
            return source
        # torch and CuPy copy on their current stream, and the writes go to this one
        with use_stream(self.driver, stream):
            if source.is_contiguous:
                return describe(copy_of(value, self.driver, stream))
            return dense(value)

    def _check(
        self, name: str, source: TensorRef, target: TensorRef, pattern: bytes | None
    ) -> None:
        if source.dtype != target.dtype:
            raise ConfigurationError(f"{name}: expected {target.dtype}, got {source.dtype}")
        here = (target.device_kind, target.device)
        if (source.device_kind, source.device) not in (here, ("cpu", 0)):
            raise ConfigurationError(
                f"{name}: expected memory of the host or of {here[0]}:{here[1]}, got a tensor on "
                f"{source.device_kind}:{source.device}"
            )
        if len(source.shape) != len(target.shape):
            raise ConfigurationError(
                f"{name}: expected {len(target.shape)} axes as in {target.shape}, got "
                f"{source.shape}"
            )
        if any(real > room for real, room in zip(source.shape, target.shape, strict=True)):
            raise CapacityError(
                f"{name}: expected at most {target.shape}, got {source.shape}; nothing was written"
            )
        if source.shape != target.shape and pattern is None:
            raise ConfigurationError(
                f"{name}: expected the whole shape {target.shape}, got {source.shape}: it has no "
                "fill value for the rest, which would keep its last values; give one with fill="
            )

    def _run(self, write: _Write, stream: StreamHandle) -> None:
        target = write.target
        if write.source is None:
            assert write.pattern is not None
            fill_memory(self.driver, stream, target.address, target.size, write.pattern)
        elif write.source != target or not target.size:  # else it lies there already
            if write.keep is not None:
                active.keep(write.keep)  # a copy that is captured reads its source at each replay
            write_corner(self.driver, stream, target, write.source, write.pattern, write.memory)

    def _stream(self, stream: Any) -> StreamHandle:
        handle = (
            current_stream(self.driver) if stream is None else as_stream(self.driver, stream).handle
        )
        refuse_legacy_work(self.driver, handle, "inputs")
        return handle

    def _refuse_unknown(self, field: str, names: Iterable[str]) -> None:
        unknown = [name for name in names if name not in self._refs]
        if unknown:
            raise ConfigurationError(
                f"{field}: expected names among {', '.join(self._refs)}; got "
                f"{', '.join(map(repr, unknown))}"
            )

    def _refuse_moved(self) -> None:
        for name, was in self._refs.items():
            now = describe(self._tensors[name], name=name)
            if (now.address, now.shape, now.dtype) != (was.address, was.shape, was.dtype):
                raise StaleGraphError(
                    f"{name}: expected {was.dtype}{list(was.shape)} at {was.address:#x}, got "
                    f"{now.dtype}{list(now.shape)} at {now.address:#x}: graphs read the old "
                    "memory; capture again with new StaticInputs"
                )

    # ---- the mapping ---------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        parts = (f"{name} {ref.dtype}{list(ref.shape)}" for name, ref in self._refs.items())
        return f"<StaticInputs {', '.join(parts)}>"


def _mapping(field: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ConfigurationError(f"{field}: expected a mapping of name -> value, got {value!r}")
    return value


def _static(driver: Driver, name: str, tensor: Any) -> TensorRef:
    ref = describe(tensor, name=name, writable=True)
    here = ("cpu", 0) if driver.is_emulated else ("cuda", driver.device)
    if (ref.device_kind, ref.device) != here:
        raise ConfigurationError(
            f"{name}: expected memory of driver {driver.name}:{driver.device}, got a tensor on "
            f"{ref.device_kind}:{ref.device}"
        )
    if not ref.is_contiguous:
        raise ConfigurationError(
            f"{name}: expected contiguous memory, got strides {ref.strides} for shape {ref.shape}"
        )
    return replace(ref, owner=None)


def _refuse_overlap(refs: Mapping[str, TensorRef]) -> None:
    ordered = sorted((item for item in refs.items() if item[1].size), key=lambda i: i[1].address)
    for (name, ref), (other, after) in pairwise(ordered):
        if _overlap(ref, after):
            raise ConfigurationError(
                f"{other}: expected memory of its own, got some of {name}'s: writing one would "
                "change the other"
            )


def _overlap(one: TensorRef, other: TensorRef) -> bool:
    return one.address < other.address + other.nbytes and other.address < one.address + one.nbytes


def _plain(ref: TensorRef) -> TensorRef:
    return replace(ref, strides=contiguous_strides(ref.shape), owner=None)
