"""What transformers' tensor parallelism leaves of a layer on this rank.

Weights that its ``tp_plan`` shards are DTensors, whose modules still say the whole width. A rank
holds the heads of its part: a cache has the heads that are here.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

from graphcore.errors import ConfigurationError

_PARTS_OF_EXPERTS = "moe_tp_experts"
"""Style of a module of experts of which each rank has a part of every one."""
_WHOLE_EXPERTS = "grouped_gemm"
"""Style of a weight that is cut between two experts."""
_FUSED = ("qkv_proj", "query_key_value", "Wqkv", "c_attn")


def features_here(module: Any, name: str, head_dim: int | None) -> int | None:
    """Width of what the projection ``name`` gives on this rank; None where there is no such one.

    Raises:
        ConfigurationError: It is sharded inside a head, or some ranks have more heads than others.
    """
    projection = getattr(module, name, None)
    features: int | None = getattr(projection, "out_features", None)
    ranks = shards_of(getattr(projection, "weight", None))
    if features is None or ranks == 1 or not head_dim:
        return features
    heads = features // head_dim
    if features % head_dim or heads % ranks:
        raise ConfigurationError(
            f"ranks: expected a number that divides the {heads} heads of {name} in layer "
            f"{getattr(module, 'layer_idx', '?')}, got {ranks}"
        )
    return features // ranks


def shards_of(weight: Any) -> int:
    """Over how many ranks the rows of a weight are spread; 1 for one that is whole."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(weight, module.DTensor):
        return 1
    count = 1
    for placement, size in zip(weight.placements, weight.device_mesh.shape, strict=True):
        if placement.is_shard(0):
            count *= size
    return count


def refuse_fused(module: Any) -> None:
    """Refuses K and V that one sharded projection gives together with Q: whose part is unknown.

    Raises:
        ConfigurationError: Names the projection.
    """
    for name in _FUSED:
        ranks = shards_of(getattr(getattr(module, name, None), "weight", None))
        if ranks > 1:
            raise ConfigurationError(
                f"model: expected projections of their own for K and V where heads are sharded, "
                f"got {type(module).__name__}.{name} over {ranks} ranks"
            )


def ranks_of(weight: Any) -> int | None:
    """How many ranks have a part of a weight; None for one that torch does not know as spread."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(weight, module.DTensor):
        return None
    return int(weight.device_mesh.size())


def with_whole_experts(config: Any, ranks: int) -> Any:
    """A copy of ``config`` by whose plan each rank gets some experts, not a part of every one.

    Raises:
        ConfigurationError: A plan that spreads no experts, or more of them than two weights; a
            number of ranks that does not divide the experts.
    """
    made = copy.deepcopy(config)
    text = made.get_text_config(decoder=True)
    plan: dict[str, str] = dict(getattr(text, "base_model_tp_plan", None) or {})
    modules = [rule for rule, style in plan.items() if style == _PARTS_OF_EXPERTS]
    if not modules:
        raise ConfigurationError(
            f"whole_experts: expected a mixture whose tp_plan spreads its experts, got "
            f"{type(text).__name__}"
        )
    for module in modules:
        del plan[module]
        for rule in [each for each in plan if each.startswith(f"{module}.")]:
            if rule.rpartition(".")[2] not in ("gate_up_proj", "down_proj"):
                raise ConfigurationError(
                    f"whole_experts: expected experts of gate_up_proj and down_proj, got {rule} in "
                    f"the tp_plan of {type(text).__name__}"
                )
            plan[rule] = _WHOLE_EXPERTS
    count = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    if isinstance(count, int) and count % ranks:
        raise ConfigurationError(
            f"ranks: expected a number that divides the {count} experts, got {ranks}"
        )
    text.base_model_tp_plan = plan
    return made
