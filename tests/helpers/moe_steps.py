"""A small decode model with its experts in slots, as steps for GraphReuse, and what each must give.

Two layers: experts admitted, gate and up with SwiGLU, down with the weighted combination, and a
strided copy of the last hidden rows into the output. Every expectation is computed by the same
kernels over a pool that holds all experts, so that bits are compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy
from graphcore_kernels import moe_grouped_gemm, strided_copy
from helpers.slot_pools import pinned_experts

from graphcore import GraphPlan
from graphcore.driver import Driver
from graphcore.moe import (
    CallableStep,
    GraphReuse,
    GroupUse,
    Manifest,
    ManifestRegistry,
    PlanStep,
    SlotAdmission,
    SlotPool,
    manifest_of,
)
from graphcore.resources.buffer import Buffer
from graphcore.resources.tensors import TensorRef

HIDDEN, INTER, EXPERTS, TOP_K, ROWS, SLOTS = 8, 8, 6, 2, 2, 4
LAYERS = ("layers.0", "layers.1")


class LayerLaunches(NamedTuple):
    """One layer: its launches in order, and what they write."""

    admit: Callable[..., None]
    up: Callable[..., None]
    down: Callable[..., None]
    hidden: Buffer
    out: Buffer


class Layers:
    """The launches of a step of one row count over one pool."""

    def __init__(self, pool: SlotPool, rows: int, x: Buffer, ids: Any, weights: Any) -> None:
        driver = pool.driver
        self.admissions: dict[str, SlotAdmission] = {}
        self.launches: dict[str, LayerLaunches] = {}
        value = x
        for name in LAYERS:
            made = SlotAdmission(pool, name, ids[name], weights=weights[name])
            group, outputs = pool[name], made.outputs
            hidden = Buffer.allocate((rows * TOP_K, INTER), "float32", driver=driver)
            out = Buffer.allocate((rows, HIDDEN), "float32", driver=driver)
            tables = outputs["offsets"], outputs["slots"]
            size = moe_grouped_gemm.workspace_bytes(rows * TOP_K, HIDDEN)
            up = moe_grouped_gemm.plan(
                value, group.rows["gate_up"], *tables, hidden, gather=outputs["gather"],
                activation="swiglu", error=Buffer.allocate((1,), "int32", driver=driver),
            )  # fmt: skip
            down = moe_grouped_gemm.plan(
                hidden, group.rows["down"], *tables, out, scale=outputs["scale"],
                scatter=outputs["scatter"], error=Buffer.allocate((1,), "int32", driver=driver),
                workspace=Buffer.allocate((max(size, 1),), "uint8", driver=driver),
            )  # fmt: skip
            self.admissions[name] = made
            self.launches[name] = LayerLaunches(made.launch, up.launch, down.launch, hidden, out)
            value = out
        self.out = value

    def launch(self, stream: Any = None) -> None:
        for each in self.launches.values():
            each.admit(stream)
            each.up(stream)
            each.down(stream)


class Scene:
    """Experts in pinned memory, a pool with few slots, and a reuse over them."""

    def __init__(
        self, driver: Driver, *, slots: int = SLOTS, rows: int = ROWS, **options: Any
    ) -> None:
        self.driver, self.rows = driver, rows
        self.stream = driver.stream(blocking=True)
        banks = {
            name: {
                "gate_up": pinned_experts(driver, EXPERTS, 2 * INTER, HIDDEN, seed=2 * at)[0],
                "down": pinned_experts(driver, EXPERTS, HIDDEN, INTER, seed=2 * at + 1)[0],
            }
            for at, name in enumerate(LAYERS)
        }
        self.pool = SlotPool(banks, slots, driver=driver)
        self.everything = SlotPool(banks, EXPERTS, driver=driver)
        self.manifests = ManifestRegistry()
        self.pool.ownership = self.manifests.ownership
        self.manifest = manifest_of(self.pool, top_k=TOP_K)
        self.publish(self.manifest)
        self.reuse = GraphReuse(driver=driver, pool=self.pool, manifests=self.manifests, **options)
        self.random = random.Random(7)
        self.seen: list[Any] = []
        self.reuse.observers.append(self.seen.append)
        self.claim: Any = None
        """What steps claim to be, where a test has them claim something."""
        self.after: Callable[[], object] = lambda: None
        """Ends what goes on beside the steps."""

    def publish(self, manifest: Manifest) -> int:
        publication = self.manifests.replace(manifest)
        assert publication.is_accepted, publication
        return publication.generation

    def buffer(self, rows: int) -> Buffer:
        """A tensor [rows, hidden]."""
        return Buffer.allocate((rows, HIDDEN), "float32", driver=self.driver)

    def tables(self, rows: int) -> tuple[dict[str, Buffer], dict[str, Buffer]]:
        """Ids and weights of each layer, [rows, top_k]."""
        ids, weights = (
            {name: Buffer.allocate((rows, TOP_K), dtype, driver=self.driver) for name in LAYERS}
            for dtype in ("int32", "float32")
        )
        return ids, weights

    def lane(self, rows: int | None = None, name: str = "decode") -> Lane:
        """Steps of one row count, as a function."""
        return Lane(self, self.rows if rows is None else rows, name)

    def plan_lane(self, copied: int | None = None) -> PlanLane:
        """The same as a plan."""
        return PlanLane(self, self.rows, copied=copied)


class Lane:
    """Steps of one row count: their inputs, their output, and the step itself.

    Args:
        scene: Whose slots.
        rows: Of the step.
        name: Of its graph.
        in_slots: Whether its experts fit the slots, for which it has admissions then.
    """

    def __init__(
        self, scene: Scene, rows: int, name: str = "decode", *, in_slots: bool = True
    ) -> None:
        self.scene, self.rows = scene, rows
        self.x, self.out = scene.buffer(rows), scene.buffer(rows)
        self.ids, self.weights = scene.tables(rows)
        self.layers: Layers | None = None
        if in_slots:
            self.layers = Layers(scene.pool, rows, self.x, self.ids, self.weights)
        self._expected = Layers(scene.everything, rows, self.x, self.ids, self.weights)
        self.calls: list[str] = []
        self.extra = 0
        """How often the output is copied once more: other nodes."""
        self.step = CallableStep(
            name,
            self._launch,
            tensors={"x": self.x, "out": self.out},
            groups=self.uses(),
            staged=self._staged,
            takes_stream=True,
        )

    def uses(self) -> list[GroupUse]:
        made = {} if self.layers is None else self.layers.admissions
        return [GroupUse(each, self.ids[each], admission=made.get(each)) for each in LAYERS]

    def move_output(self, out: Buffer | None = None) -> Buffer:
        """Another output buffer."""
        self.out = out or self.scene.buffer(self.rows)
        self.step.set("out", self.out)
        return self.out

    def replan(self) -> None:
        """The launches over the pool as it is now."""
        self.layers = Layers(self.scene.pool, self.rows, self.x, self.ids, self.weights)
        self.step.set_groups(self.uses())

    def _launch(self, stream: Any) -> None:
        self.calls.append("run")
        self.layers.launch(stream)
        for _ in range(1 + self.extra):
            strided_copy(self.out, self.layers.out, stream)

    def _staged(self, stream: Any) -> None:
        self.calls.append("staged")
        self._expected.launch(stream)
        strided_copy(self.out, self._expected.out, stream)

    # ---- one step ------------------------------------------------------------------------------

    def choose(self, experts: Sequence[int] | None = None) -> None:
        """Other inputs and other experts."""
        draw = self.scene.random
        numbers = numpy.random.default_rng(draw.randrange(1 << 30))
        # few enough that the slots serve them
        pool = draw.sample(range(EXPERTS), min(SLOTS, EXPERTS)) if experts is None else experts
        for name in LAYERS:
            rows = [draw.sample(list(pool), TOP_K) for _ in range(self.rows)]
            self.ids[name].write(numpy.asarray(rows, numpy.int32))
            self.weights[name].write(numbers.random((self.rows, TOP_K), numpy.float32))
        self.x.write(numbers.standard_normal((self.rows, HIDDEN)).astype(numpy.float32))

    def expected(self) -> bytes:
        """What the step must give, bit for bit."""
        self.scene.driver.synchronize()
        self._expected.launch()
        self.scene.driver.synchronize()
        return self._expected.out.read().tobytes()

    def run(
        self, certificate: Any = None, *, check: bool = True, experts: Any = None, **more: Any
    ) -> Any:
        """One step with other experts, its output checked; what GraphReuse says of it."""
        self.choose(experts)
        wanted = self.expected()
        self._poison()
        more.setdefault("stream", self.scene.stream)
        self.calls.clear()
        result = self.scene.reuse.run(self.step, certificate, **more)
        self.scene.driver.synchronize()
        if check:
            assert self._output() == wanted, result
        return result

    def _poison(self) -> None:
        self.out.write(numpy.full((self.rows, HIDDEN), numpy.nan, numpy.float32))

    def _output(self) -> bytes:
        return self.out.read().tobytes()

    def kinds(self, count: int, certificate: Any = None, **more: Any) -> list[Any]:
        """The kinds of ``count`` steps."""
        return [self.run(certificate, **more).kind for _ in range(count)]

    @property
    def executable(self) -> Any:
        """Of the only captured variant of this lane's identity."""
        (found,) = [
            each.use.executable
            for each in self.scene.reuse.variants
            if each.use is not None and each.key.graph == self.step.identity
        ]
        return found


