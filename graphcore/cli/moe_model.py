"""A decoder with random weights whose experts lie in slots, for ``graphcore moe``.

One token of each row a step: attention over a static cache of keys and values, a router, experts
through slots, the most likely token chosen on the device. Attention looks at as many positions as
the longest row has, in steps of a bucket: with each bucket the graph of the step is another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from graphcore_kernels import moe_grouped_gemm

from graphcore.driver import Driver
from graphcore.errors import CapacityError, ConfigurationError
from graphcore.moe.decisions.decode_overlap import Row
from graphcore.moe.decisions.slots_needed import slots_needed
from graphcore.moe.layers.product_options import ProductOptions
from graphcore.moe.layers.staged import StagedProducts, StagedStep, StagedTotals
from graphcore.moe.layers.staging_memory import StagingMemory
from graphcore.moe.manifests.manifest_registry import ManifestRegistry
from graphcore.moe.overlap.decode_model import INPUT_WORDS
from graphcore.moe.slots.admission import SlotAdmission
from graphcore.moe.slots.expert_memory import ExpertMemory
from graphcore.moe.slots.group_use import GroupUse
from graphcore.moe.slots.pool_manifest import manifest_of
from graphcore.moe.slots.slot_pool import SlotPool
from graphcore.moe.steps.callable_step import CallableStep

_OPTIONS = ProductOptions()
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of the model; ``bucket`` and ``positions`` count positions of a row."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    experts: int = 16
    top_k: int = 2
    expert_width: int = 32
    vocabulary: int = 211
    rows: int = 2
    positions: int = 256
    bucket: int = 16
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise ConfigurationError(f"top_k: expected at most {self.experts}, got {self.top_k}")
        if self.hidden % self.heads:
            raise ConfigurationError(
                f"hidden: expected a multiple of {self.heads} heads, got {self.hidden}"
            )

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, hidden {self.hidden}, {self.experts} experts of width "
            f"{self.expert_width}, {self.top_k} a token, {self.rows} rows, {self.dtype}"
        )


class _Layer:
    """Weights, cache and experts of one layer, and its static tensors for the kernels."""

    def __init__(self, model: RandomDecoder, name: str) -> None:
        shape = model.shape
        rows, hidden = shape.rows, shape.hidden
        self.attention = model.weights(hidden, 3 * hidden)
        self.back = model.weights(hidden, hidden)
        self.router = model.weights(hidden, shape.experts)
        cache = (rows, shape.heads, shape.positions, hidden // shape.heads)
        self.keys, self.values = model.zeros(*cache), model.zeros(*cache)
        self.name = name
        self.x, self.out = model.zeros(rows, hidden), model.zeros(rows, hidden)
        self.ids = model.zeros(rows, shape.top_k, dtype=torch.int32)
        self.factors = model.zeros(rows, shape.top_k, dtype=torch.float32)

    def join(self, model: RandomDecoder, memory: StagingMemory | None) -> None:
        """Plans its products over the pool; what fits no slots goes through ``memory``."""
        self.staged: StagedStep | None = None
        self.staging: StagedProducts | None = None
        self.admission: SlotAdmission | None = None
        if memory is not None:
            self.staging = StagedProducts.of_pool(
                model.pool, self.name, memory=memory, options=_OPTIONS
            )
            self.staged = self.staging.plan(self.x, self.ids, self.factors, self.out)
            return
        group = model.pool[self.name]
        self.admission = SlotAdmission(model.pool, self.name, self.ids, weights=self.factors)
        outputs, routes = self.admission.outputs, self.ids.numel()
        self._inner = model.zeros(routes, model.shape.expert_width)
        self._error = model.zeros(1, dtype=torch.int32)
        size = max(moe_grouped_gemm.workspace_bytes(routes, model.shape.hidden), 1)
        self._workspace = model.zeros(size, dtype=torch.uint8)
        tables = outputs["offsets"], outputs["slots"]
        self.products = (
            moe_grouped_gemm.plan(
                self.x, group.rows["gate_up"], *tables, self._inner, gather=outputs["gather"],
                error=self._error, **_OPTIONS.first,
            ),
            moe_grouped_gemm.plan(
                self._inner, group.rows["down"], *tables, self.out, scale=outputs["scale"],
                scatter=outputs["scatter"], error=self._error, workspace=self._workspace,
                **_OPTIONS.second,
            ),
        )  # fmt: skip

    def run_experts(self) -> None:
        """The weighted sums of the experts of ``x`` into ``out``."""
        if self.staged is not None:
            self.staged.launch()
            return
        assert self.admission is not None
        for each in (self.admission, *self.products):
            each.launch()


class RandomDecoder:
    """The model; a :class:`graphcore.moe.overlap.decode_model.DecodeModel`. Not locked.

    Args:
        shape: Its sizes.
        slots: Of each layer.
        driver: Where.
        seed: Of its weights.

    Attributes:
        pool: The slots.
        manifests: The manifest of the pool, published.
        step: Of every row count there is: one.

    Raises:
        ConfigurationError: A number of slots that cannot be.
        CudaError: Out of memory.
    """

    devices = 1
    embeddings_on_device = True
    is_sampled_on_device = True
    can_roll_back = True

    def __init__(self, shape: DecoderShape, slots: int, driver: Driver, seed: int = 0) -> None:
        self.shape, self.driver = shape, driver
        self.rows = shape.rows
        self._device = "cpu" if driver.is_emulated else f"cuda:{driver.device}"
        self._dtype = getattr(torch, shape.dtype)
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self.inputs = self.zeros(shape.rows, INPUT_WORDS, dtype=torch.int64)
        self.tokens = self.zeros(shape.rows, dtype=torch.int64)
        self._embedding = self.weights(shape.vocabulary, shape.hidden, scale=1.0)
        self._head = self.weights(shape.hidden, shape.vocabulary)
        # on the device, or a captured step would copy it from pageable memory
        self._places = torch.arange(shape.positions, device=self._device)
        names = [f"layers.{index}" for index in range(shape.layers)]
        self._layers = [_Layer(self, name) for name in names]
        self._memory = ExpertMemory(driver)
        self.pool = SlotPool({name: self._experts() for name in names}, slots, driver=driver)
        self.manifests = ManifestRegistry()
        self.pool.ownership = self.manifests.ownership
        self.manifests.replace(manifest_of(self.pool, top_k=shape.top_k))
        memory = None
        if slots < slots_needed(shape.rows * shape.top_k, shape.experts):
            memory = StagingMemory(expert_bytes=64 * _MIB, row_bytes=64 * _MIB, driver=driver)
        for layer in self._layers:
            layer.join(self, memory)
        self._extent = 0
        self.step = self._step()

    # ---- memory --------------------------------------------------------------------------------

    def weights(self, *sizes: int, scale: float | None = None) -> Any:
        """Random numbers of about one over the root of the first size, of the model's type."""
        spread = sizes[-2] ** -0.5 if scale is None else scale
        made = torch.randn(sizes, generator=self._generator, device=self._device)
        return (made * spread).to(self._dtype)

    def zeros(self, *sizes: int, dtype: Any = None) -> Any:
        """Static memory on the device."""
        return torch.zeros(sizes, dtype=dtype or self._dtype, device=self._device)

    def _experts(self) -> dict[str, Any]:
        shape = self.shape
        sizes = {
            "gate_up": (shape.experts, 2 * shape.expert_width, shape.hidden),
            "down": (shape.experts, shape.hidden, shape.expert_width),
        }
        return {
            bank: self._memory.take(
                torch.nn.Parameter(self.weights(*each, scale=each[-1] ** -0.5), requires_grad=False)
            )
            for bank, each in sizes.items()
        }

    def staged_totals(self) -> dict[str, StagedTotals]:
        """Layer -> what went through scratch memory, after all work."""
        return {
            layer.name: layer.staging.totals()
            for layer in self._layers
            if layer.staging is not None
        }

    # ---- steps ---------------------------------------------------------------------------------

    def grows(self, rows: Sequence[Row]) -> bool:
        """Whether the cache, which has its size, has no room for them."""
        return max(row.position for row in rows) >= self.shape.positions

    def prepare(self, rows: Sequence[Row]) -> CallableStep:
        """The step; another one where a row is the first to need another bucket of positions.

        Raises:
            CapacityError: A position beyond the cache.
        """
        shape = self.shape
        longest = max(row.position for row in rows) + 1
        if longest > shape.positions:
            raise CapacityError(
                f"position: expected at most {shape.positions - 1}, got {longest - 1}"
            )
        extent = min(-(-longest // shape.bucket) * shape.bucket, shape.positions)
        if extent != self._extent:
            self._extent = extent
            self.step.set_value("extent", extent)
        return self.step

    def roll_back(self, row: Row) -> None:
        """Nothing: no row looks beyond its position, and whoever comes next writes there."""

    def _step(self) -> CallableStep:
        uses = [GroupUse(each.name, each.ids, each.admission) for each in self._layers]
        return CallableStep(
            "decode",
            self._run,
            tensors={"inputs": self.inputs, "tokens": self.tokens},
            groups=uses,
            staged=self._run if self._layers[0].staged is not None else None,
            driver=self.driver,
            capabilities=(self.shape.dtype,),
        )

    @torch.no_grad()
    def _run(self) -> None:
        positions, given, is_live = self.inputs.unbind(1)
        token = torch.where(given >= 0, given, self.tokens)
        x = self._embedding[token]
        reach = self._places[: self._extent]
        is_here = (self._places == positions[:, None])[:, None, :, None]
        is_seen = (reach <= positions[:, None])[:, None, None, :]
        for layer in self._layers:
            x = x + self._attend(layer, _normal(x), is_here, is_seen)
            hidden = _normal(x)
            scores = (hidden @ layer.router).float().softmax(-1)
            factors, ids = scores.topk(self.shape.top_k)
            layer.factors.copy_(factors / factors.sum(-1, keepdim=True))
            layer.ids.copy_(ids)
            layer.x.copy_(hidden)
            layer.run_experts()
            x = x + layer.out
        chosen = (_normal(x) @ self._head).argmax(-1)
        self.tokens.copy_(torch.where(is_live > 0, chosen, self.tokens))

    def _attend(self, layer: _Layer, x: Any, is_here: Any, is_seen: Any) -> Any:
        shape = self.shape
        split = (shape.rows, 3, shape.heads, 1, shape.hidden // shape.heads)
        query, key, value = (x @ layer.attention).view(split).unbind(1)
        layer.keys.copy_(torch.where(is_here, key, layer.keys))
        layer.values.copy_(torch.where(is_here, value, layer.values))
        keys = layer.keys[:, :, : self._extent]
        values = layer.values[:, :, : self._extent]
        scores = (query * keys).sum(-1)[:, :, None] * (shape.hidden // shape.heads) ** -0.5
        weights = scores.float().masked_fill(~is_seen, float("-inf")).softmax(-1)
        mixed = (weights.transpose(2, 3).to(values.dtype) * values).sum(2)
        return mixed.reshape(shape.rows, shape.hidden) @ layer.back


def _normal(x: Any) -> Any:
    return torch.nn.functional.rms_norm(x, x.shape[-1:])
