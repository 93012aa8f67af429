"""FastRunning: runs replays that are known to be ones, with the few looks that they still need."""

from __future__ import annotations

from collections.abc import Hashable
from time import perf_counter

from graphcore.executable.legacy_work import IMPLICIT
from graphcore.moe.decisions.settling import Failure, fail
from graphcore.moe.manifests.ownership import Ownership, Refusal, Transaction
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

    def replay(self, fast: FastReplay) -> StepResult | None:
        """Launches ``fast`` once more; None where its groups, or all ranks, are not to be had.

        Raises:
            CudaError: The driver refused the launch; what was captured stays.
            StaleGraphError: Memory that it works on has gone; nothing was launched.
        """
        transaction: Transaction | None = None
        ownership, log, names = self._ownership, self._log, fast.names
        start = perf_counter()
        try:
            if names:
                entered = ownership.enter(self._owner, names, fast.published.generation)
                if isinstance(entered, Refusal):
                    return None
                transaction = entered
                if transaction.lease.epochs != fast.epochs or not fast.has_slots():
                    return None
            if self._agreement is not None and not self._agreement.at_once(is_ready=True):
                return None
            if log.device is None:
                fast.executable.launch(fast.stream)
            else:
                with log.device.around(fast.decision.kind, fast.stream):
                    fast.executable.launch(fast.stream)
        except BaseException as error:
            if getattr(error, "code", None) == IMPLICIT:
                return None  # nothing was launched: another thread captures
            ownership.abandon(self._owner)  # also what Ctrl-C kept from being noted
            self._note_failure(fast, error)
            raise
        finally:
            if transaction is not None:
                ownership.leave(transaction)
        seconds = perf_counter() - start
        self._table.sweep(fast.use.note())
        log.note_replay(seconds, len(names))
        decision, key = fast.decision, fast.variant.key
        took = _made(StepSeconds, (0.0, 0.0, seconds, 0.0))
        result = _made(StepResult, (decision.kind, decision.reason, "", decision.way, took, key))
        if log.observers:
            log.tell(self._record(fast, result, StepPart("launch", start, start + seconds)))
        return result

    def _note_failure(self, fast: FastReplay, error: BaseException) -> None:
        detail = f"{type(error).__name__}: {error}"
        variant, log = fast.variant, self._log
        decision, variant.state = fail(variant.state, fast.decision, Failure.DRIVER, detail)
        result = StepResult(
            decision.kind, decision.reason, detail, decision.way, StepSeconds(), variant.key
        )
        log.counting.add("plan_calls", "plan_reuses")
        log.number += 1
        log.note(self._record(fast, result), decision)
        error.add_note(f"the step was to {fast.decision}; now {decision}")

    def _record(self, fast: FastReplay, result: StepResult, *parts: StepPart) -> StepRecord:
        return StepRecord(
            result,
            self._log.number,
            fast.uid,
            fast.certificate,
            fast.phase,
            fast.published.generation,
            parts,
        )
