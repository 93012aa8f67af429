"""accelerate(): a transformers mixture of experts whose experts lie in slots; and back.

The model stays the model: its blocks route as they did, their experts' place is taken by
:class:`SlotExperts`. What raises has changed nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from graphcore_kernels import RoutePolicy

from graphcore.driver import Driver, active
from graphcore.errors import CaptureError, ConfigurationError, LifecycleError
from graphcore.interop import choose_driver
from graphcore.moe.expert_memory import ExpertMemory
from graphcore.moe.products_plan import ProductsPlans
from graphcore.moe.slot_experts import SlotExperts
from graphcore.moe.slot_pool import SlotPool
from graphcore.moe.slot_products import SlotProducts
from graphcore.moe.slot_state import SlotFault, SlotTotals
from graphcore.moe.transformers_experts import FoundExperts, find_experts
from graphcore.resources.driver_argument import checked_driver

_log = logging.getLogger("graphcore")


def accelerate(
    model: Any,
    slots_per_layer: int | Mapping[str, int],
    *,
    device: Any = None,
    driver: Driver | None = None,
    policy: RoutePolicy | None = None,
    precision: str = "ieee",
) -> AcceleratedModel:
    """Moves the experts of ``model`` to pinned host memory, and gives each layer slots for some.

    The model then decodes as before, eagerly and captured (``CUDAGraphAR(model, ...)``): which
    experts are resident is decided on the device at every step, missing ones are copied on the same
    stream, and a captured step needs no update when experts move.

    Args:
        model: A transformers model in evaluation mode, with experts as ``gate_up_proj`` and
            ``down_proj`` in bfloat16, float16 or float32: Mixtral, Qwen3-MoE, DeepSeek-V3 and many
            more. With ``device`` it may be one that does not fit there as a whole.
        slots_per_layer: Experts of a layer that can be resident, from the router's top_k to all;
            or module name of each layer's experts -> slots.
        device: Where the model shall run: everything but the experts is moved there. None: where
            it is.
        driver: None: the one of that device.
        policy: How victims are chosen.
        precision: Of float32 experts, as of ``moe_grouped_gemm``.

    Returns:
        A handle; ``restore()`` makes the model what it was.

    Raises:
        CacheTypeError: No torch module.
        CaptureError: Inside a capture.
        ConfigurationError: No experts, or experts of another form, type or device; training mode; a
            compiled model; a number of slots that cannot be.
        CudaError: Out of memory, or the driver refused.
        LifecycleError: The model is accelerated already.
    """
    _refuse_inside_capture("accelerate")
    found = find_experts(model)
    _check_model(model, found)
    origin = _device_of(model, found)
    home = origin if device is None else _with_index(torch.device(device))
    driver = choose_driver(torch.empty(0, device=home)) if driver is None else driver
    _check_driver(checked_driver(driver), home)
    slots = _checked_slots(slots_per_layer, found)
    with ExitStack() as undo:
        made = AcceleratedModel(model, found, driver, origin, home)
        made._begin(slots, policy or RoutePolicy(), precision, undo)
        undo.pop_all()
    counts = ", ".join(f"{slots[each.name]} of {each.module.num_experts}" for each in found[:1])
    _log.info(
        "accelerated %s: %d layers of experts in slots (%s ...), %d bytes on %s",
        type(model).__name__, len(found), counts, made.pool.nbytes, home,
    )  # fmt: skip
    return made


class AcceleratedModel:
    """A model whose experts lie in slots; made by :func:`accelerate`. Not locked.

    Attributes:
        model: The model itself.
        pool: The slots of all layers; a group is named as its module is.
        layers: Name of the module -> what stands in its place.
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
        self.layers: Mapping[str, SlotExperts] = {}
        self.pool: SlotPool

    # ---- looking --------------------------------------------------------------------------------

    def totals(self) -> dict[str, SlotTotals]:
        """Layer -> what its steps came to, after all work."""
        return {name: self.pool.totals(name) for name in self.layers}

    def faults(self) -> dict[str, SlotFault]:
        """Layer -> the first step that was refused (its rows were zero), of those that had one."""
        faults = {name: self.pool.fault(name) for name in self.layers}
        return {name: fault for name, fault in faults.items() if fault.count}

    @property
    def hit_rate(self) -> float:
        """Of all experts that were asked for, after all work; 1.0 before the first."""
        totals = self.totals().values()
        hits, misses = sum(each.hits for each in totals), sum(each.misses for each in totals)
        return hits / (hits + misses) if hits + misses else 1.0

    @property
    def is_restored(self) -> bool:
        return self._is_restored

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
        _refuse_inside_capture("restore")
        for each in self._found:
            if getattr(each.block, each.attribute) is not self.layers[each.name]:
                raise LifecycleError(
                    f"restore: expected the experts in slots at {each.name}, got "
                    f"{type(getattr(each.block, each.attribute)).__name__}"
                )
        self.driver.synchronize()
        self.pool.close()
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
        self, slots: dict[str, int], policy: RoutePolicy, precision: str, undo: ExitStack
    ) -> None:
        undo.callback(self._memory.give_back)
        sources = {
            each.name: {bank: self._memory.take(weight) for bank, weight in each.weights.items()}
            for each in self._found
        }
        self._release_cached()
        self.pool = SlotPool(sources, slots, driver=self.driver, policy=policy)
        undo.callback(self.pool.close)
        plans = ProductsPlans(self.driver, policy)
        self.layers = {
            each.name: SlotExperts(
                SlotProducts(
                    self.pool,
                    each.name,
                    options=each.options(precision),
                    plans=plans,
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

    def _put_back(self) -> None:
        for each in self._found:
            setattr(each.block, each.attribute, each.module)
        if self.device != self._origin:
            self.model.to(self._origin)

    def _release_cached(self) -> None:
        """Gives memory that torch keeps for later back to the driver, whose pool needs it."""
        if not self.driver.is_emulated:
            torch.cuda.empty_cache()


def _refuse_inside_capture(action: str) -> None:
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if active.current() is not None or (initialized and torch.cuda.is_current_stream_capturing()):
        raise CaptureError(f"{action}: not while a graph is captured; do it before the capture")


def _check_model(model: Any, found: list[FoundExperts]) -> None:
    if any(each.module.training for each in found) or model.training:
        raise ConfigurationError(
            "model: expected evaluation mode, got training mode: experts in slots have no "
            "gradients; call model.eval()"
        )
    for name, module in model.named_modules():
        is_wrapped = type(module).__name__ == "OptimizedModule"
        if is_wrapped or getattr(module, "_compiled_call_impl", None) is not None:
            raise ConfigurationError(
                f"model: expected one that is not compiled, got {name or 'the model'} compiled by "
                "torch.compile, which would go on computing the experts it knows"
            )


def _device_of(model: Any, found: list[FoundExperts]) -> torch.device:
    """Where everything but the experts lies; where they lie if there is nothing else."""
    experts = {id(weight): weight.device for each in found for weight in each.weights.values()}
    others = {each.device for each in model.parameters() if id(each) not in experts}
    devices = others or set(experts.values())
    if len(devices) > 1:
        raise ConfigurationError(
            f"model: expected one device for all weights but the experts', got "
            f"{sorted(map(str, devices))}"
        )
    home: torch.device = devices.pop()
    return home


def _with_index(device: torch.device) -> torch.device:
    if device != torch.device("cuda"):
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _check_driver(driver: Driver, home: torch.device) -> None:
    name = "emulated" if home.type == "cpu" else "cuda"
    ordinal = home.index if home.type == "cuda" else driver.device
    if driver.name != name or driver.device != ordinal:
        raise ConfigurationError(
            f"driver: expected the {name} driver for the model on {home}, got "
            f"{driver.name}:{driver.device}"
        )


def _checked_slots(
    slots_per_layer: int | Mapping[str, int], found: list[FoundExperts]
) -> dict[str, int]:
    names = [each.name for each in found]
    if isinstance(slots_per_layer, Mapping):
        if set(slots_per_layer) != set(names):
            raise ConfigurationError(
                f"slots_per_layer: expected {', '.join(names)}, got "
                f"{', '.join(map(str, slots_per_layer)) or 'none'}"
            )
        slots = dict(slots_per_layer)
    else:
        slots = dict.fromkeys(names, slots_per_layer)
    for each in found:
        count, most = slots[each.name], int(each.weights["down"].shape[0])
        least = min(each.top_k or 1, most)
        if isinstance(count, bool) or not isinstance(count, int) or not least <= count <= most:
            raise ConfigurationError(
                f"slots_per_layer: expected {least} (experts of a row) to {most} (all) for "
                f"{each.name}, got {count!r}"
            )
    return slots
