"""Runs a script of the tests in a process of its own, for cases that may take the process down."""

from __future__ import annotations

import os
from pathlib import Path

from graphcore.testing import IsolatedRun, run_isolated

_TESTS = Path(__file__).parent.parent


def run_script(script: str, *arguments: str) -> IsolatedRun:
    """The finished process; ``script`` may import ``helpers``. No coverage: it may take times."""
    environment = {name: value for name, value in os.environ.items() if "COVERAGE" not in name}
    return run_isolated(script, *arguments, search=[_TESTS], environment=environment)
