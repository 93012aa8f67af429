"""What a test suite of GPU code needs: checks, faults, isolation, and (plugin.py) the fixture.

Installing graphcore is enough: pytest finds the plugin, and with it the fixture
``graphcore_driver`` and the mark ``gpu``.
"""

from graphcore.testing.checks import assert_no_growth, capture_errors
from graphcore.testing.faults import Injection, inject
from graphcore.testing.isolation import IsolatedRun, run_isolated
from graphcore.testing.outcomes import outcome_differences
from graphcore.testing.replay import assert_replay_equals_eager

__all__ = [
    "Injection",
    "IsolatedRun",
    "assert_no_growth",
    "assert_replay_equals_eager",
    "capture_errors",
    "inject",
    "outcome_differences",
    "run_isolated",
]
