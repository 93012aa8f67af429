"""trace_replays(): a few replays under a profiler, as a table of times and a trace file.

On a device torch.profiler records them through CUPTI; the emulated driver times its own nodes on
the host and says so. Both end in one Chrome trace format, which Perfetto and chrome://tracing open.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from graphcore.advice import instead
from graphcore.driver import active, as_stream
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.emulated.execution import Executable
from graphcore.driver.emulated.graph import Node
from graphcore.driver.records import Dim3, KernelParams
from graphcore.errors import CacheTypeError, ConfigurationError, DriverUnavailable, LifecycleError
from graphcore.executable.graph_exec import GraphExec
from graphcore.executable.replay_matching import TIMED, TimedEvent, match
from graphcore.executable.replay_profile import EMULATED, ReplayProfile
from graphcore.interop import current_stream
from graphcore.interop.torch_profiler import chrome_trace, require_profiler

_CATEGORIES = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
Trace = dict[str, Any]


def trace_replays(
    exec_: GraphExec, path: str | Path | None = None, *, replays: int = 3, stream: Any = None
) -> ReplayProfile:
    """Replays a graph under a profiler: how long did each node take?

    The graph really runs ``replays`` + 1 times (the first is not measured). Profiling makes a
    replay slower as a whole; a node's own time is what it is.

    Args:
        exec_: The executable.
        path: Where to write the trace: ``.json``, or ``.json.gz``. None writes none.
        replays: How many are measured.
        stream: As of :meth:`GraphExec.launch`.

    Raises:
        CacheTypeError: ``exec_`` is no executable.
        ConfigurationError: ``replays``, or a path that cannot be written (before anything runs).
        DriverUnavailable: torch is missing or cannot profile the device, or it recorded nothing.
        LifecycleError: Closed, or a capture is under way on this thread.
        StaleGraphError, CudaError: As of :meth:`GraphExec.launch`.
    """
    _check(exec_, replays)
    target = None if path is None else _checked_path(path)
    driver = exec_.driver
    if not isinstance(driver, EmulatedDriver):
        require_profiler()
    snapshot = exec_.graph.snapshot()
    handle = current_stream(driver) if stream is None else as_stream(driver, stream).handle

    def run(times: int = replays) -> None:
        for _ in range(times):
            exec_.launch(stream)
        driver.synchronize_stream(handle)

    run(1)
    if isinstance(driver, EmulatedDriver):
        events, trace = _emulated(driver, exec_, stream, replays)
    else:
        trace = chrome_trace(run)
        events = _device_events(trace, driver.device, replays)
    if not events and any(node.kind in TIMED for node in snapshot.walk()):
        raise DriverUnavailable(
            "trace: the profiler recorded nothing of the replays: CUPTI is missing, not allowed "
            "here (CUPTI_ERROR_INSUFFICIENT_PRIVILEGES), or used by another profiler"
        )
    rows = match([event for event, _ in events], snapshot, replays)
    for event, entry in events:
        _name(entry, event)
    if target is not None:
        _write(target, trace)
    span = _span([event for event, _ in events], replays)
    return ReplayProfile(rows, replays, span, driver.name, driver.is_emulated, snapshot)


def _name(entry: Trace, event: TimedEvent) -> None:
    """Writes into a trace's entry which node it is of, and of what kind that is."""
    entry["cat"] = _category(event.kind)  # a copy that CUDA did by a kernel is a copy
    if event.node:
        entry["args"] |= {"node": event.node, "label": event.label}


def _category(kind: str) -> str:
    return "kernel" if kind == "kernel" else f"gpu_{kind}"


def _check(exec_: Any, replays: Any) -> None:
    if not isinstance(exec_, GraphExec):
        raise CacheTypeError(
            f"exec_: expected a GraphExec, got {type(exec_).__name__}{instead(exec_, 'executable')}"
        )
    if isinstance(replays, bool) or not isinstance(replays, int) or replays < 1:
        raise ConfigurationError(f"replays: expected 1 or more, got {replays!r}")
    if active.current() is not None:
        raise LifecycleError("trace: not while a capture is under way on this thread")


def _checked_path(path: str | Path) -> Path:
    target = Path(path)
    if target.suffix not in (".json", ".gz"):
        raise ConfigurationError(f"path: expected one that ends in .json or .json.gz, got {path}")
    if target.is_dir() or not target.parent.is_dir():
        raise ConfigurationError(f"path: expected a file in a folder that exists, got {path}")
    return target


