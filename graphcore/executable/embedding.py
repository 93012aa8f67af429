"""Embedding: a launch inside a capture of ours becomes a child node of the captured graph."""

from __future__ import annotations

from collections.abc import Iterable

from graphcore.driver import Driver, active
from graphcore.driver.records import ChildParams, GraphHandle, StreamHandle
from graphcore.errors import CaptureError
from graphcore.executable.runs import Runs
from graphcore.resources.lifetime import OwnerSet


def embed(
    driver: Driver,
    graph: GraphHandle,
    stream: StreamHandle,
    owners: OwnerSet,
    runs: Iterable[Runs],
) -> None:
    """Adds ``graph`` to the capture of ``stream`` as a child node.

    The captured graph keeps ``owners``, and its runs count as runs of ``graph``, whose outputs they
    write.

    Raises:
        CaptureError: An error has invalidated the capture.
    """
    status = driver.capture_status(stream)
    if status.graph is None:
        raise CaptureError(
            "launch: expected a capture that is under way, got one that an error invalidated",
            code="CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        )
    node = driver.add_node(status.graph, status.frontier, ChildParams(graph))
    driver.set_capture_frontier(stream, [node])
    for owner in owners:
        active.keep(owner.object, owner.label)
    for each in runs:
        active.keep(each)
