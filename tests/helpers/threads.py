"""Work in another thread, beside a block, and waiting for what it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SOON = 10.0
"""Seconds after which something will not happen any more."""


@contextmanager
def in_thread(work: Callable[[], Any]) -> Iterator[list[Any]]:
    """Runs ``work`` beside the block and hands its result, or its error, over."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield result
    finally:
        thread.join(SOON)
        assert not thread.is_alive()


def until(condition: Callable[[], bool]) -> None:
    """Waits for ``condition``."""
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)
