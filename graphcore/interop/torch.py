"""torch: its current stream, a memory pool for a capture, names for nodes, graphs to adopt.

Everything but :func:`require`, :func:`annotate_modules` and :func:`without_cached_casts` does
nothing where torch is not loaded or has no CUDA device.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

from graphcore.driver import Driver, Stream
from graphcore.driver.lent_streams import is_given_up
from graphcore.errors import ConfigurationError, DriverUnavailable
from graphcore.interop.pool_snapshot import pool_snapshot
from graphcore.interop.pool_uses import pool_uses


class Annotating(Protocol):
    """A capture that names nodes."""

    def annotate(self, label: str) -> AbstractContextManager[None]: ...


def is_loaded() -> bool:
    """Whether the process has imported torch."""
    return hasattr(sys.modules.get("torch"), "cuda")


def require() -> Any:
    """torch; DriverUnavailable with the install line where it is missing."""
    try:
        import torch
    except ImportError as error:
        raise DriverUnavailable(
            f"torch is needed here and cannot be imported ({error}): "
            "pip install 'graphcore-cuda[torch]'"
        ) from error
    return torch


def _with_device() -> Any:
    """Gives torch where it is loaded and has a CUDA device; else None."""
    if not is_loaded():
        return None
    torch = sys.modules["torch"]
    return torch if torch.cuda.is_available() else None


def current_stream(device: int) -> int | None:
    """Handle of torch's current stream on ``device``; None where torch has not begun with CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    handle: int = torch._C._cuda_getCurrentRawStream(device)
    return handle


def current_stream_reader(device: int) -> Callable[[], int] | None:
    """What calls torch at once for :func:`current_stream`; None where torch has not begun.

    It holds for good: torch that has begun with CUDA does not end.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return partial(torch._C._cuda_getCurrentRawStream, device)


@contextmanager
def use_stream(handle: int, device: int) -> Iterator[None]:
    """Makes ``handle`` torch's current stream and ``device`` its current device."""
    torch = _with_device()
    if torch is None:
        yield
        return
    with torch.cuda.device(device):
        if handle in (0, 1):  # torch names the legacy stream its default one
            stream = torch.cuda.default_stream(device)
        else:
            stream = torch.cuda.ExternalStream(handle, device=device)
        with torch.cuda.stream(stream):
            yield


@contextmanager
def without_cached_casts() -> Iterator[None]:
    """Lets autocast cast weights anew in the block, and forget the casts it kept from before.

    autocast keeps the casts of weights for its block. A graph that was captured with the address of
    one would read memory that is freed when the block ends, and would not follow the weight. A cast
    that was made in a capture lies in the graph's memory, which holds nothing before a launch.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "clear_autocast_cache"):  # while it is being imported
        yield
        return
    before = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)
        torch.clear_autocast_cache()
        yield
    finally:
        try:
            torch.clear_autocast_cache()  # blocks inside may have kept some
            torch.set_autocast_cache_enabled(before)
        finally:  # where Ctrl-C came into the first
            torch.clear_autocast_cache()
            torch.set_autocast_cache_enabled(before)


class MemoryPool:
    """A torch memory pool, or nothing where torch has no device.

    What a captured step allocates through torch lives here; whoever owns the graph must own the
    pool for as long as the graph or one of its executables can be launched.

    Several captures may share one (``capture(pool=...)``): what one step has freed by its end, the
    next one's temporaries take. Such graphs must not run at the same time, and a launch of one may
    overwrite an output of another; clone what has to outlive it. torch gives freed memory only to
    the stream it came from, so captures into a shared pool without a stream of their own take the
    pool's (:meth:`capture_stream`).
    """

    def __init__(self, device: int) -> None:
        self._torch = _with_device()
        self.device = device
        # the only reference to torch's pool: it must not die while another one is in use
        self._holder: list[Any] = [] if self._torch is None else [self._torch.cuda.MemPool()]
        weakref.finalize(self, pool_uses.drop, self._holder).atexit = False
        self.captures = 0
        """How many captures have used it; one that more than one used is shared."""
        self._graphs: list[weakref.ref[Any]] = []
        self._streams: dict[tuple[int, bool], Stream] = {}

    @property
    def pool(self) -> Any:
        """The ``MemPool`` of torch; None where torch has no device. Do not keep it."""
        return self._holder[0] if self._holder else None

    @property
    def is_shared(self) -> bool:
        """Whether more than one capture used it, so that graphs lie in each other's memory."""
        return self.captures > 1

    def note_capture(self, runs: object) -> None:
        """Notes a graph that was captured into the pool, by the counter of its runs."""
        self.captures += 1
        self._graphs = [each for each in self._graphs if each() is not None]
        self._graphs.append(weakref.ref(runs))

    def captured_before(self, runs: object) -> list[Any]:
        """The counters, as far as they live, of graphs captured before that of ``runs``.

        Temporaries of these may lie where that graph's outputs do. Of later ones they cannot:
        memory of an output that is alive is given to nobody.
        """
        before: list[Any] = []
        for each in self._graphs:
            other = each()
            if other is runs:
                return before
            if other is not None:
                before.append(other)
        return []

    def capture_stream(self, driver: Driver, *, blocking: bool, products: bool) -> Stream:
        """The stream that captures into this pool take where none is given.

        ``blocking``, ``products``: as of :meth:`Driver.capture_stream`, where it is lent now.
        """
        key = (driver.context_id(), blocking)
        if key not in self._streams or is_given_up(self._streams[key]):
            self._streams[key] = driver.capture_stream(blocking=blocking, products=products)
        return self._streams[key]

    @property
    def library(self) -> Any:
        """torch; None where it has no device."""
        return self._torch

    def pieces(self) -> list[dict[str, Any]]:
        """What torch's snapshot says of every segment it holds for the pool."""
        return self.reader()()

    def reader(self) -> Callable[[], list[dict[str, Any]]]:
        """Reads :meth:`pieces`, also for who keeps torch's pool when this object is gone."""
        if self.pool is None:
            return list
        assert self._torch is not None
        return partial(pool_snapshot, self._torch.cuda.memory_snapshot, self.pool.id)

    def segments(self) -> list[tuple[int, int]]:
        """(address, bytes) of every segment torch holds for the pool."""
        return [(piece["address"], piece["total_size"]) for piece in self.pieces()]

    def bytes(self) -> int:
        """Bytes of all segments: what the pool takes of the device, used or not."""
        return sum(size for _, size in self.segments())

    def use(self) -> AbstractContextManager[None]:
        """Lets this thread's torch allocations on the device come from the pool."""
        if self._torch is None:
            return nullcontext()
        return pool_uses.use(self._torch.cuda.use_mem_pool(self.pool, self.device))

    def __repr__(self) -> str:
        return f"<MemoryPool device {self.device}, {self.captures} captures>"


