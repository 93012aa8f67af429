"""accelerate(): a transformers mixture of experts whose experts lie in slots; and back.

The model stays the model: its blocks route as they did, their experts' place is taken by
:class:`SlotExperts`. What raises has changed nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from graphcore_kernels import RoutePolicy

from graphcore.driver import Driver
from graphcore.errors import ConfigurationError
from graphcore.interop import choose_driver
from graphcore.moe.layers.staging_memory import StagingMemory
from graphcore.moe.layers.torch_capture import refuse_inside_capture
from graphcore.moe.layers.transformers_experts import FoundExperts, find_experts
from graphcore.moe.models.accelerated_model import AcceleratedModel
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
    staging: StagingMemory | bool = True,
) -> AcceleratedModel:
    """Moves the experts of ``model`` to pinned host memory, and gives each layer slots for some.

    The model then decodes as before, eagerly and captured (``CUDAGraphAR(model, ...)``): which
    experts are resident is decided on the device at every step, missing ones are copied on the same
    stream, and a captured step needs no update when experts move.

    Args:
        model: A transformers model in evaluation mode, with experts as ``gate_up_proj`` and
            ``down_proj`` in bfloat16, float16 or float32: Mixtral, Qwen3-MoE, DeepSeek-V3 and many
            more. With ``device`` it may be one that does not fit there as a whole.
        slots_per_layer: Experts of a layer that can be resident, from the router's top_k (with
            staging from one) to all; or module name of each layer's experts -> slots.
        device: Where the model shall run: everything but the experts is moved there. None: where
            it is.
        driver: None: the one of that device.
        policy: How victims are chosen.
        precision: Of float32 experts, as of ``moe_grouped_gemm``.
        staging: Memory that the experts of prompts pass through, so that they neither wait for
            slots nor take them from decode. True: some is made where not every expert has a slot;
            False: prompts go through the slots, a few rows at once. Shared memory stays open.

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
    refuse_inside_capture("accelerate")
    found = find_experts(model)
    _check_model(model, found)
    origin = _device_of(model, found)
    home = origin if device is None else _with_index(torch.device(device))
    driver = choose_driver(torch.empty(0, device=home)) if driver is None else driver
    _check_driver(checked_driver(driver), home)
    slots = _checked_slots(slots_per_layer, found, is_staged=staging is not False)
    with ExitStack() as undo:
        made = AcceleratedModel(model, found, driver, origin, home)
        made._begin(slots, policy or RoutePolicy(), precision, staging, undo)
        undo.pop_all()
    counts = ", ".join(f"{slots[each.name]} of {each.module.num_experts}" for each in found[:1])
    _log.info(
        "accelerated %s: %d layers of experts in slots (%s ...), %d bytes on %s",
        type(model).__name__, len(found), counts, made.pool.nbytes, home,
    )  # fmt: skip
    return made


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
    slots_per_layer: int | Mapping[str, int], found: list[FoundExperts], *, is_staged: bool
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
        least = 1 if is_staged else min(each.top_k or 1, most)
        if isinstance(count, bool) or not isinstance(count, int) or not least <= count <= most:
            raise ConfigurationError(
                f"slots_per_layer: expected {least} to {most}, all experts, for "
                f"{each.name}, got {count!r}"
            )
    return slots
