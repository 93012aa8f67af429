"""StepDoing: does what was decided, in the order of driver_steps, and says what failed where.

What is known of a variant is written down as soon as its executable is what was captured, before
the launch: whatever fails then, the next call finds the truth. A capture is made while the device
is at the step before: nothing here waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter

from graphcore.errors import CapacityError, CaptureError, CudaError, LifecycleError
from graphcore.executable import Graph, UpdateStatus
from graphcore.executable.legacy_work import turn_on
from graphcore.moe.decisions.decision import Decision
from graphcore.moe.decisions.entry_state import CaptureState, EntryState
from graphcore.moe.decisions.reasons import Reason
from graphcore.moe.decisions.resource_fingerprint import ResourceFingerprint
from graphcore.moe.decisions.settling import Failure, fail, settle
from graphcore.moe.decisions.witnesses import Witnesses
from graphcore.moe.manifests.names import Kind, Way
from graphcore.moe.steps.device_times import DeviceTimes
from graphcore.moe.steps.step_agreement import StepAgreement
from graphcore.moe.steps.step_facts import StepFacts
from graphcore.moe.steps.step_record import StepPart, StepSeconds
from graphcore.moe.steps.variant_table import NotCapturableError, Variant, VariantTable


@dataclass(slots=True)
class Attempt:
    """One call while it is done.

    Args:
        facts: What is known of it.
        variant: Its variant.
        decision: What it does; another one where something came between.
        fingerprint: Of its resources, taken under the lock.
        failure: What it is where something raises now; None: nothing has begun.
        begun: When the call began.
        seconds: Host seconds of each part.
        parts: The parts that are over.
    """

    facts: StepFacts
    variant: Variant
    decision: Decision
    fingerprint: ResourceFingerprint | None = None
    failure: Failure | None = None
    begun: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    parts: list[StepPart] = field(default_factory=list)

    @contextmanager
    def part(self, name: str, failure: Failure) -> Iterator[None]:
        """A part of it: its time counts under ``name``, and what raises in it is ``failure``.

        The time of a part inside another one counts under its own name only.
        """
        self.failure = failure
        start = perf_counter()
        if self.begun:
            self.parts.append(StepPart("prepare", self.begun, start))
            self.begun = 0.0
        before = len(self.parts)
        try:
            yield
        finally:
            end = perf_counter()
            inner = self.parts[before:]
            self.parts.append(StepPart(name, inner[-1].end if inner else start, end))
            own = end - start - sum(each.end - each.begin for each in inner)
            self.seconds[name] = self.seconds.get(name, 0.0) + own

    @property
    def times(self) -> StepSeconds:
        """Its host seconds so far."""
        return StepSeconds(**self.seconds)

    def commit(self, captured: CaptureState | None = None) -> None:
        """Writes down what is known of the variant."""
        self.variant.state = settle(self.variant.state, self.decision, self.facts.call, captured)


class StepDoing:
    """Does what attempts have decided.

    Args:
        table: Holds the executables.
        device: Times launches on the device; None: nobody asked.
        rows_by_kernel: Whether float32 copies with a step between rows become kernels in captures.
        destroys_late: Whether an old description goes behind the launch of the new one.
        agreement: With the other ranks that share the experts; None: there are none.
    """

    def __init__(
        self,
        table: VariantTable,
        device: DeviceTimes | None = None,
        *,
        rows_by_kernel: bool = False,
        destroys_late: bool = False,
        agreement: StepAgreement | None = None,
    ) -> None:
        self._device = device
        self._table = table
        self._rows_by_kernel = rows_by_kernel
        self._destroys_late = destroys_late
        self._agreement = agreement

    def do(self, attempt: Attempt) -> None:
        """Does what was decided and writes down what is known then; raises what failed."""
        kind = attempt.decision.kind
        if kind in (Kind.CAPTURE, Kind.UPDATE):
            try:
                (self._capture if kind is Kind.CAPTURE else self._update)(attempt)
                return
            except NotCapturableError as error:
                # nothing was launched, and the captured work has not run
                if self._agreement is not None and not isinstance(error, _ElsewhereError):
                    self._agreement.captured(str(error))
                attempt.decision = attempt.decision.turned(Reason.NOT_CAPTURABLE, str(error))
                attempt.variant.note_obstacle(attempt.facts.step.uid, error)
                if not attempt.variant.state.after(attempt.decision.retention).capture:
                    self._table.drop(attempt.variant)
        if kind is Kind.REPLAY:
            self._launch(attempt)
        else:
            self._run(attempt)
        attempt.commit()

    @contextmanager
    def _timed(self, attempt: Attempt) -> Iterator[None]:
        """A block for the work of a step: timed, and where it may break no capture."""
        stream = attempt.facts.step.stream
        timed = (
            self._device.around(attempt.decision.kind, stream) if self._device else nullcontext()
        )
        with turn_on(stream.handle), timed:
            yield

    # ---- without a graph -----------------------------------------------------------------------

    def _run(self, attempt: Attempt) -> None:
        work, stream = attempt.facts.step.work, attempt.facts.step.stream
        with attempt.part("launch", Failure.EVALUATOR), self._timed(attempt):
            if attempt.decision.way is Way.STAGED and work.has_staged:
                work.run_staged(stream)
            else:
                work.run(stream)

    # ---- with a graph --------------------------------------------------------------------------

    def _launch(self, attempt: Attempt) -> None:
        use = attempt.variant.use
        assert use is not None, attempt.variant
        with attempt.part("launch", Failure.DRIVER), self._timed(attempt):
            use.executable.launch(attempt.facts.step.stream)
        use.note()

    def _capture(self, attempt: Attempt) -> None:
        def build() -> Graph:
            graph = self._captured(attempt)
            attempt.failure = Failure.DRIVER
            return graph

        with attempt.part("update", Failure.DRIVER):
            try:
                self._table.capture(attempt.variant, build)
            except CapacityError as error:
                raise NotCapturableError(str(error)) from error
            self._wait_for_others()
        attempt.commit(_captured_state(attempt))
        self._launch(attempt)

    def _update(self, attempt: Attempt) -> None:
        graph = self._captured(attempt)
        try:
            self._wait_for_others()
            with attempt.part("update", Failure.DRIVER):
                renewal = self._table.renew(attempt.variant, graph)
                outcome = renewal.outcome
                if not outcome.is_current:
                    raise LifecycleError(f"update: {outcome}")
        except BaseException:
            self._give_up(attempt.variant, graph)
            raise
        if outcome.status is UpdateStatus.REINSTANTIATED:
            state = attempt.variant.state
            attempt.decision, _ = fail(
                state, attempt.decision, Failure.UPDATE_REFUSED, outcome.reason
            )
        attempt.commit(_captured_state(attempt))
        former = renewal.former
        assert former is not None
        if not self._destroys_late:
            with attempt.part("cleanup", Failure.DRIVER):
                former.close()
        try:
            self._launch(attempt)
        finally:
            with attempt.part("cleanup", attempt.failure or Failure.DRIVER):
                former.close()

    def _wait_for_others(self) -> None:
        """Waits until the step is captured on all ranks; NotCapturableError where it is not."""
        problem = "" if self._agreement is None else self._agreement.captured("")
        if problem:
            raise _ElsewhereError(problem, may_pass=True)

    def _give_up(self, variant: Variant, graph: Graph) -> None:
        """Closes ``graph``, which was not taken; where it was after all, the executable, too."""
        assert variant.use is not None
        executable = variant.use.executable
        if not executable.is_closed and executable.graph is graph:
            # what failed came after the change: what is known of the variant is not what it runs
            variant.state = EntryState()
            self._table.drop(variant)
        graph.close()

    def _captured(self, attempt: Attempt) -> Graph:
        """The graph of the step.

        Raises:
            NotCapturableError: It does something that no capture allows.
        """
        step = attempt.facts.step
        try:
            with attempt.part("capture", Failure.EVALUATOR):
                return step.work.capture(step.stream, rows_by_kernel=self._rows_by_kernel)
        except CaptureError as error:
            if error.code is None or "STREAM_CAPTURE" in error.code:
                raise NotCapturableError(str(error), may_pass=error.may_pass) from error
            attempt.failure = Failure.DRIVER
            raise
        except CudaError:
            attempt.failure = Failure.DRIVER
            raise


class _ElsewhereError(NotCapturableError):
    """Another rank could not capture the step."""


def _captured_state(attempt: Attempt) -> CaptureState:
    call, plan = attempt.facts.call, attempt.decision.plan
    if attempt.fingerprint is None or plan is None:
        return CaptureState(is_grouped=False)
    return CaptureState(
        is_grouped=True,
        phase=plan.phase,
        semantic_key=call.semantic_key,
        generation=call.generation,
        fingerprint=attempt.fingerprint,
        witnesses=Witnesses.of(attempt.facts.owners),
    )


def failed(attempt: Attempt, error: BaseException, table: VariantTable) -> Decision:
    """What the call comes to after ``error``; what is known of its variant is written down."""
    variant = attempt.variant
    failure = attempt.failure or Failure.DRIVER
    lost = variant.use is not None and variant.use.executable.is_closed
    detail = f"{type(error).__name__}: {error}"
    decision, state = fail(variant.state, attempt.decision, failure, detail, lost=lost)
    if state.capture is None:
        table.drop(variant)
    variant.state = state
    return decision
