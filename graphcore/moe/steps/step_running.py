"""StepRunning: one call from its facts to its record: decided, entered, looked at again, done.

Slots and graphs of experts are used under a lease and exclusively; the last look before that and
the lease itself are one under the lock of the manifest.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from time import perf_counter

from graphcore.moe.decisions.activation import ActivationFacts, activate
from graphcore.moe.decisions.decision import Decision
from graphcore.moe.decisions.entry_state import EntryState
from graphcore.moe.decisions.lookup_key import LookupKey
from graphcore.moe.decisions.options import MoEOptions
from graphcore.moe.decisions.reasons import Reason, Retention
from graphcore.moe.decisions.resource_fingerprint import ResourceFingerprint
from graphcore.moe.decisions.settling import Failure
from graphcore.moe.decisions.state_machine import decide
from graphcore.moe.decisions.witnesses import OwnersMatch
from graphcore.moe.manifests.names import Kind, PlanOutcome, Way
from graphcore.moe.manifests.ownership import Ownership, Refusal, Transaction
from graphcore.moe.slots.slot_pool import SlotPool
from graphcore.moe.steps.fact_finder import FactFinder
from graphcore.moe.steps.fast_replay import FastReplay, Given, fast_replay
from graphcore.moe.steps.slots_wait import SlotsWait
from graphcore.moe.steps.step_agreement import StepAgreement, agreed, choice_of
from graphcore.moe.steps.step_doing import Attempt, StepDoing, failed
from graphcore.moe.steps.step_facts import Step
from graphcore.moe.steps.step_log import StepLog
from graphcore.moe.steps.step_record import StepRecord, StepResult
from graphcore.moe.steps.variant_table import Variant, VariantTable


class StepRunning:
    """Runs the steps of one :class:`graphcore.moe.GraphReuse`.

    Args:
        finder: Finds out facts.
        table: Holds what is known of variants.
        log: The books.
        ownership: Of the groups.
        owner: Whoever runs the steps.
        options: What is switched on.
        patience_seconds: How long slots are waited for where there is no staged way.
        agreement: With the other ranks that share the experts; None: there are none.
    """

    def __init__(
        self,
        finder: FactFinder,
        table: VariantTable,
        log: StepLog,
        ownership: Ownership,
        owner: Hashable,
        options: MoEOptions,
        patience_seconds: float,
        agreement: StepAgreement | None = None,
    ) -> None:
        self._finder = finder
        self._table = table
        self._log = log
        self._ownership = ownership
        self._owner = owner
        self._options = options
        overlaps = options.decode_boundary_overlap
        self._agreement = agreement
        self._doing = StepDoing(
            table,
            log.device,
            rows_by_kernel=overlaps,
            destroys_late=overlaps,
            agreement=agreement,
        )
        self._wait = SlotsWait(ownership, owner, patience_seconds)

    # ---- a call --------------------------------------------------------------------------------

    def run(
        self, step: Step, key: LookupKey, pool: SlotPool | None, given: Given
    ) -> tuple[StepResult, FastReplay | None]:
        """What the call came to, and what the next one comes to at once; raises what failed."""
        begun = perf_counter()
        revision = self._ownership.revision
        variant = self._table.of(key)
        self._drop_stale(variant)
        self._table.tidy(variant)
        obstacle = variant.obstacle_of(step.uid)
        facts = self._finder.find(step, key, variant.state, pool, self._options, obstacle)
        before = variant.state
        attempt = Attempt(facts, variant, decide(before, facts.call), begun=begun)
        self._count_switches(before, attempt.decision)
        transaction: Transaction | None = None
        replay = None
        try:
            transaction = self._enter(attempt)
            if attempt.decision.kind is Kind.FAILED:
                self._retain(attempt)
                attempt.commit()
                raise attempt.decision.error()
            self._agree(attempt)
            self._retain(attempt)
            transaction = self._prepare(attempt, transaction)
            self._doing.do(attempt)
            replay = self._next(attempt, given, revision, transaction)
            if transaction is not None:
                attempt.failure = Failure.FINISH
                self._ownership.leave(transaction)
        except BaseException as error:
            self._ownership.abandon(self._owner)  # also what Ctrl-C kept from being noted
            self._fail(attempt, error)
            raise
        finally:
            if transaction is not None:
                self._ownership.leave(transaction)
        return self._note(attempt), replay

    def release(self, variant: Variant) -> None:
        """Gives up the graph of a variant, which begins anew."""
        variant.state = EntryState()
        self._table.drop(variant)

    def _drop_stale(self, variant: Variant) -> None:
        """Gives up a graph whose executable refuses to launch: memory that it works on has gone."""
        use = variant.use
        if use is not None and (use.executable.is_closed or use.executable.marked is not None):
            variant.state = replace(variant.state.after(Retention.RESET), capture=None)
            self._table.drop(variant)

    # ---- before --------------------------------------------------------------------------------

    def _enter(self, attempt: Attempt) -> Transaction | None:
        """The last look under the lock; the exclusive use of the groups, where it is needed."""
        decision, facts = attempt.decision, attempt.facts
        plan = decision.plan
        if decision.way not in (Way.GRAPH, Way.DIRECT) or not facts.seen.groups:
            return None
        if plan is None or plan.outcome is PlanOutcome.ORDINARY or facts.pool is None:
            return None
        names, ownership = facts.seen.names, self._ownership
        with ownership.locked():
            entered = ownership.enter(self._owner, names, facts.call.generation)
            if isinstance(entered, Refusal):
                seen = ActivationFacts(refusal=entered)
                attempt.decision = activate(attempt.variant.state, decision, seen)
                return None
            try:
                self._activate(attempt, entered)
            except BaseException:
                ownership.leave(entered)
                raise
        if attempt.decision.way in (Way.GRAPH, Way.DIRECT):
            return entered
        ownership.leave(entered)
        return None

    def _agree(self, attempt: Attempt) -> None:
        """Does what all ranks do, where there are several."""
        if self._agreement is None:
            return
        decision = attempt.decision
        why = f"{decision.reason.value}{': ' * bool(decision.detail)}{decision.detail}"
        choice, because = self._agreement.choice(choice_of(decision), why)
        attempt.decision = agreed(decision, choice, because)

    def _activate(self, attempt: Attempt, entered: Transaction) -> None:
        facts, state = attempt.facts, attempt.variant.state
        if attempt.decision.way is not Way.GRAPH:
            return
        found = self._finder.fingerprint(facts, entered)
        decided = facts.call.fingerprint
        witnesses = None if state.capture is None else state.capture.witnesses
        owners = OwnersMatch.NONE if witnesses is None else witnesses.compare(facts.owners)
        # the device renumbers its clock by itself, so that it neither stops nor runs out
        attempt.decision = activate(
            state,
            attempt.decision,
            ActivationFacts(fingerprint=found, owners=owners),
            decided if isinstance(decided, ResourceFingerprint) else None,
        )
        attempt.fingerprint = found if isinstance(found, ResourceFingerprint) else None

    def _retain(self, attempt: Attempt) -> None:
        """Lets go of the graph that the decision gives up, before anything is done."""
        variant = attempt.variant
        state = variant.state
        if state.capture is not None and state.after(attempt.decision.retention).capture is None:
            self._table.drop(variant)

    def _prepare(self, attempt: Attempt, transaction: Transaction | None) -> Transaction | None:
        """Slots as steps expect them; waits for them where only they can do the work."""
        facts, decision = attempt.facts, attempt.decision
        pool, names = facts.pool, facts.seen.names
        if decision.way is Way.STAGED and not facts.step.work.has_staged:
            # whoever does not say how to do without slots gets them, without a graph
            transaction = self._wait.enter(names, decision) if pool is not None else None
            detail = "; ".join(filter(None, (decision.detail, "there is no staged way")))
            attempt.decision = replace(decision, way=Way.DIRECT, detail=detail)
        if pool is not None and names and attempt.decision.way is not Way.STAGED:
            attempt.failure = Failure.DRIVER
            if not pool.is_settled and sum(pool.settle(name) for name in names):
                self._log.counting.add("rollback")
            pool.order.enter(facts.step.stream)
        return transaction

    # ---- after ---------------------------------------------------------------------------------

    def _next(
        self, attempt: Attempt, given: Given, revision: int, transaction: Transaction | None
    ) -> FastReplay | None:
        decision = attempt.decision
        if not decision.uses_graph:
            return None
        replayed = replace(
            decision, kind=Kind.REPLAY, reason=Reason.UNCHANGED, detail="", retention=Retention.KEEP
        )
        passage = None if transaction is None else self._ownership.passage(transaction)
        tally = self._log.replay_tally(len(attempt.facts.seen.groups))
        return fast_replay(
            attempt.facts, attempt.variant, replayed, given, revision, passage, tally
        )

    def _fail(self, attempt: Attempt, error: BaseException) -> None:
        decision = attempt.decision
        if decision.kind is not Kind.FAILED:
            attempt.decision = failed(attempt, error, self._table)
            error.add_note(f"the step was to {decision}; now {attempt.decision}")
        self._note(attempt)

    def _note(self, attempt: Attempt) -> StepResult:
        decision, facts = attempt.decision, attempt.facts
        result = StepResult(
            decision.kind,
            decision.reason,
            decision.detail,
            decision.way,
            attempt.times,
            facts.key,
        )
        step = facts.step
        record = StepRecord(
            result,
            self._log.next_number(),
            step.uid,
            step.certificate,
            step.phase,
            facts.published.generation,
            tuple(attempt.parts),
        )
        self._log.note(record, decision)
        return result

    def _count_switches(self, before: EntryState, decision: Decision) -> None:
        if before.plan is None or decision.plan is None or before.plan is decision.plan:
            return
        old = {each.sighting.group: each.strategy for each in before.plan.groups}
        new = {each.sighting.group: each.strategy for each in decision.plan.groups}
        count = sum(old.get(name, strategy) is not strategy for name, strategy in new.items())
        if count:
            self._log.counting.add("strategy_switches", count=count)
