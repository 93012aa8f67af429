"""Captures into conditional bodies: captured apart, moved in once they have succeeded.

A capture that fails takes its graph with it, also one that was given to it and belongs to a
conditional node: whoever destroys the node's graph afterwards (the end of an invalidated capture of
the parent does) frees the body twice, and the process dies inside libcuda. So a body is never
captured into. Its capture makes a graph of its own; when that stands, each node is added to the
body with the very structure the driver gives for it, its attributes, and its edges with their data.

What follows from that:

* ``capture_status`` names the graph that takes the nodes, which is not the body; node handles read
  during the capture end with it;
* a body takes kernels, copies, fills, empty nodes and child graphs this way. A conditional node
  cannot be copied: it is added to the body by hand, and its own bodies are captured into. Nodes of
  other kinds no body may hold;
* a captured child graph moves as a new graph with copies of its nodes: CUDA refuses to embed one
  that is embedded already;
* a copy gets the context of the body's driver, not the one it was captured in: bodies refuse nodes
  of several contexts;
* host callbacks need no thought: host nodes are of no kind that moves.

Bodies are those of conditional nodes that the same driver object added.
"""

from __future__ import annotations

from typing import Any

from graphcore.driver.codes import cuda_error
from graphcore.driver.cuda.check import ask
from graphcore.driver.cuda.graphs import GraphCalls, change_edges
from graphcore.driver.cuda.versions import cuda
from graphcore.driver.records import Edge, GraphHandle, NodeHandle, NodeKind


class BodyCalls(GraphCalls):
    """The part of the driver that fills conditional bodies with what was captured."""

    def _is_body(self, graph: GraphHandle) -> bool:
        return any(graph in made.bodies for _, made in self._conditionals.values())

    def _move_into_body(self, captured: GraphHandle, body: GraphHandle) -> None:
        """Adds what ``captured`` holds to ``body``; ``captured`` is gone, whatever happens.

        Raises:
            CudaError: A node that cannot move, or the body is gone; the body is as it was.
        """
        became: dict[NodeHandle, NodeHandle] = {}
        try:
            if not self._is_body(body):
                raise cuda_error(
                    "CUDA_ERROR_INVALID_VALUE",
                    "cuStreamEndCapture",
                    description="the graph with the conditional body was destroyed meanwhile",
                )
            self._copy_graph(captured, body, became)
        except BaseException:
            for copied in became.values():
                cuda.cuGraphDestroyNode(copied)
            raise
        finally:
            self.destroy_graph(captured)

    def _copy_graph(
        self, source: GraphHandle, target: GraphHandle, became: dict[NodeHandle, NodeHandle]
    ) -> None:
        """Adds copies of all nodes and edges; ``became`` has those that were added, also after."""
        for node in self.nodes(source):
            became[node] = NodeHandle(int(self._copy_node(node, target)))
        edges = [
            Edge(became[edge.source], became[edge.target], edge.data) for edge in self.edges(source)
        ]
        change_edges(cuda.cuGraphAddDependencies, target, edges)

    def _copy_child(self, node: NodeHandle, place: tuple[GraphHandle, list[Any], int]) -> Any:
        child = GraphHandle(int(ask(cuda.cuGraphChildGraphNodeGetGraph, node)))
        copy = self.create_graph()
        try:
            self._copy_graph(child, copy, {})
            return ask(cuda.cuGraphAddChildGraphNode, *place, copy)
        finally:
            self.destroy_graph(copy)

    def _copy_node(self, node: NodeHandle, graph: GraphHandle) -> Any:
        """A node of ``graph`` that does what ``node`` does, without dependencies."""
        place: tuple[GraphHandle, list[Any], int] = (graph, [], 0)
        kind = self._kind(node)
        match kind:
            case NodeKind.KERNEL:
                return _copy_kernel(node, place)
            case NodeKind.MEMCPY:
                copy = ask(cuda.cuGraphMemcpyNodeGetParams, node)
                return ask(cuda.cuGraphAddMemcpyNode, *place, copy, self._context.object)
            case NodeKind.MEMSET:
                fill = ask(cuda.cuGraphMemsetNodeGetParams, node)
                return ask(cuda.cuGraphAddMemsetNode, *place, fill, self._context.object)
            case NodeKind.EMPTY:
                return ask(cuda.cuGraphAddEmptyNode, *place)
            case NodeKind.CHILD:
                return self._copy_child(node, place)
        raise cuda_error(
            "CUDA_ERROR_NOT_SUPPORTED",
            "cuStreamEndCapture",
            description=f"a conditional body takes no captured node of kind {kind.value}",
        )


def _copy_kernel(node: NodeHandle, place: tuple[GraphHandle, list[Any], int]) -> Any:
    # the structure points at argument bytes of the captured node, which are copied by the call
    params = ask(cuda.cuGraphKernelNodeGetParams, node)
    copied = ask(cuda.cuGraphAddKernelNode, *place, params)
    try:
        ask(cuda.cuGraphKernelNodeCopyAttributes, copied, node)
    except BaseException:
        cuda.cuGraphDestroyNode(copied)
        raise
    return copied
