"""Several GPUs: ranks that agree, collectives in captured graphs, tensor- and expert-parallel.

Everything here needs torch, which loads when a name is first used, not before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphcore.parallel.agreement import Agreed
    from graphcore.parallel.communicators import warm_up
    from graphcore.parallel.expert_buckets import ExpertParallelBuckets
    from graphcore.parallel.expert_decode import ExpertParallelAR
    from graphcore.parallel.expert_parallel import SpreadExperts, spread_experts
    from graphcore.parallel.rank_manifests import RankManifests
    from graphcore.parallel.rank_reuse import RankReuse
    from graphcore.parallel.ranks import AgreementCost, Ranks
    from graphcore.parallel.sharded_model import load_sharded
    from graphcore.parallel.tensor_parallel import TensorParallelAR
    from graphcore.parallel.tensor_parallel_buckets import TensorParallelBuckets

__all__ = [
    "Agreed",
    "AgreementCost",
    "ExpertParallelAR",
    "ExpertParallelBuckets",
    "RankManifests",
    "RankReuse",
    "Ranks",
    "SpreadExperts",
    "TensorParallelAR",
    "TensorParallelBuckets",
    "load_sharded",
    "spread_experts",
    "warm_up",
]

_homes = {
    "Agreed": "graphcore.parallel.agreement",
    "AgreementCost": "graphcore.parallel.ranks",
    "ExpertParallelAR": "graphcore.parallel.expert_decode",
    "ExpertParallelBuckets": "graphcore.parallel.expert_buckets",
    "RankManifests": "graphcore.parallel.rank_manifests",
    "RankReuse": "graphcore.parallel.rank_reuse",
    "Ranks": "graphcore.parallel.ranks",
    "SpreadExperts": "graphcore.parallel.expert_parallel",
    "TensorParallelAR": "graphcore.parallel.tensor_parallel",
    "TensorParallelBuckets": "graphcore.parallel.tensor_parallel_buckets",
    "load_sharded": "graphcore.parallel.sharded_model",
    "spread_experts": "graphcore.parallel.expert_parallel",
    "warm_up": "graphcore.parallel.communicators",
}


def __getattr__(name: str) -> Any:
    if name not in _homes:
        raise AttributeError(f"module 'graphcore.parallel' has no attribute {name!r}")
    return getattr(import_module(_homes[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
