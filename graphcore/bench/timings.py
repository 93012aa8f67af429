"""What a benchmark measured, and what may be concluded from it: medians of ratios, never of times.

Pure arithmetic over numbers; knows no clock, driver or arm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

Round = tuple[float, ...]
"""The samples of one arm in one round: two, one in each half of A B B A."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the smallest and the largest value it stands for."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    def bounds(self, digits: int = 4) -> list[float]:
        """[low, high], rounded, as result files have them."""
        return [round(self.low, digits), round(self.high, digits)]


@dataclass(frozen=True)
class Timings:
    """Seconds a call, by arm and round."""

    rounds: Mapping[str, Sequence[Round]]

    def seconds(self, arm: str) -> Spread:
        """Seconds a call of one arm, over its rounds."""
        return Spread.of([mean(samples) for samples in self.rounds[arm]])

    def speed(self, arm: str, base: str, extra: float = 0.0) -> Spread:
        """How good ``arm`` is: 1.0 is as fast as ``base`` plus ``extra`` seconds, larger is better.

        From the ratios within each round, so that what slows a round slows both sides.
        """
        pairs = zip(self.rounds[arm], self.rounds[base], strict=True)
        return Spread.of([(mean(b) + extra) / mean(a) for a, b in pairs])

    def beyond(self, arm: str, base: str) -> Spread:
        """Seconds a call that ``arm`` takes beyond ``base``, from the differences in each round."""
        pairs = zip(self.rounds[arm], self.rounds[base], strict=True)
        return Spread.of([mean(a) - mean(b) for a, b in pairs])

    def same_against_same(self, arm: str) -> Spread:
        """The arm's first sample of a round over its last: what no difference looks like."""
        return Spread.of([samples[0] / samples[-1] for samples in self.rounds[arm]])

    def fastest(self, arms: Sequence[str]) -> str | None:
        """The arm of ``arms`` with the smallest median, None where there is none."""
        return min(arms, key=lambda arm: self.seconds(arm).median, default=None)
