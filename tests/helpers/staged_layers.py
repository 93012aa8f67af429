"""A layer of experts in pinned memory, its two ways (slots, stages), and the truth in float64."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy
from graphcore_kernels import moe_grouped_gemm
from helpers.gemm_problems import TOLERANCES, decode, encode, poison

from graphcore.driver import Driver
from graphcore.driver.kernel import Pointer
from graphcore.moe import (
    Location,
    ProductOptions,
    SlotAdmission,
    SlotPool,
    StagedProducts,
    StagingMemory,
)
from graphcore.resources.buffer import Buffer
from graphcore.resources.pinned import PinnedMemory
from graphcore.resources.tensors import TensorRef, contiguous_strides

EXPERTS, HIDDEN, INNER = 10, 16, 8
GUARD = 512
_PLAIN = ProductOptions()


class StagedLayer:
    """Experts of one layer on a driver.

    Args:
        driver: Where.
        dtype: Of everything.
        options: Of the products.
        seed: Of the weights.
        pageable: Whether experts lie in pageable memory.
        sizes: Experts, columns of a row, columns between the products.
    """

    def __init__(
        self,
        driver: Driver,
        dtype: str = "float32",
        options: ProductOptions = _PLAIN,
        seed: int = 0,
        pageable: bool = False,
        sizes: tuple[int, int, int] = (EXPERTS, HIDDEN, INNER),
    ) -> None:
        self.driver, self.dtype, self.options = driver, dtype, options
        self.count, self.hidden, self.inner = sizes
        self.location = Location.PAGEABLE if pageable and driver.is_emulated else None
        shapes = {"gate_up": (2 * self.inner, self.hidden), "down": (self.hidden, self.inner)}
        if options.layout == "kn":
            shapes = {name: shape[::-1] for name, shape in shapes.items()}
        draw = numpy.random.default_rng(seed)
        self.experts = {
            name: encode(
                draw.standard_normal((self.count, *shape), numpy.float32)
                * (16 / shape[-1]) ** 0.5
                / 3,
                dtype,
            )
            for name, shape in shapes.items()
        }
        place = self._pageable if pageable else self._pinned
        self.sources: Mapping[str, TensorRef] = {
            name: place(values) for name, values in self.experts.items()
        }

    def _ref(self, address: int, values: Any, owner: object) -> TensorRef:
        strides = contiguous_strides(values.shape)
        size = values.itemsize
        return TensorRef(address, values.shape, strides, self.dtype, size, "cpu", owner=owner)

    def _pinned(self, values: Any) -> TensorRef:
        memory = PinnedMemory(self.driver, values.nbytes)
        Pointer(memory.address, "uint8").array(values.nbytes)[:] = numpy.frombuffer(
            values.tobytes(), numpy.uint8
        )
        return self._ref(memory.address, values, memory)

    def _pageable(self, values: Any) -> TensorRef:
        return self._ref(values.ctypes.data, values, values)

    # ---- tensors -------------------------------------------------------------------------------

    def step(self, rows: int, top_k: int, seed: int = 0) -> StagedTensors:
        return StagedTensors(self, rows, top_k, seed)

    # ---- ways ----------------------------------------------------------------------------------

    def memory(self, experts: int = 3, rows: int = 64, top_k: int = 2) -> GuardedMemory:
        """Scratch for so many experts and rows at once, between guards."""
        return GuardedMemory(self, experts, rows, top_k)

    def staged(self, memory: StagingMemory) -> StagedProducts:
        return StagedProducts(
            self.sources, memory=memory, options=self.options, location=self.location
        )

    def through_slots(self, tensors: StagedTensors) -> bytes:
        """What the same step gives where every expert has a slot."""
        pool = SlotPool({"layer": self.sources}, self.count, driver=self.driver)
        out = tensors.fresh_out()
        admission = SlotAdmission(pool, "layer", tensors.ids, weights=tensors.weights)
        rows, given = pool["layer"].rows, admission.outputs
        routes = tensors.rows * tensors.top_k
        inner = Buffer.allocate((routes, self.inner), self.dtype, driver=self.driver)
        admission.launch()
        moe_grouped_gemm(
            tensors.x, rows["gate_up"], given["offsets"], given["slots"], inner,
            gather=given["gather"], driver=self.driver, **self.options.first,
        )  # fmt: skip
        moe_grouped_gemm(
            inner, rows["down"], given["offsets"], given["slots"], out, scale=given["scale"],
            scatter=given["scatter"], driver=self.driver, **self.options.second,
        )  # fmt: skip
        assert admission.outcome().is_ok
        return out.read().tobytes()


class StagedTensors:
    """The tensors of one step; ``out`` is poisoned."""

    def __init__(self, layer: StagedLayer, rows: int, top_k: int, seed: int) -> None:
        self.layer, self.rows, self.top_k = layer, rows, top_k
        draw = numpy.random.default_rng(seed)
        driver = layer.driver
        self.x = Buffer.allocate((rows, layer.hidden), layer.dtype, driver=driver)
        self.x_values = encode(draw.standard_normal((rows, layer.hidden)), layer.dtype)
        self.ids = Buffer.allocate((rows, top_k), "int32", driver=driver)
        self.weights = Buffer.allocate((rows, top_k), "float32", driver=driver)
        self.weight_values = draw.uniform(0.1, 1.0, (rows, top_k)).astype(numpy.float32)
        self.out = self.fresh_out()
        if rows:
            driver.write(self.x.address, self.x_values.tobytes())
            self.weights.write(self.weight_values)
        self.choose(random.Random(seed))

    def choose(self, draw: random.Random, popular: int | None = None) -> None:
        """Other experts: each row's are different, among the first ``popular`` (None: all)."""
        most = popular or self.layer.count
        chosen = [draw.sample(range(most), self.top_k) for _ in range(self.rows)]
        self.route(chosen)

    def route(self, chosen: list[list[int]]) -> None:
        self.chosen = numpy.reshape(numpy.array(chosen, numpy.int32), (self.rows, self.top_k))
        if self.rows:
            self.ids.write(self.chosen)

    def fresh_out(self) -> Buffer:
        shape = self.rows, self.layer.hidden
        out = Buffer.allocate(shape, self.layer.dtype, driver=self.layer.driver)
        self.poison(out)
        return out

    def poison(self, out: Buffer | None = None) -> None:
        out = out or self.out
        if self.rows:
            values = poison((self.rows, self.layer.hidden), self.layer.dtype)
            self.layer.driver.write(out.address, values.tobytes())

    def all(self) -> tuple[Buffer, Buffer, Buffer, Buffer]:
        return self.x, self.ids, self.weights, self.out

    def read(self) -> bytes:
        data: bytes = self.out.read().tobytes()
        return data

    def truth(self) -> numpy.ndarray:
        """float64 [rows, hidden]; what lies between the products is rounded as it is stored."""
        layer = self.layer
        up, down = (decode(layer.experts[name], layer.dtype) for name in ("gate_up", "down"))
        if layer.options.layout == "kn":
            up, down = up.transpose(0, 2, 1), down.transpose(0, 2, 1)
        x = decode(self.x_values, layer.dtype)
        result = numpy.zeros((self.rows, layer.hidden))
        for row, experts in enumerate(self.chosen.tolist()):
            for choice, expert in enumerate(experts):
                sums = up[expert] @ x[row]
                gate, linear = (
                    (sums[: layer.inner], sums[layer.inner :]) if layer.options.gate_up == "concat"
                    else (sums[::2], sums[1::2])
                )  # fmt: skip
                inner = gate / (1 + numpy.exp(-gate)) * linear
                inner = decode(encode(inner, layer.dtype), layer.dtype)
                result[row] += self.weight_values[row, choice] * (down[expert] @ inner)
        return result

    def check(self) -> None:
        """``out`` is the truth, row by row, within what the grouped product's tests allow."""
        layer, expected = self.layer, self.truth()
        got = decode(self.out.read(), layer.dtype)
        kind = layer.options.precision if layer.dtype == "float32" else layer.dtype
        error = numpy.linalg.norm(got - expected, axis=1)
        size = numpy.linalg.norm(expected, axis=1)
        # two products, one with an activation
        assert (error <= 3 * TOLERANCES[kind] * size).all(), (error / size).max()