@contextmanager
def memory_pool(device: int) -> Iterator[MemoryPool]:
    """A new pool that this thread's torch allocations come from inside the block.

    Keep what it yields: the memory goes back when it is dropped.
    """
    pool = MemoryPool(device)
    with pool.use():
        yield pool


@contextmanager
def annotate_modules(
    capture: Annotating, module: Any, names: Iterable[str] | None = None
) -> Iterator[None]:
    """Names the nodes that each submodule's forward captures, by hooks removed at the end.

    A nested module's label is its name below the nearest annotated module around it, so that paths
    read "model/layers.3/self_attn".

    Args:
        capture: The capture under way.
        module: A ``torch.nn.Module``.
        names: Dotted names of submodules (as of ``named_modules``); None is all of them.

    Raises:
        ConfigurationError: A name that the module does not have.
    """
    chosen = _chosen_modules(module, names)
    with ExitStack() as hooks:
        for name, part in chosen.items():
            _Annotation(capture, _relative(name, chosen), part, hooks)
        yield


def _chosen_modules(module: Any, names: Iterable[str] | None) -> dict[str, Any]:
    known = {name: part for name, part in module.named_modules() if name}
    if names is None:
        # containers are never called: their parts are named through them, "layers.3"
        unused = require().nn.Module.forward
        return {name: part for name, part in known.items() if type(part).forward is not unused}
    wanted = list(names)
    missing = [name for name in wanted if name not in known]
    if missing:
        raise ConfigurationError(
            f"names: expected names of submodules of {type(module).__name__}, got {missing}"
        )
    return {name: known[name] for name in wanted}


def _relative(name: str, chosen: Iterable[str]) -> str:
    around = [other for other in chosen if name.startswith(other + ".")]
    return name[len(max(around, key=len)) + 1 :] if around else name


class _Annotation:
    """Two forward hooks of one module; a module may call itself, so blocks are stacked."""

    def __init__(self, capture: Annotating, label: str, module: Any, hooks: ExitStack) -> None:
        self._capture = capture
        self._label = label
        self._open: list[AbstractContextManager[None]] = []
        before = module.register_forward_pre_hook(self._begin)
        hooks.callback(before.remove)
        # always_call: a forward that raises must close its block too
        after = module.register_forward_hook(self._end, always_call=True)
        hooks.callback(after.remove)

    def _begin(self, *_: Any) -> None:
        block = self._capture.annotate(self._label)
        block.__enter__()
        self._open.append(block)

    def _end(self, *_: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)


def raw_graph(graph: Any) -> int:
    """The ``CUgraph`` handle of a ``torch.cuda.CUDAGraph`` made with ``keep_graph=True``.

    Raises:
        ConfigurationError: torch gives no handle; the message says why.
    """
    try:
        return int(graph.raw_cuda_graph())
    except RuntimeError as error:
        raise ConfigurationError(
            "graph: expected a captured torch.cuda.CUDAGraph(keep_graph=True), got one without a "
            f"graph to read: {error}"
        ) from error


def is_graph(obj: Any) -> bool:
    """Whether ``obj`` is a ``torch.cuda.CUDAGraph``."""
    return is_loaded() and hasattr(obj, "raw_cuda_graph")
