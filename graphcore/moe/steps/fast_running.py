"""FastRunning: runs replays that are known to be ones, with the few looks that they still need."""

from __future__ import annotations

from collections.abc import Hashable
from time import perf_counter
from typing import Any

from graphcore.executable.legacy_work import IMPLICIT, turn_on
from graphcore.moe.decisions.certificate import Certificate
from graphcore.moe.decisions.settling import Failure, fail
from graphcore.moe.manifests.ownership import Ownership
from graphcore.moe.slots.slot_pool import SlotPool
from graphcore.moe.steps.device_times import DeviceTimes
from graphcore.moe.steps.fast_replay import FastReplay
from graphcore.moe.steps.step_agreement import StepAgreement
from graphcore.moe.steps.step_log import StepLog
from graphcore.moe.steps.step_record import StepPart, StepRecord, StepResult, StepSeconds
from graphcore.moe.steps.variant_table import VariantTable

_made = tuple.__new__  # a named tuple's own way in takes twice as long


class FastRunning:
    """Runs the replays of one :class:`graphcore.moe.GraphReuse`.

    Args:
        table: Holds what is known of variants.
        log: The books.
        ownership: Of the groups.
        owner: Whoever runs the steps.
        agreement: With the other ranks that share the experts; None: there are none.
    """

    __slots__ = ("_agreement", "_log", "_owner", "_ownership", "_table")

    def __init__(
        self,
        table: VariantTable,
        log: StepLog,
        ownership: Ownership,
        owner: Hashable,
        agreement: StepAgreement | None = None,
    ) -> None:
        self._table = table
        self._log = log
        self._ownership = ownership
        self._owner = owner
        self._agreement = agreement

    def replay(
        self, fast: FastReplay, certificate: Certificate | None, stream: Any, pool: SlotPool | None
    ) -> StepResult | None:
        """Launches ``fast`` once more, where everything that it was decided from is as it was.

        Slots are looked at once nobody else may use them: before that another thread may still step
        on another stream, or leave a step half done.

        Args:
            fast: The last replay of the same work, phase and rows.
            certificate: As the caller gives it.
            stream: As the caller gives it.
            pool: The slots of now.

        Returns:
            What it came to; None, with nothing launched, where something is not as it was, its
            groups are not to be had, or other ranks do something else.

        Raises:
            CudaError: The driver refused the launch; what was captured stays.
            StaleGraphError: Memory that it works on has gone; nothing was launched.
        """
        work, given, slots = fast.work, fast.given_stream, fast.pool
        ownership, passage = self._ownership, fast.passage
        if not (
            work.uid == fast.uid
            and certificate is fast.given
            and ownership.revision == fast.revision
            and fast.variant.state is fast.state
            and not work.obstacle
            and (slots is pool or slots is None)
            and (stream is given or bool(stream == given))
            and (stream is not None or fast.read_current() == fast.current)
        ):
            return None
        log, agreement = self._log, self._agreement
        start = perf_counter()
        try:
            if passage is not None and not ownership.enter_again(passage):
                return None
            is_same = (slots is None or slots.order.turn == fast.turn) and (
                agreement is None or agreement.at_once(is_ready=True)
            )
            if is_same:
                if log.device is None:
                    fast.executable.launch(fast.stream)
                else:
                    self._launch_timed(fast, log.device)
            if passage is not None:
                ownership.leave(passage.transaction)
        except BaseException as error:
            ownership.abandon(self._owner)  # also what Ctrl-C kept from being noted
            if getattr(error, "code", None) == IMPLICIT:
                return None  # nothing was launched: another thread captures
            self._note_failure(fast, error)
            raise
        seconds = perf_counter() - start
        return self._noted(fast, start, seconds) if is_same else None

    def _noted(self, fast: FastReplay, start: float, seconds: float) -> StepResult:
        """Writes a launch down that began at ``start``; what is told of it."""
        log = self._log
        now = fast.use.note()
        if now >= self._table.next_sweep:
            self._table.sweep(now)
        tally = fast.tally
        tally.times += 1
        tally.seconds += seconds
        decision = fast.decision
        took = _made(StepSeconds, (0.0, 0.0, seconds, 0.0))
        result = _made(
            StepResult, (decision.kind, decision.reason, "", decision.way, took, fast.key)
        )
        if log.observers:
            part = StepPart("launch", start, start + seconds)
            log.tell(self._record(fast, result, log.number, part))
        return result

    def _launch_timed(self, fast: FastReplay, device: DeviceTimes) -> None:
        with turn_on(fast.stream.handle), device.around(fast.decision.kind, fast.stream):
            fast.executable.launch(fast.stream)

    def _note_failure(self, fast: FastReplay, error: BaseException) -> None:
        detail = f"{type(error).__name__}: {error}"
        variant, log = fast.variant, self._log
        decision, variant.state = fail(variant.state, fast.decision, Failure.DRIVER, detail)
        result = StepResult(
            decision.kind, decision.reason, detail, decision.way, StepSeconds(), variant.key
        )
        log.counting.add("plan_calls", "plan_reuses")
        log.note(self._record(fast, result, log.next_number()), decision)
        error.add_note(f"the step was to {fast.decision}; now {decision}")

    def _record(
        self, fast: FastReplay, result: StepResult, number: int, *parts: StepPart
    ) -> StepRecord:
        return StepRecord(
            result,
            number,
            fast.uid,
            fast.certificate,
            fast.phase,
            fast.generation,
            parts,
        )
