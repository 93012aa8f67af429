"""The rows of a bucket: those that pad a prompt, and generations that move to a larger bucket."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from graphcore.decode.runner import CUDAGraphAR


def ended_rows(new_ids: torch.Tensor, eos: tuple[int, ...], spare: int) -> torch.Tensor:
    """Bool ``[rows]``: which rows have chosen an end-of-sequence id, or stand for nothing."""
    ended = torch.isin(new_ids, torch.tensor(eos, device=new_ids.device)).any(dim=1)
    if spare:
        ended[-spare:] = True
    return ended


def decode_on(
    runner: CUDAGraphAR,
    count: int,
    eos: tuple[int, ...],
    pad: int,
    ended: torch.Tensor,
    poll_every: int | None,
) -> torch.Tensor:
    """Up to ``count`` tokens more, int64 ``[rows, new]``, behind what the runner's cache holds.

    ``poll_every`` None: in one launch.
    """
    step, start = runner._step, runner.cache.seen_tokens
    step.set_eos(eos, pad)
    step.finished.logical_or_(ended)
    if poll_every is None:
        with runner._take_off(count, eos) as tokens:
            deque(tokens, maxlen=0)
        return step.history[:, start : runner.cache.seen_tokens].clone()
    for done in range(1, count + 1):
        runner.replay()
        if eos and done % poll_every == 0 and runner._has_ended(bool(step.finished.all())):
            break
    step.set_eos((), 0)
    return step.history[:, start : runner.cache.seen_tokens].clone()


@contextmanager
def sparing(runner: CUDAGraphAR, rows: int) -> Iterator[None]:
    """A generation that begins in the block has that many last rows that stand for nothing."""
    runner._step.spare_rows = rows
    try:
        yield
    finally:
        runner._step.spare_rows = 0


def padded(rows: torch.Tensor, spare: int) -> torch.Tensor:
    """``rows`` with the last one repeated, so that what pads is a valid prompt too."""
    if not spare:
        return rows
    return torch.cat((rows, rows[-1:].expand(spare, *rows.shape[1:])))


def padded_options(options: Mapping[str, Any], rows: int, spare: int) -> dict[str, Any]:
    """``options`` of a generation with what has a row for each of ``rows`` padded too."""
    by_row = ("attention_mask", "negative_input_ids", "negative_attention_mask")
    return {
        name: padded(value, spare)
        if name in by_row and isinstance(value, torch.Tensor) and value.shape[:1] == (rows,)
        else value
        for name, value in options.items()
    }


def cut(tokens: Iterator[torch.Tensor], rows: int) -> Iterator[torch.Tensor]:
    return (ids[:rows].clone() for ids in tokens)
