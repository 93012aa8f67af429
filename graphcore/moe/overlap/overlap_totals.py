"""OverlapTotals: how many steps of decoding were queued ahead, and why the others were not."""

from __future__ import annotations

from typing import NamedTuple

from graphcore.moe.decisions.decode_overlap import OverlapRule


class OverlapTotals(NamedTuple):
    """Counts since the start.

    Args:
        ahead: Steps that were prepared and queued while the one before ran.
        steps: All of them.
        rolled_back: Rows of queued steps that were taken back.
        obstacles: Rule -> steps that it kept from being queued; a step may have several.
    """

    ahead: int
    steps: int
    rolled_back: int
    obstacles: tuple[tuple[OverlapRule, int], ...]
