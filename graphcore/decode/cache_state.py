"""What all layers of a static cache share: the device position, its host mirror, who watches.

The position is a 0-d int64 tensor that a step advances in place; it says which slot the next token
takes. ``seen`` mirrors it on the host, so that capacity is checked before anything is launched. A
capture moves neither; inside a compiled region Python runs only while tracing, so ``seen`` is not
kept there and is read from the device when next asked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from graphcore.decode.access import Access, Form
from graphcore.driver import active
from graphcore.errors import CapacityError, CaptureError, ConfigurationError, LifecycleError


class CacheWatcher(Protocol):
    """Who depends on a cache: a runner, with or without a captured graph."""

    @property
    def holds_graph(self) -> bool:
        """Whether a graph with the cache's addresses exists."""

    def cache_changed(self, name: str, how: str) -> None:
        """The buffer ``name`` is no longer the one that was captured."""

    def cache_was_emptied(self, reason: str) -> None:
        """The buffers are the same, but their contents are not those of the last step."""


def is_capturing() -> bool:
    """Whether this thread records a graph now, through graphcore or through torch."""
    if active.current() is not None:
        return True
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def refuse_inside_capture(action: str) -> None:
    """Raises CaptureError where ``action`` would become part of a graph or a compiled region."""
    if torch.compiler.is_compiling():
        raise CaptureError(f"{action}: not inside a compiled region; do it before the first step")
    if is_capturing():
        raise CaptureError(f"{action}: not while a graph is captured; do it before the capture")


