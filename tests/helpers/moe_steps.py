"""A small decode model with its experts in slots, as steps for GraphReuse, and what each must give.

Two layers: experts admitted, gate and up with SwiGLU, down with the weighted combination, and a
strided copy of the last hidden rows into the output. Every expectation is computed by the same
kernels over a pool that holds all experts, so that bits are compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy
from graphcore_kernels import moe_grouped_gemm, strided_copy
from helpers.slot_pools import pinned_experts

from graphcore.driver import Driver
from graphcore.moe import (
    CallableStep,
    GraphReuse,
    GroupUse,
    Manifest,
    ManifestRegistry,
    SlotAdmission,
    SlotPool,
    manifest_of,
)
from graphcore.resources.buffer import Buffer

HIDDEN, INTER, EXPERTS, TOP_K, ROWS, SLOTS = 8, 8, 6, 2, 2, 4
LAYERS = ("layers.0", "layers.1")


class Layers:
    """The launches of a step of one row count over one pool."""

    def __init__(self, pool: SlotPool, rows: int, x: Buffer, ids: Any, weights: Any) -> None:
        driver = pool.driver
        self.admissions: dict[str, SlotAdmission] = {}
        self._launches: list[Any] = []
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
            self._launches += [made.launch, up.launch, down.launch]
            value = out
        self.out = value

    def launch(self) -> None:
        for launch in self._launches:
            launch()


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

    def publish(self, manifest: Manifest) -> int:
        publication = self.manifests.replace(manifest)
        assert publication.is_accepted, publication
        return publication.generation

    def lane(self, rows: int | None = None, name: str = "decode", **more: Any) -> Lane:
        """Static buffers of steps of one row count."""
        return Lane(self, self.rows if rows is None else rows, name, **more)


class Lane:
    """Steps of one row count: their inputs, their output, and the step itself."""

    def __init__(self, scene: Scene, rows: int, name: str = "decode") -> None:
        driver = scene.driver
        self.scene, self.rows = scene, rows
        self.x = Buffer.allocate((rows, HIDDEN), "float32", driver=driver)
        self.ids = {each: Buffer.allocate((rows, TOP_K), "int32", driver=driver) for each in LAYERS}
        self.weights = {
            each: Buffer.allocate((rows, TOP_K), "float32", driver=driver) for each in LAYERS
        }
        self.out = Buffer.allocate((rows, HIDDEN), "float32", driver=driver)
        self.layers = Layers(scene.pool, rows, self.x, self.ids, self.weights)
        self._expected = Layers(scene.everything, rows, self.x, self.ids, self.weights)
        self.calls: list[str] = []
        self.step = CallableStep(
            name,
            self._launch,
            tensors={"x": self.x, "out": self.out},
            groups=self.uses(),
            staged=self._staged,
        )

    def uses(self) -> list[GroupUse]:
        return [
            GroupUse(each, self.ids[each], admission=self.layers.admissions[each])
            for each in LAYERS
        ]

    def move_output(self, out: Buffer | None = None) -> Buffer:
        """Another output buffer."""
        self.out = out or Buffer.allocate((self.rows, HIDDEN), "float32", driver=self.scene.driver)
        self.step.set("out", self.out)
        return self.out

    def _launch(self) -> None:
        self.calls.append("run")
        self.layers.launch()
        strided_copy(self.out, self.layers.out)

    def _staged(self) -> None:
        self.calls.append("staged")
        self._expected.launch()
        strided_copy(self.out, self._expected.out)

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

    def run(self, certificate: Any = None, *, check: bool = True, **more: Any) -> Any:
        """One step with other experts, its output checked; what GraphReuse says of it."""
        self.choose()
        wanted = self.expected()
        self.out.write(numpy.full((self.rows, HIDDEN), numpy.nan, numpy.float32))
        more.setdefault("stream", self.scene.stream)
        self.calls.clear()
        result = self.scene.reuse.run(self.step, certificate, **more)
        self.scene.driver.synchronize()
        if check:
            assert self.out.read().tobytes() == wanted, result
        return result

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


Work = Callable[[], object]
