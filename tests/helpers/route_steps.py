"""Steps of a router over the slots of one group, compared with the oracle table by table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy
from graphcore_kernels import RoutePlan, RoutePolicy, RouteStatus, route_plan
from graphcore_kernels.route_layout import Shapes, output_shapes, table_shapes

from graphcore.moe.slots.oracle import SlotDecision, SlotOracle

Launch = Callable[[RoutePlan], None]
POISON = -77


def run_reference(plan: RoutePlan) -> None:
    """Runs the kernel's reference."""
    plan.kernel.run_reference(plan.config, plan.arguments)


class RouteSteps:
    """Tables of a group as NumPy arrays, and the oracle that says what must be in them.

    ``launch`` runs a plan: its reference, or its source.
    """

    def __init__(
        self, experts: int, slots: int, policy: RoutePolicy, launch: Launch = run_reference
    ) -> None:
        self.experts, self.slots, self.policy, self.launch = experts, slots, policy, launch
        self.oracle = SlotOracle(experts, slots, policy)
        self.tables = _arrays(table_shapes(experts, slots), 0)
        for name in ("slot_for_expert", "expert_for_slot"):
            self.tables[name][:] = -1
        self.tables["is_open"][0] = 1
        self.outputs: dict[str, Any] = {}

    def pin(self, expert: int, count: int) -> None:
        self.oracle.pinned[expert] = self.tables["pinned"][expert] = count

    def open(self, is_open: bool) -> None:
        self.oracle.is_open = is_open
        self.tables["is_open"][0] = is_open

    def step(self, ids: Sequence[int], top_k: int = 1, dtype: str = "int32") -> SlotDecision:
        """One step on both sides, compared."""
        expected = self.oracle.plan(ids, top_k)
        self.run(ids, top_k, dtype)
        self.check(expected)
        return expected

    def run(self, ids: Sequence[int], top_k: int = 1, dtype: str = "int32", **more: Any) -> None:
        """One step of the kernel only, into poisoned outputs."""
        chosen = numpy.array(ids, dtype).reshape(-1, top_k)
        self.outputs = _arrays(output_shapes(self.experts, *chosen.shape), POISON)
        plan = route_plan.plan(chosen, self.tables, self.outputs, policy=self.policy, **more)
        self.launch(plan)

    def check(self, expected: SlotDecision) -> None:
        """What the kernel wrote is what the oracle says, and its tables are the oracle's."""
        out = {name: values.reshape(-1).tolist() for name, values in self.outputs.items()}
        for name in ("route_slots", "offsets", "slots", "gather", "scatter"):
            assert out[name] == list(getattr(expected, name)), name
        counts = [len(expected.unique), len(expected.misses)]
        assert out["report"] == [expected.status, *counts, expected.detail]
        refused = expected.status is not RouteStatus.OK
        assert set(out["scale"]) <= {0 if refused else POISON}
        misses = int(self.tables["miss_count"][0])
        listed = [self.tables[name][:misses].tolist() for name in ("miss_expert", "miss_slot")]
        assert list(zip(*listed, strict=True)) == list(expected.misses)
        self.check_tables()

    def check_tables(self) -> None:
        oracle = self.oracle
        for name in (
            "slot_for_expert", "expert_for_slot", "last_used", "frequency", "frequency_epoch",
            "pinned",
        ):  # fmt: skip
            assert self.tables[name].tolist() == getattr(oracle, name), name
        assert (self.tables["clock"][0], self.tables["step"][0]) == (oracle.clock, oracle.step)
        totals = [oracle.steps, oracle.routes, oracle.hits, oracle.misses]
        assert self.tables["totals"].tolist() == totals
        assert self.tables["fault"][2] == oracle.failures
        is_pending, unique, routes, _ = self.tables["pending"].tolist()
        assert bool(is_pending) == (oracle.pending is not None)
        if is_pending:
            listed = [
                self.tables[name][:unique].tolist() for name in ("pending_expert", "pending_slot")
            ]
            assert list(zip(*listed, strict=True)) == oracle.pending
            assert routes == oracle.pending_routes


def _arrays(shapes: Shapes, value: int) -> dict[str, Any]:
    return {name: numpy.full(shape, value, dtype) for name, (dtype, shape) in shapes.items()}
