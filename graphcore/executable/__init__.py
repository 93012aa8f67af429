"""What holds driver handles: capture, Graph, GraphExec, and what an update came to."""

from graphcore.executable.branches import Fork
from graphcore.executable.capture_session import Capture
from graphcore.executable.capturing import capture, capture_function
from graphcore.executable.graph import Graph
from graphcore.executable.graph_exec import GraphExec
from graphcore.executable.memory_report import MemoryReport
from graphcore.executable.output_guard import OutputGuard
from graphcore.executable.rebinding import RebindOutcome, RebindRoute
from graphcore.executable.static_inputs import StaticInputs
from graphcore.executable.update import UpdateOutcome, UpdateStatus
from graphcore.resources.staleness import StaleResource

__all__ = [
    "Capture",
    "Fork",
    "Graph",
    "GraphExec",
    "MemoryReport",
    "OutputGuard",
    "RebindOutcome",
    "RebindRoute",
    "StaleResource",
    "StaticInputs",
    "UpdateOutcome",
    "UpdateStatus",
    "capture",
    "capture_function",
]
