"""AcceleratedModel: a model whose experts lie in slots, what its steps came to, and the way back.

Which module stands where, and whose weights lie where, is changed as a whole: what raises has
changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import torch
from graphcore_kernels import RoutePolicy

from graphcore.driver import Driver, active
from graphcore.errors import ConfigurationError, LifecycleError
from graphcore.moe.graph_reuse import GraphReuse
from graphcore.moe.layers.layer_staging import staging_for
from graphcore.moe.layers.products_plan import ProductsPlans
from graphcore.moe.layers.slot_experts import SlotExperts
from graphcore.moe.layers.slot_products import SlotProducts
from graphcore.moe.layers.staged import StagedProducts, StagedTotals
from graphcore.moe.layers.staging_memory import StagingMemory
from graphcore.moe.layers.torch_capture import refuse_inside_capture
from graphcore.moe.layers.transformers_experts import FoundExperts
from graphcore.moe.manifests.manifest_registry import ManifestRegistry
from graphcore.moe.slots.expert_memory import ExpertMemory
from graphcore.moe.slots.pool_manifest import manifest_of
from graphcore.moe.slots.slot_pool import SlotPool
from graphcore.moe.slots.slot_state import SlotFault, SlotTotals
from graphcore.moe.steps.callable_step import CallableStep


class AcceleratedModel:
    """A model whose experts lie in slots; made by :func:`accelerate`. Not locked.

    Attributes:
        model: The model itself.
        pool: The slots of all layers; a group is named as its module is.
        layers: Name of the module -> what stands in its place.
        staging: What prompts' experts pass through; None: nothing does.
    """

    def __init__(
        self,
        model: Any,
        found: list[FoundExperts],
        driver: Driver,
        origin: torch.device,
        home: torch.device,
    ) -> None:
        self.model = model
        self.driver = driver
        self.device = home
        self._found = found
        self._memory = ExpertMemory(driver)
        self._origin = origin
        self._is_restored = False
        self._owns_staging = False
        self.layers: Mapping[str, SlotExperts] = {}
        self.staging: StagingMemory | None = None
        self.pool: SlotPool

    # ---- looking --------------------------------------------------------------------------------

    def totals(self) -> dict[str, SlotTotals]:
        """Layer -> what its steps came to, after all work."""
        return {name: self.pool.totals(name) for name in self.layers}

    def staged_totals(self) -> dict[str, StagedTotals]:
        """Layer -> what went through staging memory, after all work; empty without any."""
        found = {name: layer.products.staged for name, layer in self.layers.items()}
        return {name: staged.totals() for name, staged in found.items() if staged is not None}

    def faults(self) -> dict[str, SlotFault]:
        """Layer -> the first step that was refused (its rows were zero), of those that had one."""
        found: dict[str, SlotFault] = {}
        for name, layer in self.layers.items():
            staged = layer.products.staged
            for fault in (self.pool.fault(name), staged.fault() if staged else None):
                if fault is not None and fault.count:
                    found.setdefault(name, fault)
        return found

    @property
    def hit_rate(self) -> float:
        """Of all experts that were asked for, after all work; 1.0 before the first."""
        totals = self.totals().values()
        hits, misses = sum(each.hits for each in totals), sum(each.misses for each in totals)
        return hits / (hits + misses) if hits + misses else 1.0

    @property
    def is_restored(self) -> bool:
        return self._is_restored

    # ---- through GraphReuse ---------------------------------------------------------------------

    def reuse(self, **options: Any) -> GraphReuse:
        """A GraphReuse over the slots, whose manifest is theirs.

        Args:
            options: As of :class:`GraphReuse`, but ``driver``, ``pool`` and ``manifests``.

        Raises:
            ConfigurationError: As of :class:`GraphReuse`; a router that does not say its top_k.
        """
        manifests = ManifestRegistry()
        orders = {each.layout for each in self._found}
        if len(orders) > 1:
            raise ConfigurationError(f"layers: expected banks in one order, got {sorted(orders)}")
        manifests.replace(manifest_of(self.pool, top_k=self._choices(), order=orders.pop()))
        self.pool.ownership = manifests.ownership
        return GraphReuse(driver=self.driver, pool=self.pool, manifests=manifests, **options)

    def step(
        self,
        identity: Hashable,
        function: Callable[[], object],
        *,
        tensors: Mapping[str, Any],
        rows: int,
        values: Mapping[str, Hashable] | None = None,
        capabilities: Sequence[Hashable] = (),
    ) -> CallableStep:
        """A step of the model as :meth:`GraphReuse.run` takes it, over all of its layers.

        Args:
            identity: Of its graph; steps of several row counts share one.
            function: Runs the model on the current stream, over static tensors, without gradients.
            tensors: Name -> static tensor that it reads or writes; what comes in first.
            rows: Rows that reach the experts: batch times tokens.
            values: Name -> whatever else it depends on.
            capabilities: Whatever else selects kernels.

        Raises:
            CacheTypeError: Something declared as a tensor is none.
            CaptureError: Inside a capture.
            ConfigurationError: No tensors, or a router that does not say its top_k.
        """
        choices = self._choices()
        uses = [layer.bind(rows, choices[name]) for name, layer in self.layers.items()]
        return CallableStep(
            identity,
            function,
            tensors=tensors,
            groups=uses,
            staged=None if self.staging is None else partial(self._run_staged, function),
            values=values,
            rows=rows,
            capabilities=capabilities,
            driver=self.driver,
        )

    def _run_staged(self, function: Callable[[], object]) -> None:
        products = [layer.products for layer in self.layers.values()]
        for each in products:
            each.leaves_slots_alone = True
        try:
            function()
        finally:
            for each in products:
                each.leaves_slots_alone = False

    def _choices(self) -> dict[str, int]:
        silent = [each.name for each in self._found if each.top_k is None]
        if silent:
            raise ConfigurationError(f"top_k: expected routers that say theirs, {silent} do not")
        return {each.name: each.top_k or 1 for each in self._found}

    # ---- the end --------------------------------------------------------------------------------

    def restore(self) -> None:
        """Makes the model what it was: its own experts, their weights where they were.

        Waits for all work. Guarded graphs over the slots (those of ``CUDAGraphAR``) refuse their
        next launch; the next prompt captures anew. A second call does nothing.

        Raises:
            CaptureError: Inside a capture.
            LifecycleError: Something else stands in the place of the experts now.
            torch.OutOfMemoryError: The device has no room for the weights; free some, and call it
                again.
        """
        if self._is_restored:
            return
        refuse_inside_capture("restore")
        for each in self._found:
            if getattr(each.block, each.attribute) is not self.layers[each.name]:
                raise LifecycleError(
                    f"restore: expected the experts in slots at {each.name}, got "
                    f"{type(getattr(each.block, each.attribute)).__name__}"
                )
        with active.outside_captures():
            self.driver.synchronize()
        self._close()
        self._release_cached()
        self._memory.give_back()
        self._put_back()
        self._is_restored = True

    def __enter__(self) -> AcceleratedModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        state = "restored" if self._is_restored else repr(self.pool)
        return f"<AcceleratedModel {type(self.model).__name__}, {len(self._found)} layers, {state}>"

    # ---- the beginning --------------------------------------------------------------------------

    def _begin(
        self,
        slots: dict[str, int],
        policy: RoutePolicy,
        precision: str,
        staging: StagingMemory | bool,
        undo: ExitStack,
    ) -> None:
        undo.callback(self._memory.give_back)
        sources = {
            each.name: {bank: self._memory.take(weight) for bank, weight in each.weights.items()}
            for each in self._found
        }
        self._release_cached()
        self.pool = SlotPool(sources, slots, driver=self.driver, policy=policy)
        undo.callback(self._close)
        self._make_staging(staging, precision)
        plans = ProductsPlans(self.driver, policy)
        self.layers = {
            each.name: SlotExperts(
                SlotProducts(
                    self.pool,
                    each.name,
                    options=each.options(precision),
                    plans=plans,
                    staged=self._staged(each, precision),
                ),
                each.module,
            ).eval()
            for each in self._found
        }
        undo.callback(self._put_back)
        for each in self._found:
            setattr(each.block, each.attribute, self.layers[each.name])
        if self.device != self._origin:
            self.model.to(self.device)

    def _make_staging(self, staging: StagingMemory | bool, precision: str) -> None:
        if isinstance(staging, StagingMemory):
            self.staging = staging
        elif staging:
            self.staging = staging_for(
                self.pool,
                [(each.name, each.options(precision), each.top_k or 1) for each in self._found],
            )
            self._owns_staging = True

    def _staged(self, found: FoundExperts, precision: str) -> StagedProducts | None:
        if self.staging is None:
            return None
        options = found.options(precision)
        return StagedProducts.of_pool(self.pool, found.name, memory=self.staging, options=options)

    def _close(self) -> None:
        for layer in self.layers.values():
            layer.products.close()
        if self.staging is not None and self._owns_staging:
            self.staging.close()
        self.pool.close()

    def _put_back(self) -> None:
        for each in self._found:
            setattr(each.block, each.attribute, each.module)
        if self.device != self._origin:
            self.model.to(self._origin)

    def _release_cached(self) -> None:
        """Gives memory that torch keeps for later back to the driver, whose pool needs it."""
        if not self.driver.is_emulated:
            torch.cuda.empty_cache()
