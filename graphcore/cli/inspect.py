"""``graphcore inspect``: a graph, plan or comparison as one HTML page, or as text.

Exit status 1 means, with ``--diff``, that the two are different, as ``diff`` does it; with
``--check``, that something (a data race, say) keeps the plan from being built.
"""

from __future__ import annotations

import shutil
import sys
import webbrowser
from dataclasses import dataclass
from pathlib import Path

from graphcore.cli.pages import check_page, say, write_page
from graphcore.cli.subjects import NO_PROBLEM, Subject, load
from graphcore.drawing.text import in_encoding
from graphcore.errors import ConfigurationError
from graphcore.graph import diff


@dataclass(frozen=True)
class InspectOptions:
    """What ``graphcore inspect`` was asked for; names as on the command line."""

    subject: str
    output: Path | None = None
    diff: str | None = None
    check: bool = False
    text: bool = False
    full: bool = False
    open: bool = False
    driver: str | None = None
    warmup: int = 3


def inspect(options: InspectOptions) -> int:
    """Writes the page, or prints the text, or what is wrong with a plan.

    Returns:
        0; with ``--diff``: 1 where the two are different; with ``--check``: 1 where something keeps
        the plan from being built.

    Raises:
        GraphcoreError: The subject, the other one, or a page that cannot be written.
    """
    if options.check and options.diff is not None:
        raise ConfigurationError("--check: expected none with --diff, whose exit status it is")
    page = options.output
    check_page(page, "-o")
    subject = load(options.subject, driver=options.driver, warmup=options.warmup)
    status = 0
    if options.diff is not None:
        other = load(options.diff, driver=options.driver, warmup=options.warmup)
        found = diff(subject.snapshot(), other.snapshot())
        subject = Subject(f"{subject.name} and {other.name}", found)
        status = int(bool(found))
    if options.check:
        wrong = subject.problems()
        print(_encoded("\n".join(wrong) or NO_PROBLEM))
        status = int(bool(wrong))
    if options.text:
        print(_text(subject, options.full))
    if page is None and not (options.text or options.check):
        page = Path(f"{_stem(subject.name)}.html")
        check_page(page, "-o")
    if page is not None:
        write_page(page, subject.page(options.full), "-o")
        say(f"written: {page}")
        if options.open:
            webbrowser.open(page.resolve().as_uri())
    return status


def _text(subject: Subject, full: bool) -> str:
    width = shutil.get_terminal_size((100, 24)).columns
    return _encoded(subject.drawing().to_text(width=width, full=full))


def _encoded(text: str) -> str:
    """``text`` as the terminal can show it."""
    return in_encoding(text, sys.stdout.encoding or "utf-8")


def _stem(name: str) -> str:
    """A file name made of a subject's name."""
    plain = name.removesuffix(".json").replace(".json", "")
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in plain)[:100] or "graph"
