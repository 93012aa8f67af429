"""Graphs that hold collectives, so that they can be given back before their communicators are.

A communicator cannot be destroyed while a graph that captured it exists: NCCL waits for the graph,
for ever. So whoever destroys communicators closes these first; at the end of the process they are
closed by themselves.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from graphcore.driver import collectives
from graphcore.executable.handles import GraphResource
from graphcore.resources.lifetime import OwnerSet

if TYPE_CHECKING:
    from graphcore.executable.graph import Graph
    from graphcore.executable.graph_exec import GraphExec

_lock = threading.Lock()
_graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
_captured: weakref.WeakKeyDictionary[GraphResource, frozenset[int]] = weakref.WeakKeyDictionary()
"""Handle of a graph -> ids of the process groups that it captured."""


def note_graph(graph: Graph, resource: GraphResource, owners: OwnerSet) -> None:
    """Notes ``graph`` where it keeps a process group, which it does where it captured one."""
    groups = _groups_of(owners)
    if not groups:
        return
    with _lock:
        if not _captured:  # behind what was registered before, such as torch's own: it runs earlier
            atexit.unregister(close_graphs)
            atexit.register(close_graphs)
        _graphs.add(graph)
        _captured[resource] = groups


def close_graphs(groups: Iterable[Any] | None = None) -> int:
    """Closes every graph and executable that captured a communicator, after their launches.

    Args:
        groups: Only those that captured one of these; None: all.

    Returns:
        How many executables and graphs were closed.
    """
    wanted = None if groups is None else frozenset(map(id, groups))
    with _lock:
        resources = [each for each, used in _captured.items() if _is_wanted(used, wanted)]
        graphs = [each for each in _graphs if _is_wanted(_groups_of(each.owners), wanted)]
    executables = [each for each in _executables() if _is_wanted(_groups_of(each.owners), wanted)]
    holders: list[GraphExec | Graph] = [*executables, *graphs]
    for driver in {id(each.driver): each.driver for each in holders}.values():
        driver.synchronize()
    for holder in holders:
        holder.close()
    for resource in resources:  # whoever else holds it
        resource.close()
    with _lock:
        for resource in resources:
            _captured.pop(resource, None)
    return len(holders)


def _executables() -> list[GraphExec]:
    from graphcore.executable.graph_exec import living

    return [each for each in living() if not each.is_closed]


def _is_wanted(used: frozenset[int], wanted: frozenset[int] | None) -> bool:
    return bool(used if wanted is None else used & wanted)


def _groups_of(owners: OwnerSet) -> frozenset[int]:
    return frozenset(map(id, collectives.groups_in(owner.object for owner in owners)))
