"""Running what may take the process down, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class IsolatedRun:
    """A finished process. ``killed_by`` is the signal's name ("SIGSEGV"), or None."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def killed_by(self) -> str | None:
        return signal.Signals(-self.returncode).name if self.returncode < 0 else None

    @property
    def survived(self) -> bool:
        """Whether the script ran to its end."""
        return self.returncode == 0


def run_isolated(
    script: str,
    *arguments: str,
    timeout: float = 120.0,
    search: Sequence[str | Path] = (),
    environment: Mapping[str, str] | None = None,
) -> IsolatedRun:
    """Runs Python source in a new process with this interpreter.

    Args:
        script: The source; reads ``arguments`` as ``sys.argv[1:]``.
        arguments: Given to the script.
        timeout: Seconds after which the process is killed.
        search: Folders put in front of the module search path.
        environment: Its environment variables; None passes this process's on. The module search
            path is added.

    Raises:
        subprocess.TimeoutExpired: The script did not end in time.
    """
    inherited = [path for path in sys.path if path]
    path = os.pathsep.join([*map(str, search), *inherited])
    finished = subprocess.run(  # noqa: S603  (the interpreter itself, on a script of the caller)
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**(os.environ if environment is None else environment), "PYTHONPATH": path},
    )
    return IsolatedRun(finished.returncode, finished.stdout, finished.stderr)
