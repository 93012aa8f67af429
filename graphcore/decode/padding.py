"""Padding of ragged prompts: masks checked, rows moved to the right, hidden slots remembered.

Legend: R rows, T tokens of a prompt, S slots of the cache. Rows of one batch share the cache's
position, so the shorter ones are padded on the left: their last token is everybody's last token,
and what is decoded follows at the same slot. A pad takes a slot that nobody but itself attends to,
and it does not count in position ids.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from graphcore.decode.cache_state import static_zeros
from graphcore.errors import ConfigurationError


class Padding:
    """Which slots of a cache hold pads. Part of the cache: it says what the slots mean.

    Attributes:
        hidden: bool ``[R, S]``, static: slots that hold a pad.
        pads: int64 ``[R]``, static: how many of them a row has.
    """

    def __init__(self, rows: int, slots: int, device: torch.device) -> None:
        self.hidden = static_zeros((rows, slots), torch.bool, device)
        self.pads = static_zeros((rows,), torch.int64, device)
        self._whole = self
        self._end = 0
        self._was_used = False

    def view(self, rows: int, slots: int) -> Padding:
        """That of the first rows and slots, in the same storage: what one hides, the other does."""
        made = copy.copy(self)
        made.hidden, made.pads = self.hidden[:rows, :slots], self.pads[:rows]
        return made

    def __bool__(self) -> bool:
        """Whether any slot holds a pad; known on the host."""
        return self._whole._end > 0

    @property
    def was_used(self) -> bool:
        """Whether any slot ever held a pad: before, no step depends on the tensors here."""
        return self._whole._was_used

    def append(self, start: int, mask: torch.Tensor | None) -> None:
        """A prompt is about to be written from slot ``start`` on; ``mask [R, T]`` as a Prompt's."""
        self.clear_from(start)
        if mask is None:
            return
        end = start + mask.shape[1]
        self.hidden[:, start:end] = ~mask
        self.pads.add_(self.hidden[:, start:end].sum(dim=1))
        self._whole._end = end
        self._whole._was_used = True

    def clear_from(self, start: int) -> None:
        """The slots from ``start`` on hold nothing any more, in no row."""
        whole = self._whole
        if whole._end <= start:
            return
        whole.hidden[:, start:] = False
        whole.pads.copy_(whole.hidden.sum(dim=1))
        whole._end = start if start and bool(whole.hidden.any()) else 0  # waits for the device

    def reorder(self, rows: torch.Tensor) -> None:
        """Reorders the rows in place."""
        for buffer in (self.hidden, self.pads):
            buffer.copy_(buffer.index_select(0, rows.to(buffer.device)))

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Its static tensors by the name reports use."""
        return {"hidden slots": self.hidden, "pads of rows": self.pads}


def checked_mask(ids: torch.Tensor, mask: Any, name: str = "input_ids") -> torch.Tensor | None:
    """``mask`` as bool on the device of ``ids``; None where it hides nothing.

    Raises:
        ConfigurationError: Another shape, values other than 0 and 1, a row without a token.
    """
    if mask is None:
        return None
    field = name.replace("input_ids", "attention_mask")
    shape = list(getattr(mask, "shape", ()))
    if isinstance(mask, torch.Tensor) and (mask.layout is not torch.strided or mask.is_meta):
        raise ConfigurationError(
            f"{field}: expected a dense tensor with values, got {mask.layout} on {mask.device}"
        )
    if not isinstance(mask, torch.Tensor) or shape != list(ids.shape):
        raise ConfigurationError(
            f"{field}: expected the shape of {name} {list(ids.shape)}, got {shape}"
        )
    counts = mask.to(ids.device) != 0
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ConfigurationError(
            f"{field}: expected ones for tokens and zeros for padding, as a tokenizer gives, got "
            f"other values"
        )
    empty = (~counts.any(dim=1)).nonzero().flatten().tolist()
    if empty:
        raise ConfigurationError(
            f"{field}: expected a token in every row, got none in rows {empty}"
        )
    return None if bool(counts.all()) else counts


def left_padded(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(ids, mask) with every row's tokens at its right end, in order; a pad is 0.

    Columns that hold no token are left out; where no pad is left, the mask is None.
    """
    longest = int(mask.sum(dim=1).max())
    # a stable sort: pads before tokens, tokens in their order
    order = mask.to(torch.int8).argsort(dim=1, stable=True)[:, -longest:]
    kept = mask.gather(1, order)
    moved = ids.gather(1, order).masked_fill(~kept, 0)
    return moved, None if bool(kept.all()) else kept


def of_length(
    ids: torch.Tensor, mask: torch.Tensor | None, length: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(ids, mask) padded on the left to ``length`` tokens; the mask None where nothing is."""
    missing = length - ids.shape[1]
    if missing == 0:
        return ids, mask
    counts = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    return (
        torch.nn.functional.pad(ids, (missing, 0)),
        torch.nn.functional.pad(counts, (missing, 0)),
    )
