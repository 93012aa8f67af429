"""What the decoder of an encoder-decoder begins with: the caller's ids or the start token, checked.

Rows may differ in length: padding (zeros of ``decoder_attention_mask``) may stand anywhere, and is
moved to the left, as for decoder-only models. Legend: R rows, T tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from graphcore.decode import padding
from graphcore.decode import transformers_encoder_decoder as families
from graphcore.decode.prompt import Prompt, check_ids, vocabulary_size
from graphcore.errors import ConfigurationError

_NAME = "decoder_input_ids"

Padded = tuple[torch.Tensor, torch.Tensor | None]
"""Ids ``[R, T]`` and which of them count, bool ``[R, T]``; None: all."""


def check_begin(
    model: Any, rows: int, device: torch.device, decoder_input_ids: Any, mask: Any
) -> Prompt:
    """The decoder's side of a prompt that begins a generation; see :func:`begin_ids`.

    Raises:
        ConfigurationError: As :func:`begin_ids`; or padding, and the model counts its positions
            itself.
    """
    return _prompt(model, begin_ids(model, rows, device, decoder_input_ids, mask))


def check_continued(
    model: Any, rows: int, device: torch.device, decoder_input_ids: Any, mask: Any
) -> Prompt:
    """The decoder's side of a prompt that goes on behind what the cache holds.

    Raises:
        ConfigurationError: As :func:`check_begin`.
    """
    return _prompt(model, checked_ids(model, rows, device, _NAME, decoder_input_ids, mask))


def begin_ids(
    model: Any,
    rows: int,
    device: torch.device,
    decoder_input_ids: Any = None,
    mask: Any = None,
) -> Padded:
    """The ids ``[rows, tokens]`` that the decoder begins with: the caller's, or the start token.

    As in transformers, the start token is put before ids that begin with another one, except for
    models that begin with a task (Whisper's forced tokens). A row begins with the first of its
    tokens that counts.

    Raises:
        ConfigurationError: Wrong ids or a wrong mask, a mask without ids, or neither ids nor a
            start token in the model's configuration.
    """
    start = families.start_token(model)
    if decoder_input_ids is None:
        if mask is not None and not bool((mask != 0).all()):
            raise ConfigurationError(
                "decoder_attention_mask: expected decoder_input_ids with it, got None"
            )
        if start is None:
            raise ConfigurationError(
                "decoder_input_ids: expected ids, got None, and the model's configuration names no "
                "decoder_start_token_id"
            )
        return torch.full((rows, 1), start, dtype=torch.int64, device=device), None
    ids, counts = checked_ids(model, rows, device, _NAME, decoder_input_ids, mask)
    if start is None or families.begins_with_task(model) or _begins_with(start, ids, counts):
        return ids, counts
    if counts is not None:
        counts = torch.cat([torch.ones_like(counts[:, :1]), counts], dim=1)
    return torch.cat([torch.full_like(ids[:, :1], start), ids], dim=1), counts


def checked_ids(
    model: Any, rows: int, device: torch.device, name: str, given: Any, mask: Any = None
) -> Padded:
    """``given`` as int64 ids of the vocabulary, with a checked mask; what pads hold is no matter.

    Raises:
        ConfigurationError: A wrong shape, dtype, device, batch or id, or a wrong mask.
    """
    ids = check_ids(given, name)
    if ids.shape[0] != rows:
        raise ConfigurationError(f"{name}: expected batch {rows} (the cache's), got {len(ids)}")
    if ids.device != device:
        raise ConfigurationError(
            f"{name}: expected device {device} (the model's), got {ids.device}"
        )
    counts = padding.checked_mask(ids, mask, name)
    real = ids if counts is None else ids[counts]
    lowest, highest = (int(bound) for bound in real.aminmax())
    vocabulary = vocabulary_size(model)
    if lowest < 0 or highest >= vocabulary:
        raise ConfigurationError(
            f"{name}: expected ids from 0 to {vocabulary - 1}, got {lowest} to {highest}"
        )
    # a copy: it may be an alias of what a step writes
    return ids.to(torch.int64, copy=True), counts


def _begins_with(start: int, ids: torch.Tensor, counts: torch.Tensor | None) -> bool:
    """Whether any row's first token is ``start``."""
    if counts is None:
        return bool((ids[:, 0] == start).any())
    first = counts.to(torch.int8).argmax(dim=1, keepdim=True)
    return bool((ids.gather(1, first) == start).any())


def _prompt(model: Any, begin: Padded) -> Prompt:
    ids, counts = begin
    if counts is None:
        return Prompt(ids)
    if not families.takes_padded_decoder(model):
        raise ConfigurationError(
            f"decoder_attention_mask: expected all ones, got padding: {type(model).__name__} "
            "counts the positions of its decoder's tokens itself, from the first slot, so that a "
            "padded row would begin at another position; begin with rows of one length"
        )
    return Prompt(*padding.left_padded(ids, counts), given=ids)
