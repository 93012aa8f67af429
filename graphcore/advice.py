"""What to use instead of names and objects that users of other libraries try first.

A wrong name is an attribute of its class that raises when it is read: what is there is read as fast
as without (a ``__getattr__`` on the class makes each call of a method two to three times slower),
and ``hasattr`` says False. What is advised is text: nothing here knows the classes.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, Literal, NoReturn, TypeVar

from graphcore.errors import CacheTypeError

_LAUNCH = "launch(stream) runs it"
_PICTURE = "drawing() has to_svg(), to_dot() and to_text()"
_CAPTURING = "a block captures: with graphcore.capture() as capture: ..., then capture.graph"
_INSTANTIATE = "executable = graph.instantiate() first, then executable."
_BUFFERS = "buffers are those of a layer: layers[index].keys and layers[index].values"
_CACHE = {
    "allocate": "early_initialization(...) makes the buffers",
    "clear": "reset() empties it in place",
    "empty": "reset() empties it in place",
    "get_max_cache_shape": "max_seq_len is how many tokens it holds at most",
    "get_usable_length": "seen_tokens is how many tokens it holds",
    "initialize": "early_initialization(...) makes the buffers",
    "key_cache": _BUFFERS,
    "length": "seen_tokens is how many tokens it holds, max_seq_len how many it can hold",
    "max_batch_size": "batch_size is how many rows it has",
    "max_cache_len": "max_seq_len is how many tokens it holds at most",
    "to_legacy_cache": _BUFFERS,
    "truncate": "rewind(position) goes back to so many tokens",
    "value_cache": _BUFFERS,
}

# class -> name that it does not have -> what to use instead
WRONG_NAMES: dict[str, dict[str, str]] = {
    "Buffer": {
        "copy_from_host": "write(values) writes it",
        "copy_to_host": "read() gives its values as a NumPy array",
        "data_ptr": "address is where it lies",
        "free": "close() gives it back",
        "get": "read() gives its values as a NumPy array",
        "numpy": "read() gives its values as a NumPy array",
        "set": "write(values) writes it",
    },
    "CUDAGraphAR": {
        "decode": "replay() decodes one token, generate(prompt) all of them",
        "forward": "capture(prompt) forwards a prompt, replay() decodes one token",
        "instantiate": "capture(prompt) does it; executable is what was made",
        "kv_cache": "cache is the cache in use",
        "launch": "replay() launches the step and counts its token",
        "past_key_values": "cache is the cache in use",
        "prefill": "capture(prompt) forwards a prompt",
        "reset": "cache.reset() empties the cache in place; the graph stays",
        "step": "replay() decodes one token",
        "update": "use(cache) takes another cache over",
        "warmup": "capture(prompt) warms the step up before it captures it",
    },
    "Capture": {
        "begin": _CAPTURING,
        "begin_building": _CAPTURING,
        "capture_begin": _CAPTURING,
        "capture_end": _CAPTURING,
        "end": _CAPTURING,
        "end_building": _CAPTURING,
        "instantiate": "capture.graph.instantiate(), after the block",
        "launch": "executable = capture.graph.instantiate() after the block, then "
        "executable.launch()",
        "outputs": "what the block computes is in your own variables; graphcore.capture_function "
        "keeps what its function returned",
        "replay": "executable = capture.graph.instantiate() after the block, then "
        "executable.launch()",
        "snapshot": "capture.graph.snapshot(), after the block",
        "start": _CAPTURING,
        "stop": _CAPTURING,
        "update": "executable.update(capture.graph) updates an executable that exists",
    },
    "CompiledPlan": {
        "replay": _LAUNCH,
        "run": _LAUNCH,
        "update": "executable.update(graph), where executable is not None",
    },
    "Driver": {
        "Stream": "stream() makes one",
        "capture": "graphcore.capture(driver=driver) captures",
        "current_stream": "graphcore.interop.current_stream(driver) is its handle",
        "graph": "graphcore.capture(driver=driver) or graphcore.GraphPlan makes one",
        "malloc": "alloc(bytes) gives memory, graphcore.Buffer.allocate a buffer",
        "memcpy": "Buffer.write and Buffer.read move values, copy(params, stream) device memory",
        "memset": "fill(params, stream) fills device memory",
        "sync": "synchronize() waits for all work",
    },
    "EncoderDecoderKVCache": {
        **_CACHE,
        "layers": "decoder_half.layers and encoder_half.layers are those of the two halves",
        "max_cache_len": "max_seq_len and encoder_len are how many tokens its halves hold at most",
    },
    "Event": {
        "elapsed_time": "end.elapsed_ms_since(start) gives milliseconds",
        "record": "stream.record(event) records it",
        "wait": "stream.wait(event) lets a stream wait for it, synchronize() the host",
    },
    "Graph": {
        "add_kernel_node": "nodes are written with graphcore.GraphPlan, before the graph is built",
        "begin_capture": _CAPTURING,
        "capture_begin": _CAPTURING,
        "capture_end": _CAPTURING,
        "check": _INSTANTIATE + "check()",
        "debug_dot_print": _PICTURE,
        "debug_dump": _PICTURE,
        "edges": "snapshot().edges are its edges",
        "end_capture": _CAPTURING,
        "exec": "instantiate() makes an executable",
        "executable": "instantiate() makes an executable",
        "launch": _INSTANTIATE + "launch(stream)",
        "nodes": "snapshot().nodes are its nodes",
        "pool": "private_memory() is the graph's alone; graphcore.capture(pool=pool) takes one",
        "raw_cuda_graph": "handle is the driver's handle",
        "rebind": _INSTANTIATE + "rebind(...)",
        "replay": _INSTANTIATE + "launch(stream)",
        "reset": "close() lets go of it",
        "run": _INSTANTIATE + "launch(stream)",
        "to_dot": _PICTURE,
        "to_svg": _PICTURE,
        "update": "an executable is updated: executable.update(graph)",
        "upload": _INSTANTIATE + "upload(stream)",
    },
    "GraphCache": {
        "get_or_create": "get_or_capture(key, function) captures at a miss",
        "hits": "counters.hits counts them",
        "invalidate": "evict(key) drops an entry",
        "misses": "counters.misses counts them",
        "pop": "evict(key) drops an entry",
        "put": "get_or_build(key, lambda: graph) takes a graph that exists",
        "remove": "evict(key) drops an entry",
        "reset": "clear() drops all entries",
        "stats": "counters are numbers, decisions say why",
    },
    "GraphExec": {
        "clone": "executable.graph.clone().instantiate() makes another one",
        "debug_dump": _PICTURE.replace("drawing()", "snapshot().drawing()"),
        "drawing": "snapshot().drawing() draws what runs now",
        "edges": "snapshot().edges are its edges",
        "instantiate": "it is an executable already; executable.graph.instantiate() makes another",
        "is_stale": "check() lists what is stale; empty is valid",
        "nodes": "snapshot().nodes are its nodes",
        "pool": "private_memory() is what is the graph's alone",
        "raw_cuda_graph": "executable.graph.handle is the graph's handle",
        "raw_cuda_graph_exec": "handle is the driver's handle",
        "replay": _LAUNCH,
        "reset": "close() gives it back",
        "run": _LAUNCH,
        "synchronize": "wait for the stream of the launch, or driver.synchronize()",
        "to_html_page": "executable.graph.to_html_page() makes a page",
    },
    "GraphPlan": {
        "add_kernel_node": "launch(kernel, config, *arguments) adds one",
        "add_node": "launch, memcpy, memset, callback and call add nodes",
        "alloc": "allocate(name, shape) is memory of the graph, buffer(name, shape) is given to it",
        "copy": "memcpy(dst, src) adds a copy",
        "execute": "run(buffers) runs it directly, build(buffers) makes a graph",
        "fill": "memset(dst, value) adds a fill",
        "free": "deallocate(buffer) ends what allocate began",
        "instantiate": "build(buffers).instantiate(), or compile(buffers)",
        "kernel": "launch(kernel, config, *arguments) adds a kernel",
        "replay": "compile(buffers) gives what has launch(stream)",
        "snapshot": "build(buffers).snapshot(); nodes are those of the plan",
        "to_html_page": "drawing().to_html_page(title) makes a page",
        "while_": "while_loop(condition) opens a loop",
    },
    "OutputGuard": {
        "numpy": "get() gives the tensor",
        "read": "get() gives the tensor",
        "tensor": "get() gives the tensor",
        "value": "get() gives the tensor",
    },
    "StaticKVCache": _CACHE,
    "Stream": {
        "begin_capture": "a block captures: with graphcore.capture(stream) as capture: ...",
        "end_capture": "a block captures: with graphcore.capture(stream) as capture: ...",
        "record_event": "record(event) records one",
        "sync": "synchronize() waits for its work",
        "use": "graphcore.interop.use_stream(driver, stream) is a block of work on it",
        "wait_event": "wait(event) lets later work wait",
        "wait_stream": "wait(other.record()) waits for the work of another stream",
    },
    "UpdateOutcome": {
        "ok": "is_current says whether the executable does what the graph says",
        "success": "is_current says whether the executable does what the graph says",
        "updated": "status is UPDATED, REINSTANTIATED or REFUSED",
    },
    "graphcore": {
        "CUDAGraph": "graphcore.capture() or graphcore.GraphPlan makes a graphcore.Graph",
        "CUDAGraphAR": "write: from graphcore.decode import CUDAGraphAR",
        "EncoderDecoderKVCache": "write: from graphcore.decode import EncoderDecoderKVCache",
        "Sampling": "write: from graphcore.decode import Sampling",
        "StaticCache": "write: from graphcore.decode import StaticKVCache",
        "StaticKVCache": "write: from graphcore.decode import StaticKVCache",
        "generate": "write: from graphcore.decode import generate",
        "graphed": "graphcore.capture_function(function, *arguments) captures a function",
        "instantiate": "graph.instantiate() makes an executable",
        "launch": "graph.instantiate().launch(stream) runs a graph",
        "make_graphed_callables": "graphcore.capture_function(function, *arguments) captures a "
        "function",
        "stream": "graphcore.open_driver().stream() makes a stream",
        "synchronize": "driver.synchronize() waits for all work, stream.synchronize() for its own",
    },
}  # fmt: skip

_MADE_BY = {
    "Event": "driver.event() and stream.record() make events",
    "Graph": "graphcore.capture(), graphcore.capture_function and GraphPlan.build make graphs",
    "GraphExec": "graph.instantiate() makes executables",
    "Stream": "driver.stream() makes streams, with driver = graphcore.open_driver()",
}

Wanted = Literal["event", "executable", "function", "graph", "stream"]

# what is wanted -> class that was given -> what to give
_INSTEAD: dict[Wanted, dict[str, str]] = {
    "event": {"Stream": "stream.record() gives one of the work that a stream has by now"},
    "executable": {
        "CUDAGraph": "Graph.adopt(graph).instantiate() makes one",
        "CUDAGraphAR": "runner.executable is one",
        "Capture": "capture.graph.instantiate() makes one",
        "CompiledPlan": "compiled.executable is one",
        "Graph": "graph.instantiate() makes one",
        "GraphPlan": "plan.build(buffers).instantiate() makes one",
    },
    "function": {
        "Graph": "get_or_build(key, lambda: graph) and plan.embed(graph) take graphs that exist",
        "GraphExec": "give the function that launches the work, not what was made of it",
        "NoneType": "give the function itself, without calling it",
        "Tensor": "give the function itself, without calling it",
    },
    "graph": {
        "CUDAGraph": "Graph.adopt takes it",
        "CUDAGraphAR": "runner.graph is one",
        "Capture": "capture.graph is one, after the block",
        "CompiledPlan": "compiled.executable.graph is one",
        "GraphExec": "executable.graph is one",
        "GraphPlan": "plan.build(buffers) makes one",
        "GraphSnapshot": "a snapshot is data, of which no graph can be made",
    },
    "stream": {
        "Capture": "capture.stream is one",
        "Driver": "driver.stream() makes one",
        "Event": "stream.wait(event) lets a stream wait for an event",
        "Fork": "fork.stream is one",
        "Graph": "a graph is launched as graph.instantiate().launch(stream)",
        "GraphExec": "an executable is launched as executable.launch(stream)",
    },
}

T = TypeVar("T", bound=type)


def instead(given: object, wanted: Wanted) -> str:
    """What to give instead of ``given``, to be put behind an error's message; else empty."""
    advice = _INSTEAD[wanted]
    names = (base.__name__ for base in type(given).__mro__)
    return next((f"; {advice[name]}" for name in names if name in advice), "")


