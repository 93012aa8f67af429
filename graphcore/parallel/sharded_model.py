"""A transformers model spread over ranks by its ``tp_plan``: how it is loaded, what must fit."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from graphcore.decode import transformers_sharding as sharding
from graphcore.decode.transformers_compat import text_config
from graphcore.errors import ConfigurationError
from graphcore.parallel.expert_parts import loaded_by_rank
from graphcore.parallel.ranks import Ranks

_log = logging.getLogger("graphcore")
_MOST_VALUES = 1 << 16


def load_sharded(
    path: str | Path,
    ranks: Ranks,
    *,
    dtype: Any = None,
    tp_plan: Any = "auto",
    whole_experts: bool = False,
    **options: Any,
) -> Any:
    """Loads a causal language model, each rank its part, as the model's ``tp_plan`` says.

    Args:
        path: Of the saved model, or its name, as ``from_pretrained`` takes it.
        ranks: Who shares it; those of the whole process group.
        dtype: Of the weights; None: as saved.
        tp_plan: "auto": the model's own; or a mapping, as transformers takes it.
        whole_experts: Of a mixture each rank loads the experts that it owns, whole, instead of a
            part of every one: for :func:`spread_experts`, without which it does not run.
        options: Of ``from_pretrained``.

    Returns:
        The model, in evaluation mode, on the rank's device.

    Raises:
        ConfigurationError: A number of ranks that does not divide the heads, or the experts; a
            model without a plan, or without experts in it where they shall be whole; ranks that are
            not all of the process group. On all ranks.
        RankError: Another rank could not load it.
    """
    import torch.distributed as dist
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    with ranks.together("loading the model"):
        if ranks.size != dist.get_world_size():
            raise ConfigurationError(
                f"ranks: expected all {dist.get_world_size()} of the process group, over which "
                f"transformers spreads a model, got {ranks.size}"
            )
        config = options.get("config") or AutoConfig.from_pretrained(path)
        check_heads(config, ranks.size)
        if whole_experts:
            options["config"] = sharding.with_whole_experts(config, ranks.size)
        spread = DistributedConfig(tp_plan=tp_plan, tp_size=ranks.size)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype or "auto", distributed_config=spread, **options
        ).eval()
        if ranks.size == 1:  # transformers loads a model of one rank as if there were none
            model.to(ranks.device)
        check_sharded(model, ranks)
        if whole_experts and ranks.size > 1 and not loaded_by_rank(model, ranks):
            raise ConfigurationError(
                f"whole_experts: expected transformers to give each rank some experts of "
                f"{type(model).__name__}, whole; it did not by the tp_plan {tp_plan!r}"
            )
    ranks.agree("the model is loaded", facts=facts_of(model))
    _log.info("rank %d has its part of %s", ranks.rank, type(model).__name__)
    return model


def check_heads(config: Any, ranks: int) -> None:
    """Refuses a number of ranks over which attention heads cannot be spread evenly.

    Raises:
        ConfigurationError: Names the heads.
    """
    text = config.get_text_config(decoder=True)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, name, None)
        if isinstance(heads, int) and heads % ranks:
            raise ConfigurationError(
                f"ranks: expected a number that divides {name} ({heads}), got {ranks}"
            )


def check_sharded(model: Any, ranks: Ranks) -> None:
    """Refuses a model that is not spread over just these ranks.

    Raises:
        ConfigurationError: No weight is sharded, or over another number of ranks.
    """
    if getattr(model, "config", None) is None or not hasattr(model.config, "get_text_config"):
        raise ConfigurationError(
            f"model: expected a transformers model, got {type(model).__name__}"
        )
    check_heads(model.config, ranks.size)
    spread = {sharding.ranks_of(weight) for weight in model.parameters()} - {None}
    if ranks.size > 1 and not spread:
        raise ConfigurationError(
            f"model: expected one sharded over {ranks.size} ranks by its tp_plan, got whole "
            "weights; load it with graphcore.parallel.load_sharded"
        )
    if spread - {ranks.size}:
        raise ConfigurationError(
            f"model: expected weights sharded over {ranks.size} ranks, got {sorted(spread)}"  # type: ignore[type-var]
        )


def facts_of(model: Any) -> dict[str, str]:
    """What of a model must be the same on all ranks: class, sizes, types, and values of the small.

    Weights of up to 65536 values that are whole on every rank (norms, biases, small routers) tell
    one checkpoint from another of the same sizes; all of them would be too many to read.
    """
    config = text_config(model).to_dict()
    config.pop("_name_or_path", None)  # every machine may have it elsewhere
    text = json.dumps(config, sort_keys=True, default=str)
    shapes = [(name, str(each.dtype), list(each.shape)) for name, each in model.named_parameters()]
    return {
        "model": type(model).__name__,
        "model.config": digest(text),
        "model.weights": digest(json.dumps(shapes)),
        "model.dtype": str(model.dtype),
        "model.values": _digest_of_values(model),
    }


def _digest_of_values(model: Any) -> str:
    """A digest of the small weights that no rank has a part of."""
    import torch

    found = hashlib.blake2b(digest_size=8)
    for name, weight in model.named_parameters():
        if sharding.ranks_of(weight) is None and weight.numel() <= _MOST_VALUES:
            values = weight.detach().to("cpu", copy=True).reshape(-1).view(torch.uint8)
            found.update(name.encode() + values.numpy().tobytes())
    return found.hexdigest()


def digest(text: str | bytes) -> str:
    """A few letters that differ where ``text`` does."""
    data = text.encode() if isinstance(text, str) else text
    return hashlib.blake2b(data, digest_size=8).hexdigest()
