"""The one place of this package that knows how transformers writes experts (5.17 to 5.24).

What a module is, is found by looking at it, never by its class or a version: three-dimensional
``gate_up_proj`` and ``down_proj``, and the flags that ``use_experts_implementation`` sets. What
cannot be computed in slots with the same meaning is refused with its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from graphcore.errors import CacheTypeError, ConfigurationError, LifecycleError
from graphcore.moe.layers.product_options import ProductOptions
from graphcore.moe.layers.slot_experts import SlotExperts

BANKS = {"gate_up": "gate_up_proj", "down": "down_proj"}
"""Bank of a group -> what the module calls it."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FORMS: dict[str, tuple[bool, str]] = {
    "has_gate": (True, "experts with gate and up"),
    "has_bias": (False, "experts without biases"),
    "has_post_expert_norm": (False, "experts without a norm of their own"),
    "_is_expert_parallel": (False, "all experts on one device"),
}
"""Flag of the module -> (what it must say, what is expected in words)."""
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)

_SHARED: tuple[set[str], ...] = (
    set(),
    {"shared_experts"},
    {"shared_expert", "shared_expert_gate"},
)
"""What a sparse block may have beside ``gate`` and ``experts``."""


@dataclass(frozen=True, slots=True)
class FoundExperts:
    """Experts of one layer of a model.

    Args:
        name: Of the module in the model.
        block: The module that calls it.
        attribute: Its name there.
        module: Itself.
        gate_up: How gate and up lie in one bank: "concat" or "interleaved".
        layout: Of both banks: "nk" or "kn".
        top_k: Experts of a row, where the block says so.
    """

    name: str
    block: Any
    attribute: str
    module: Any
    gate_up: str
    layout: Literal["nk", "kn"]
    top_k: int | None

    @property
    def weights(self) -> dict[str, torch.nn.Parameter]:
        """Bank -> weights."""
        return {bank: getattr(self.module, attribute) for bank, attribute in BANKS.items()}

    def options(self, precision: str) -> ProductOptions:
        """Of the products, for float32 in ``precision``."""
        return ProductOptions(gate_up=self.gate_up, layout=self.layout, precision=precision)


