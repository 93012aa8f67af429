"""A runner that is given another cache: what becomes of its captured steps, as a value, and why.

Their graphs hold the addresses of the cache they were captured with. Where the other cache has the
same layout, the addresses are exchanged in place; where that is impossible the graphs are given
back, and the next prompt captures. A graph of the old cache is never launched in between.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from graphcore.decode.variants import Variants
from graphcore.errors import GraphcoreError

_log = logging.getLogger("graphcore")


class BindingRoute(Enum):
    """What was done with the captured steps."""

    SAME = "nothing to do"
    REBOUND = "rebound"
    DROPPED = "given back, the next prompt captures again"


@dataclass(frozen=True, slots=True)
class CacheBinding:
    """What became of a runner's captured steps when it was given a cache.

    Attributes:
        route: What was done.
        reason: Why, in words.
        rebound: Graphs that work on the new cache.
        dropped: Graphs that were given back.
    """

    route: BindingRoute
    reason: str
    rebound: int = 0
    dropped: int = 0

    def __str__(self) -> str:
        return f"{self.route.value}: {self.reason}"


def layout_difference(old: Any, new: Any) -> str | None:
    """The first thing in which two caches are not alike, in words; None: they are exchangeable.

    Compared are batch, capacity, and name, shape, strides, dtype and device of every buffer.
    """
    for field in ("batch_size", "max_seq_len"):
        was, now = getattr(old, field), getattr(new, field)
        if was != now:
            return f"{field} is {now} instead of {was}"
    before, after = old.named_tensors(padded=True), new.named_tensors(padded=True)
    if before.keys() != after.keys():
        names = ", ".join(sorted(before.keys() ^ after.keys()))
        return f"not both caches have: {names}"
    for name, tensor in before.items():
        was, now = _kind(tensor), _kind(after[name])
        if was != now:
            return f"{name} is {_words(after[name])} instead of {_words(tensor)}"
    return None


def bind_variants(variants: Variants, difference: str | None, new: Any) -> CacheBinding:
    """Makes the captured steps work on the cache ``new``, or gives them back.

    Args:
        variants: Captured with a cache that differs by ``difference``; marked stale until the
            caller has made everything else work on ``new``.
        difference: As of :func:`layout_difference`.
        new: The cache.
    """
    count = len(variants)
    if not count:
        return CacheBinding(BindingRoute.SAME, "no step is captured yet")
    reason = variants.stale or difference
    if reason is None:
        # whoever stops this half way leaves graphs that are captured again, not launched
        variants.stale = "a change of caches was interrupted"
        reason = _rebound(variants, new.named_tensors(padded=True))
    if reason is None:
        return CacheBinding(
            BindingRoute.REBOUND, "the other cache has the same layout", rebound=count
        )
    variants.close()
    return CacheBinding(BindingRoute.DROPPED, reason, dropped=count)


def _rebound(variants: Variants, buffers: dict[str, torch.Tensor]) -> str | None:
    """Rebinds every variant; why not, where one cannot be."""
    for step in variants:
        try:
            outcome = step.rebind(buffers)
        except GraphcoreError as error:
            return f"the graph takes no other buffers: {error}"
        _log.info("the decode step works on another cache: %s", outcome)
    return None


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device


def _words(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} strides {list(tensor.stride())}"
