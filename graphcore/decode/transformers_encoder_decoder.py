"""What encoder-decoder models of transformers call things: attention, capacities, inputs.

Resolved by looking (a signature, an attribute, a module's name), never by a model's name or a
version number. T5, BART and Whisper and their relatives are what it was written against.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from graphcore.decode import transformers_compat as compat
from graphcore.decode.sizes import check_positive
from graphcore.decode.transformers_compat import LayerShape
from graphcore.errors import ConfigurationError

_limits = {
    # in this order: Whisper has one name for each side, BART one for both, T5 none for the decoder
    "max_seq_len": ("max_target_positions", "max_position_embeddings"),
    "encoder_len": ("max_source_positions", "max_position_embeddings", "n_positions"),
}
_key_names = ("k_proj", "k", "key")
_value_names = ("v_proj", "v", "value")
_head_names = ("head_dim", "key_value_proj_dim", "attention_head_size")


def is_encoder_decoder(model: Any) -> bool:
    """Whether ``model`` has an encoder whose output its decoder attends to."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def position_limit(field: str, model: Any) -> int | None:
    """Positions that the model has for "max_seq_len" or "encoder_len"; None: no limit is known."""
    found = (getattr(model.config, name, None) for name in _limits[field])
    return next((int(limit) for limit in found if limit is not None), None)


def checked_capacity(field: str, wanted: int | None, model: Any) -> int:
    """``wanted``, or what the model has positions for.

    Raises:
        ConfigurationError: Not a positive int, or None where the model names no limit.
    """
    capacity = position_limit(field, model) if wanted is None else wanted
    if capacity is None:
        raise ConfigurationError(
            f"{field}: expected a capacity, got None: {type(model).__name__} names no limit of its "
            "positions"
        )
    check_positive(field, capacity)
    return capacity


def attention_shapes(model: Any) -> tuple[list[LayerShape], list[LayerShape]]:
    """What each decoder layer stores: (self attention, cross attention).

    Raises:
        ConfigurationError: A layer whose K and V projections are not recognised.
    """
    found: dict[bool, dict[int, LayerShape]] = {False: {}, True: {}}
    for name, module in model.get_decoder().named_modules():
        index, shape = getattr(module, "layer_idx", None), _stored_shape(module)
        if isinstance(index, int) and shape is not None:
            found[_is_cross(name)][index] = shape
    count = max(found[False], default=-1) + 1
    for kind, shapes in (("self", found[False]), ("cross", found[True])):
        if not shapes or sorted(shapes) != list(range(count)):
            raise ConfigurationError(
                f"model: expected {kind} attention with K and V projections in each of {count} "
                f"decoder layers, found it in layers {sorted(shapes)} of {type(model).__name__}"
            )
    own, cross = ([shapes[index] for index in range(count)] for shapes in found.values())
    return own, cross


def has_learned_positions(model: Any) -> bool:
    """Whether the model looks its positions up in a table (T5's are relative to each other)."""
    return any("embed_positions" in name for name, _ in model.named_modules())


def attention_implementation(model: Any) -> str | None:
    """Which attention the decoder runs: "sdpa", "eager", "flash_attention_2" and others."""
    config = getattr(model.get_decoder(), "config", None)  # FSMT's has none: its attention is fixed
    name: str | None = getattr(config, "_attn_implementation", None)
    return name


def layer_kinds(model: Any) -> list[tuple[str, int | None]]:
    """(kind, window) of each decoder layer's self attention; empty where the model names none."""
    config = getattr(model.get_decoder(), "config", None)
    return [] if getattr(config, "layer_types", None) is None else compat.layer_kinds(config)


class EncoderStates(BaseModelOutput):  # type: ignore[misc]  # transformers is untyped
    """What the decoder's forward is given in place of the encoder's output."""

    router_logits = None  # models with experts pass on the encoder's, which nobody reads here


def main_input(model: Any) -> str:
    """What the encoder's input is called: "input_ids", "input_features"."""
    return str(getattr(model, "main_input_name", "input_ids"))


