"""How a generation ends: which ids end a row, what a finished row repeats, where to cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphcore.decode import transformers_compat as compat
from graphcore.decode.forward import Forward
from graphcore.errors import ConfigurationError

MOST_EOS_IDS = 16
"""Room for end-of-sequence ids in the static buffers of a step."""

EosIds = int | Sequence[int] | None


def end_ids(
    forward: Forward, eos_token_id: EosIds, pad_token_id: int | None
) -> tuple[tuple[int, ...], int]:
    """(end-of-sequence ids, pad id), from the arguments or the model's generation config.

    Raises:
        ConfigurationError: An id outside the vocabulary, or more ids than a step has room for.
    """
    highest = forward.vocabulary - 1
    given = _checked_ids("eos_token_id", eos_token_id, highest)
    pads = _checked_ids("pad_token_id", pad_token_id, highest)
    if eos_token_id is None:
        # an id that the model cannot choose ends nothing
        configured = _id_list(compat.generation_setting(forward.model, "eos_token_id"))
        eos = tuple(token for token in configured if 0 <= token <= highest)
    else:
        eos = given
    if len(eos) > MOST_EOS_IDS:
        raise ConfigurationError(
            f"eos_token_id: expected at most {MOST_EOS_IDS} ids, got {len(eos)}"
        )
    pads = pads or _id_list(compat.generation_setting(forward.model, "pad_token_id"))
    pad = next((token for token in (*pads, *eos) if 0 <= token <= highest), 0)
    return eos, pad


def cut_after_end(ids: torch.Tensor, prompt: int, eos: tuple[int, ...]) -> torch.Tensor:
    """``ids`` up to the step at which the last row finished."""
    if not eos:
        return ids
    ends = torch.isin(ids[:, prompt:], torch.tensor(eos, device=ids.device))
    done = (ends.cumsum(dim=1) > 0).all(dim=0)
    if not bool(done.any()):
        return ids
    return ids[:, : prompt + int(done.to(torch.int64).argmax()) + 1]


def _id_list(ids: Any) -> tuple[int, ...]:
    if ids is None:
        return ()
    if isinstance(ids, torch.Tensor):
        ids = ids.tolist()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _checked_ids(field: str, ids: Any, highest: int) -> tuple[int, ...]:
    try:
        tokens = _id_list(ids)
    except TypeError:
        tokens = (ids,)
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ConfigurationError(f"{field}: expected an int id or a list of ids, got {ids!r}")
        if not 0 <= token <= highest:
            raise ConfigurationError(f"{field}: expected ids from 0 to {highest}, got {token}")
    return tokens
