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
    try:
        path.lstat()
    except FileNotFoundError:
        is_name = True
    except (OSError, ValueError):  # too long, or with a null character
        is_name = False
    else:
        is_name = not path.is_dir()
    if not (is_name and is_folder(path.parent) and os.access(path.parent, os.W_OK)):
        raise ConfigurationError(f"{option}: expected a file in a writable folder, got {path}")


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a folder; no name is too long to ask."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def is_there(path: Path) -> bool:
    """Whether ``path`` exists; no name is too long to ask."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


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
