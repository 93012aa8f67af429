"""Plans inside plans: which view stands for which buffer, and what that does to the outer memory.

A binding has the layout of the buffer it stands for, so that a view of the buffer is a view of the
binding's own buffer, moved by the binding's offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphcore.advice import instead
from graphcore.errors import ConfigurationError, PlanError
from graphcore.plan.records import Embed, PlanBuffer, View
from graphcore.plan.views import as_view

if TYPE_CHECKING:
    from graphcore.plan.contents import PlanContents
    from graphcore.plan.plan import GraphPlan

Bindings = Mapping[str, View]
"""View of the outer plan by the name of the embedded plan's buffer."""


def bind(
    outer: PlanContents, inner: GraphPlan, bindings: Mapping[str, Any]
) -> tuple[Embed, tuple[View, ...], tuple[View, ...]]:
    """The record of an embedded plan, and what it reads and writes of the outer plan's memory.

    Raises:
        PlanError: A buffer without binding or the reverse, or a plan that would contain itself.
        ConfigurationError: A binding that is no view, or one of another layout.
    """
    if not isinstance(bindings, Mapping):
        raise ConfigurationError(
            f"bindings: expected a mapping of buffer name -> view, got {type(bindings).__name__}"
        )
    if inner.is_body:
        raise PlanError(
            f"{inner.name!r} is a body of a conditional node, which no other plan can embed"
        )
    if any(registry is outer._registry for registry in inner._registry.reached()):
        raise PlanError(f"plan {inner.name!r} cannot be embedded: it would contain itself")
    views = {name: as_view(value, f"bindings[{name!r}]") for name, value in bindings.items()}
    work = Embed(inner, tuple(views.items()))
    unmatched = next(unmatched_names(work), None)
    if unmatched:
        raise PlanError(unmatched)
    misfit = next(misfits(work), None)
    if misfit:
        raise ConfigurationError(misfit)
    from graphcore.plan.accesses import memory_of

    reads, writes = memory_of(inner, views)
    return work, reads, writes


def check_embedding(what: Any, bindings: Mapping[str, Any] | None) -> Any:
    """``what``, which must be a graph of graphcore.

    Raises:
        ConfigurationError: It is something else, or there are bindings.
    """
    from graphcore.executable.graph import Graph

    if not isinstance(what, Graph):
        raise ConfigurationError(
            "embed: expected a GraphPlan or a Graph (Graph.adopt takes graphs of other libraries), "
            f"got {type(what).__name__}{instead(what, 'graph')}"
        )
    if bindings is not None and not (isinstance(bindings, Mapping) and not bindings):
        raise ConfigurationError("bindings: a graph that exists has its addresses already")
    return what


def unmatched_names(work: Embed) -> Iterator[str]:
    """What is wrong with the names of an embedded plan's bindings."""
    wanted = {name for name, buffer in work.plan.buffers.items() if buffer.origin == "argument"}
    given = {name for name, _ in work.bindings}
    title = f"embedded plan {work.plan.name!r}"
    for name in sorted(wanted - given):
        yield f"{title}: buffer {name!r} has no binding"
    for name in sorted(given - wanted):
        known = ", ".join(sorted(wanted)) or "none"
        yield f"{title}: binding {name!r} is no argument buffer of it (it has {known})"


def misfits(work: Embed) -> Iterator[str]:
    """Bindings of another layout than the buffer they stand for."""
    buffers = work.plan.buffers
    for name, view in work.bindings:
        buffer = buffers.get(name)
        if buffer is not None and not _is_alike(buffer, view):
            yield (
                f"embedded plan {work.plan.name!r}: buffer {name!r} is {_layout(buffer)}, "
                f"its binding is {_layout(view)}"
            )


def translate(view: View, bindings: Bindings) -> View | None:
    """The view of the outer plan's memory; None for memory that the embedded plan allocates."""
    bound = bindings.get(view.buffer.name)
    if bound is None:
        return None
    if not _is_alike(view.buffer, bound):
        return bound  # reported by itself; as if all of it were touched
    return replace(view, buffer=bound.buffer, offset=bound.offset + view.offset)


def _is_alike(buffer: PlanBuffer, view: View) -> bool:
    return (
        buffer.shape == view.shape
        and buffer.dtype == view.dtype
        and all(
            size == 1 or have == want
            for size, have, want in zip(buffer.shape, view.strides, buffer.strides, strict=True)
        )
    )


def _layout(operand: PlanBuffer | View) -> str:
    return f"{operand.dtype} {list(operand.shape)} with strides {list(operand.strides)}"
