"""What transformers' tensor parallelism leaves of a layer on this rank.

Weights that its ``tp_plan`` shards are DTensors, whose modules still say the whole width. A rank
holds the heads of its part: a cache has the heads that are here.
"""

from __future__ import annotations

import sys
from typing import Any

from graphcore.errors import ConfigurationError

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
