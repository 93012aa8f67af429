"""How others change what an executable does, for suite update: whole updates and new captures.

A peer is a function of two chains (the same kernels on other memory) that returns a call. Each call
makes the executable run the other chain and launches it, as a user of that library writes it.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from graphcore.bench.suites.chain import Chain
from graphcore.bench.suites.launch_peers import cuda_core_module
from graphcore.bench.suites.update_pairs import Pair
from graphcore.driver.records import StreamHandle


def cuda_bindings(pair: Pair) -> Callable[[], object]:
    """``cuGraphExecUpdate`` and ``cuGraphLaunch`` of the bindings, with objects made once."""
    bindings = importlib.import_module("cuda.bindings.driver")
    first = pair[0]
    executable = bindings.CUgraphExec(first.driver.instantiate(first.graph.handle))
    stream = bindings.CUstream(first.stream.handle)
    graphs = itertools.cycle([bindings.CUgraph(chain.graph.handle) for chain in pair[::-1]])

    def call() -> None:
        bindings.cuGraphExecUpdate(executable, next(graphs))
        bindings.cuGraphLaunch(executable, stream)

    return call


def cuda_core(pair: Pair) -> Callable[[], object]:
    """``update`` and ``launch`` of graphs built by cuda.core's graph builder."""
    library = cuda_core_module()
    device = library.Device(pair[0].driver.device)
    device.set_current()
    builders = [_built(device, chain) for chain in pair]
    graph, stream = builders[0].complete(), device.create_stream()
    others = itertools.cycle(builders[::-1])

    def call() -> None:
        graph.update(next(others))
        graph.launch(stream)

    return call


def torch_capture(pair: Pair) -> Callable[[], object]:
    """A new ``torch.cuda.CUDAGraph`` captured and replayed: torch has no update of its own."""
    library = importlib.import_module("torch")
    stream = library.cuda.Stream(device=pair[0].driver.device)
    chains = itertools.cycle(pair[::-1])

    def call() -> None:
        graph = library.cuda.CUDAGraph()
        with library.cuda.graph(graph, stream=stream):
            next(chains).launch_on(StreamHandle(stream.cuda_stream))
        with library.cuda.stream(stream):
            graph.replay()

    return call


def driver_call(pair: Pair) -> Callable[[], object]:
    """Our own driver's calls: the peer on the emulated driver, where there are no others."""
    driver, stream = pair[0].driver, pair[0].stream.handle
    executable = driver.instantiate(pair[0].graph.handle)
    graphs = itertools.cycle([chain.graph.handle for chain in pair[::-1]])

    def call() -> None:
        driver.update_exec(executable, next(graphs))
        driver.launch_graph(executable, stream)

    return call


def _built(device: Any, chain: Chain) -> Any:
    builder = device.create_graph_builder()
    builder.begin_building()
    chain.launch_on(StreamHandle(int(builder.stream.handle)))
    return builder.end_building()


PEERS: Mapping[str, Callable[[Pair], Callable[[], object]]] = {
    "cuda.core": cuda_core,
    "cuda.bindings": cuda_bindings,
    "torch re-capture": torch_capture,
}
EMULATED_PEERS: Mapping[str, Callable[[Pair], Callable[[], object]]] = {"driver call": driver_call}
