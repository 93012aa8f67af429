"""What goes into an encoder-decoder: the encoder's side, and the tokens the decoder begins with.

Checked before anything is launched or written. The result's ``ids`` are the decoder's; its
``inputs`` are the encoder's, empty where a prompt continues behind what the cache holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphcore.decode import transformers_encoder_decoder as families
from graphcore.decode.decoder_begin import begin_ids, check_begin, check_continued, checked_ids
from graphcore.decode.encoder_decoder_cache import EncoderDecoderKVCache
from graphcore.decode.prompt import Prompt, check_ids
from graphcore.errors import CapacityError, ConfigurationError

_decoder_names = ("decoder_input_ids", "decoder_attention_mask")


def check_prompt(
    model: Any,
    cache: EncoderDecoderKVCache,
    input_ids: Any,
    attention_mask: Any,
    inputs: Mapping[str, Any],
    *,
    rows: int | None = None,
) -> Prompt:
    """The prompt, checked.

    Args:
        model: The model.
        cache: Its cache.
        input_ids: The encoder's main input, by position: ids ``[batch, tokens]``, or what the model
            takes instead (Whisper: ``input_features``). None: by name in ``inputs``, or none, which
            continues behind what the cache holds.
        attention_mask: Over the encoder's tokens ``[batch, tokens]``; None: all count.
        inputs: ``decoder_input_ids`` ``[batch, tokens]`` and ``decoder_attention_mask``, where its
            rows differ in length; ``encoder_outputs``; others of the encoder.
        rows: Of the prompt; None: as many as the cache has.

    Raises:
        ConfigurationError: A wrong shape, dtype, device, batch or id; no input; an empty encoder
            prompt, or a row in which no token counts; padding on the decoder's side of a model that
            counts its positions itself.
        CapacityError: More encoder tokens than the cross half has slots.
    """
    given = {name: value for name, value in inputs.items() if value is not None}
    rows = cache.batch_size if rows is None else rows
    decoder = [given.pop(name, None) for name in _decoder_names]
    where = rows, cache.device
    main = families.main_input(model)
    if input_ids is not None:
        if main in given:
            raise ConfigurationError(f"{main}: expected it once, got it by position and by name")
        given[main] = input_ids
    if not given and attention_mask is None:
        if decoder[0] is None:
            raise ConfigurationError(
                f"{main}: expected the encoder's input, or decoder_input_ids to continue with, got "
                "none"
            )
        return check_continued(model, *where, *decoder)
    encoder = _checked_encoder(model, cache, rows, main, given)
    if attention_mask is not None:
        encoder["attention_mask"] = _checked_mask(model, cache, rows, encoder, main, attention_mask)
    return replace(check_begin(model, *where, *decoder), inputs=encoder)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the smallest cache that one call needs.

    Attributes:
        rows: Rows.
        begin: Tokens that the decoder begins with.
        encoder: Encoder tokens; None: as many as the model has positions for.
    """

    rows: int
    begin: int
    encoder: int | None


def needed_sizes(model: Any, input_ids: Any, inputs: Mapping[str, Any]) -> Sizes:
    """What a prompt needs, before there is a cache to check it against.

    Raises:
        ConfigurationError: No input of the encoder, or wrong ids.
    """
    main = families.main_input(model)
    made, given = inputs.get("encoder_outputs"), inputs.get(main, input_ids)
    if made is not None:
        states = families.encode(model, inputs)
        rows, length = int(states.shape[0]), int(states.shape[1])
    elif not isinstance(given, torch.Tensor) or not given.dim():
        raise ConfigurationError(f"{main}: expected the encoder's input, got {given!r}")
    elif main == "input_ids":
        rows, length = check_ids(given).shape
    else:
        rows, length = given.shape[0], None
    begin, _ = begin_ids(model, rows, model.device, *map(inputs.get, _decoder_names))
    return Sizes(rows, begin.shape[1], length)


def _checked_encoder(
    model: Any, cache: EncoderDecoderKVCache, rows: int, main: str, given: dict[str, Any]
) -> dict[str, Any]:
    """The encoder's inputs; those that show their length fit the cross half."""
    unknown = sorted(set(given) - families.encoder_names(model) - {"encoder_outputs"})
    if unknown:
        raise ConfigurationError(
            f"{unknown[0]}: expected an input of {type(model).__name__}'s encoder "
            f"({', '.join(sorted(families.encoder_names(model)))}), encoder_outputs, or one of "
            f"{', '.join(_decoder_names)}"
        )
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and value.dim():
            _check_place(cache, rows, name, value)
    if main == "input_ids" and main in given:
        ids, _ = checked_ids(model, rows, cache.device, main, given[main])
        if ids.shape[1] > cache.encoder_len:
            raise CapacityError(
                f"{main}: an encoder prompt of {ids.shape[1]} tokens; encoder_len is "
                f"{cache.encoder_len}"
            )
        return {**given, main: ids}
    if main in given and not (
        isinstance(given[main], torch.Tensor) and given[main].is_floating_point()
    ):
        what = getattr(given[main], "dtype", type(given[main]).__name__)
        raise ConfigurationError(f"{main}: expected a floating tensor, got {what}")
    return dict(given)


def _check_place(cache: EncoderDecoderKVCache, rows: int, field: str, tensor: torch.Tensor) -> None:
    if tensor.shape[0] != rows:
        raise ConfigurationError(
            f"{field}: expected batch {rows} (the cache's), got {tensor.shape[0]}"
        )
    if tensor.device != cache.device:
        raise ConfigurationError(
            f"{field}: expected device {cache.device} (the model's), got {tensor.device}"
        )


def _checked_mask(
    model: Any,
    cache: EncoderDecoderKVCache,
    rows: int,
    encoder: dict[str, Any],
    main: str,
    mask: Any,
) -> torch.Tensor:
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        raise ConfigurationError(
            f"attention_mask: expected a tensor [batch, tokens], got "
            f"{list(getattr(mask, 'shape', ())) or type(mask).__name__}"
        )
    _check_place(cache, rows, "attention_mask", mask)
    if not families.is_masked(model):
        return mask  # over features, which every layer of such a model reads in full
    ids = encoder.get(main)
    if ids is not None and mask.shape != ids.shape[:2]:
        raise ConfigurationError(
            f"attention_mask: expected the shape of {main} {list(ids.shape[:2])}, got "
            f"{list(mask.shape)}"
        )
    if not bool(((mask == 0) | (mask == 1)).all()):  # one that is added has zeros for what counts
        raise ConfigurationError(
            "attention_mask: expected ones for tokens and zeros for padding, as a tokenizer gives, "
            "got other values"
        )
    empty = (mask != 0).any(dim=1).logical_not().nonzero().flatten().tolist()
    if empty:
        raise ConfigurationError(
            f"attention_mask: expected a token that counts in every row, got none in row {empty[0]}"
        )
    return mask
