"""OverlappedDecode: steps of decoding, the next one prepared and queued while one runs.

Tokens stay on the device: a queued step reads there what the running one chooses. At most one step
is queued behind the running one, and its rows can be taken back. What cannot be queued is told by
the rules of :mod:`graphcore.moe.decisions.decode_overlap`, and is an ordinary step afterwards.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphcore.driver import as_stream
from graphcore.errors import ConfigurationError, LifecycleError
from graphcore.interop import current_stream
from graphcore.moe.decisions.decode_overlap import OverlapFacts, OverlapRule, Row, overlap_obstacles
from graphcore.moe.graph_reuse import GraphReuse
from graphcore.moe.overlap.decode_model import INPUT_WORDS, IS_LIVE, POSITION, TOKEN, DecodeModel
from graphcore.moe.overlap.overlap_totals import OverlapTotals
from graphcore.moe.overlap.turn_buffers import TurnBuffer, TurnBuffers
from graphcore.moe.steps.step_record import StepResult
from graphcore.moe.steps.step_watch import NoWatch, StepWatch
from graphcore.resources.tensors import describe

_log = logging.getLogger("graphcore")
_GIVEN_BY_DEVICE = -1


@dataclass(slots=True, eq=False)
class StepTicket:
    """A step whose tokens are to be taken.

    Attributes:
        number: Of the step, from 1.
        rows: Of the step, but those that were taken back.
        is_ahead: Whether it was queued while the one before ran.
        obstacles: Why it was not.
        result: What GraphReuse did.
    """

    number: int
    rows: tuple[Row, ...]
    is_ahead: bool
    obstacles: tuple[OverlapRule, ...]
    result: StepResult
    _buffer: TurnBuffer = field(repr=False)


class OverlappedDecode:
    """Runs the steps of one model. Not locked.

    Args:
        reuse: Runs them; its option decode_overlap says whether any is queued ahead.
        model: Whose steps.
        stream: Where; None: the current one.
        watch: Told of spans.

    Raises:
        ConfigurationError: ``inputs`` or ``tokens`` of the model have another form.
        CudaError: Out of pinned memory.
    """

    def __init__(
        self,
        reuse: GraphReuse,
        model: DecodeModel,
        *,
        stream: Any = None,
        watch: StepWatch | None = None,
    ) -> None:
        driver = reuse.driver
        self.reuse, self.model = reuse, model
        self.stream = as_stream(driver, current_stream(driver) if stream is None else stream)
        self.watch: StepWatch = NoWatch() if watch is None else watch
        self._to = _checked("inputs", model.inputs, (model.rows, INPUT_WORDS))
        self._from = _checked("tokens", model.tokens, (model.rows,))
        self._inputs = TurnBuffers(driver, model.rows * INPUT_WORDS)
        self._outputs = TurnBuffers(driver, model.rows)
        self._tickets: deque[StepTicket] = deque()
        # sequence -> the row whose token the device holds for it
        self._held: dict[int, Row] = {}
        self._number = 0
        self._ahead = self._rolled_back = 0
        self._obstacles: Counter[OverlapRule] = Counter()

    # ---- steps ---------------------------------------------------------------------------------

    def submit(
        self,
        rows: Sequence[Row],
        tokens: Mapping[int, int] | None = None,
        *,
        obstacles: tuple[OverlapRule, ...] = (),
    ) -> StepTicket:
        """An ordinary step: prepared and put on the stream now, when nothing is outstanding.

        Args:
            rows: Of the step, each of another sequence.
            tokens: Sequence -> its token, for rows whose token is not the newest one that the
                device chose for that request.
            obstacles: Why it was not queued before, for the records.

        Raises:
            LifecycleError: Tokens of a step before were not taken.
            ConfigurationError: Rows that are none, or a row without a token.
            Exception: As :meth:`GraphReuse.run`; nothing is outstanding then.
        """
        if self._tickets:
            raise LifecycleError(
                f"submit: expected no step whose tokens are not taken, got {len(self._tickets)}"
            )
        given = dict(tokens or {})
        self._check(rows, given)
        return self._go(rows, given, is_ahead=False, obstacles=obstacles)

    def queue(self, rows: Sequence[Row]) -> StepTicket | tuple[OverlapRule, ...]:
        """The step behind the running one, prepared and queued now, or why not: nothing is done.

        Args:
            rows: Each follows a row of the running step.

        Raises:
            LifecycleError: No step is running.
            Exception: As :meth:`GraphReuse.run`; the running step's tokens can still be taken.
        """
        if not self._tickets:
            raise LifecycleError("queue: expected a running step, got none; submit one")
        obstacles = overlap_obstacles(self._facts(tuple(rows)))
        if obstacles:
            if self.reuse.effective_options.decode_overlap:
                told = "; ".join(f"not so: {each.value}" for each in obstacles)
                _log.info("moe decode step %d is an ordinary one: %s", self._number + 1, told)
            return obstacles
        return self._go(rows, {}, is_ahead=True, obstacles=())

    def take(self) -> tuple[StepTicket, dict[Row, int]]:
        """Waits for the oldest step; the step, and the token of each of its rows.

        Raises:
            LifecycleError: No step is outstanding.
            CudaError: The step failed; it is not outstanding any more.
        """
        if not self._tickets:
            raise LifecycleError("take: expected a running step, got none; submit one")
        ticket = self._tickets.popleft()
        with self.watch.host("wait", ticket.number):
            ticket._buffer.wait()
        words = ticket._buffer.words
        return ticket, {row: words[row.sequence] for row in ticket.rows}

    def roll_back(self, sequence: int) -> Row:
        """Takes back the row of ``sequence`` in the queued step: its token is nobody's.

        The next step of the sequence has to be given its token.

        Raises:
            LifecycleError: No queued step has such a row.
        """
        newest = self._tickets[-1] if self._tickets else None
        found = None
        if newest is not None and newest.is_ahead:
            found = next((row for row in newest.rows if row.sequence == sequence), None)
        if newest is None or found is None:
            raise LifecycleError(f"roll_back: expected a queued row of sequence {sequence}")
        self.model.roll_back(found)
        newest.rows = tuple(row for row in newest.rows if row is not found)
        self._held.pop(sequence, None)
        self._rolled_back += 1
        return found

    def abandon(self) -> None:
        """Gives up the tokens that were not taken, and waits for their steps.

        Raises:
            CudaError: A step failed; nothing is outstanding all the same.
        """
        tickets = list(self._tickets)
        self._tickets.clear()
        self._held.clear()
        for ticket in tickets:
            ticket._buffer.wait()

    @property
    def outstanding(self) -> int:
        """Steps whose tokens are to be taken: none, the running one, or one queued behind it."""
        return len(self._tickets)

    @property
    def totals(self) -> OverlapTotals:
        """What was done since the start."""
        reasons = tuple(self._obstacles.most_common())
        return OverlapTotals(self._ahead, self._number, self._rolled_back, reasons)

    # ---- helpers -------------------------------------------------------------------------------

    def _facts(self, following: tuple[Row, ...]) -> OverlapFacts:
        *before, running = self._tickets
        unread = Counter(row.sequence for ticket in before for row in ticket.rows)
        model = self.model
        return OverlapFacts(
            options=self.reuse.effective_options,
            running=running.rows,
            following=following,
            outstanding=tuple(unread.items()),
            is_sampled_on_device=model.is_sampled_on_device,
            devices=model.devices,
            embeddings_on_device=model.embeddings_on_device,
            can_roll_back=model.can_roll_back,
            grows=model.grows(following),
            free_buffers=self._inputs.free,
        )

    def _check(self, rows: Sequence[Row], tokens: Mapping[int, int]) -> None:
        sequences = [row.sequence for row in rows]
        last = self.model.rows - 1
        if not rows or len(set(sequences)) < len(rows) or not 0 <= min(sequences) <= max(
            sequences
        ) <= last:  # fmt: skip
            raise ConfigurationError(
                f"rows: expected rows of different sequences from 0 to {last}, got {list(rows)}"
            )
        for row in rows:
            held = self._held.get(row.sequence)
            follows = held is not None and (held.request, held.position + 1) == (
                row.request, row.position
            )  # fmt: skip
            if row.sequence not in tokens and not follows:
                raise ConfigurationError(
                    f"tokens: expected one for {row}, which does not follow what the device holds "
                    f"({held})"
                )
            if tokens.get(row.sequence, 0) < 0:
                raise ConfigurationError(
                    f"tokens[{row.sequence}]: expected 0 or more, got {tokens[row.sequence]}"
                )

    def _go(
        self,
        rows: Sequence[Row],
        tokens: Mapping[int, int],
        *,
        is_ahead: bool,
        obstacles: tuple[OverlapRule, ...],
    ) -> StepTicket:
        number, stream = self._number + 1, self.stream
        with self.watch.host("prepare", number):
            # the tokens of a running step are not taken yet
            running = self._tickets[-1]._buffer if self._tickets else None
            inputs, outputs = self._inputs.take(), self._outputs.take(running)
            _fill(inputs, rows, tokens)
            work = self.model.prepare(tuple(rows))
        with self.watch.device("step", number, stream):
            # whatever fails from here on may have moved what the device holds
            for row in rows:
                self._held.pop(row.sequence, None)
            inputs.copy_to(self._to, stream)
            result = self.reuse.run(work, stream=stream)
            outputs.copy_from(self._from, stream)
        ticket = StepTicket(number, tuple(rows), is_ahead, obstacles, result, outputs)
        self._held.update({row.sequence: row for row in rows})
        self._tickets.append(ticket)
        self._number = number
        self._ahead += is_ahead
        self._obstacles.update(obstacles)
        return ticket


def _fill(buffer: TurnBuffer, rows: Sequence[Row], tokens: Mapping[int, int]) -> None:
    words = buffer.words
    words[:] = [0, _GIVEN_BY_DEVICE, 0] * (len(words) // INPUT_WORDS)
    for row in rows:
        at = row.sequence * INPUT_WORDS
        words[at + POSITION] = row.position
        words[at + TOKEN] = tokens.get(row.sequence, _GIVEN_BY_DEVICE)
        words[at + IS_LIVE] = 1


def _checked(name: str, tensor: Any, shape: tuple[int, ...]) -> int:
    ref = describe(tensor, name=name)
    if ref.dtype != "int64" or ref.shape != shape or not ref.is_contiguous:
        raise ConfigurationError(
            f"{name}: expected contiguous int64 {shape}, got {ref.dtype} {ref.shape} with strides "
            f"{ref.strides}"
        )
    return ref.address
