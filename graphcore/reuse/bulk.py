"""Capturing many buckets at once: the largest first, with the memory in sight."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from graphcore.advice import instead
from graphcore.errors import ConfigurationError
from graphcore.executable import GraphExec
from graphcore.executable.memory_report import in_words
from graphcore.reuse.eager import EagerExec
from graphcore.reuse.keys import check_key, same_kinds, size_of

if TYPE_CHECKING:
    from graphcore.reuse.cache import GraphCache

_log = logging.getLogger("graphcore")


class Progress(Protocol):
    """What shows how far it is: tqdm's bar, or lines in the log."""

    def set_postfix_str(self, text: str, /) -> None: ...

    def update(self) -> None: ...


def capture_all(
    cache: GraphCache,
    keys: list[Hashable],
    fn: Callable[[Any], Any],
    *,
    progress: bool,
    size: Callable[[Any], float] | None,
    options: dict[str, Any],
) -> dict[Hashable, GraphExec | EagerExec]:
    """As :meth:`GraphCache.capture_all` says."""
    if not callable(fn):
        raise ConfigurationError(
            f"fn: expected a callable, got {type(fn).__name__}{instead(fn, 'function')}"
        )
    if "family" in options:
        raise ConfigurationError(
            "family: expected none in capture_all, whose keys each have an executable of their "
            f"own, got {options['family']!r}"
        )
    first: dict[Hashable, Hashable] = {}
    for key in keys:
        known = first.setdefault(check_key(key), key)
        if not same_kinds(known, key):
            raise ConfigurationError(
                f"keys: expected keys that differ, got {key!r}, which Python takes for equal to "
                f"{known!r}; use one kind of number"
            )
    ordered = sorted(first, key=size or size_of, reverse=True)
    made: dict[Hashable, GraphExec | EagerExec] = {}
    with cache._keeping_new() as keep, shown(progress, len(ordered)) as bar:
        for key in ordered:
            keep(key)
            try:
                made[key] = cache.get_or_capture(key, _bound(fn, key), **options)
            except BaseException as error:
                stand = ", ".join(map(repr, made)) or "none"
                error.add_note(
                    f"capture_all: key {key!r} failed, {len(made)} of {len(ordered)} stand: {stand}"
                )
                raise
            bar.set_postfix_str(_memory(cache))
            bar.update()
    return {key: made[key] for key in keys}


def _bound(fn: Callable[[Any], Any], key: Hashable) -> Callable[[], Any]:
    return lambda: fn(key)


def _memory(cache: GraphCache) -> str:
    budget = cache.limits.max_bytes
    most = "" if budget is None else f" of {in_words(budget)}"
    return in_words(cache.bytes) + most


@contextmanager
def shown(progress: bool, total: int) -> Iterator[Progress]:
    """What shows that ``total`` captures go on: tqdm's bar where it is installed, else the log."""
    if not progress:
        yield _Lines(total, logging.DEBUG)
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        yield _Lines(total, logging.INFO)
        return
    with tqdm(total=total, desc="capturing graphs", unit="graph") as bar:
        yield bar


class _Lines:
    """Progress as lines in the log."""

    def __init__(self, total: int, level: int) -> None:
        self._total = total
        self._level = level
        self._done = 0
        self._text = ""

    def set_postfix_str(self, text: str, /) -> None:
        self._text = text

    def update(self) -> None:
        self._done += 1
        _log.log(self._level, "capturing graphs: %d of %d, %s", self._done, self._total, self._text)
