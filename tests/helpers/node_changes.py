"""Small graphs whose nodes a test changes, and what they leave."""

from __future__ import annotations

from typing import Any

from helpers.contract import Bench
from helpers.graph_specs import Spec, Step, build
from helpers.kernels import fill_value
from helpers.tensors import replay

from graphcore import Graph, GraphExec
from graphcore.driver.records import NodeParams


def graph_of(bench: Bench, *steps: Any) -> Graph:
    spec: Spec = tuple(step if isinstance(step, Step) else Step(step) for step in steps)
    return Graph(bench.driver, build(bench, spec), owned=False)


def filling(bench: Bench, x: int, value: float) -> NodeParams:
    return bench.kernel_params(fill_value, x, value, 4)


def launched(executable: GraphExec, bench: Bench, address: int) -> list[float]:
    """What a launch leaves at ``address``, which is poisoned before."""
    bench.poison(address, 16)
    replay(executable, bench.stream)
    return bench.get(address, 4)
