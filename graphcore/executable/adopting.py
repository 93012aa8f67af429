"""Graphs of other libraries: their handles, and whether they are still there."""

from __future__ import annotations

from typing import Any

from graphcore.advice import instead
from graphcore.driver.records import GraphHandle
from graphcore.errors import CacheTypeError, ConfigurationError, LifecycleError
from graphcore.interop import cuda_core
from graphcore.interop import torch as torch_interop


def refuse_gone(obj: Any, handle: GraphHandle) -> None:
    """LifecycleError where ``obj`` has another graph than the one that was adopted, or none."""
    try:
        now = raw_handle(obj)
    except (ConfigurationError, CacheTypeError) as error:
        raise LifecycleError(
            f"graph: the adopted {type(obj).__name__} has destroyed its graph (a reset or close): "
            f"adopt its next one; {error}"
        ) from error
    if now != handle:
        raise LifecycleError(
            f"graph: the adopted {type(obj).__name__} has another graph now ({now:#x}, adopted was "
            f"{handle:#x}): adopt it again"
        )


def raw_handle(obj: Any) -> GraphHandle:
    """The handle of another library's graph; raises as ``Graph.adopt`` says."""
    if isinstance(obj, int) and not isinstance(obj, bool):
        return GraphHandle(obj)
    if torch_interop.is_graph(obj):
        return GraphHandle(torch_interop.raw_graph(obj))
    handle = cuda_core.raw_graph(obj)
    if handle is None:
        raise CacheTypeError(
            "graph: expected a torch.cuda.CUDAGraph(keep_graph=True), a cuda.core GraphDefinition "
            f"or GraphBuilder, a CUgraph or an int handle; got {type(obj).__name__}"
            f"{instead(obj, 'graph')}"
        )
    return GraphHandle(handle)
