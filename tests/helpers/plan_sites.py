"""A plan with real buffers on a driver, and its work done in each of the ways a plan has."""

from __future__ import annotations

from typing import Any

from graphcore_kernels import strided_copy
from helpers.contract import Bench

from graphcore import Buffer, Graph, GraphPlan, PlanBuffer
from graphcore.driver import Driver, Stream

GRAPH_WAYS = ("build", "capture")
WAYS = (*GRAPH_WAYS, "run")


def make_graph(plan: GraphPlan, buffers: dict[str, Any], way: str, **options: Any) -> Graph:
    """The plan's graph, built or captured."""
    graph: Graph = getattr(plan, way)(buffers, **{"copy_kernel": strided_copy, **options})
    return graph


def do(
    plan: GraphPlan,
    buffers: dict[str, Any],
    way: str,
    stream: Stream,
    *,
    times: int = 1,
    **options: Any,
) -> None:
    """Does the plan's work ``times`` times on ``stream`` and waits for it."""
    driver: Driver = stream.driver
    options = {"copy_kernel": strided_copy, "driver": driver, **options}
    driver.synchronize()
    if way == "run":
        for _ in range(times):
            plan.run(buffers, stream, **options)
    else:
        with make_graph(plan, buffers, way, **options) as graph, graph.instantiate() as executable:
            for _ in range(times):
                executable.launch(stream)
            stream.synchronize()
    stream.synchronize()


class Site:
    """A plan that grows together with its buffers."""

    def __init__(self, bench: Bench, name: str = "site") -> None:
        self.bench = bench
        self.driver = bench.driver
        self.plan = GraphPlan(name)
        self.buffers: dict[str, Any] = {}

    def put(self, name: str, values: Any, dtype: str = "float32") -> PlanBuffer:
        """A buffer of the plan, and a real one that holds ``values``."""
        import numpy

        array = numpy.asarray(values, dtype)
        made = Buffer.allocate(array.shape, dtype, driver=self.driver)
        made.write(array)
        self.buffers[name] = made
        return self.plan.buffer(name, array.shape, dtype)

    def address(self, name: str) -> int:
        address: int = self.buffers[name].address
        return address

    def read(self, name: str) -> Any:
        """The contents as nested lists."""
        return self.buffers[name].read().tolist()

    def graph(self, way: str = "build", **options: Any) -> Graph:
        return make_graph(self.plan, self.buffers, way, **{"driver": self.driver, **options})

    def do(self, way: str, *, times: int = 1, **options: Any) -> None:
        do(self.plan, self.buffers, way, self.bench.stream, times=times, **options)
