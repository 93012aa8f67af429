"""PlanStep: a step that a GraphPlan describes, over real tensors for its buffers.

Its products are found by what they read: the slots of a bank. A plan that grows in place, or a
buffer that moves, makes it another step by itself; in the first case it has to be certified again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from graphcore.driver import Driver, Stream
from graphcore.errors import ConfigurationError, LifecycleError
from graphcore.executable import Graph
from graphcore.interop import choose_driver
from graphcore.moe.decisions.coverage import NodeList
from graphcore.moe.decisions.graph_uids import GraphUids
from graphcore.moe.decisions.property_probe import Records
from graphcore.moe.slots.group_use import GroupUse
from graphcore.moe.steps.plan_places import find_places
from graphcore.moe.steps.plan_records import plan_records
from graphcore.moe.steps.reuse_arguments import check_content, check_rows
from graphcore.moe.steps.step_work import Banks, GroupPlaces, StepLook, declared_places
from graphcore.plan import GraphPlan, PlanNode
from graphcore.resources.driver_argument import checked_driver
from graphcore.resources.tensors import describe

_uids = GraphUids()


class PlanStep:
    """One step. Not locked.

    Args:
        identity: Of its graph: a name, or another content that stays. Plans that take turns under
            one identity, with as many nodes and the same ends, are one variant that changes.
        plan: What it does.
        buffers: Name -> tensor, for every argument buffer.
        groups: The groups of experts that it uses.
        staged: Launches the same work on a stream, with experts in scratch memory.
        rows: Of the step; None: those of its groups, else of what its first node writes.
        capabilities: Whatever else selects kernels.
        copy_kernel: For copies that no memcpy node does, and float32 rows where updates are on:
            ``graphcore_kernels.strided_copy``.
        driver: Where it runs; None: where its buffers are.

    Raises:
        ConfigurationError: The plan is a body, or has no node; no number of rows.
        CacheTypeError: A buffer is no tensor; a name without a hash.
    """

    def __init__(  # noqa: PLR0913  (each is a choice of its own)
        self,
        identity: Hashable,
        plan: GraphPlan,
        buffers: Mapping[str, Any],
        *,
        groups: Sequence[GroupUse] = (),
        staged: Callable[[Stream], object] | None = None,
        rows: int | None = None,
        capabilities: Sequence[Hashable] = (),
        copy_kernel: Any = None,
        driver: Driver | None = None,
    ) -> None:
        if not isinstance(plan, GraphPlan) or plan.is_body or not plan.nodes:
            raise ConfigurationError(f"plan: expected a GraphPlan with nodes, got {plan!r:.60}")
        check_rows(rows)
        check_content("identity", identity)
        for index, each in enumerate(capabilities):
            check_content(f"capabilities[{index}]", each)
        self.identity = identity
        self.plan = plan
        self.capabilities = tuple(capabilities)
        self.groups = tuple(groups)
        self.copy_kernel = copy_kernel
        self._buffers = dict(buffers)
        self._refs = {name: describe(each, name=name) for name, each in buffers.items()}
        self._places = self._pointers()
        self.driver = choose_driver(*buffers.values()) if driver is None else checked_driver(driver)
        self._staged = staged
        self._rows = rows
        self._changes = 0
        self._revision: tuple[tuple[int, ...], int] | None = None
        self._uid = 0
        self._number = _uids.of(plan, "nodes")

    # ---- what it is ----------------------------------------------------------------------------

    @property
    def uid(self) -> int:
        """Another one after each change of the plan, of what it embeds, or of a buffer.

        Raises:
            CacheTypeError: A buffer of torch's has no memory any more.
        """
        for address_of, address in self._places:
            if address_of() != address:  # moved in place
                self._look_at_buffers()
                break
        revision = self.plan.revision, self._changes
        if revision != self._revision:
            self._revision, self._uid = revision, _uids.of(self, revision)
        return self._uid

    @property
    def rows(self) -> int:
        """Of the step."""
        if self._rows is not None:
            return self._rows
        return self.groups[0].rows if self.groups else (*self.extents[0], 1)[0]

    @property
    def extents(self) -> tuple[tuple[int, ...], ...]:
        """Of what its nodes write."""
        return tuple(_extents(node) for node in self.plan.nodes)

    @property
    def obstacle(self) -> str:
        """Why it cannot be captured; "" where it can."""
        return ""

    @property
    def has_staged(self) -> bool:
        return self._staged is not None

    @property
    def buffers(self) -> Mapping[str, Any]:
        """Name -> tensor."""
        return dict(self._buffers)

    def look(self, banks: Banks) -> StepLook:
        """Its nodes; a group that none of them shows gets nodes that stand for it."""
        nodes: list[Hashable] = [self._identity(node) for node in self.plan.nodes]
        places: list[GroupPlaces] = []
        for use, each in banks:
            found = find_places(self.plan, self._refs, use, each, self._identity)
            if found is None:
                made, found = declared_places(self._number, len(nodes), use, each)
                nodes += made
            places.append(found)
        return StepLook(NodeList((self.identity, self._number), tuple(nodes)), tuple(places))

    def records(self) -> Records:
        """One record for each of its nodes, and for each group."""
        uses = tuple(use.record() for use in self.groups)
        return (*plan_records(self.plan, self._refs), *uses)

    def _identity(self, node: PlanNode) -> Hashable:
        return self._number, node.index, node.name

    # ---- changing ------------------------------------------------------------------------------

    def bind(self, name: str, tensor: Any) -> None:
        """Puts another tensor in the place of a buffer.

        Raises:
            ConfigurationError: There is no such buffer.
            CacheTypeError: It is no tensor.
        """
        if name not in self._buffers:
            raise ConfigurationError(f"name: expected one of {list(self._buffers)}, got {name!r}")
        self._refs[name] = describe(tensor, name=name)
        self._buffers[name] = tensor
        self._places = self._pointers()
        self._changes += 1

    def set_groups(self, groups: Sequence[GroupUse]) -> None:
        """Uses other groups, ids or admissions."""
        self.groups = tuple(groups)
        self._changes += 1

    def _look_at_buffers(self) -> None:
        self._refs = {name: describe(each, name=name) for name, each in self._buffers.items()}
        self._places = self._pointers()
        self._changes += 1

    def _pointers(self) -> tuple[tuple[Callable[[], int], int], ...]:
        """How to ask each tensor of torch's for its address, and what that is; others stay."""
        return tuple(
            (each.data_ptr, each.data_ptr())
            for each in self._buffers.values()
            if hasattr(each, "data_ptr")
        )

    # ---- running -------------------------------------------------------------------------------

    def run(self, stream: Stream) -> None:
        """Runs the plan node by node."""
        self.plan.run(self._buffers, stream, driver=self.driver, copy_kernel=self.copy_kernel)

    def run_staged(self, stream: Stream) -> None:
        """Launches the staged work; LifecycleError where there is none."""
        if self._staged is None:
            raise LifecycleError(f"step {self.identity!r}: expected a staged function, got none")
        self._staged(stream)

    def capture(self, stream: Stream, *, rows_by_kernel: bool) -> Graph:
        """A graph of the plan by one capture."""
        return self.plan.capture(
            self._buffers,
            driver=self.driver,
            copy_kernel=self.copy_kernel,
            rows_by_kernel=rows_by_kernel and self.copy_kernel is not None,
        )

    def __repr__(self) -> str:
        return f"<PlanStep {self.identity!r}, {self.rows} rows, {len(self.plan)} nodes>"


def _extents(node: PlanNode) -> tuple[int, ...]:
    views = node.writes or node.reads
    return views[0].shape if views else ()
