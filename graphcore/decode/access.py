"""Access: how one forward writes to the rings of a cache, and what its attention reads.

A ring (a layer that keeps a window of W tokens) holds token t in slot t mod W. One new token is
written first and the ring is read as it is. Several new tokens may overwrite what the first of them
still sees, so attention reads copies: what the window needs of the past, then the new tokens.
Whoever makes the masks chooses the form; layers follow.

Legend: T new tokens, W slots of a ring, p the position of the first new token.
"""

from __future__ import annotations

from enum import Enum

import torch


class Form(Enum):
    """What a ring gives to attention."""

    SLOTS = "slots"
    """The W slots after the write, in slot order: one address for life. For one token."""

    TOKENS = "tokens"
    """Up to W - 1 past tokens, oldest first, then the T new ones. The length follows the host's
    count of tokens, so that nothing more is copied than attention needs; not inside a graph."""

    FIXED = "fixed"
    """The W slots before the write, in slot order, then the T new tokens: W + T at any position."""


class Access:
    """One forward's write and read of all rings.

    Attributes:
        positions: int64 ``[T]`` on the device: the new tokens' positions.
        form: What the rings give.
        seen: Tokens held before, as far as the host knows; None in a compiled region.
    """

    def __init__(self, positions: torch.Tensor, form: Form, seen: int | None) -> None:
        self.positions = positions
        self.form = form
        self.seen = seen
        self._slots: dict[int, torch.Tensor] = {}

    @property
    def length(self) -> int:
        """T."""
        return int(self.positions.shape[0])

    def slots(self, window: int) -> torch.Tensor:
        """Where the last min(T, W) new tokens go: int64, computed once for all layers."""
        if window not in self._slots:
            self._slots[window] = self.positions[-window:].remainder(window)
        return self._slots[window]

    def past(self, window: int) -> int:
        """How many past tokens a ring gives in the form TOKENS."""
        assert self.seen is not None
        return min(self.seen, window - 1)
