"""Streams and events as objects: ours, and anything another library calls a stream.

A :class:`Stream` owns its handle or borrows it; it speaks ``__cuda_stream__``, so CuPy, cuda.core
and torch accept it. Nothing here looks up a current stream: interop/ does.
"""

from __future__ import annotations

import warnings
import weakref
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from graphcore.advice import advises, instead
from graphcore.driver import active
from graphcore.driver.records import EventHandle, StreamHandle
from graphcore.errors import CacheTypeError, GraphcoreError, GraphcoreWarning, LifecycleError

if TYPE_CHECKING:
    from graphcore.driver.api import Driver


class UsesStream(Protocol):
    """What holds a call that is bound to a stream."""

    def stream_closed(self) -> None: ...


@advises
class Stream:
    """A stream of a driver. Made by :meth:`Driver.stream` (owned) or :func:`as_stream` (borrowed).

    Not locked. ``close()`` is final; closing a borrowed stream only forgets it.
    """

    def __init__(
        self, driver: Driver, handle: StreamHandle, *, owned: bool, keep: object = None
    ) -> None:
        self.driver = driver
        self.handle = handle
        self.owned = owned
        self._keep = keep  # the foreign object whose stream this is
        self._closer = self._when_dropped()
        self._closer.atexit = False
        if not owned:
            self._closer.detach()
        self._closed = False
        self._users: weakref.WeakSet[UsesStream] | None = None

    def __reduce_ex__(self, protocol: object) -> Any:
        raise CacheTypeError(
            f"{type(self).__name__}: cannot be copied or pickled, its handle is of a driver here; "
            "make one in the other process"
        )

    def __cuda_stream__(self) -> tuple[int, int]:
        """The stream protocol: (version 0, handle)."""
        return (0, self._live())

    def __int__(self) -> int:
        return self._live()

    @property
    def is_blocking(self) -> bool:
        """Whether the stream orders with the legacy stream; fixed when it was made."""
        return self.driver.stream_is_blocking(self._live())

    def synchronize(self) -> None:
        """Waits for the stream's work."""
        self.driver.synchronize_stream(self._live())

    def query(self) -> bool:
        """Whether the stream's work has finished."""
        return self.driver.query_stream(self._live())

    def record(self, event: Event | None = None, *, external: bool = False) -> Event:
        """Records ``event`` (a new one where None) and returns it.

        Raises:
            CacheTypeError: ``event`` is no event.
        """
        event = self.driver.event() if event is None else _checked(event)
        self.driver.record_event(event.handle, self._live(), external=external)
        return event

    def wait(self, event: Event, *, external: bool = False) -> None:
        """Makes later work wait for ``event``.

        Raises:
            CacheTypeError: ``event`` is no event.
        """
        self.driver.wait_event(self._live(), _checked(event).handle, external=external)

    def close(self) -> None:
        """Destroys an owned stream after its work; a second call does nothing."""
        if not self._closed:
            self._closed = True
            users, self._users = self._users, None
            for user in users or ():
                user.stream_closed()
            self._closer()

    def when_closed(self, user: UsesStream) -> None:
        """Tells ``user``, which is held weakly, when the stream is closed."""
        if self._users is None:
            self._users = weakref.WeakSet()
        self._users.add(user)

    def _when_dropped(self) -> weakref.finalize[..., Stream]:
        return weakref.finalize(self, destroy_quietly, self.driver.destroy_stream, self.handle)

    def _live(self) -> StreamHandle:
        if self._closed:
            raise LifecycleError("stream: expected an open stream, got a closed one")
        return self.handle

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        owner = "owned" if self.owned else "borrowed"
        return f"<Stream {self.handle:#x} {self.driver.name}:{self.driver.device} {owner}>"


@advises
class Event:
    """An event of a driver, owned. Not locked."""

    def __init__(self, driver: Driver, handle: EventHandle) -> None:
        self.driver = driver
        self.handle = handle
        self._closer = weakref.finalize(self, destroy_quietly, driver.destroy_event, handle)
        self._closer.atexit = False

    def __reduce_ex__(self, protocol: object) -> Any:
        raise CacheTypeError(
            f"{type(self).__name__}: cannot be copied or pickled, its handle is of a driver here; "
            "make one in the other process"
        )

    def synchronize(self) -> None:
        """Waits until the recorded work has finished."""
        self.driver.synchronize_event(self.handle)

    def query(self) -> bool:
        """Whether the recorded work has finished."""
        return self.driver.query_event(self.handle)

    def elapsed_ms_since(self, start: Event) -> float:
        """Milliseconds from ``start`` to this event; both need ``timing=True``."""
        return self.driver.elapsed_ms(start.handle, self.handle)

    def close(self) -> None:
        """Destroys the event; a second call does nothing."""
        self._closer()


def _checked(event: Any) -> Event:
    if not isinstance(event, Event):
        raise CacheTypeError(
            f"event: expected a graphcore.Event, got {type(event).__name__}"
            f"{instead(event, 'event')}"
        )
    return event


def stream_handle(stream: Any) -> StreamHandle:
    """The handle of anything that is a stream: ours, torch's, CuPy's, cuda.core's, or an int.

    Raises:
        CacheTypeError: ``stream`` is none of these.
    """
    if isinstance(stream, Stream):
        return stream._live()
    if isinstance(stream, int) and not isinstance(stream, bool):
        return StreamHandle(stream)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version, handle = protocol() if callable(protocol) else protocol
        if version != 0:
            raise CacheTypeError(f"stream: expected __cuda_stream__ version 0, got {version}")
        return StreamHandle(int(handle))
    for attribute in ("cuda_stream", "ptr"):  # torch.cuda.Stream; cupy.cuda.Stream
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return StreamHandle(handle)
    raise CacheTypeError(
        "stream: expected a graphcore, torch, CuPy or cuda.core stream, an object with "
        f"__cuda_stream__, or an int; got {type(stream).__name__}{instead(stream, 'stream')}"
    )


def as_stream(driver: Driver, stream: Any) -> Stream:
    """``stream`` as a :class:`Stream` of ``driver``: itself, or a borrowed view that keeps it."""
    if isinstance(stream, Stream):
        if stream.driver is not driver and (
            stream.driver.name != driver.name or stream.driver.device != driver.device
        ):
            raise CacheTypeError(
                f"stream: expected one of driver {driver.name}:{driver.device}, got one of "
                f"{stream.driver.name}:{stream.driver.device}"
            )
        return stream
    return Stream(driver, stream_handle(stream), owned=False, keep=stream)


def destroy_quietly(destroy: Any, handle: int) -> None:
    """Destroys from a finalizer, where nothing can be raised: a failure becomes a warning."""
    if active.in_callback():
        active.when_idle(partial(destroy_quietly, destroy, handle))
        return
    try:
        destroy(handle)
    except GraphcoreError as error:
        warnings.warn(f"while finalizing: {error}", GraphcoreWarning, stacklevel=2)