def advises(cls: T) -> T:
    """Makes wrong names of ``cls`` say what to use instead; a decorator.

    What the class has by itself or from its bases stays as it is: what transformers' caches have
    differs from version to version.
    """
    for name, advice in WRONG_NAMES.get(cls.__name__, {}).items():
        if not hasattr(cls, name):
            setattr(cls, name, _WrongName(cls.__name__, name, advice))
    cls.__dir__ = _dir  # type: ignore[assignment]
    made_by = _MADE_BY.get(cls.__name__)
    if made_by is not None:
        _refuse_call(cls, made_by)
    return cls


class _WrongName:
    """An attribute that is not there, and says what is."""

    def __init__(self, kind: str, name: str, advice: str) -> None:
        self.name = name
        self.message = f"{kind!r} object has no attribute {name!r}: {advice}"
        self.__doc__ = f"Not there: {advice}."  # for the pages of help()

    def __get__(self, instance: object, owner: type) -> NoReturn:
        # of no object: Python would add "Did you mean", with some name that reads alike
        raise AttributeError(self.message, name=self.name, obj=None)


def _dir(self: object) -> list[str]:
    return [name for name in object.__dir__(self) if not _is_wrong(self, name)]


def _is_wrong(obj: object, name: str) -> bool:
    if name in getattr(obj, "__dict__", ()):
        return False
    found = next((vars(base)[name] for base in type(obj).__mro__ if name in vars(base)), None)
    return isinstance(found, _WrongName)


def _refuse_call(cls: type, made_by: str) -> None:
    """Makes ``cls()`` and ``cls(something)`` say who makes its objects, of two parts or more."""

    @wraps(cls.__init__)  # type: ignore[misc]  # for inspect.signature, which asks here first
    def new(kind: type, *args: Any, **keywords: Any) -> Any:
        if kind is cls and len(args) + len(keywords) < 2:
            raise CacheTypeError(f"{cls.__name__}: is not made by calling the class; {made_by}")
        return object.__new__(kind)

    new.__name__, new.__qualname__ = "__new__", f"{cls.__qualname__}.__new__"
    cls.__new__ = new  # type: ignore[method-assign,assignment]
