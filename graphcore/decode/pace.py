"""Pace: how long the host sleeps between two looks at a generation that runs in one launch.

A look costs the host ten microseconds and more, most of it for sleeping and waking. So there are
few: each sleep is half of the time that is left, as the tokens up to now tell it, and near the end
all of it but little.
"""

from __future__ import annotations

_SHORTEST = 20e-6
SLOW = 200e-6
"""What pauses grow to where nothing is known but that something will come, in seconds."""
_EARLY = 500e-6  # before the first token
_LONGEST = 50e-3  # a failure is seen after so long
_LATE = 1 / 50  # of the time up to now
_TOKENS_LATE = 4
_MOST_OF_IT = 7 / 8


class Pace:
    """The pauses of one wait; where they begin, grow and shrink.

    The end is seen late by at most half a millisecond, or 1/50 of the time waited up to then. Where
    all rows have ended before the last token that was allowed: also by the time of four tokens,
    which is more in a wait of less than 200 tokens. That holds for tokens that take equally long,
    behind a first one that may take any time; no pause is longer than 50 ms. Where one token is
    waited for, pauses are 20 to 200 us.

    Args:
        may_end_early: Whether all rows may end before the last token that is allowed.
    """

    def __init__(self, *, may_end_early: bool) -> None:
        self._may_end_early = may_end_early
        self._least = _SHORTEST
        self._first: tuple[float, int] | None = None

    def pause(self, elapsed: float, published: int, left: int) -> float:
        """Seconds until the next look.

        Args:
            elapsed: Seconds since the wait began.
            published: Tokens that are there.
            left: Tokens that are still to come, at most.
        """
        least, self._least = self._least, min(2 * self._least, SLOW)
        if left > 1:
            least = SLOW
        return max(least, min(self._wanted(elapsed, published, left), _LONGEST))

    def _wanted(self, elapsed: float, published: int, left: int) -> float:
        late = _LATE * elapsed
        if self._first is None:
            # what the first token takes tells nothing of the others: a prompt's time is in it
            self._first = (elapsed, published) if published else None
            return max(min(elapsed, _EARLY), late) if left > 1 else 0.0
        since, before = self._first
        made = published - before
        # never more than the truth: between two looks pass less than one more than the new tokens
        step = (elapsed - since) / (made + 1)
        # half a token less: the newest one has been there for some time
        ahead = (max(left, 1) - 0.5) * step
        if left <= 1:
            return min(ahead / 2, late) if made else 0.0
        pause = min(ahead * _MOST_OF_IT, ahead / 2 + late)
        return min(pause, max(_TOKENS_LATE * step, late)) if self._may_end_early else pause
