"""FastReplay: a replay that was decided, and by what few comparisons it holds once more.

A replay whose graph, certificate, manifest, slots and stream are the very objects of the last one
needs no facts found out: nothing that they come from has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from graphcore.driver import Stream
from graphcore.driver.records import StreamHandle
from graphcore.executable import GraphExec
from graphcore.interop.streams import current_stream, current_stream_reader
from graphcore.moe.decisions.certificate import Certificate
from graphcore.moe.decisions.decision import Decision
from graphcore.moe.decisions.entry_state import EntryState
from graphcore.moe.manifests.manifest_registry import Published
from graphcore.moe.manifests.names import Phase
from graphcore.moe.slots.slot_pool import SlotPool
from graphcore.moe.steps.step_facts import StepFacts
from graphcore.moe.steps.step_work import StepWork
from graphcore.moe.steps.variant_table import Variant
from graphcore.reuse.renewable import EntryUse


@dataclass(frozen=True, slots=True, eq=False)
class FastReplay:
    """One replay.

    Args:
        work: What runs.
        uid: Of it.
        given: The certificate as the caller gave it; None: one was issued.
        certificate: Of the step.
        given_stream: As the caller gave it; None: the current one.
        stream: What it was.
        handle: Of it.
        read_current: Tells one current stream from another.
        current: What it said.
        phase: That the call counts as.
        published: The manifest.
        pool: The slots; None for a plain step.
        serial: Of their allocations.
        names: Of the groups.
        epochs: Of the groups, by name.
        variant: Its variant.
        state: What was known of that.
        use: Its executable in hand.
        executable: The same, bare.
        decision: What was decided.
    """

    work: StepWork
    uid: int
    given: Certificate | None
    certificate: Certificate | None
    given_stream: Any
    stream: Stream
    handle: StreamHandle
    read_current: Callable[[], int]
    current: int
    phase: Phase
    published: Published
    pool: SlotPool | None
    serial: int
    names: tuple[str, ...]
    epochs: tuple[Any, ...]
    variant: Variant
    state: EntryState
    use: EntryUse
    executable: GraphExec
    decision: Decision

    def holds(
        self,
        work: StepWork,
        certificate: Certificate | None,
        stream: Any,
        published: Published,
        pool: SlotPool | None,
    ) -> bool:
        """Whether everything that it was decided from is as it was; the slots are looked at later.

        Args:
            work: Of the call.
            certificate: As the caller gives it.
            stream: As the caller gives it.
            published: The manifest of now.
            pool: The slots of now.
        """
        given = self.given_stream
        return (
            self.work is work
            and work.uid == self.uid
            and self.given is certificate
            and self.published is published
            and self.variant.state is self.state
            and not work.obstacle
            and (self.pool is pool or self.pool is None)
            and (stream is given or bool(stream == given))
            and (stream is not None or self.read_current() == self.current)
        )

    def has_slots(self) -> bool:
        """Whether the slots are as they were; asked once nobody else may use them.

        Before that another thread may still step on another stream, or leave a step half done.
        """
        pool = self.pool
        return pool is None or pool.stands(self.serial, self.handle)


def fast_replay(
    facts: StepFacts,
    variant: Variant,
    decision: Decision,
    given: tuple[Certificate | None, Any],
    epochs: tuple[Any, ...],
) -> FastReplay | None:
    """What the next call of ``facts`` may come to at once; None where it has to be looked at.

    Args:
        facts: Of a call that launched a graph, after which its variant holds what was captured.
        variant: Its variant.
        decision: What a replay of it is.
        given: Certificate and stream as the caller gave them.
        epochs: Of its groups, under the lease that it had.
    """
    step, use = facts.step, variant.use
    if use is None or not step.uid:
        return None
    stream = step.stream
    if given[1] is None and current_stream(stream.driver) != stream.handle:
        return None
    pool = facts.pool if facts.seen.groups else None
    read_current = current_stream_reader(stream.driver)
    return FastReplay(
        work=step.work,
        uid=step.uid,
        given=given[0],
        certificate=step.certificate,
        given_stream=given[1],
        stream=stream,
        handle=stream.handle,
        read_current=read_current,
        current=read_current(),
        phase=step.phase,
        published=facts.published,
        pool=pool,
        serial=0 if pool is None else pool.serial,
        names=facts.seen.names,
        epochs=epochs,
        variant=variant,
        state=variant.state,
        use=use,
        executable=use.executable,
        decision=decision,
    )
