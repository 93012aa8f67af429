"""Watching memory without keeping it alive, and hearing of it when it goes.

A graph keeps the owners it is told of, so that their memory cannot be freed under it. What others
own (a cache that evicts, a pool that grows) can only be watched: a :class:`Watch` knows how the
memory was, holds its owner weakly, and tells whoever listens when the owner lets the memory go.
Listening costs nothing until that moment. What is heard may come from any thread and from the
garbage collector: a listener does no more than set a flag.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphcore.errors import ConfigurationError
from graphcore.resources.buffer import Buffer
from graphcore.resources.lifetime import Record, buffer_id, memory_of
from graphcore.resources.staleness import StaleResource, compare
from graphcore.resources.tensors import TensorRef, describe

if TYPE_CHECKING:
    from graphcore.driver.api import Driver


class Watch:
    """One tensor, watched.

    Args:
        name: What messages call it.
        obj: A tensor, a buffer, a ``TensorRef`` or (address, bytes).
        driver: Whose memory it is.

    Raises:
        CacheTypeError: ``obj`` is none of these.
        ConfigurationError: An (address, bytes) that is in no memory the driver knows.
    """

    __slots__ = ("_memory", "_object", "_ref", "name", "record")

    def __init__(self, name: str, obj: Any, driver: Driver) -> None:
        self.name = name
        ref = _plain(name, obj, driver) if isinstance(obj, tuple) else describe(obj, name=name)
        self.record = Record(replace(ref, owner=None), buffer_id(driver, ref))
        self._ref: TensorRef | None = None
        self._object: weakref.ref[Any] | None = None
        self._memory: weakref.ref[Any] | None = None
        if isinstance(obj, (tuple, TensorRef)):
            self._ref = self.record.tensor
            return
        self._object = _weakly(obj)
        self._memory = _weakly(life_of(memory_of(obj, ref)))

    @property
    def extent(self) -> tuple[int, int]:
        """(address, bytes), as it was."""
        return self.record.tensor.address, self.record.tensor.nbytes

    def stale(self, driver: Driver) -> StaleResource | None:
        """What has become of it; None where it is what it was, or where nothing can tell."""
        if self._memory is not None and self._memory() is None:
            return self._gone("memory that its owner has let go")
        obj = self._ref if self._object is None else self._object()
        if obj is None:  # the memory lives on in a view; or nothing was left to look at
            now = buffer_id(driver, self.record.tensor)
            return None if now == self.record.buffer_id else self._gone("freed memory")
        return compare(obj, self.record, self.name, driver)

    def living(self) -> list[object]:
        """What is there still and can say that the memory goes: the memory, or its owner."""
        memory = None if self._memory is None else self._memory()
        obj = None if self._object is None else self._object()
        if isinstance(obj, Buffer):
            return [obj] if memory is None else [obj, memory]
        return [each for each in (obj if memory is None else memory,) if each is not None]

    def _gone(self, actual: str) -> StaleResource:
        was = self.record.tensor
        return StaleResource(self.name, "memory", f"{was.nbytes} bytes", actual)


def watch_all(names: Mapping[str, Any], driver: Driver) -> tuple[Watch, ...]:
    """A watch for each name.

    Raises:
        ConfigurationError: ``names`` is no mapping.
        CacheTypeError: A named object is no tensor, no buffer and no (address, bytes).
    """
    if not isinstance(names, Mapping):
        raise ConfigurationError(
            f"names: expected a mapping of name -> tensor, got {type(names).__name__}"
        )
    return tuple(Watch(str(name), obj, driver) for name, obj in names.items())


def _plain(name: str, obj: tuple[Any, ...], driver: Driver) -> TensorRef:
    from graphcore.resources.spans import extent

    address, size = extent(name, obj)
    kind = "cpu" if driver.is_emulated else "cuda"
    device = 0 if driver.is_emulated else driver.device
    return TensorRef(address, (size,), (1,), "uint8", 1, kind, device)  # type: ignore[arg-type]


class _Life:
    """What dies with the object in whose attributes it is."""


def life_of(memory: object) -> object:
    """An object that can be held weakly and dies when ``memory`` does; ``memory`` itself if it can.

    CuPy's pieces of a pool cannot be held weakly, but they have attributes.
    """
    if type(memory).__weakrefoffset__ or not hasattr(memory, "__dict__"):
        return memory
    return memory.__dict__.setdefault("_graphcore_life", _Life())


def _weakly(obj: object) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(obj)
    except TypeError:  # a kind without weak references: its memory's id must do
        return None


class Alarm:
    """Lets one listener hear when memory goes, until it is closed; the listener only sets a flag.

    Args:
        ring: What is called, from any thread; it must hold nothing that is watched.
    """

    __slots__ = ("__weakref__", "_finalizers", "_ring")

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._finalizers: list[weakref.finalize[..., Any]] = []

    def hear(self, *objects: object) -> None:
        """Rings when one of ``objects`` goes, or is a buffer that is closed."""
        for obj in objects:
            if isinstance(obj, Buffer):
                obj.when_closed(self)
            try:
                finalizer = weakref.finalize(obj, self._ring)
            except TypeError:  # a kind without weak references
                continue
            finalizer.atexit = False
            self._finalizers.append(finalizer)

    def ring(self) -> None:
        """Says that something of what is heard has changed."""
        self._ring()

    def close(self) -> None:
        """Nothing is heard any more."""
        for finalizer in self._finalizers:
            finalizer.detach()
        self._finalizers.clear()
        self._ring = _nothing


def _nothing() -> None:
    """What a closed alarm does."""
