"""The rows of suite update that change k of n nodes one by one and launch.

Ours are prepared forms (``GraphExec.bind_params``); the floor is a C loop over the driver's call
with structures made once, and the peer the call of the bindings with objects made once.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from typing import Any

from graphcore.bench.cloop import KernelNode, NodeLoop
from graphcore.bench.harness import Arm, measure, python_arm
from graphcore.bench.results import Row, row_of
from graphcore.bench.suites import Request
from graphcore.bench.suites.update_pairs import Pair, Step, effort
from graphcore.driver.records import KernelParams
from graphcore.errors import GraphcoreError

OURS = "ours"


class NodeChanges:
    """The first ``changed`` nodes of a chain, moved to the other chain's memory and back.

    The executable begins with all nodes on the first chain's memory.
    """

    def __init__(self, pair: Pair, changed: int) -> None:
        self.pair = pair
        self.changed = changed
        first = pair[0]
        self.driver, self.stream = first.driver, first.stream
        self.nodes = self.driver.nodes(first.graph.handle)[:changed]
        self._executable = first.graph.instantiate()
        bound = [self._executable.bind_params(node) for node in range(changed)]
        turns = itertools.cycle([chain.arguments() for chain in pair[::-1]])

        def step() -> None:
            arguments = next(turns)
            for change in bound:
                change(*arguments)
            self._executable.launch(self.stream)

        self.step: Step = step

    def check(self, name: str, step: Step) -> None:
        """Two steps: the first must move the changed nodes to the other memory, the second back.

        Raises:
            GraphcoreError: The arm ``name`` did something else.
        """
        length = self.pair[0].length
        for expected in ((length - self.changed, self.changed), (length, 0)):
            for chain in self.pair:
                chain.clear()
            step()
            found = tuple(chain.sum() for chain in self.pair)
            if found != expected:
                raise GraphcoreError(
                    f"bench update: arm {name}: expected one call to add {expected} to the two "
                    f"sums, got {found}"
                )

    def params(self) -> tuple[KernelParams, KernelParams]:
        """What the nodes are set to in turn."""
        both = [self.driver.node_params(self.driver.nodes(c.graph.handle)[0]) for c in self.pair]
        assert isinstance(both[0], KernelParams)
        assert isinstance(both[1], KernelParams)
        return both[1], both[0]


def measure_nodes(case: str, pair: Pair, changed: int, request: Request) -> Row:
    """The row of ``changed`` nodes of a pair of chains."""
    changes = NodeChanges(pair, changed)
    driver = changes.driver
    floor, peer = _floor(changes), _peer(changes)
    arms = [floor, _arm(changes, OURS, changes.step), peer]
    timings = measure(arms, effort(driver, request), driver.synchronize)
    return row_of(case, timings, ours=OURS, floor=floor.name, peers=[peer.name], allowance=0.0)


def _arm(changes: NodeChanges, name: str, step: Step) -> Arm:
    changes.check(name, step)
    return python_arm(name, step)


def _floor(changes: NodeChanges) -> Arm:
    driver, stream = changes.driver, changes.stream.handle
    executable = driver.instantiate(changes.pair[0].graph.handle)
    if driver.is_emulated:
        return _arm(changes, "driver calls", _driver_calls(changes))
    loop = NodeLoop()
    one, other = (KernelNode(params) for params in changes.params())
    both = itertools.cycle([(one, other), (other, one)])
    once = functools.partial(loop.seconds, executable, changes.nodes)
    changes.check("C loop", lambda: once(next(both), stream, 1))
    return Arm("C loop", lambda calls: once((one, other), stream, calls))


def _peer(changes: NodeChanges) -> Arm:
    if changes.driver.is_emulated:
        return _arm(changes, "driver call", _driver_calls(changes))
    return _arm(changes, "cuda.bindings", _bindings(changes))


def _driver_calls(changes: NodeChanges) -> Step:
    driver, stream = changes.driver, changes.stream.handle
    executable = driver.instantiate(changes.pair[0].graph.handle)
    turns = itertools.cycle(changes.params())

    def step() -> None:
        params = next(turns)
        for node in changes.nodes:
            driver.set_exec_node_params(executable, node, params)
        driver.launch_graph(executable, stream)

    return step


def _bindings(changes: NodeChanges) -> Step:
    bindings = importlib.import_module("cuda.bindings.driver")
    executable = bindings.CUgraphExec(changes.driver.instantiate(changes.pair[0].graph.handle))
    stream = bindings.CUstream(changes.stream.handle)
    nodes = [bindings.CUgraphNode(node) for node in changes.nodes]
    # each structure points at arguments that its KernelNode keeps
    kept = [KernelNode(params) for params in changes.params()]
    turns = itertools.cycle([(_structure(bindings, each), each) for each in kept])

    def step() -> None:
        params, _ = next(turns)
        for node in nodes:
            bindings.cuGraphExecKernelNodeSetParams(executable, node, params)
        bindings.cuGraphLaunch(executable, stream)

    return step


def _structure(bindings: Any, node: KernelNode) -> Any:
    """``CUDA_KERNEL_NODE_PARAMS`` of the bindings with the fields of ``node``."""
    return bindings.CUDA_KERNEL_NODE_PARAMS(_ptr=node.address)
