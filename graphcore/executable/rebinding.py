"""Rebind: an executable made to work on other buffers, everywhere, all or nothing.

What a caller gives becomes moves of memory (checked: kind, size, layout, place), the moves become
new parameters (resources/repointing.py, pure), and these go to the driver by the cheaper route.
Owners are swapped after it has taken them all.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, Any

from graphcore.driver.records import NodeHandle, NodeParams, RawUpdate, UpdateResult
from graphcore.errors import CudaError, UpdateRefused
from graphcore.executable.current import with_params
from graphcore.executable.known_versions import KnownVersion
from graphcore.executable.node_changes import NodeChange, explain
from graphcore.executable.rebind_request import Exchange, exchanges, rivals
from graphcore.graph.reading import read
from graphcore.graph.snapshot import GraphSnapshot
from graphcore.resources.lifetime import Owner, OwnerSet
from graphcore.resources.repointing import Move, Repointing, repoint
from graphcore.resources.spans import Span

if TYPE_CHECKING:
    from graphcore.executable.handles import ExecResource
    from graphcore.executable.rebindable import RebindableExec

_log = logging.getLogger("graphcore")

# one by one a node costs about 0.5 us, in a whole update 0.13 us (docs/driver-notes.md)
_WHOLE_FROM = 4


class RebindRoute(Enum):
    """How an executable took its new pointers."""

    PER_NODE = "node by node"
    WHOLE = "whole update"
    REINSTANTIATED = "reinstantiated"


@dataclass(frozen=True, slots=True)
class RebindOutcome:
    """The result of ``GraphExec.rebind``.

    Args:
        route: How it was done.
        reason: One sentence: why this way.
        nodes: How many nodes changed, those in child graphs and bodies included.
        words: How many pointers changed, by the name of the buffer.
    """

    route: RebindRoute
    reason: str
    nodes: int
    words: Mapping[str, int]

    def __str__(self) -> str:
        pointers = _counted(sum(self.words.values()), "pointer")
        nodes = _counted(self.nodes, "node")
        return f"{self.route.value}: {pointers} in {nodes}: {self.reason}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def rebind(
    executable: RebindableExec,
    given: Mapping[str, Any] | Iterable[tuple[Any, Any]],
    names: Mapping[str, Any],
    *,
    reinstantiate: bool,
    allow_unused: bool,
) -> RebindOutcome:
    """As ``GraphExec.rebind``."""
    current = executable._current
    wanted = exchanges(executable.driver, executable.owners, given, names)
    others = rivals(executable.owners, names, wanted)
    key = _key(executable, wanted, others)
    known = None if key is None else current.known.switch(current.version.resource, key)
    owners = _Owners.after(executable, wanted)  # may fail, so before anything is done
    replaced = None
    if known is not None and known[0].is_taken_by(executable.handle):
        _take(executable, *known)
        found, route, reason = known[1], RebindRoute.WHOLE, "a graph of an earlier exchange"
    else:
        snapshot = current.snapshot()
        moves = [Move(each.old, each.by) for each in wanted]
        found = repoint(snapshot, moves, others, allow_unused=allow_unused)
        route, reason, replaced = _apply(executable, found, snapshot, key, reinstantiate, owners)
    owners.take_over(executable, has_new_nodes=replaced is not None)
    executable._exchanged([each.old for each in wanted])
    executable._let_go(replaced, executable.owners)
    _warn_of_sharing(wanted, others)
    names_of = [each.old.name for each in wanted]
    counts = dict(zip(names_of, found.words, strict=True))
    outcome = RebindOutcome(route, reason, len(found.params), counts)
    _log.info("rebind of %r: %s", executable, outcome)
    return outcome


def _key(
    executable: RebindableExec, wanted: Sequence[Exchange], others: Sequence[Span]
) -> Hashable | None:
    """What an exchange depends on besides the version; None after changes of single nodes."""
    if executable._current.changes():
        return None
    moves = tuple((each.old.start, each.old.size, each.by) for each in wanted)
    return moves, tuple((span.start, span.size) for span in others)


def _take(executable: RebindableExec, version: KnownVersion, found: Repointing) -> None:
    """The driver has taken a graph of ours."""
    made = executable._copy_of(version.resource)
    executable._take_copy(made, found.params, version.snapshot)


# ---- routes -----------------------------------------------------------------------------------


def _apply(
    executable: RebindableExec,
    found: Repointing,
    snapshot: GraphSnapshot,
    key: Hashable | None,
    reinstantiate: bool,
    owners: _Owners,
) -> tuple[RebindRoute, str, ExecResource | None]:
    """Hands the new parameters to the driver by the cheaper way that it takes.

    Returns:
        The way, why, and the old executable where there is a new one.
    """
    count, total = len(found.params), sum(1 for _ in snapshot.walk())
    if not executable._current.can_be_cloned():
        _one_by_one(executable, found.params, owners)
        return RebindRoute.PER_NODE, "CUDA clones no graph with conditional or memory nodes", None
    refused = ""
    if count * _WHOLE_FROM < total:
        try:
            _one_by_one(executable, found.params, owners)
        except UpdateRefused as error:
            refused = str(error)
        else:
            return RebindRoute.PER_NODE, f"{count} of {total} nodes is under a quarter", None
    current = executable._current
    before, after = current.version.resource, with_params(snapshot, found.params)
    known = None if key is None else current.known.find(after)
    if known is None:
        known = KnownVersion(executable._copy_with(found.params).resource, after)
    executable._resource.upload_first()
    answer = executable.driver.update_exec(executable.handle, known.resource.handle)
    if answer.result is not UpdateResult.SUCCESS:
        return _anew(executable, known, found, refused or _words(known, answer), reinstantiate)
    _take(executable, known, found)
    if key is not None:
        if before.owned:  # else it may change, or go
            current.known.keep(KnownVersion(before, snapshot))
        current.known.remember(before, key, known, found)
    return RebindRoute.WHOLE, f"{count} of {total} nodes is a quarter or more", None


def _anew(
    executable: RebindableExec,
    version: KnownVersion,
    found: Repointing,
    refused: str,
    reinstantiate: bool,
) -> tuple[RebindRoute, str, ExecResource]:
    if not reinstantiate:
        raise UpdateRefused(f"rebind: nothing was changed: {refused}")
    replaced = executable._take_anew(executable._copy_of(version.resource), found.params)
    return RebindRoute.REINSTANTIATED, refused, replaced


def _words(version: KnownVersion, answer: RawUpdate) -> str:
    """The driver's refusal in words, with the node that it names."""
    driver, handle = version.resource.driver, version.resource.handle
    node = read(driver, handle).find(answer.node)
    where = "" if node is None else f" at {node}"
    return f"an update in place is refused ({answer.result.value}){where}"


