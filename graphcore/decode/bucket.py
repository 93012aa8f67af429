"""Bucket: a size that a step is captured for, and what was decoded in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphcore.decode.sizes import check_positive
from graphcore.errors import ConfigurationError


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A size for which a step is captured: rows and tokens that it has room for."""

    batch_size: int
    max_seq_len: int

    def __str__(self) -> str:
        return f"{self.batch_size} x {self.max_seq_len}"


@dataclass(frozen=True, slots=True)
class BucketGeneration:
    """What :meth:`DecodeBuckets.generate` decoded, and where.

    Attributes:
        ids: int64 ``[rows, prompt + new]``, the prompt's rows only.
        prompt_length: Tokens of the prompt.
        bucket: Where the generation ended.
        path: The buckets it went through, smallest first.
        execution: "graph" (a replay for each token), "one launch" or "eager".
        reason: Why.
        seed: Of the random numbers, given or drawn; None for greedy.
    """

    ids: torch.Tensor
    prompt_length: int
    bucket: Bucket
    path: tuple[Bucket, ...]
    execution: str
    reason: str
    seed: int | None = None

    @property
    def new_ids(self) -> torch.Tensor:
        """int64 ``[rows, new]``."""
        return self.ids[:, self.prompt_length :]


def checked_sizes(field: str, given: Sequence[int]) -> list[int]:
    """``given``, ascending; raises ConfigurationError unless these are different positive ints."""
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence) or not given:
        raise ConfigurationError(f"{field}: expected a list of sizes, got {given!r}")
    for index, size in enumerate(given):
        check_positive(f"{field}[{index}]", size)
    if len(set(given)) != len(given):
        raise ConfigurationError(f"{field}: expected sizes that differ, got {list(given)}")
    return sorted(given)
