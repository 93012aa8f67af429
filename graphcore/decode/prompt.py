"""What goes into a runner: the prompt, the budget, a forced token; checked before any launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graphcore.decode.sizes import check_positive
from graphcore.decode.static_cache import StaticKVCache
from graphcore.errors import CapacityError, ConfigurationError


@dataclass(frozen=True, slots=True)
class Prompt:
    """A checked prompt.

    Attributes:
        ids: int64 ``[rows, tokens]`` of the decoder.
        mask: bool ``[rows, tokens]``, True where a token counts; None: all do.
        inputs: What else the model's first forward takes, by name.
        seed: Of the random numbers of what follows; None: the sampler decides.
    """

    ids: torch.Tensor
    mask: torch.Tensor | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return int(self.ids.shape[1])


def check_ids(input_ids: Any) -> torch.Tensor:
    """``input_ids``, if it is an integer tensor ``[batch, tokens]`` with at least one token."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        what = getattr(input_ids, "dtype", type(input_ids).__name__)
        raise ConfigurationError(f"input_ids: expected a torch.int64 tensor, got {what}")
    if input_ids.layout is not torch.strided:
        raise ConfigurationError(f"input_ids: expected a dense tensor, got {input_ids.layout}")
    if input_ids.dim() != 2:
        raise ConfigurationError(
            f"input_ids: expected two dimensions [batch, tokens], got shape {list(input_ids.shape)}"
        )
    if input_ids.numel() == 0:
        raise ConfigurationError("input_ids: expected at least one token, got an empty prompt")
    return input_ids


def check_prompt(
    model: Any, cache: StaticKVCache, input_ids: Any, attention_mask: Any = None
) -> Prompt:
    """``input_ids`` ``[batch, tokens]``, checked, as a prompt.

    Reads the smallest and largest id, which waits for the device.

    Raises:
        ConfigurationError: As :func:`check_ids`; or another device or batch, an id outside the
            vocabulary, or padding.
    """
    ids = check_ids(input_ids)
    if ids.shape[0] != cache.batch_size:
        raise ConfigurationError(
            f"input_ids: expected batch {cache.batch_size} (the cache's), got {ids.shape[0]}"
        )
    if ids.device != cache.device:
        raise ConfigurationError(
            f"input_ids: expected device {cache.device} (the model's), got {ids.device}"
        )
    lowest, highest = (int(bound) for bound in ids.aminmax())
    vocabulary = vocabulary_size(model)
    if lowest < 0 or highest >= vocabulary:
        raise ConfigurationError(
            f"input_ids: expected ids from 0 to {vocabulary - 1}, got {lowest} to {highest}"
        )
    _check_mask(ids, attention_mask)
    return Prompt(ids.to(torch.int64))


def check_count(max_new_tokens: object) -> int:
    """``max_new_tokens``, if it is a positive int."""
    check_positive("max_new_tokens", max_new_tokens)
    assert isinstance(max_new_tokens, int)
    return max_new_tokens


def check_budget(cache: StaticKVCache, start: int, tokens: int, max_new_tokens: object) -> None:
    """Raises CapacityError unless prompt and new tokens fit behind ``start`` held ones."""
    new = check_count(max_new_tokens)
    check_prompt_fits(cache, start, tokens)
    need = start + tokens + new
    if need > cache.max_seq_len:
        raise CapacityError(
            f"max_new_tokens: a prompt of {tokens} tokens and {new} new ones{_behind(start)} need "
            f"{need}; max_seq_len is {cache.max_seq_len}"
        )


def check_prompt_fits(cache: StaticKVCache, start: int, tokens: int) -> None:
    """Raises CapacityError unless ``tokens`` more fit behind ``start``."""
    if start + tokens > cache.max_seq_len:
        raise CapacityError(
            f"input_ids: a prompt of {tokens} tokens{_behind(start)} needs {start + tokens}; "
            f"max_seq_len is {cache.max_seq_len}"
        )


def check_token(model: Any, cache: StaticKVCache, token: Any) -> int | torch.Tensor:
    """A token to force: an int in the vocabulary, or integer ids ``[batch]`` (or one for all).

    Ids on the host are checked against the vocabulary; ids on a device are not, since that would
    wait for it (they are clamped where they are used).

    Raises:
        ConfigurationError: Anything else.
    """
    if isinstance(token, int) and not isinstance(token, bool):
        _check_ids(model, token, token)
        return token
    if not isinstance(token, torch.Tensor) or token.dtype not in (torch.int64, torch.int32):
        what = token.dtype if isinstance(token, torch.Tensor) else repr(token)
        raise ConfigurationError(f"token: expected an int or an int64 tensor, got {what}")
    if token.numel() not in (1, cache.batch_size):
        raise ConfigurationError(
            f"token: expected 1 or {cache.batch_size} ids (the batch), got {list(token.shape)}"
        )
    if token.device.type == "cpu":
        _check_ids(model, *(int(bound) for bound in token.aminmax()))
    elif token.device != cache.device:
        raise ConfigurationError(
            f"token: expected device {cache.device} or the host, got {token.device}"
        )
    return token.reshape(-1)


def vocabulary_size(model: Any) -> int:
    """Rows of the input embedding: ids that can be looked up."""
    return int(model.get_input_embeddings().weight.shape[0])


def _check_mask(ids: torch.Tensor, attention_mask: Any) -> None:
    if attention_mask is None:
        return
    shape = list(getattr(attention_mask, "shape", ()))
    if shape != list(ids.shape):
        raise ConfigurationError(
            f"attention_mask: expected the shape of input_ids {list(ids.shape)}, got {shape}"
        )
    if not bool((attention_mask != 0).all()):
        raise ConfigurationError(
            "attention_mask: expected all ones, got padding: prompts of different length in one "
            "batch are not offered in this version"
        )


def _behind(start: int) -> str:
    return f" behind {start} held" if start else ""


def _check_ids(model: Any, lowest: int, highest: int) -> None:
    vocabulary = vocabulary_size(model)
    if lowest < 0 or highest >= vocabulary:
        worst = lowest if lowest < 0 else highest
        raise ConfigurationError(f"token: expected 0 to {vocabulary - 1}, got {worst}")
