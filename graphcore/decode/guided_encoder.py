"""Both branches of classifier-free guidance on the encoder's side of an encoder-decoder.

The encoder reads the prompts of both branches as one batch of 2 R rows, padded to the longer of the
two; the decoder's tokens are the same in both. Legend: R rows of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad

from graphcore.decode import encoder_decoder_prompt as prompts
from graphcore.decode import transformers_encoder_decoder as families
from graphcore.decode.encoder_decoder_cache import EncoderDecoderKVCache
from graphcore.decode.prompt import Prompt
from graphcore.errors import ConfigurationError

_NEGATIVE = "negative_"


def guided_prompt(
    model: Any,
    cache: EncoderDecoderKVCache,
    input_ids: Any,
    attention_mask: Any,
    inputs: Mapping[str, Any],
) -> Prompt:
    """The checked prompt of R rows; its encoder's side is that of both branches, 2 R rows.

    Args:
        model: The model.
        cache: Its cache, of 2 R rows.
        input_ids: As of :func:`encoder_decoder_prompt.check_prompt`, and so are the others.
        attention_mask: Over the encoder's tokens of the conditional branch.
        inputs: Beside those of a prompt, what the unconditional branches' encoder reads, by its
            names with "negative_" before them; one row serves all.

    Raises:
        ConfigurationError: As of ``check_prompt``; no negative input with an encoder's input, one
            without, or inputs of the two branches that are not of one kind.
        CapacityError: As of ``check_prompt``.
    """
    rows = cache.batch_size // 2
    mine = {name: value for name, value in inputs.items() if not name.startswith(_NEGATIVE)}
    other = negative_inputs(inputs)
    main = families.main_input(model)
    prompt = prompts.check_prompt(model, cache, input_ids, attention_mask, mine, rows=rows)
    if bool(prompt.inputs) != bool(other):
        expected, got = ("the encoder's input", "none") if prompt.inputs else ("none", "some")
        raise ConfigurationError(
            f"{_NEGATIVE}{main}: expected {expected} of the unconditional branches, got {got}"
        )
    encoder: Mapping[str, Any] = {}
    if other:
        spread = {name: _spread(value, rows) for name, value in other.items()}
        mask = spread.pop("attention_mask", None)
        negative = prompts.check_prompt(model, cache, None, mask, spread, rows=rows)
        encoder = _joined(model, prompt.inputs, negative.inputs)
    return replace(prompt, inputs=encoder, negative=Prompt(prompt.ids, prompt.mask))


def sizes_of_branches(model: Any, input_ids: Any, inputs: Mapping[str, Any]) -> prompts.Sizes:
    """As :func:`encoder_decoder_prompt.needed_sizes`, with the longer encoder of both branches.

    Raises:
        ConfigurationError: As of ``needed_sizes``.
    """
    sizes, other = prompts.needed_sizes(model, input_ids, inputs), negative_inputs(inputs)
    if not other or sizes.encoder is None:
        return sizes
    longest = max(sizes.encoder, prompts.needed_sizes(model, None, other).encoder or 0)
    return replace(sizes, encoder=longest)


def negative_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What the unconditional branches are given, by the names that the encoder knows."""
    return {
        name.removeprefix(_NEGATIVE): value
        for name, value in inputs.items()
        if name.startswith(_NEGATIVE) and value is not None
    }


def _spread(value: Any, rows: int) -> Any:
    """One row for all of them."""
    if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == 1:
        return value.expand(rows, *value.shape[1:])
    return value


def _joined(model: Any, first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The encoder's inputs of both branches as one batch, the conditional rows first."""
    branches = [_with_states(model, each) for each in (first, second)]
    names = [{name for name in each if name != "attention_mask"} for each in branches]
    if names[0] != names[1]:
        only = min(names[0] ^ names[1])
        raise ConfigurationError(
            f"{_NEGATIVE}{only}: expected inputs of one kind in both branches, got {only} in one"
        )
    joined: dict[str, Any] = {}
    for name in sorted(names[0]):
        joined[name] = _one_batch(model, name, branches[0][name], branches[1][name])
    masks = [each.get("attention_mask") for each in branches]
    if families.is_masked(model):
        length = [_length(model, each) for each in branches]
        if length[0] != length[1] or any(mask is not None for mask in masks):
            joined["attention_mask"] = torch.cat(
                [
                    pad(_ones(each, count) if mask is None else mask, (0, max(length) - count))
                    for each, count, mask in zip(branches, length, masks, strict=True)
                ]
            )
    elif any(mask is not None for mask in masks):
        joined["attention_mask"] = _one_batch(model, "attention_mask", *masks)
    return joined


def _with_states(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """``inputs`` with the states alone of an encoder's output."""
    made = dict(inputs)
    if made.get("encoder_outputs") is not None:
        made["encoder_outputs"] = families.encode(model, made)
    return made


def _one_batch(model: Any, name: str, first: Any, second: Any) -> torch.Tensor:
    are_tensors = isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
    if are_tensors and families.is_masked(model) and name in ("input_ids", "encoder_outputs"):
        length = max(first.shape[1], second.shape[1])
        return torch.cat([_longer(first, length), _longer(second, length)])
    if not are_tensors or first.shape != second.shape:
        shapes = [list(getattr(each, "shape", ())) for each in (first, second)]
        raise ConfigurationError(
            f"{_NEGATIVE}{name}: expected the shape of {name} {shapes[0]}, got {shapes[1]}"
        )
    return torch.cat([first, second])


def _longer(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Zeros behind dimension 1, up to ``length``."""
    behind = [0, 0] * (tensor.dim() - 2) + [0, length - tensor.shape[1]]
    return pad(tensor, behind)


def _length(model: Any, inputs: Mapping[str, Any]) -> int:
    """Encoder tokens of one branch."""
    states = inputs.get("encoder_outputs")
    held = inputs[families.main_input(model)] if states is None else states
    return int(held.shape[1])


def _ones(inputs: Mapping[str, Any], length: int) -> torch.Tensor:
    """A mask that leaves nothing out, for the rows of ``inputs``."""
    tensor = next(value for value in inputs.values() if isinstance(value, torch.Tensor))
    return torch.ones(tensor.shape[0], length, dtype=torch.int64, device=tensor.device)