def static_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A buffer for life: marked static for torch.compile, writable in and out of inference mode.

    A tensor born in inference mode could not be written outside of it.
    """
    with torch.inference_mode(False):
        buffer = torch.zeros(shape, dtype=dtype, device=device)
    torch._dynamo.mark_static_address(buffer)
    return buffer


class CacheState:
    """Position, capacity and watchers of one cache. Not locked."""

    name = "cache position"
    """What reports call the position."""

    def __init__(self, capacity: int, device: torch.device, last_owner: int) -> None:
        self.capacity = capacity
        self.last_owner = last_owner
        self.seen: int | None = 0
        self.reached = 0
        """Tokens that any layer was given by Python: more than ``seen`` after a failed forward."""
        self.lost: str | None = None
        """Why what is held is more than what was returned; None: it is not."""
        self._access: tuple[Access, bool] | None = None
        self._device = device
        self._position = static_zeros((), torch.int64, device)
        self._watchers: weakref.WeakSet[CacheWatcher] = weakref.WeakSet()
        self._writer: CacheWatcher | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a copy of the cache takes with it: nobody watches it, no graph depends on it."""
        return {**self.__dict__, "_watchers": None, "_writer": None, "_access": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _watchers=weakref.WeakSet())

    @property
    def position(self) -> torch.Tensor:
        """0-d int64 on the device: the slot that the next token takes."""
        return self._position

    @position.setter
    def position(self, tensor: torch.Tensor) -> None:
        if tensor is self._position:
            return
        if not self.is_captured:
            self.check_position(tensor)
        self._position = tensor
        self.seen = None
        self._access = None
        self.changed(self.name, f"bound to another tensor ({tensor.dtype})")

    def check_position(self, tensor: torch.Tensor) -> None:
        """Raises ConfigurationError unless ``tensor`` can be the position."""
        if (tensor.dtype, tensor.dim(), tensor.device) != (torch.int64, 0, self._device):
            raise ConfigurationError(
                f"position: expected a 0-d torch.int64 tensor on {self._device}, got "
                f"{tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}"
            )

    @property
    def is_captured(self) -> bool:
        """Whether a graph depends on the buffers."""
        return any(watcher.holds_graph for watcher in self._watchers)

    @property
    def is_written_by_others(self) -> bool:
        """Whether nobody has announced, by :meth:`written_by`, that it writes."""
        return self._writer is None

    def watch(self, watcher: CacheWatcher) -> None:
        """Tells ``watcher`` (held weakly) of every change from now on."""
        self._watchers.add(watcher)

    def unwatch(self, watcher: CacheWatcher) -> None:
        """Forgets ``watcher``."""
        self._watchers.discard(watcher)

    def changed(self, name: str, how: str) -> None:
        """Tells the watchers that a buffer is not the captured one any more."""
        for watcher in list(self._watchers):
            watcher.cache_changed(name, how)

    def emptied(self, reason: str, *, by: CacheWatcher | None = None) -> None:
        """Tells the watchers, except ``by``, that the contents are not what they left."""
        for watcher in list(self._watchers):
            if watcher is not by:
                watcher.cache_was_emptied(reason)

    def known_seen(self) -> int:
        """The mirror; read from the device (which waits for it) where a compiled step moved it."""
        if self.seen is None:
            self.seen = int(self._position.item())
        return self.seen

    def seek(self, position: int, reached: int | None = None) -> None:
        """Sets device position and mirror.

        ``reached``: tokens that were written before; rings have overwritten what they have, however
        often one goes back. None: none that count.
        """
        self._position.fill_(position)
        self.seen = position
        self.reached = reached if reached and position else position
        self._access = None
        if position == 0:
            self.lost = None

    def check_continues(self) -> None:
        """Raises LifecycleError where what is held is more than what was returned."""
        if self.lost is not None and self.seen != 0:
            raise LifecycleError(f"nothing can follow what the cache holds: {self.lost}")

    def check_room(self, length: int) -> None:
        """Raises CapacityError unless ``length`` more tokens fit."""
        seen = self.known_seen()
        if seen + length > self.capacity:
            raise CapacityError(
                f"max_seq_len: capacity is {self.capacity} tokens and {seen} are held; "
                f"{length} more need {seen + length}. Nothing was written"
            )

    def begin_access(
        self,
        length: int,
        *,
        positions: torch.Tensor | None = None,
        form: Form | None = None,
    ) -> Access:
        """Says how the rings answer the forward of the next ``length`` tokens.

        Args:
            length: T.
            positions: int64 ``[T]`` of the tokens; None: made here.
            form: None: the ring itself for one token; for several what the window needs, in a form
                that fits a graph where one is being made.
        """
        compiling = torch.compiler.is_compiling()
        in_graph = compiling or is_capturing()
        if form is None:
            form = Form.SLOTS if length == 1 else Form.FIXED if in_graph else Form.TOKENS
        positions = self.slots(length) if positions is None else positions
        access = Access(positions, form, self._seen_for_access(compiling, in_graph))
        if not compiling:  # kept past a compiled region, its next run would overwrite it
            self._access = (access, in_graph)
        return access

    def _seen_for_access(self, compiling: bool, in_graph: bool) -> int | None:
        if compiling:  # not even looked at: the region would be compiled again for each number
            return None
        return self.seen if in_graph else self.known_seen()

    def access_for(self, length: int) -> Access:
        """What :meth:`begin_access` said of the forward under way; else its default."""
        if self._access is not None and not torch.compiler.is_compiling():
            access, in_graph = self._access
            # left from a forward that failed: no longer true
            if (access.length, access.seen, in_graph) == (length, self.seen, is_capturing()):
                return access
        return self.begin_access(length)

    def slots(self, length: int) -> torch.Tensor:
        """Int64 ``[length]`` on the device: where the next ``length`` tokens go."""
        if length == 1:
            return self._position.view(1)
        return self._position + torch.arange(length, device=self._position.device)

    def note_reached(self, length: int) -> None:
        """Notes that Python gave a layer the next ``length`` tokens."""
        if not (torch.compiler.is_compiling() or is_capturing()):
            self.reached = max(self.reached, self.known_seen() + length)

    def advance(self, length: int) -> None:
        """Moves the device position in place, and the mirror where Python runs each step."""
        self._position.add_(length)
        if torch.compiler.is_compiling():
            self.seen = None
            return
        self._access = None
        if not is_capturing():
            if self.seen is not None:
                self.seen += length
            if self.is_written_by_others:
                self.emptied("tokens were written to the cache by somebody else")

    @contextmanager
    def written_by(self, watcher: CacheWatcher) -> Iterator[None]:
        """Inside the block ``watcher`` itself lets the model write."""
        before, self._writer = self._writer, watcher
        try:
            yield
        finally:
            self._writer = before
