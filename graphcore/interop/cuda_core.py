"""cuda.core and cuda.bindings: the ``CUgraph`` handle of their graph objects.

Works by what objects offer, so that nothing is imported.
"""

from __future__ import annotations

from typing import Any

from graphcore.errors import ConfigurationError


def raw_graph(obj: Any) -> int | None:
    """The handle of a cuda.core ``GraphDefinition`` or ``GraphBuilder``, or of a ``CUgraph``.

    None for anything else.

    Raises:
        ConfigurationError: An executable graph, or a builder that has not finished.
    """
    name = type(obj).__name__
    if name in ("CUgraph", "cudaGraph_t"):
        return int(obj)
    if name in ("CUgraphExec", "cudaGraphExec_t") or _is_executable(obj):
        raise ConfigurationError(
            f"graph: expected a graph description, got an executable ({name}); adopt the "
            "definition or builder it was made from"
        )
    if getattr(obj, "is_building", False):
        raise ConfigurationError(f"graph: expected a finished {name}, got one that is building")
    definition = getattr(obj, "graph_definition", obj)
    handle = getattr(definition, "handle", None)
    if handle is None or type(handle).__name__ != "CUgraph":
        return None
    return int(handle)


def _is_executable(obj: Any) -> bool:
    return type(getattr(obj, "handle", None)).__name__ == "CUgraphExec"