class PlanLane(Lane):
    """The same steps as a GraphPlan: a node for each launch, and a copy of rows into the output.

    Args:
        scene: Whose slots.
        rows: Of the step.
        name: Of the plan.
        copied: How many rows of the output are copied; the others stay as they are.
    """

    def __init__(
        self, scene: Scene, rows: int, name: str = "plan", copied: int | None = None
    ) -> None:
        super().__init__(scene, rows, name)
        self.copied = rows if copied is None else copied
        self.pitched = Buffer.allocate((rows, 2 * HIDDEN), "float32", driver=scene.driver)
        self.done = Buffer.allocate((1,), "float32", driver=scene.driver)
        self.plan, self._buffers = GraphPlan(name), {}
        self.fill(self.plan)
        self.step = PlanStep(
            name, self.plan, self._buffers, groups=self.uses(),
            staged=lambda _: self._run_staged(), copy_kernel=strided_copy,
        )  # fmt: skip

    def fill(self, plan: GraphPlan) -> None:
        """Adds the nodes of the step to ``plan``."""
        view = partial(self._view, plan)
        value = view("x", self.x)
        for name in LAYERS:
            group, launches = self.scene.pool[name], self.layers.launches[name]
            ids, weights = (
                view(f"{name} ids", self.ids[name]),
                view(f"{name} w", self.weights[name]),
            )
            rows = {bank: view(f"{name} {bank}", each) for bank, each in group.rows.items()}
            hidden = view(f"{name} hidden", launches.hidden)
            out = view(f"{name} out", launches.out)
            plan.call(
                _without_arguments(launches.admit), name=f"{name} admit", warmup=0,
                reads=[ids, weights], writes=list(rows.values()),
            )  # fmt: skip
            plan.call(
                _without_arguments(launches.up), name=f"{name} up", warmup=0,
                reads=[value, rows["gate_up"]], writes=[hidden],
            )  # fmt: skip
            plan.call(
                _without_arguments(launches.down), name=f"{name} down", warmup=0,
                reads=[hidden, rows["down"]], writes=[out],
            )  # fmt: skip
            value = out
        self.copy_rows(plan, value)

    def copy_rows(self, plan: GraphPlan, value: Any) -> None:
        """Float32 rows into a wider output, and a last node whose extents never change."""
        target = self._view(plan, "out", self.pitched)
        plan.memcpy(target[: self.copied, :HIDDEN], value[: self.copied, :], name="copy")
        plan.memset(self._view(plan, "done", self.done), 1.0, name="done")

    def copy(self, copied: int) -> None:
        """Another plan under the same name, which copies another number of rows."""
        self.copied = copied
        plan = GraphPlan(self.step.identity)
        self._buffers = {}
        self.plan = plan
        self.fill(plan)
        self.step = PlanStep(
            self.step.identity, plan, self._buffers, groups=self.step.groups,
            staged=lambda _: self._run_staged(), copy_kernel=strided_copy,
        )  # fmt: skip

    def _view(self, plan: GraphPlan, name: str, buffer: Buffer) -> Any:
        if name not in self._buffers:
            self._buffers[name] = buffer
            return plan.buffer(name, buffer.shape, buffer.dtype)
        return plan.buffers[name]

    def _run_staged(self) -> None:
        self.calls.append("staged")
        self._expected.launch()
        strided_copy(_part(self.pitched, self.copied), _part(self._expected.out, self.copied))

    def _poison(self) -> None:
        shape = self.pitched.shape
        self.pitched.write(numpy.full(shape, numpy.nan, numpy.float32))

    def _output(self) -> bytes:
        return self.pitched.read()[: self.copied, :HIDDEN].tobytes()

    def expected(self) -> bytes:
        return super().expected()[: 4 * HIDDEN * self.copied]


def _part(buffer: Buffer, rows: int) -> TensorRef:
    ref = buffer.__graphcore_tensor__()
    return replace(ref, shape=(rows, HIDDEN))


def _without_arguments(function: Callable[[], object]) -> Callable[..., object]:
    def call(*_: object) -> None:
        function()

    return call
