"""graphcore: build, capture, read, check, change and reuse CUDA graphs.

Public names are loaded when they are first used: importing this package loads no NumPy, torch, CuPy
or CUDA library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# public name -> the module that has it
_HOMES = {
    "Buffer": "graphcore.resources.buffer",
    "CacheCounters": "graphcore.reuse",
    "CacheTypeError": "graphcore.errors",
    "CapacityError": "graphcore.errors",
    "Capture": "graphcore.executable",
    "CaptureError": "graphcore.errors",
    "CompiledPlan": "graphcore.plan",
    "ConfigurationError": "graphcore.errors",
    "CudaError": "graphcore.errors",
    "Driver": "graphcore.driver",
    "DriverUnavailable": "graphcore.errors",
    "EagerExec": "graphcore.reuse",
    "Event": "graphcore.driver",
    "Fingerprint": "graphcore.resources.fingerprint",
    "Fork": "graphcore.executable",
    "Graph": "graphcore.executable",
    "GraphCache": "graphcore.reuse",
    "GraphDiff": "graphcore.graph",
    "GraphExec": "graphcore.executable",
    "GraphPlan": "graphcore.plan",
    "GraphSnapshot": "graphcore.graph",
    "GraphcoreError": "graphcore.errors",
    "GraphcoreWarning": "graphcore.errors",
    "Kernel": "graphcore.driver",
    "LaunchConfig": "graphcore.driver.records",
    "LifecycleError": "graphcore.errors",
    "MemoryReport": "graphcore.executable",
    "OutputGuard": "graphcore.executable",
    "OverwrittenOutputError": "graphcore.errors",
    "PlanBuffer": "graphcore.plan",
    "PlanError": "graphcore.errors",
    "PlanNode": "graphcore.plan",
    "PlanProblem": "graphcore.plan",
    "RankError": "graphcore.errors",
    "RebindOutcome": "graphcore.executable",
    "RebindRoute": "graphcore.executable",
    "ReplayProfile": "graphcore.executable.replay_profile",
    "StaleGraphError": "graphcore.errors",
    "StaleResource": "graphcore.executable",
    "StaticInputs": "graphcore.executable",
    "Stream": "graphcore.driver",
    "UpdateOutcome": "graphcore.executable",
    "UpdateRefused": "graphcore.errors",
    "UpdateStatus": "graphcore.executable",
    "capture": "graphcore.executable",
    "capture_function": "graphcore.executable",
    "diff": "graphcore.executable.comparing",
    "fingerprint": "graphcore.resources.fingerprint",
    "kernel": "graphcore.driver",
    "open_driver": "graphcore.driver",
    "set_conditional": "graphcore.driver.emulated",
    "trace_replays": "graphcore.executable.tracing",
}

# packages that are imported by themselves
_PARTS = ["bench", "decode", "interop", "moe", "parallel", "plan", "resources", "reuse", "testing"]

__all__ = [
    "Buffer",
    "CacheCounters",
    "CacheTypeError",
    "CapacityError",
    "Capture",
    "CaptureError",
    "CompiledPlan",
    "ConfigurationError",
    "CudaError",
    "Driver",
    "DriverUnavailable",
    "EagerExec",
    "Event",
    "Fingerprint",
    "Fork",
    "Graph",
    "GraphCache",
    "GraphDiff",
    "GraphExec",
    "GraphPlan",
    "GraphSnapshot",
    "GraphcoreError",
    "GraphcoreWarning",
    "Kernel",
    "LaunchConfig",
    "LifecycleError",
    "MemoryReport",
    "OutputGuard",
    "OverwrittenOutputError",
    "PlanBuffer",
    "PlanError",
    "PlanNode",
    "PlanProblem",
    "RankError",
    "RebindOutcome",
    "RebindRoute",
    "ReplayProfile",
    "StaleGraphError",
    "StaleResource",
    "StaticInputs",
    "Stream",
    "UpdateOutcome",
    "UpdateRefused",
    "UpdateStatus",
    "capture",
    "capture_function",
    "diff",
    "fingerprint",
    "kernel",
    "open_driver",
    "set_conditional",
    "trace_replays",
]

if TYPE_CHECKING:
    from graphcore.driver import Driver, Event, Kernel, Stream, kernel, open_driver
    from graphcore.driver.emulated import set_conditional
    from graphcore.driver.records import LaunchConfig
    from graphcore.errors import (
        CacheTypeError,
        CapacityError,
        CaptureError,
        ConfigurationError,
        CudaError,
        DriverUnavailable,
        GraphcoreError,
        GraphcoreWarning,
        LifecycleError,
        OverwrittenOutputError,
        PlanError,
        RankError,
        StaleGraphError,
        UpdateRefused,
    )
    from graphcore.executable import (
        Capture,
        Fork,
        Graph,
        GraphExec,
        MemoryReport,
        OutputGuard,
        RebindOutcome,
        RebindRoute,
        StaleResource,
        StaticInputs,
        UpdateOutcome,
        UpdateStatus,
        capture,
        capture_function,
    )
    from graphcore.executable.comparing import diff
    from graphcore.executable.replay_profile import ReplayProfile
    from graphcore.executable.tracing import trace_replays
    from graphcore.graph import GraphDiff, GraphSnapshot
    from graphcore.plan import CompiledPlan, GraphPlan, PlanBuffer, PlanNode, PlanProblem
    from graphcore.resources.buffer import Buffer
    from graphcore.resources.fingerprint import Fingerprint, fingerprint
    from graphcore.reuse import CacheCounters, EagerExec, GraphCache


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_advice(name)}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def _advice(name: str) -> str:
    """What to write instead, where ``name`` is a part imported by itself, or a usual mistake."""
    if name in _PARTS:
        return f"; write: import graphcore.{name}"
    from graphcore.advice import WRONG_NAMES

    advice = WRONG_NAMES["graphcore"].get(name)
    return f": {advice}" if advice else ""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
