"""How others launch the chain of suite launch: each peer captures the same kernels its own way.

A peer is a function of the chain that returns a call and its arguments, as a user of that library
writes it; they hold whatever is needed alive. What it raises where its library is missing or cannot
do it becomes a note.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from graphcore.bench.suites.chain import Chain
from graphcore.driver.records import StreamHandle

Launch = tuple[Callable[..., object], *tuple[object, ...]]
"""A call, then its arguments."""


def cuda_bindings(chain: Chain) -> Launch:
    """``cuGraphLaunch`` of the bindings, bound with handle objects made once."""
    bindings = importlib.import_module("cuda.bindings.driver")
    executable = chain.driver.instantiate(chain.graph.handle)
    return (
        bindings.cuGraphLaunch,
        bindings.CUgraphExec(executable),
        bindings.CUstream(chain.stream.handle),
    )


def torch(chain: Chain) -> Launch:
    """``torch.cuda.CUDAGraph.replay``; torch's current stream is changed for good."""
    library = importlib.import_module("torch")
    stream = library.cuda.Stream(device=chain.driver.device)
    graph = library.cuda.CUDAGraph()
    with library.cuda.graph(graph, stream=stream):
        chain.launch_on(StreamHandle(stream.cuda_stream))
    library.cuda.set_stream(stream)
    return (graph.replay,)


def cuda_core(chain: Chain) -> Launch:
    """``launch`` of a graph built by cuda.core's graph builder."""
    library = cuda_core_module()
    device = library.Device(chain.driver.device)
    device.set_current()
    builder = device.create_graph_builder()
    builder.begin_building()
    chain.launch_on(StreamHandle(int(builder.stream.handle)))
    graph = builder.end_building().complete()
    return graph.launch, device.create_stream()


def cupy(chain: Chain) -> Launch:
    """``launch`` of a graph captured by CuPy."""
    library = importlib.import_module("cupy")
    with library.cuda.Device(chain.driver.device):
        stream = library.cuda.Stream(non_blocking=True)
        stream.begin_capture()
        try:
            chain.launch_on(StreamHandle(stream.ptr))
        finally:
            graph = stream.end_capture()
    return graph.launch, stream


def cuda_core_module() -> Any:
    """cuda.core, under the name its version has; ImportError where it is missing."""
    library = importlib.import_module("cuda.core")
    if hasattr(library, "Device"):
        return library
    return importlib.import_module("cuda.core.experimental")  # before cuda.core 1.0


def driver_call(chain: Chain) -> Launch:
    """Our own driver's unbound call: the peer on the emulated driver, where there are no others."""
    executable = chain.driver.instantiate(chain.graph.handle)
    return chain.driver.launch_graph, executable, chain.stream.handle


# the order matters once: CuPy is loaded before our launch is bound, which then goes through it
PEERS: Mapping[str, Callable[[Chain], Launch]] = {
    "CuPy": cupy,
    "torch": torch,
    "cuda.core": cuda_core,
    "cuda.bindings": cuda_bindings,
}
EMULATED_PEERS: Mapping[str, Callable[[Chain], Launch]] = {"driver call": driver_call}
