"""Processes that take turns: all get ready side by side, then each measures while the others rest.

What a device gives is counted for all processes at once, and a process keeps much of what it ever
took. So each arrangement has a process of its own, which ends before the next one measures. They
load at the same time, since that is what takes long. In the process: :class:`Turn`.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import IO, Any

_READY, _RESULT = "graphcore turn: ready", "graphcore turn: result "
_LONGEST_WAIT = 150.0  # seconds that a process may take in all, others' turns counted


class Lost(Exception):  # noqa: N818  (no error of the library's: becomes a note)
    """A process gave no result; says why."""


class Turn:
    """The side of a process that was started by :func:`take_turns`."""

    def __init__(self) -> None:
        # what libraries print goes elsewhere: the lines of a turn stay apart
        self._lines, sys.stdout = sys.stdout, sys.stderr

    def wait(self) -> None:
        """Everything is loaded; returns when all others rest or are gone."""
        print(_READY, file=self._lines, flush=True)
        sys.stdin.readline()

    def give(self, result: Mapping[str, Any]) -> None:
        """What was measured; the process is to end then."""
        print(_RESULT + json.dumps(result), file=self._lines, flush=True)


def take_turns(
    commands: Mapping[str, Sequence[str]], *, side_by_side: bool = True
) -> dict[str, dict[str, Any] | Lost]:
    """Runs ``commands``, each of which makes a :class:`Turn`.

    Args:
        commands: Arguments of a Python process each, by name.
        side_by_side: False: each is started when the one before has ended.

    Returns:
        By name what each gave, or why it gave nothing.
    """
    groups = [list(commands)] if side_by_side else [[name] for name in commands]
    found: dict[str, dict[str, Any] | Lost] = {}
    for group in groups:
        with ExitStack() as stack:
            running = {name: stack.enter_context(_Running(commands[name])) for name in group}
            for name, process in running.items():
                try:
                    process.read_until(_READY)
                except Lost as lost:
                    found[name] = lost
            for name in [name for name in group if name not in found]:
                try:
                    found[name] = running[name].result()
                except Lost as lost:
                    found[name] = lost
    return {name: found[name] for name in commands}


class _Running:
    """One process; killed at the end of the block where it still runs."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        # a process that hangs must not make its reader wait for ever
        self._watch = threading.Timer(_LONGEST_WAIT, self._process.kill)
        self._watch.daemon = True
        self._watch.start()

    def __enter__(self) -> _Running:
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.cancel()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                _open(pipe).close()

    def read_until(self, beginning: str) -> str:
        """The next line with that beginning, without it."""
        for line in _open(self._process.stdout):
            if line.startswith(beginning):
                return line.removeprefix(beginning).strip()
        raise Lost(f"the process ended with status {self._process.wait()}")

    def result(self) -> dict[str, Any]:
        """Lets it measure, and waits until it has ended and given its memory back."""
        try:
            stdin = _open(self._process.stdin)
            stdin.write("go\n")
            stdin.flush()
        except BrokenPipeError as error:
            raise Lost("the process ended before its turn") from error
        result: dict[str, Any] = json.loads(self.read_until(_RESULT))
        self._process.wait()
        return result


def _open(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
