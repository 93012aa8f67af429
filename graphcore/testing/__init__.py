"""What a test suite of GPU code needs: checks, isolation, and (plugin.py) the driver fixture.

Faults are injected on an emulated driver itself: ``driver.faults.inject("alloc", count=1)``.
"""

from graphcore.testing.checks import assert_no_growth, capture_errors
from graphcore.testing.isolation import IsolatedRun, run_isolated
from graphcore.testing.outcomes import outcome_differences
from graphcore.testing.replay import assert_replay_equals_eager

__all__ = [
    "IsolatedRun",
    "assert_no_growth",
    "assert_replay_equals_eager",
    "capture_errors",
    "outcome_differences",
    "run_isolated",
]
