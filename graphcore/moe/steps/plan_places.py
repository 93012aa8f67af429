"""Places of a group in a plan: what reads its slots, who reads that, and what chose its ids."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from graphcore.moe.slots.group_use import GroupUse
from graphcore.moe.slots.pool_bank import PoolBank
from graphcore.moe.steps.plan_records import Refs, place_of
from graphcore.moe.steps.step_work import GroupPlaces, ProductPlace
from graphcore.plan import GraphPlan, PlanNode, View

Identify = Callable[[PlanNode], Hashable]


def find_places(
    plan: GraphPlan, refs: Refs, use: GroupUse, banks: Sequence[PoolBank], identify: Identify
) -> GroupPlaces | None:
    """Where a group stands in ``plan``; None where no node of it reads a slot.

    Args:
        plan: The plan.
        refs: Where its buffers lie.
        use: The group.
        banks: Its banks.
        identify: Gives the identity of a node.
    """
    found = [
        (node, bank) for node in plan.nodes if (bank := _bank_of(node, refs, banks)) is not None
    ]
    if not found:
        return None
    nodes = [node for node, _ in found]
    inner = _inner(plan, refs, nodes, identify)
    readers = [_readers(plan, refs, node, identify) for node in nodes]
    if not readers[-1]:  # what the last product writes is what the plan is for
        outside = (identify(nodes[-1]), "outside")
        readers[-1], inner = ((outside, 1),), (*inner, outside)
    products = tuple(
        ProductPlace(node.index, identify(node), bank.name, read)
        for (node, bank), read in zip(found, readers, strict=True)
    )
    return GroupPlaces(products, inner, _chain(plan, refs, use, identify))


def _bank_of(node: PlanNode, refs: Refs, banks: Sequence[PoolBank]) -> PoolBank | None:
    """The bank whose slots a node reads and does not write; what writes them is the copy."""
    if any(_lies_in(view, refs, bank) for view in node.writes for bank in banks):
        return None
    read = (
        bank
        for bank in banks
        if not bank.is_auxiliary and any(_lies_in(view, refs, bank) for view in node.reads)
    )
    return next(read, None)


def _lies_in(view: View, refs: Refs, bank: PoolBank) -> bool:
    place = place_of(view, refs)
    return place is not None and bank.has_rows_at(*place)


def _readers(
    plan: GraphPlan, refs: Refs, node: PlanNode, identify: Identify
) -> tuple[tuple[Hashable, int], ...]:
    counts = (
        (other, sum(_meet(out, view, refs) for out in node.writes for view in other.reads))
        for other in plan.nodes[node.index + 1 :]
    )
    return tuple((identify(other), count) for other, count in counts if count)


def _meet(written: View, read: View, refs: Refs) -> bool:
    one, other = place_of(written, refs), place_of(read, refs)
    if one is None or other is None:
        return written.buffer == read.buffer
    return one[0] < other[1] and other[0] < one[1]


def _inner(
    plan: GraphPlan, refs: Refs, products: Sequence[PlanNode], identify: Identify
) -> tuple[Hashable, ...]:
    """Nodes on a way from one product to another, and those that read the last one."""
    last = products[-1].index
    leads = {node.index for node in products}
    for node in reversed(plan.nodes[products[0].index : last]):
        follows = (plan.nodes[index] for index in sorted(leads))
        if any(_feeds(node, other, refs) for other in follows if other.index > node.index):
            leads.add(node.index)
    between = leads - {node.index for node in products}
    readers = (other.index for other in plan.nodes[last + 1 :] if _feeds(products[-1], other, refs))
    return tuple(identify(plan.nodes[index]) for index in sorted({*between, *readers}))


def _feeds(node: PlanNode, other: PlanNode, refs: Refs) -> bool:
    return any(_meet(out, view, refs) for out in node.writes for view in other.reads)


def _chain(
    plan: GraphPlan, refs: Refs, use: GroupUse, identify: Identify
) -> tuple[Hashable, ...] | None:
    """The nodes that write the ids; None where none does: they come from outside the plan."""
    low = use.ref.address
    span = low, low + max(use.ref.nbytes, 1)
    writers = tuple(
        identify(node)
        for node in plan.nodes
        for view in node.writes
        if (place := place_of(view, refs)) is not None and place[0] < span[1] and span[0] < place[1]
    )
    return writers or None