def _one_by_one(
    executable: RebindableExec, params: Mapping[NodeHandle, NodeParams], owners: _Owners
) -> None:
    """Changes every node; where one is refused, those before it get back what they had.

    Raises:
        UpdateRefused: CUDA does not change such a node alone; nothing has changed.
        CudaError: Another failure; what could not be put back stands in its notes.
    """
    driver, handle, current = executable.driver, executable.handle, executable._current
    changes = [NodeChange(current.find(node), after, ()) for node, after in params.items()]
    done: list[NodeChange] = []
    if changes:
        executable._resource.upload_first()
    try:
        for change in changes:
            done.append(change)  # an interrupt leaves open whether the driver took it
            driver.set_exec_node_params(handle, change.record.handle, change.params)
    except CudaError as error:
        refused = done.pop()
        _put_back(executable, done, error, owners)
        explained = explain(error, refused)
        if explained is error:
            raise
        explained.__notes__ = list(getattr(error, "__notes__", ()))
        raise explained from error
    except BaseException as error:
        _put_back(executable, done, error, owners)
        raise
    for node, after in params.items():
        current.note(node, after)


def _put_back(
    executable: RebindableExec, done: list[NodeChange], error: BaseException, owners: _Owners
) -> None:
    left = []
    for change in reversed(done):
        node = change.record.handle
        try:
            executable.driver.set_exec_node_params(executable.handle, node, change.record.params)
        except CudaError as second:
            executable._current.note(node, change.params)
            left.append(f"{change.record} ({second.code})")
    if left:
        owners.add_to(executable)
        error.add_note(f"these nodes could not be put back and work on new buffers: {left}")
    else:
        error.add_note(f"{len(done)} nodes that were changed before have been put back")


# ---- owners -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Owners:
    """What an executable keeps alive after an exchange: of its version, and by single nodes."""

    base: OwnerSet
    by_node: Mapping[NodeHandle, OwnerSet]

    @staticmethod
    def after(executable: RebindableExec, wanted: Sequence[Exchange]) -> _Owners:
        """The owners that will be; asks the driver about the new memory."""
        current, driver = executable._current, executable.driver
        placed: set[int] = set()
        base = _swapped(current.base_owners, wanted, placed)
        by_node = {
            node: OwnerSet(_swapped(owners, wanted, placed)).recorded(driver)
            for node, owners in current.owners.items()
        }
        added = [
            Owner(each.new, each.old.name)
            for index, each in enumerate(wanted)
            if index not in placed and each.owns
        ]
        return _Owners(OwnerSet([*base, *added]).recorded(driver), by_node)

    def take_over(self, executable: RebindableExec, *, has_new_nodes: bool) -> None:
        """The exchange is done: these are its owners. Nodes of a new executable have none."""
        current = executable._current
        current.base_owners = self._all() if has_new_nodes else self.base
        current.owners = (
            {} if has_new_nodes else {node: tuple(own) for node, own in self.by_node.items()}
        )
        executable._own(current.all_owners())

    def add_to(self, executable: RebindableExec) -> None:
        """The exchange failed halfway: old and new memory are in use."""
        current = executable._current
        current.base_owners = current.base_owners.union(self._all())
        executable._own(current.all_owners())
        executable._resource.replace_owners(executable.owners)

    def _all(self) -> OwnerSet:
        return OwnerSet(chain(self.base, *self.by_node.values()))


def _swapped(owners: Iterable[Owner], wanted: Sequence[Exchange], placed: set[int]) -> list[Owner]:
    result = []
    for owner in owners:
        index = _index_of(owner, wanted)
        if index is None:
            result.append(owner)
            continue
        exchange = wanted[index]
        assert owner.record is not None
        is_whole = Span.of(owner.label, owner.record.tensor).covers(exchange.old)
        if exchange.owns and is_whole:  # a view into the old memory just goes
            result.append(Owner(exchange.new, owner.label))
            placed.add(index)
    return result


def _index_of(owner: Owner, wanted: Sequence[Exchange]) -> int | None:
    if owner.record is None:
        return None
    span = Span.of(owner.label, owner.record.tensor)
    found = (i for i, each in enumerate(wanted) if span.size and each.old.covers(span))
    return next(found, None)


def _warn_of_sharing(wanted: Sequence[Exchange], others: Iterable[Span]) -> None:
    for exchange in wanted:
        new = replace(exchange.old, start=exchange.old.start + exchange.by)
        shared = next((each for each in others if each.overlaps(new)), None)
        if shared is not None:
            _log.warning(
                "rebind: %s goes to memory that the graph uses as %s already: nodes that were "
                "independent may now race",
                exchange.old.name,
                shared.name,
            )