class GuardedMemory(StagingMemory):
    """Staging memory of a layer's sizes whose contents are NaN and which lies between guards."""

    def __init__(self, layer: StagedLayer, experts: int, rows: int, top_k: int) -> None:
        from graphcore.moe.layers.staged_sizes import StagedSizes

        up, down = layer.sources["gate_up"], layer.sources["down"]
        sizes = StagedSizes.of(up, down, layer.options)
        super().__init__(
            expert_bytes=sizes.bytes_of_experts(experts),
            row_bytes=sizes.bytes_of_rows(rows, top_k, experts),
            driver=layer.driver,
        )
        self._guarded: list[Buffer] = []
        self._experts = self._between_guards(self.expert_bytes)
        self._rows = self._between_guards(self.row_bytes)

    def _between_guards(self, size: int) -> Buffer:
        whole = Buffer.allocate(size + 2 * GUARD, "uint8", driver=self.driver)
        whole.write(0xFF)
        self._guarded.append(whole)
        ref = whole.__graphcore_tensor__()
        part = TensorRef(
            ref.address + GUARD, (size,), (1,), "uint8", 1, ref.device_kind, ref.device,
            owner=ref.owner,
        )  # fmt: skip
        return Buffer(part, self.driver)

    def poison(self) -> None:
        for whole in self._guarded:
            whole.write(0xFF)

    def check_guards(self) -> None:
        for whole in self._guarded:
            data = whole.read()
            assert (data[:GUARD] == 0xFF).all()
            assert (data[-GUARD:] == 0xFF).all()
