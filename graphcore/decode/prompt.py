"""What goes into a runner: the prompt, the budget, a forced token; checked before any launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from graphcore.decode import padding
from graphcore.decode.sizes import check_positive
from graphcore.decode.static_cache import StaticKVCache
from graphcore.errors import CapacityError, ConfigurationError

if TYPE_CHECKING:
    from graphcore.decode.forward import Forward


@dataclass(frozen=True, slots=True)
class Prompt:
    """A checked prompt, padded on the left where its rows differ in length.

    Attributes:
        ids: int64 ``[rows, tokens]`` of the decoder; a pad is 0.
        mask: bool ``[rows, tokens]``, True where a token counts; None: all do.
        inputs: What else the model's first forward takes, by name: the encoder's side of an
            encoder-decoder.
        seed: Of the random numbers of what follows; None: the sampler decides.
        negative: The prompt of the unconditional branch, of the same length.
        given: int64, the ids as the caller gave them, with their padding; None: ``ids``.
    """

    ids: torch.Tensor
    mask: torch.Tensor | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    negative: Prompt | None = None
    given: torch.Tensor | None = None

    @property
    def as_given(self) -> torch.Tensor:
        """What the caller gave, which generated ids follow."""
        return self.ids if self.given is None else self.given

    @property
    def begins_anew(self) -> bool:
        """Whether nothing that the cache holds can come before it: an encoder's output is new."""
        return bool(self.inputs)

    @property
    def length(self) -> int:
        """Slots that it takes: tokens of its longest row."""
        return int(self.ids.shape[1])


def check_ids(input_ids: Any, name: str = "input_ids") -> torch.Tensor:
    """``input_ids``, if it is an integer tensor ``[batch, tokens]`` with at least one token."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        what = getattr(input_ids, "dtype", type(input_ids).__name__)
        raise ConfigurationError(f"{name}: expected a torch.int64 tensor, got {what}")
    if input_ids.layout is not torch.strided:
        raise ConfigurationError(f"{name}: expected a dense tensor, got {input_ids.layout}")
    if input_ids.dim() != 2:
        raise ConfigurationError(
            f"{name}: expected two dimensions [batch, tokens], got shape {list(input_ids.shape)}"
        )
    if input_ids.numel() == 0:
        raise ConfigurationError(f"{name}: expected at least one token, got an empty prompt")
    return input_ids


def check_prompt(
    forward: Forward, input_ids: Any, attention_mask: Any = None, *, name: str = "input_ids"
) -> Prompt:
    """``input_ids`` ``[rows, tokens]``, checked, as a prompt.

    Padding (zeros of ``attention_mask``) may stand anywhere: each row's tokens are moved to its
    right end, which changes nothing for them, and columns without any token are left out. Reads
    the ids and the mask, which waits for the device.

    Args:
        forward: Rows, vocabulary and device that the prompt has to fit.
        input_ids: The prompt; what pads hold does not matter.
        attention_mask: As a tokenizer gives it; None: every token counts.
        name: Of the argument, in messages.

    Raises:
        ConfigurationError: As :func:`check_ids`; or another device or batch, an id outside the
            vocabulary, a mask of another shape or of other values than 0 and 1, or a row without
            a token.
    """
    ids = check_ids(input_ids, name)
    if ids.shape[0] != forward.rows:
        raise ConfigurationError(
            f"{name}: expected batch {forward.rows} (the cache's), got {ids.shape[0]}"
        )
    device = forward.cache.device
    if ids.device != device:
        raise ConfigurationError(
            f"{name}: expected device {device} (the model's), got {ids.device}"
        )
    given = ids.to(torch.int64, copy=True)  # it may be an alias of what a step writes
    mask = padding.checked_mask(given, attention_mask, name)
    real = given if mask is None else given[mask]
    lowest, highest = (int(bound) for bound in real.aminmax())
    if lowest < 0 or highest >= forward.vocabulary:
        raise ConfigurationError(
            f"{name}: expected ids from 0 to {forward.vocabulary - 1}, got {lowest} to {highest}"
        )
    if mask is None:
        return Prompt(given)
    return Prompt(*padding.left_padded(given, mask), given=given)


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


def check_token(forward: Forward, token: Any) -> int | torch.Tensor:
    """A token to force: an int in the vocabulary, or integer ids ``[batch]`` (or one for all).

    Ids on the host are checked against the vocabulary; ids on a device are not, since that would
    wait for it (they are clamped where they are used).

    Raises:
        ConfigurationError: Anything else.
    """
    if isinstance(token, int) and not isinstance(token, bool):
        _check_ids(forward, token, token)
        return token
    if not isinstance(token, torch.Tensor) or token.dtype not in (torch.int64, torch.int32):
        what = token.dtype if isinstance(token, torch.Tensor) else repr(token)
        raise ConfigurationError(f"token: expected an int or an int64 tensor, got {what}")
    if token.numel() not in (1, forward.rows):
        raise ConfigurationError(
            f"token: expected 1 or {forward.rows} ids (the batch), got {list(token.shape)}"
        )
    if token.device.type == "cpu":
        _check_ids(forward, *(int(bound) for bound in token.aminmax()))
    elif token.device != forward.cache.device:
        raise ConfigurationError(
            f"token: expected device {forward.cache.device} or the host, got {token.device}"
        )
    return token.reshape(-1)


def vocabulary_size(model: Any) -> int:
    """Rows of the input embedding: ids that can be looked up."""
    return int(model.get_input_embeddings().weight.shape[0])


def _behind(start: int) -> str:
    return f" behind {start} held" if start else ""


def _check_ids(forward: Forward, lowest: int, highest: int) -> None:
    vocabulary = forward.vocabulary
    if lowest < 0 or highest >= vocabulary:
        worst = lowest if lowest < 0 else highest
        raise ConfigurationError(f"token: expected 0 to {vocabulary - 1}, got {worst}")
