"""Pages that subcommands write, and what they say beside their output."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from graphcore.errors import ConfigurationError


def check_page(path: Path | None, option: str) -> None:
    """Refuses a page that could not be written, before anything is loaded for it."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigurationError(f"{option}: expected a file in a writable folder, got {path}")


def write_page(path: Path, text: str, option: str) -> None:
    """Writes the page; ConfigurationError where the system refuses."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"{option}: expected a file that can be written, got {path} ({error.strerror})"
        ) from error


def say(text: str) -> None:
    """Tells the user something that is not the command's output (standard error)."""
    print(text, file=sys.stderr, flush=True)
