"""Changes of an executable with a fault at every call they make: it is what it was, or all new.

An error that notes what it left, and an interrupt while old things are given back, may leave the
new state; never a mixture, and never an executable that does another thing than it says.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from helpers.every_fault import each_fault, interrupts_instead
from helpers.kernels import ONE_BLOCK, add_one, axpy, fill_value, scale, set_value

from graphcore import Buffer, GraphExec, GraphPlan
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import LaunchConfig
from graphcore.executable.retired import release_finished

COUNT = 24
COOPERATIVE = LaunchConfig((1, 1, 1), (32, 1, 1), cooperative=True)
Plan = Callable[[float], GraphPlan]


def _begun(name: str) -> tuple[GraphPlan, Any, Any]:
    plan = GraphPlan(name)
    return plan, plan.buffer("x", (COUNT,)), plan.buffer("y", (COUNT,))


def plain(factor: float, first: LaunchConfig = ONE_BLOCK) -> GraphPlan:
    plan, x, y = _begun("plain")
    plan.launch(scale, first, x, factor, COUNT)
    plan.memcpy(y, x)
    plan.memset(x[:4], factor)
    plan.launch(axpy, ONE_BLOCK, factor, x, y, COUNT)
    inner = GraphPlan("inner")
    inner.launch(add_one, ONE_BLOCK, inner.buffer("z", (COUNT,)), COUNT)
    plan.embed(inner, {"z": y})
    return plan


def cooperative(factor: float) -> GraphPlan:
    return plain(factor, COOPERATIVE)


def rows(factor: float) -> GraphPlan:
    plan = plain(factor)
    x, y = plan.buffers["x"].reshape(4, 6), plan.buffers["y"].reshape(4, 6)
    plan.memcpy(y[:, :3], x[:, 3:])
    return plan


def long(factor: float) -> GraphPlan:
    plan, x, y = _begun("long")
    other = plan.buffer("other", (COUNT,))
    for _ in range(24):
        plan.launch(add_one, ONE_BLOCK, other, COUNT)
    plan.launch(axpy, ONE_BLOCK, factor, x, y, COUNT)
    plan.launch(scale, ONE_BLOCK, y, factor, COUNT)
    return plan


def conditional(factor: float) -> GraphPlan:
    plan, x, y = _begun("conditional")
    chosen = plan.condition("chosen")
    plan.launch(set_value, ONE_BLOCK, chosen, 1)
    with plan.if_then(chosen) as body:
        body.launch(axpy, ONE_BLOCK, factor, x, y, COUNT)
    plan.launch(scale, ONE_BLOCK, y, factor, COUNT)
    return plan


def allocating(factor: float) -> GraphPlan:
    plan, x, y = _begun("allocating")
    scratch = plan.allocate("scratch", (COUNT,))
    plan.launch(fill_value, ONE_BLOCK, scratch, factor, COUNT)
    plan.launch(axpy, ONE_BLOCK, factor, scratch, y, COUNT)
    plan.launch(axpy, ONE_BLOCK, 1.0, x, y, COUNT)
    plan.deallocate(scratch)
    return plan


class Scene:
    """An executable of a plan that was launched, and two sets of buffers."""

    def __init__(self, driver: EmulatedDriver, plan: Plan, *, off: bool, guard: Any) -> None:
        self.driver = driver
        self.buffers, self.others = self._buffers(plan), self._buffers(plan)
        self.executable = plan(2.0).build(self.buffers).instantiate(guard=guard)
        self.executable.launch()
        if off:
            self.executable.enable(0, False)
        self.before = self.said()

    def _buffers(self, plan: Plan) -> dict[str, Buffer]:
        made = {
            name: Buffer.allocate((COUNT,), "float32", driver=self.driver)
            for name in plan(1.0).buffers
            if name != "scratch"
        }
        for buffer in made.values():
            buffer.write(numpy.zeros(COUNT, "float32"))
        return made

    def said(self) -> tuple[Any, ...]:
        """What the executable does, what it says that it runs, and what it keeps alive."""
        assert not self.executable.check()
        owners = sorted(id(owner.object) for owner in self.executable.owners)
        return self.contents(self.executable), self.executable.snapshot(), owners

    def contents(self, executable: GraphExec) -> list[bytes]:
        """What a run leaves in every buffer."""
        every = [*self.buffers.values(), *self.others.values()]
        for number, buffer in enumerate(every):
            buffer.write(numpy.arange(COUNT, dtype="float32") * (number + 1))
        executable.launch()
        return [buffer.read().tobytes() for buffer in every]


class Operation:
    """What is done to the executable of a plan, and a fresh executable that does the same."""

    def __init__(
        self,
        plan: Plan,
        do: Callable[[Scene], object],
        became: Callable[[Scene], GraphExec],
        *,
        off: bool = False,
        guard: str | None = None,
    ) -> None:
        self.plan, self.do, self.became, self.off, self.guard = plan, do, became, off, guard

    def scene(self, driver: EmulatedDriver) -> Scene:
        return Scene(driver, self.plan, off=self.off, guard=self.guard)

    def is_done(self, scene: Scene) -> bool:
        with self.became(scene) as other:
            if self.off:
                other.enable(0, False)
            does = scene.contents(scene.executable) == scene.contents(other)
            return does and _says_the_same(scene.executable, other)


def _says_the_same(one: GraphExec, other: GraphExec) -> bool:
    """Whether both say that they run the same on the same memory, and keep it alive."""
    nodes = [[*each.snapshot().walk()] for each in (one, other)]
    # handles of conditions, and memory of the graph's own, are others in each graph
    has_own = any(node.kind.value in ("alloc", "conditional") for node in nodes[0])
    same = all(
        mine.name == theirs.name and (mine.inner or has_own or mine.params == theirs.params)
        for mine, theirs in zip(*nodes, strict=True)
    )
    kept, wanted = ({id(owner.object) for owner in each.owners if owner.record is not None}
                    for each in (one, other))  # fmt: skip
    return same and kept == wanted


def _update(old: Plan, new: Plan, **options: Any) -> Operation:
    return Operation(
        old,
        lambda scene: scene.executable.update(new(3.0).build(scene.others)),
        lambda scene: new(3.0).build(scene.others).instantiate(),
        **options,
    )


def _exchange(scene: Scene) -> None:
    scene.executable.rebind([(scene.buffers[name], scene.others[name]) for name in "xy"])


def _exchange_and_back(scene: Scene) -> None:
    _exchange(scene)
    scene.executable.rebind([(scene.others[name], scene.buffers[name]) for name in "xy"])


def _rebind(plan: Plan, **options: Any) -> Operation:
    def became(scene: Scene) -> GraphExec:
        mixed = {**scene.buffers, **{name: scene.others[name] for name in "xy"}}
        return plan(2.0).build(mixed).instantiate()

    return Operation(plan, _exchange, became, **options)


def _set_params(scene: Scene, executable: GraphExec | None = None) -> GraphExec:
    chosen = executable or scene.executable
    chosen.set_params(0, [scene.others["x"], 5.0, COUNT])
    return chosen


OPERATIONS = {
    "update in place": _update(plain, plain),
    "update in place, a node off": _update(plain, plain, off=True),
    "update in place, guarded": _update(plain, plain, guard="full"),
    "update that builds": _update(plain, cooperative),
    "update that builds, a node off": _update(plain, cooperative, off=True),
    "update that builds, other nodes": _update(plain, rows),
    "update of a conditional": _update(conditional, conditional),
    "update of an allocation": _update(allocating, allocating),
    "rebind whole": _rebind(plain),
    "rebind whole, a node off": _rebind(plain, off=True),
    "rebind whole, guarded": _rebind(plain, guard="owners"),
    "rebind node by node": _rebind(long),
    "rebind of a conditional": _rebind(conditional),
    "rebind of an allocation": _rebind(allocating),
    "rebind that builds": _rebind(rows),
    "rebind that builds, a node off": _rebind(rows, off=True),
    "set_params": Operation(
        plain,
        _set_params,
        lambda scene: _set_params(scene, plain(2.0).build(scene.buffers).instantiate()),
    ),
}


@pytest.mark.parametrize("interrupted", [False, True], ids=["failure", "interrupt"])
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.filterwarnings("ignore::graphcore.GraphcoreWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_change_is_made_or_not_at_whichever_call_it_fails(
    name: str, interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation, count = OPERATIONS[name], {"old": 0, "new": 0}
    if interrupted:
        interrupts_instead(monkeypatch)
    for driver, faulted in each_fault(operation.scene, operation.do):
        scene = faulted.state
        if scene.said() == scene.before:
            assert faulted.error is not None, faulted.where
            assert faulted.leaves_nothing(driver), faulted.where
            count["old"] += 1
            operation.do(scene)
        else:
            assert faulted.error is None or faulted.is_noted, (faulted.where, faulted.error)
            count["new"] += 1
        assert operation.is_done(scene), faulted.where
    assert count["old"] >= 2


@pytest.mark.parametrize(
    "call", ["create_event", "record_event", "query_event", "exchange_capture_mode"]
)
def test_an_interrupt_while_owners_are_given_back_keeps_none_of_them_for_ever(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupts_instead(monkeypatch)
    driver = EmulatedDriver()
    scene = Scene(driver, plain, off=False, guard=None)
    gone = weakref.ref(scene.buffers["x"])
    driver.faults.inject(call)
    with pytest.raises(KeyboardInterrupt):
        _exchange(scene)
    scene.buffers.clear()
    release_finished()
    gc.collect()
    assert gone() is None