def find_experts(model: Any) -> list[FoundExperts]:
    """The experts of every layer of ``model``, in order.

    Raises:
        CacheTypeError: No torch module.
        ConfigurationError: None, or experts that cannot lie in slots: names the module and why.
        LifecycleError: Experts that lie in slots already.
    """
    if not isinstance(model, torch.nn.Module):
        raise CacheTypeError(f"model: expected a torch module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, SlotExperts):
            raise LifecycleError(
                f"model: expected experts of its own, got experts in slots ({name}); restore() the "
                "other acceleration first"
            )
    found = [
        found_experts(name, block, attribute, module)
        for name, block, attribute, module in _candidates(model)
    ]
    if not found:
        raise ConfigurationError(
            f"model: expected a mixture of experts, got {type(model).__name__}, none of whose "
            f"modules has {' and '.join(BANKS.values())} of three dimensions"
        )
    _refuse_shared(model, found)
    return found


def found_experts(name: str, block: Any, attribute: str, module: Any) -> FoundExperts:
    """Experts that were found, checked.

    Raises:
        ConfigurationError: Experts of a form that the grouped product does not compute.
    """
    _check_form(name, module)
    _check_weights(name, module)
    _check_hooks(name, module)
    top_k = getattr(block, "top_k", getattr(getattr(block, "gate", None), "top_k", None))
    return FoundExperts(
        name,
        block,
        attribute,
        module,
        "concat" if getattr(module, "is_concatenated", True) else "interleaved",
        "kn" if getattr(module, "is_transposed", False) else "nk",
        top_k if isinstance(top_k, int) else None,
    )


def router_choice(gate: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, weights), each [rows, top_k], of a router that gives (logits, weights, ids).

    Raises:
        ConfigurationError: It gives something else.
    """
    found = gate(hidden)
    if not isinstance(found, tuple) or len(found) != 3:
        kind = f"{len(found)} values" if isinstance(found, tuple) else type(found).__name__
        raise ConfigurationError(
            f"router: expected (logits, weights, ids), got {kind} of {type(gate).__name__}"
        )
    _, weights, ids = found
    return ids, weights


def shared_part(block: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What a sparse block adds for every row, as a function of its input; None: nothing.

    Raises:
        ConfigurationError: A block with parts that are not known.
    """
    parts = {name for name, _ in block.named_children()} - {"gate", "experts"}
    if not hasattr(block, "gate") or parts not in _SHARED:
        raise ConfigurationError(
            f"block: expected gate, experts and maybe shared experts, got {type(block).__name__} "
            f"with {', '.join(name for name, _ in block.named_children()) or 'nothing'}; "
            "accelerate() keeps the block's own forward"
        )
    if "shared_experts" in parts:
        shared: Callable[[torch.Tensor], torch.Tensor] = block.shared_experts
        return shared
    if "shared_expert" in parts:
        return lambda hidden: (
            torch.sigmoid(block.shared_expert_gate(hidden)) * block.shared_expert(hidden)
        )
    return None


def _candidates(model: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """(name, module around it, attribute, module) of what may be experts."""
    for around, block in model.named_modules():
        for attribute, module in block.named_children():
            name = f"{around}.{attribute}" if around else attribute
            weights = [getattr(module, each, None) for each in BANKS.values()]
            if all(isinstance(each, torch.Tensor) and each.dim() == 3 for each in weights):
                yield name, block, attribute, module
            elif attribute == "experts":
                raise ConfigurationError(
                    f"{name}: expected {' and '.join(BANKS.values())} of three dimensions, got "
                    f"{type(module).__name__}, which keeps its experts in another form"
                )


def _check_form(name: str, module: Any) -> None:
    kind = type(module).__name__
    for flag, (wanted, words) in _FORMS.items():
        if getattr(module, flag, wanted) is not wanted:
            raise ConfigurationError(f"{name}: expected {words}, got {kind} ({flag})")
    if not hasattr(module, "is_transposed"):
        raise ConfigurationError(
            f"{name}: expected experts that say how they are laid out, got {kind}, whose forward "
            "is its own"
        )
    gate = getattr(type(module), "_apply_gate", None)
    if getattr(gate, "__name__", "_default_apply_gate") != "_default_apply_gate":
        raise ConfigurationError(f"{name}: expected SwiGLU, got {kind} with a gate of its own")
    activation = getattr(module, "act_fn", None)
    if not _is_silu(activation):
        raise ConfigurationError(f"{name}.act_fn: expected SiLU, got {activation!r:.60}")


def _is_silu(activation: Any) -> bool:
    if activation is torch.nn.functional.silu or isinstance(activation, torch.nn.SiLU):
        return True
    return type(activation).__name__ == "SiLUActivation"


def _check_weights(name: str, module: Any) -> None:
    weights = {each: getattr(module, each) for each in BANKS.values()}
    for attribute, weight in weights.items():
        where = f"{name}.{attribute}"
        if weight.dtype not in _DTYPES:
            raise ConfigurationError(
                f"{where}: expected {', '.join(map(str, _DTYPES))}, got {weight.dtype} (quantised "
                "experts are not computed in slots)"
            )
        plain = type(weight) in (torch.nn.Parameter, torch.Tensor)
        if not plain or type(weight.data) is not torch.Tensor or not weight.is_contiguous():
            raise ConfigurationError(
                f"{where}: expected a plain contiguous tensor, got {type(weight).__name__} of "
                f"{type(weight.data).__name__}, strides {tuple(weight.stride())}"
            )
        if weight.device.type not in ("cpu", "cuda"):
            raise ConfigurationError(f"{where}: expected cpu or cuda, got {weight.device}")
        if attribute not in module._parameters:
            raise ConfigurationError(
                f"{where}: expected a parameter, got one that is computed (parametrised)"
            )
    extra = sorted(set(dict(module.named_parameters())) - set(weights))
    if extra:
        raise ConfigurationError(
            f"{name}: expected {' and '.join(weights)} alone, got {', '.join(extra)} too "
            "(quantised, or adapted)"
        )
    dtypes = {weight.dtype for weight in weights.values()}
    if len(dtypes) > 1:
        raise ConfigurationError(f"{name}: expected one element type, got {dtypes}")


def _check_hooks(name: str, module: Any) -> None:
    for kind in _HOOKS:
        if getattr(module, kind, None):
            raise ConfigurationError(
                f"{name}: expected a module without hooks, which would not run any more, got "
                f"{kind.strip('_').replace('_', ' ')}"
            )
    if hasattr(module, "_hf_hook"):
        raise ConfigurationError(
            f"{name}: expected weights that stay where they are, got a hook of accelerate that "
            "moves them"
        )
    if "forward" in vars(module):
        raise ConfigurationError(
            f"{name}: expected the forward of its class, got one that was put in its place"
        )


def _refuse_shared(model: Any, found: list[FoundExperts]) -> None:
    """Refuses experts that more than one module has: moved once, they would be missing twice."""
    mine = {
        _storage_of(weight): f"{each.name}.{BANKS[bank]}"
        for each in reversed(found)
        for bank, weight in each.weights.items()
    }
    for name, weight in model.named_parameters(remove_duplicate=False):
        home = mine.get(_storage_of(weight))
        if home is not None and home != name:
            raise ConfigurationError(
                f"{name}: expected weights of its own, got those of {home} (tied)"
            )


def _storage_of(weight: Any) -> int:
    """Where a weight lies; of one that is spread over ranks: what of it is here."""
    here = weight.to_local() if hasattr(weight, "to_local") else weight
    return int(here.untyped_storage().data_ptr())
