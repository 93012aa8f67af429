"""Rebind: an executable made to work on other buffers, everywhere, all or nothing.

What a caller gives becomes moves of memory (checked: kind, size, layout, place), the moves become
new parameters (resources/repointing.py, pure), and these go to the driver by the cheaper route.
Owners are swapped after it has taken them all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from graphcore.driver.records import NodeHandle, NodeParams, UpdateResult
from graphcore.errors import CudaError, UpdateRefused
from graphcore.executable.node_changes import NodeChange, explain
from graphcore.executable.rebind_request import Exchange, exchanges, rivals
from graphcore.resources.lifetime import Owner, OwnerSet
from graphcore.resources.repointing import Move, Repointing, repoint
from graphcore.resources.spans import Span

if TYPE_CHECKING:
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
        total = sum(self.words.values())
        return f"{self.route.value}: {total} pointers in {self.nodes} nodes: {self.reason}"


def rebind(
    executable: RebindableExec,
    given: Mapping[str, Any] | Iterable[tuple[Any, Any]],
    names: Mapping[str, Any],
    reinstantiate: bool,
) -> RebindOutcome:
    """As ``GraphExec.rebind``."""
    current = executable._current
    wanted = exchanges(executable.driver, executable.owners, given, names)
    snapshot = current.snapshot()
    moves = [Move(each.old, each.by) for each in wanted]
    others = rivals(executable.owners, names, wanted)
    found = repoint(snapshot, moves, others)
    _warn_of_sharing(wanted, others)
    total = sum(1 for _ in snapshot.walk())
    route, reason = _apply(executable, found, total, reinstantiate)
    _swap_owners(executable, wanted)
    executable._exchanged([each.old for each in wanted])
    names_of = [each.old.name for each in wanted]
    counts = dict(zip(names_of, found.words, strict=True))
    outcome = RebindOutcome(route, reason, len(found.params), counts)
    _log.info("rebind of %r: %s", executable, outcome)
    return outcome


# ---- routes -----------------------------------------------------------------------------------


def _apply(
    executable: RebindableExec, found: Repointing, total: int, reinstantiate: bool
) -> tuple[RebindRoute, str]:
    count = len(found.params)
    can_be_cloned = executable._current.can_be_cloned()
    if not can_be_cloned:
        _one_by_one(executable, found.params)
        return RebindRoute.PER_NODE, "CUDA clones no graph with conditional or memory nodes"
    refusal: UpdateRefused | None = None
    if count * _WHOLE_FROM < total:
        try:
            _one_by_one(executable, found.params)
        except UpdateRefused as error:
            refusal = error
        else:
            share = f"{count} of {total} nodes is under a quarter"
            return RebindRoute.PER_NODE, share
    return _whole(executable, found.params, total, reinstantiate, refusal)


def _one_by_one(executable: RebindableExec, params: Mapping[NodeHandle, NodeParams]) -> None:
    """Changes every node; where one is refused, those before it get back what they had.

    Raises:
        UpdateRefused: CUDA does not change such a node alone; nothing has changed.
        CudaError: Another failure; what could not be put back stands in its notes.
    """
    driver, handle, current = executable.driver, executable.handle, executable._current
    done: list[tuple[NodeHandle, NodeParams]] = []
    for node, after in params.items():
        record = current.find(node)
        try:
            driver.set_exec_node_params(handle, node, after)
        except CudaError as error:
            _put_back(executable, done, error)
            explained = explain(error, NodeChange(record, after, ()))
            if explained is error:
                raise
            explained.__notes__ = list(getattr(error, "__notes__", ()))
            raise explained from error
        done.append((node, record.params))
    for node, after in params.items():
        current.note(node, after)


def _put_back(
    executable: RebindableExec, done: list[tuple[NodeHandle, NodeParams]], error: CudaError
) -> None:
    left = []
    for node, before in reversed(done):
        try:
            executable.driver.set_exec_node_params(executable.handle, node, before)
        except CudaError as second:
            left.append(f"{executable._current.find(node)} ({second.code})")
    if left:
        error.add_note(f"these nodes could not be put back and work on new buffers: {left}")
    else:
        error.add_note(f"{len(done)} nodes that were changed before have been put back")


def _whole(
    executable: RebindableExec,
    params: Mapping[NodeHandle, NodeParams],
    total: int,
    reinstantiate: bool,
    refusal: UpdateRefused | None,
) -> tuple[RebindRoute, str]:
    made = executable._copy_with(params)
    answer = executable.driver.update_exec(executable.handle, made.handle)
    if answer.result is UpdateResult.SUCCESS:
        executable._take_copy(made, params)
        return RebindRoute.WHOLE, f"{len(params)} of {total} nodes is a quarter or more"
    why = str(refusal) if refusal else f"an update in place is refused ({answer.result.value})"
    blamed = made.snapshot().find(answer.node)
    if blamed is not None:
        why += f" at {blamed}"
    if not reinstantiate:
        raise UpdateRefused(f"rebind: nothing was changed: {why}")
    executable._take_anew(made, params)
    return RebindRoute.REINSTANTIATED, why


# ---- owners -----------------------------------------------------------------------------------


def _swap_owners(executable: RebindableExec, wanted: Sequence[Exchange]) -> None:
    current = executable._current
    placed: set[int] = set()
    base = _swapped(current.base_owners, wanted, placed)
    current.owners = {
        node: tuple(_swapped(owners, wanted, placed)) for node, owners in current.owners.items()
    }
    added = [
        Owner(each.new, each.old.name)
        for index, each in enumerate(wanted)
        if index not in placed and each.owns
    ]
    current.base_owners = OwnerSet([*base, *added]).recorded(executable.driver)
    executable._set_owners(current.all_owners())


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
