"""FastReplay: a replay that was decided, with all that it was decided from.

A replay whose graph, certificate, manifest, slots and stream are the very objects of the last one
needs no facts found out: nothing that they come from has changed. FastRunning compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from graphcore.driver import Stream
from graphcore.executable import GraphExec
from graphcore.interop.streams import current_stream, current_stream_reader
from graphcore.moe.decisions.certificate import Certificate
from graphcore.moe.decisions.counters import Tally
from graphcore.moe.decisions.decision import Decision
from graphcore.moe.decisions.entry_state import EntryState
from graphcore.moe.decisions.lookup_key import LookupKey
from graphcore.moe.manifests.leases import Passage
from graphcore.moe.manifests.names import Phase
from graphcore.moe.slots.slot_pool import SlotPool
from graphcore.moe.steps.step_facts import StepFacts
from graphcore.moe.steps.step_work import StepWork
from graphcore.moe.steps.variant_table import Variant
from graphcore.reuse.renewable import EntryUse


class Given(NamedTuple):
    """What a caller gave, as it was given: certificate, stream and phase."""

    certificate: Certificate | None
    stream: Any
    phase: Phase | None


@dataclass(frozen=True, slots=True, eq=False)
class FastReplay:
    """One replay.

    Args:
        work: What runs.
        prompt_rows: How many of its rows belong to prompts.
        given_phase: As the caller gave it.
        uid: Of it.
        given: The certificate as the caller gave it; None: one was issued.
        certificate: Of the step.
        given_stream: As the caller gave it; None: the current one.
        stream: What it was.
        read_current: Tells one current stream from another.
        current: What it said.
        phase: That the call counts as.
        revision: Of the ownership, before anything was decided.
        generation: Of the manifest.
        passage: How it enters its groups; None for a plain step.
        pool: The slots; None for a plain step.
        turn: Of those: what the order of their steps said.
        tally: Counts it.
        variant: Its variant.
        key: Of that.
        state: What was known of that.
        use: Its executable in hand.
        executable: The same, bare.
        decision: What was decided.
    """

    work: StepWork
    prompt_rows: int
    given_phase: Phase | None
    uid: int
    given: Certificate | None
    certificate: Certificate | None
    given_stream: Any
    stream: Stream
    read_current: Callable[[], int]
    current: int
    phase: Phase
    revision: int
    generation: int
    passage: Passage | None
    pool: SlotPool | None
    turn: int
    tally: Tally
    variant: Variant
    key: LookupKey
    state: EntryState
    use: EntryUse
    executable: GraphExec
    decision: Decision


def fast_replay(
    facts: StepFacts,
    variant: Variant,
    decision: Decision,
    given: Given,
    revision: int,
    passage: Passage | None,
    tally: Tally,
) -> FastReplay | None:
    """What the next call of ``facts`` may come to at once; None where it has to be looked at.

    Args:
        facts: Of a call that launched a graph, after which its variant holds what was captured.
        variant: Its variant.
        decision: What a replay of it is.
        given: What the caller gave.
        revision: Of the ownership, before facts were found.
        passage: Of its groups, where it has entered any.
        tally: Counts replays of so many groups.
    """
    step, use = facts.step, variant.use
    groups = facts.seen.groups
    if use is None or not step.uid or (groups and passage is None):
        return None
    stream = step.stream
    if given.stream is None and current_stream(stream.driver) != stream.handle:
        return None
    pool, turn = (facts.pool if groups else None), 0
    if pool is not None:
        turn = pool.order.turn
        if not pool.stands(stream.handle):
            return None
    read_current = current_stream_reader(stream.driver)
    return FastReplay(
        work=step.work,
        prompt_rows=step.prompt_rows,
        given_phase=given.phase,
        uid=step.uid,
        given=given.certificate,
        certificate=step.certificate,
        given_stream=given.stream,
        stream=stream,
        read_current=read_current,
        current=read_current(),
        phase=step.phase,
        revision=revision,
        generation=facts.published.generation,
        passage=passage,
        pool=pool,
        turn=turn,
        tally=tally,
        variant=variant,
        key=variant.key,
        state=variant.state,
        use=use,
        executable=use.executable,
        decision=decision,
    )
