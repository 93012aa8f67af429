"""The checkout itself: its root, and the files that belong to the project."""

import functools
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@functools.cache
def tracked_files():
    """Paths below ROOT of the files that git tracks, sorted; skips the test outside a checkout."""
    command = ["git", "ls-files", "-z"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git and a checkout, to know which files belong to the project")
    paths = [ROOT / name for name in done.stdout.split("\0") if name]
    return sorted(path for path in paths if path.is_file())


def tracked_texts():
    """(name below ROOT, text) of every tracked file that is UTF-8 text."""
    for path in tracked_files():
        try:
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