def encoder_names(model: Any) -> set[str]:
    """What the encoder's forward takes, by name."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    accepted = inspect.signature(model.get_encoder().forward).parameters.values()
    return {parameter.name for parameter in accepted if parameter.kind not in kinds}


def begins_with_task(model: Any) -> bool:
    """Whether the decoder's first tokens are the caller's alone (Whisper's language and task)."""
    return main_input(model) != "input_ids"


def is_masked(model: Any) -> bool:
    """Whether cross attention can leave encoder tokens out (Whisper's cannot)."""
    return "encoder_attention_mask" in inspect.signature(model.get_decoder().forward).parameters


def takes_padded_decoder(model: Any) -> bool:
    """Whether a decoder's row may begin behind pads: its positions are given, or only relative.

    Others count positions from the first slot, pads too.
    """
    if takes_decoder_positions(model):
        return True
    names = [name for name, _ in model.get_decoder().named_modules()]
    is_relative = any("relative_attention_bias" in name for name in names)
    return is_relative and not any("position" in name for name in names)


def takes_decoder_positions(model: Any) -> bool:
    """Whether the forward is given the positions of the decoder's tokens."""
    return "decoder_position_ids" in inspect.signature(model.forward).parameters


def start_token(model: Any) -> int | None:
    """The id that the decoder begins with."""
    for name in ("decoder_start_token_id", "bos_token_id"):
        for found in (compat.generation_setting(model, name), getattr(model.config, name, None)):
            if found is not None:
                return int(found)
    return None


def encode(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The encoder's last states ``[batch, encoder tokens, width]``; eager.

    ``encoder_outputs`` among the inputs are taken as they are: a model's output, a tuple whose
    first is the states, or the states.
    """
    made = inputs.get("encoder_outputs")
    if made is None:
        accepted = encoder_names(model)
        given = {name: value for name, value in inputs.items() if name in accepted}
        made = model.get_encoder()(**given, return_dict=True)
    states: torch.Tensor = made if isinstance(made, torch.Tensor) else made[0]
    return states


def decode_logits(
    model: Any,
    tokens: torch.Tensor,
    *,
    positions: torch.Tensor,
    mask: torch.Tensor | dict[str, torch.Tensor],
    states: torch.Tensor,
    encoder_mask: torch.Tensor | None,
    cache: Any,
) -> torch.Tensor:
    """One forward of the decoder; logits ``[batch, vocabulary]`` of the last token.

    Args:
        model: The model.
        tokens: int64 ``[batch, tokens]``.
        positions: int64 ``[batch, tokens]``; where the model takes none, it reads the cache's.
        mask: 4-D, over the slots of the self half; by layer type where their windows differ.
        states: The encoder's, ``[batch, encoder tokens, width]``.
        encoder_mask: 4-D, over what is read of the cross half; None: all of it counts.
        cache: The cache.
    """
    arguments: dict[str, Any] = {
        "encoder_outputs": EncoderStates(last_hidden_state=states),
        "attention_mask": encoder_mask,
        "decoder_input_ids": tokens,
        "decoder_attention_mask": mask,
        "use_cache": True,
        str(compat.cache_keyword(model)): cache,
    }
    if takes_decoder_positions(model):
        arguments["decoder_position_ids"] = positions
    logits: torch.Tensor | None = getattr(model(**arguments), "logits", None)
    if logits is None:
        raise ConfigurationError(
            "model: expected one whose forward gives logits (a ...ForConditionalGeneration), got "
            f"{type(model).__name__}, which gives none"
        )
    return logits[:, -1]


def _is_cross(name: str) -> bool:
    """Whether the decoder's module ``name`` attends to the encoder (encoder_attn, cross_attn)."""
    return any(word in name.lower() for word in ("enc", "cross"))


def _stored_shape(module: Any) -> LayerShape | None:
    head_dim = _first(module, _head_names)
    keys = getattr(_first(module, _key_names), "out_features", None)
    values = getattr(_first(module, _value_names), "out_features", None)
    if not isinstance(head_dim, int) or not keys or not values or keys % head_dim:
        return None
    heads = keys // head_dim
    return None if values % heads else LayerShape(heads, head_dim, values // heads)


def _first(module: Any, names: tuple[str, ...]) -> Any:
    found = (getattr(module, name, None) for name in names)
    return next((part for part in found if part is not None), None)
