"""spread_experts(): a mixture of experts whose experts are spread over ranks, in slots; and back.

Of each layer's experts every rank owns a part, and slots for those. It runs the whole model but the
experts on rows of its own, which travel to the owners of their experts and come back; or, where the
heads are spread too, its part of the model on the rows that all have, and sums are added.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch

from graphcore.decode.transformers_sharding import ranks_of
from graphcore.errors import ConfigurationError, LifecycleError
from graphcore.moe.layers.transformers_experts import FoundExperts, find_experts
from graphcore.moe.manifests.manifest import Manifest
from graphcore.moe.models.accelerated_model import AcceleratedModel
from graphcore.moe.models.accelerating import accelerate
from graphcore.moe.slots.pool_manifest import manifest_of
from graphcore.moe.slots.slot_state import SlotFault
from graphcore.moe.steps.callable_step import CallableStep
from graphcore.parallel.expert_exchange import ExchangeTotals, ExpertExchange, check_capacity
from graphcore.parallel.expert_parts import (
    ExpertPart,
    cut,
    loaded_by_rank,
    refuse_parts_of_each,
    take_loaded,
)
from graphcore.parallel.expert_sum import ExpertSum
from graphcore.parallel.parallel_experts import ParallelExperts
from graphcore.parallel.rank_manifests import RankManifests
from graphcore.parallel.rank_reuse import RankReuse
from graphcore.parallel.ranks import Ranks
from graphcore.parallel.sharded_model import check_sharded, facts_of

_log = logging.getLogger("graphcore")


def spread_experts(
    model: Any,
    ranks: Ranks,
    slots_per_layer: int,
    *,
    capacity: float = 1.0,
    **options: Any,
) -> SpreadExperts:
    """Spreads the experts of ``model`` over ``ranks``: rank r owns the r-th part of each layer's.

    Args:
        model: As of :func:`graphcore.moe.accelerate`, whole, the same on all ranks; or spread by
            :func:`load_sharded` with ``whole_experts=True``: then all ranks have the same rows,
            and :class:`TensorParallelAR` decodes them.
        ranks: Who shares the experts.
        slots_per_layer: Experts of this rank's part that can be resident.
        capacity: Share of the most routes that may go to one rank for which there are places;
            below 1.0 less memory and traffic, and a step that needs more is zero (``faults()``).
            Where the heads are spread too nothing is sent, and it is 1.0.
        options: Of :func:`graphcore.moe.accelerate`.

    Returns:
        A handle; ``restore()`` makes the model what it was.

    Raises:
        ConfigurationError: As :func:`graphcore.moe.accelerate`; a number of ranks that does not
            divide the experts; a part of every expert on each rank; models or settings that differ
            by rank, on all ranks.
        RankError: Another rank failed or is missing.
    """
    with ranks.together("spreading experts"), ExitStack() as undo:
        check_capacity(capacity)
        shares_rows = _check_rows(model, ranks, capacity, options.get("device"))
        refuse_parts_of_each(model, ranks)
        loaded = loaded_by_rank(model, ranks)
        found = [] if loaded else find_experts(model)
        check_experts(found, ranks.size)
        facts = facts_of(model) | {
            "capacity": str(capacity),
            "slots_per_layer": str(slots_per_layer),
        }
        ranks.agree("spreading experts", facts=facts)
        parts = {name: take_loaded(module, undo) for name, module in loaded.items()}
        if loaded:
            found = find_experts(model)
            check_experts(found, 1)
            check_all_loaded(found, loaded)
        else:
            parts = {each.name: cut(each.module, ranks, undo) for each in found}
        handle = accelerate(model, slots_per_layer, **options)
        undo.callback(handle.restore)
        made = SpreadExperts(handle, found, parts, ranks, capacity, shares_rows=shares_rows)
        undo.pop_all()
    ranks.agree("experts are spread")
    _log.info("rank %d owns %d experts of each layer", ranks.rank, made.experts_here)
    return made


def _check_rows(model: Any, ranks: Ranks, capacity: float, device: Any) -> bool:
    """Whether all ranks have the same rows: where heads are spread, they decode together.

    Raises:
        ConfigurationError: Spread over other ranks; a capacity where nothing is sent, or a device
            for what has its place.
    """
    weights = model.parameters() if isinstance(model, torch.nn.Module) else ()
    if all(ranks_of(each) is None for each in weights):
        return False
    check_sharded(model, ranks)
    if capacity != 1.0:
        raise ConfigurationError(
            f"capacity: expected 1.0 for a model whose heads are spread too, got {capacity}: all "
            "ranks have the same rows, and none is sent"
        )
    if device is not None:
        raise ConfigurationError(
            f"device: expected None for a model whose heads are spread too, which is where each "
            f"rank has loaded it, got {device}"
        )
    return True


def check_all_loaded(found: Sequence[FoundExperts], loaded: Mapping[str, Any]) -> None:
    """Refuses a model of which some layers' experts were loaded by rank, and others whole.

    Raises:
        ConfigurationError: Names the layer.
    """
    for each in found:
        if each.name not in loaded:
            raise ConfigurationError(
                f"{each.name}: expected experts that were loaded by rank, as those of "
                f"{next(iter(loaded))}, got all of them"
            )


def check_experts(found: Sequence[FoundExperts], ranks: int) -> None:
    """Refuses experts that cannot be spread evenly, or that do not say how many a row has.

    Raises:
        ConfigurationError: Names the layer.
    """
    for each in found:
        count = int(each.weights["down"].shape[0])
        if count % ranks:
            raise ConfigurationError(
                f"ranks: expected a number that divides the {count} experts of {each.name}, got "
                f"{ranks}"
            )
        if each.top_k is None:
            raise ConfigurationError(f"top_k: expected a router that says its own, {each.name}")


class SpreadExperts:
    """A model whose experts are spread over ranks; made by :func:`spread_experts`. Not locked.

    Attributes:
        model: The model itself.
        ranks: Who shares the experts.
        pool: The slots of this rank's experts.
        layers: Name of the module -> what stands in its place.
        shares_rows: Whether all ranks have the same rows, since the model's heads are spread too.
    """

    def __init__(
        self,
        handle: AcceleratedModel,
        found: Sequence[FoundExperts],
        parts: Mapping[str, ExpertPart],
        ranks: Ranks,
        capacity: float,
        *,
        shares_rows: bool,
    ) -> None:
        self.model = handle.model
        self.ranks = ranks
        self.pool = handle.pool
        self.driver = handle.driver
        self.device = handle.device
        self._handle = handle
        self._found = tuple(found)
        self._parts = parts
        self._choices = {each.name: each.top_k or 1 for each in found}
        self.layers: dict[str, ParallelExperts] = {}
        self.shares_rows = shares_rows
        for each in found:
            count = parts[each.name].experts
            exchange: ExpertExchange | ExpertSum
            if shares_rows:
                exchange = ExpertSum(ranks.group, count, handle.device)
            else:
                exchange = ExpertExchange(ranks.group, count, capacity, handle.device)
            layer = ParallelExperts(handle.layers[each.name], exchange).eval()
            setattr(each.block, each.attribute, layer)
            self.layers[each.name] = layer

    @property
    def experts_here(self) -> int:
        """How many experts of a layer this rank owns."""
        count: int = next(iter(self.layers.values())).exchange.local_experts
        return count

    # ---- looking --------------------------------------------------------------------------------

    @property
    def is_restored(self) -> bool:
        """Whether the model is what it was, on this rank."""
        return self._handle.is_restored

    def totals(self) -> dict[str, ExchangeTotals]:
        """Layer -> what this rank has sent, after all work."""
        self.driver.synchronize()
        return {name: layer.exchange.totals() for name, layer in self.layers.items()}

    def faults(self) -> dict[str, SlotFault | ExchangeTotals]:
        """Layer -> what went wrong there, of layers where something did."""
        found: dict[str, SlotFault | ExchangeTotals] = dict(self._handle.faults())
        wrong = {name: each for name, each in self.totals().items() if each.faults}
        return {**wrong, **found}

    @property
    def hit_rate(self) -> float:
        """Of the experts that were asked of this rank."""
        return self._handle.hit_rate

    # ---- through GraphReuse ---------------------------------------------------------------------

    def manifest(self) -> Manifest:
        """What this rank has: its part of each layer's experts; one expert for a row that comes."""
        orders = {each.layout for each in self._found}
        if len(orders) > 1:
            raise ConfigurationError(f"layers: expected banks in one order, got {sorted(orders)}")
        made = manifest_of(
            self.pool, top_k=1, order=orders.pop(), rank=self.ranks.rank, ranks=self.ranks.size
        )
        groups = []
        for group in made.groups:
            exchange = self.layers[group.name].exchange
            first = self.ranks.rank * exchange.local_experts
            part = replace(group, first_expert=first, routed_experts=exchange.experts)
            groups.append(part)
        return replace(made, groups=tuple(groups))

    def reuse(self, **options: Any) -> RankReuse:
        """A GraphReuse whose every step is agreed on; its manifest is published on all ranks.

        Args:
            options: As of :class:`GraphReuse`, but ``driver``, ``pool``, ``manifests``, ``rank``,
                ``ranks`` and ``agreement``; the same on all ranks.

        Raises:
            ConfigurationError: As of :class:`GraphReuse`; options that differ by rank; a manifest
                that some rank does not take.
            RankError: Another rank failed or is missing.
        """
        manifests = RankManifests(self.ranks)
        published = manifests.replace(self.manifest())
        if not published.is_accepted:
            raise ConfigurationError(f"manifest: {published}")
        self.pool.ownership = manifests.ownership
        with self.ranks.together("GraphReuse"):
            made = RankReuse(
                self.ranks, driver=self.driver, pool=self.pool, manifests=manifests, **options
            )
        facts = {"options": made.options.options, "driver": self.driver.name}
        facts |= {name: each for name, each in options.items() if name.startswith("max_")}
        self.ranks.agree("GraphReuse", facts=facts)
        return made

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
        """A step of the model, as :meth:`AcceleratedModel.step`.

        Args:
            identity: Of its graph.
            function: Runs the model on the current stream, over static tensors.
            tensors: Name -> static tensor that it reads or writes.
            rows: Rows of this rank that reach the experts, as many on every rank. The step's own
                ``rows`` are those that come to this rank's experts: what ``prompt_rows`` counts.
            values: Name -> whatever else it depends on.
            capabilities: Whatever else selects kernels.

        Raises:
            ConfigurationError: As of :meth:`AcceleratedModel.step`; rows that differ by rank.
            RankError: Another rank failed or is missing.
        """
        self.ranks.agree(f"making step {identity}", facts={"rows": rows})
        uses = [layer.bind(rows, self._choices[name]) for name, layer in self.layers.items()]
        staged = None
        if self._handle.staging is not None:
            staged = partial(self._handle._run_staged, function)
        return CallableStep(
            identity,
            function,
            tensors=tensors,
            groups=uses,
            staged=staged,
            values=values,
            rows=uses[0].rows,
            capabilities=(*capabilities, "ranks", self.ranks.size),
            driver=self.driver,
        )

    # ---- the end --------------------------------------------------------------------------------

    def restore(self) -> None:
        """Makes the model what it was on this rank; a second call does nothing.

        Raises:
            CaptureError: Inside a capture.
            LifecycleError: Something else stands in the place of the experts now.
        """
        if self._handle.is_restored:
            return
        for each in self._found:
            if getattr(each.block, each.attribute) is not self.layers[each.name]:
                raise LifecycleError(
                    f"restore: expected the spread experts at {each.name}, got "
                    f"{type(getattr(each.block, each.attribute)).__name__}"
                )
        for each in self._found:
            setattr(each.block, each.attribute, self.layers[each.name].here)
        self._handle.restore()
        for part in self._parts.values():
            part.put_back()

    def __enter__(self) -> SpreadExperts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        state = "restored" if self._handle.is_restored else f"{self.experts_here} experts here"
        return f"<SpreadExperts rank {self.ranks.rank} of {self.ranks.size}, {state}>"
