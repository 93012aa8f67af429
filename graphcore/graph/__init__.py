"""What a graph is: node records, snapshots, reading and comparing them. Pure data, no handles."""

from graphcore.graph.attributes import LaunchAttributes
from graphcore.graph.diff import FieldChange, GraphDiff, NodeChange, diff
from graphcore.graph.nodes import Argument, NodeRecord
from graphcore.graph.prediction import Difference, first_difference, trap_differences
from graphcore.graph.reading import read
from graphcore.graph.snapshot import GraphSnapshot
from graphcore.graph.topology import TopologyChange

__all__ = [
    "Argument",
    "Difference",
    "FieldChange",
    "GraphDiff",
    "GraphSnapshot",
    "LaunchAttributes",
    "NodeChange",
    "NodeRecord",
    "TopologyChange",
    "diff",
    "first_difference",
    "read",
    "trap_differences",
]
