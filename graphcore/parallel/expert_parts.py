"""ExpertPart: the experts of one layer that a rank has, in the place of all; and the way back.

Experts that are whole on every rank are cut. Of experts that were loaded by rank (each weight a
DTensor, sharded along its experts) the part that is here is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from graphcore.decode import transformers_sharding as sharding
from graphcore.errors import ConfigurationError
from graphcore.moe.layers.transformers_experts import BANKS
from graphcore.parallel.ranks import Ranks

_LOADED_BY_RANK = "_is_expert_parallel"
"""Which not every version of transformers says."""
_TOLD_BY_LOADING = (_LOADED_BY_RANK, "num_experts")


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """What a module has instead of its experts.

    Args:
        module: Which.
        experts: Of all ranks.
        put_back: Makes the module what it was.
    """

    module: Any
    experts: int
    put_back: Callable[[], None]


def cut(module: Any, ranks: Ranks, undo: ExitStack) -> ExpertPart:
    """Gives the module copies of this rank's part of its weights, which are whole."""
    whole = _weights(module)
    count = int(whole[BANKS["down"]].shape[0])

    def put_back() -> None:
        _give(module, whole, count)

    undo.callback(put_back)
    part = slice(ranks.rank * count // ranks.size, (ranks.rank + 1) * count // ranks.size)
    own = {name: _parameter(each.detach()[part].clone()) for name, each in whole.items()}
    _give(module, own, count // ranks.size)
    return ExpertPart(module, count, put_back)


def take_loaded(module: Any, undo: ExitStack) -> ExpertPart:
    """Gives the module what its weights, loaded by rank, have here, without a copy."""
    spread = {name: (each.device_mesh, each.placements) for name, each in _weights(module).items()}
    own = {name: _parameter(each.to_local().detach()) for name, each in _weights(module).items()}
    count = int(module.down_proj.shape[0])
    had = {name: vars(module)[name] for name in _TOLD_BY_LOADING if name in vars(module)}

    def put_back() -> None:
        from torch.distributed.tensor import DTensor

        for name, weight in own.items():
            whole = DTensor.from_local(weight.detach(), *spread[name], run_check=False)
            setattr(module, name, _parameter(whole))
        vars(module).update(had)

    undo.callback(put_back)
    _give(module, own, len(own[BANKS["down"]]))
    if _LOADED_BY_RANK in had:
        setattr(module, _LOADED_BY_RANK, False)
    return ExpertPart(module, count, put_back)


def loaded_by_rank(model: Any, ranks: Ranks) -> dict[str, Any]:
    """Name -> module, of the experts of ``model`` of which each rank has loaded some, whole."""
    found = _spread_experts(model)
    return {name: each for name, each in found.items() if _is_by_rank(each, ranks)}


def refuse_parts_of_each(model: Any, ranks: Ranks) -> None:
    """Refuses experts of which each rank has a part of every one.

    Raises:
        ConfigurationError: Names the layer.
    """
    for name, module in _spread_experts(model).items():
        if not _is_by_rank(module, ranks):
            raise ConfigurationError(
                f"{name}: expected whole experts, some on each rank, got a part of every expert "
                "on each, as the model's tp_plan has it; load it with load_sharded(..., "
                "whole_experts=True)"
            )


def _spread_experts(model: Any) -> dict[str, Any]:
    """Name -> module, of experts of which torch knows a weight as spread."""
    found = {}
    modules = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    for name, module in modules:
        weights = [getattr(module, each, None) for each in BANKS.values()]
        if all(isinstance(each, torch.Tensor) and each.dim() == 3 for each in weights) and any(
            sharding.ranks_of(each) is not None for each in weights
        ):
            found[name] = module
    return found


def _is_by_rank(module: Any, ranks: Ranks) -> bool:
    return all(sharding.shards_of(each) == ranks.size for each in _weights(module).values())


def _weights(module: Any) -> dict[str, Any]:
    return {name: getattr(module, name) for name in BANKS.values()}


def _give(module: Any, weights: Mapping[str, torch.nn.Parameter], count: int) -> None:
    for name, weight in weights.items():
        setattr(module, name, weight)
    module.num_experts = count


def _parameter(values: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(values, requires_grad=False)