def _write(target: Path, trace: Trace) -> None:
    text = json.dumps(trace).encode()
    try:
        target.write_bytes(gzip.compress(text) if target.suffix == ".gz" else text)
    except OSError as error:
        raise ConfigurationError(
            f"path: expected a file that can be written, got {target} ({error.strerror})"
        ) from error


def _span(events: Iterable[TimedEvent], replays: int) -> float:
    """Mean microseconds from the first start to the last end of a replay."""
    spans: dict[int, tuple[float, float]] = {}
    for event in events:
        start, end = spans.get(event.replay, (event.start_us, event.start_us))
        spans[event.replay] = min(start, event.start_us), max(end, event.start_us + event.us)
    return sum(end - start for start, end in spans.values()) / replays


# ---- a device ------------------------------------------------------------------------------------


def _device_events(trace: Trace, device: int, replays: int) -> list[tuple[TimedEvent, Trace]]:
    """What ran on ``device``, by replay, with the trace's own entry of each."""
    entries = [
        entry
        for entry in trace.get("traceEvents", ())
        if entry.get("cat") in _CATEGORIES and entry.get("args", {}).get("device") == device
    ]
    entries.sort(key=lambda entry: entry["ts"])
    replay_of = _replays_of(entries, replays)
    return [
        (_event(entry, replay), entry) for entry, replay in zip(entries, replay_of, strict=True)
    ]


def _replays_of(entries: list[Trace], replays: int) -> list[int]:
    """The replay of each entry: one launch gives all its nodes one correlation number."""
    numbers = [entry["args"].get("correlation") for entry in entries]
    order = {number: at for at, number in enumerate(dict.fromkeys(numbers))}
    if len(order) == replays:
        return [order[number] for number in numbers]
    # no such numbers: replays follow each other on one stream, and are alike
    return [at * replays // len(entries) for at in range(len(entries))]


def _event(entry: Trace, replay: int) -> TimedEvent:
    arguments = entry["args"]
    return TimedEvent(
        _CATEGORIES[entry["cat"]],
        entry["name"],
        float(entry["ts"]),
        float(entry.get("dur", 0.0)),
        replay,
        _dimension(arguments.get("grid")),
        _dimension(arguments.get("block")),
        arguments.get("graph node id"),
    )


def _dimension(value: Any) -> Dim3 | None:
    if not isinstance(value, list) or len(value) != 3:
        return None
    x, y, z = value
    return int(x), int(y), int(z)


# ---- the emulated driver -------------------------------------------------------------------------


def _emulated(
    driver: EmulatedDriver, exec_: GraphExec, stream: Any, replays: int
) -> tuple[list[tuple[TimedEvent, Trace]], Trace]:
    """Times of the nodes as the emulated driver ran them, and a trace that says what they are."""
    events: list[tuple[TimedEvent, Trace]] = []
    numbers: dict[Node, int] = {}
    replay = 0

    def observe(executable: Executable, node: Node, start: float, end: float) -> None:
        if node.kind not in TIMED:
            return
        if not numbers:
            numbers.update({one: at for at, one in enumerate(executable.graph.all_nodes())})
        event = _emulated_event(node, start, end, replay, numbers[node])
        events.append((event, _entry(event, driver.device)))

    with driver.observed(observe):
        for replay in range(replays):  # noqa: B007 - the observer reads it
            exec_.launch(stream)
    name = {"name": f"emulated device {driver.device} ({EMULATED})"}
    process = {"ph": "M", "name": "process_name", "pid": driver.device, "tid": 0, "args": name}
    entries = [process, *(entry for _, entry in events)]
    return events, {"traceEvents": entries, "displayTimeUnit": "ms", "emulated": EMULATED}


def _emulated_event(node: Node, start: float, end: float, replay: int, number: int) -> TimedEvent:
    params, function = node.payload.params, node.payload.function
    event = TimedEvent(
        node.kind.value, node.kind.value, start * 1e6, (end - start) * 1e6, replay, node_id=number
    )
    if isinstance(params, KernelParams) and function is not None:
        event.name = function.operation.name
        event.grid, event.block = params.config.grid, params.config.block
    return event


def _entry(event: TimedEvent, device: int) -> Trace:
    arguments: Trace = {
        "device": device,
        "correlation": event.replay,
        "graph node id": event.node_id,
        "emulated": EMULATED,
    }
    if event.grid is not None:
        arguments |= {"grid": list(event.grid), "block": list(event.block or ())}
    return {
        "ph": "X",
        "cat": _category(event.kind),
        "name": event.name,
        "pid": device,
        "tid": 0,
        "ts": event.start_us,
        "dur": event.us,
        "args": arguments,
    }
