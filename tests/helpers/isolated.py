"""Runs a script in a process of its own, for cases that may take the process down."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_TESTS = Path(__file__).parent.parent


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The finished process; ``script`` may import ``helpers``. No coverage: it may take times."""
    environment = {name: value for name, value in os.environ.items() if "COVERAGE" not in name}
    environment["PYTHONPATH"] = os.pathsep.join([str(_TESTS), str(_TESTS.parent)])
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
