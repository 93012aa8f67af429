"""DecodeLoop: requests decoded in the places of a batch, each until it ends, with one step ahead.

The host learns that a sequence has ended when the next step may be queued already; that step's row
of it is taken back. What a request gives does not depend on any of this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace

from graphcore.errors import ConfigurationError, LifecycleError
from graphcore.moe.decisions.decode_overlap import OverlapRule, Row
from graphcore.moe.overlap.overlapped_decode import OverlappedDecode, StepTicket


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """What to decode.

    Args:
        number: That no other request has.
        token: The first that is fed.
        max_new_tokens: At most.
        position: Of ``token``; whatever is before it stands in the cache of the row already.
        ends: Token ids, as a set, of which the first one made ends it, and is its last.
    """

    number: int
    token: int
    max_new_tokens: int
    position: int = 0
    ends: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name, least in (("token", 0), ("max_new_tokens", 1), ("position", 0)):
            value = getattr(self, name)
            if not _is_int(value):
                raise ConfigurationError(f"{name}: expected an int, got {value!r}")
            if value < least:
                raise ConfigurationError(f"{name}: expected {least} or more, got {value}")
        if not isinstance(self.ends, Set) or not all(map(_is_int, self.ends)):
            raise ConfigurationError(f"ends: expected a set of token ids, got {self.ends!r}")


@dataclass(frozen=True, slots=True)
class DecodedStep:
    """A step whose tokens the host has.

    Args:
        ticket: The step.
        tokens: Number of a request -> the token that it got.
        ended: Numbers of the requests that have ended with it.
    """

    ticket: StepTicket
    tokens: Mapping[int, int]
    ended: tuple[int, ...]


@dataclass(slots=True)
class _Live:
    """A request in its place: its newest row, and how many tokens were asked for and made."""

    request: DecodeRequest
    row: Row
    asked: int = 0
    made: int = 0
    newest: int = -1
    is_over: bool = False

    @property
    def wants_more(self) -> bool:
        return not self.is_over and self.asked < self.request.max_new_tokens


class DecodeLoop:
    """Decodes requests, as many at once as the model has rows. Not locked.

    Args:
        decode: Runs the steps.
    """

    def __init__(self, decode: OverlappedDecode) -> None:
        self._decode = decode
        self._waiting: deque[DecodeRequest] = deque()
        self._places: dict[int, _Live] = {}
        # places that have a row in the queued step
        self._queued: frozenset[int] = frozenset()

    def cancel(self, number: int) -> None:
        """Ends a request before its next token; nothing where there is none of that number."""
        self._waiting = deque(each for each in self._waiting if each.number != number)
        for live in self._places.values():
            if live.request.number == number:
                live.is_over = True

    def run(self, requests: Iterable[DecodeRequest]) -> Iterator[DecodedStep]:
        """Decodes ``requests``; each step as soon as its tokens are there.

        Raises:
            ConfigurationError: Two requests of one number.
            LifecycleError: Tokens of a step before were not taken: another run is not over.
            Exception: As of :class:`OverlappedDecode`, behind the tokens that were made before; the
                loop is over, and nothing outstanding.
        """
        waiting = deque(requests)
        numbers = [request.number for request in waiting]
        if len(set(numbers)) < len(numbers):
            raise ConfigurationError(f"requests: expected different numbers, got {numbers}")
        return self._run(waiting)

    def _run(self, waiting: deque[DecodeRequest]) -> Iterator[DecodedStep]:
        if self._decode.outstanding:
            raise LifecycleError("run: expected no step whose tokens are not taken")
        self._waiting = waiting
        self._places.clear()
        try:
            yield from self._steps()
        finally:
            self._decode.abandon()

    def _steps(self) -> Iterator[DecodedStep]:
        obstacles: tuple[OverlapRule, ...] = ()
        while True:
            if not self._decode.outstanding:
                tokens = self._admit()
                live = self._wanting()
                if not live:
                    return
                given = {each.row.sequence: each.newest for each in live} | tokens
                self._decode.submit(self._ask(live), given, obstacles=obstacles)
            failure: Exception | None = None
            try:
                obstacles = self._queue()
            except Exception as error:  # whatever a model or a driver raises
                failure = error
            ticket, made = self._decode.take()
            if made:
                yield self._note(ticket, made)
            if failure is not None:
                raise failure
            self._take_back()

    def _queue(self) -> tuple[OverlapRule, ...]:
        """Queues the next step behind the running one; why not."""
        self._queued = frozenset()
        live = self._wanting()
        # a request that waits for a free place makes the next step an ordinary one
        rows = [_next(each.row) for each in live] + [
            Row(request.number, place, request.position) for place, request in self._fitting()
        ]
        if not rows:
            return ()
        queued = self._decode.queue(rows)
        if not isinstance(queued, StepTicket):
            return queued
        self._ask(live)
        self._queued = frozenset(row.sequence for row in rows)
        return ()

    # ---- places --------------------------------------------------------------------------------

    def _fitting(self) -> list[tuple[int, DecodeRequest]]:
        """The free places, and the waiting requests that go there."""
        free = (place for place in range(self._decode.model.rows) if place not in self._places)
        return list(zip(free, self._waiting, strict=False))

    def _admit(self) -> dict[int, int]:
        """Puts waiting requests into free places; their tokens by place."""
        tokens = {}
        for place, request in self._fitting():
            self._waiting.popleft()
            # one before its first: every step asks for the next position
            row = Row(request.number, place, request.position - 1)
            self._places[place] = _Live(request, row)
            tokens[place] = request.token
        return tokens

    def _wanting(self) -> list[_Live]:
        return [live for live in self._places.values() if live.wants_more]

    @staticmethod
    def _ask(live: list[_Live]) -> list[Row]:
        """Notes that the next token of each is asked for; the rows that do."""
        for each in live:
            each.row = _next(each.row)
            each.asked += 1
        return [each.row for each in live]

    def _note(self, ticket: StepTicket, made: Mapping[Row, int]) -> DecodedStep:
        tokens, ended = {}, []
        for row, token in made.items():
            live = self._places[row.sequence]
            if live.is_over:
                continue  # cancelled since
            tokens[row.request] = live.newest = token
            live.made += 1
            if token in live.request.ends or live.made >= live.request.max_new_tokens:
                live.is_over = True
                ended.append(row.request)
        return DecodedStep(ticket, tokens, tuple(ended))

    def _take_back(self) -> None:
        """Frees the places of what is over, and takes its rows of a queued step back."""
        for place, live in list(self._places.items()):
            if live.is_over:
                if place in self._queued:
                    self._decode.roll_back(place)
                del self._places[place]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _next(row: Row) -> Row:
    return replace(row, position=row.position + 1)
