"""Where a result comes from: device, versions, commit, date."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from graphcore.driver import Driver

_DISTRIBUTIONS = {
    "graphcore": ("graphcore-cuda",),
    "cuda-bindings": ("cuda-bindings",),
    "cuda-core": ("cuda-core",),
    "torch": ("torch",),
    "cupy": ("cupy-cuda13x", "cupy"),
    "numpy": ("numpy",),
    "transformers": ("transformers",),
}


def versions(driver: Driver) -> dict[str, str]:
    """Versions of everything that may matter; what is not installed is left out."""
    major, minor = driver.device_info().driver_version
    found = {"python": platform.python_version(), "cuda-driver": f"{major}.{minor}"}
    for name, distributions in _DISTRIBUTIONS.items():
        for distribution in distributions:
            try:
                found[name] = metadata.version(distribution)
                break
            except metadata.PackageNotFoundError:
                continue
    return found


def commit() -> str:
    """``GRAPHCORE_COMMIT``, else git's word for this checkout, else "unknown"."""
    told = os.environ.get("GRAPHCORE_COMMIT")
    if told:
        return told
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def today() -> str:
    """The date in UTC, as in ``2026-01-31``."""
    return datetime.now(UTC).date().isoformat()
