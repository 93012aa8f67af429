"""StepFacts: one call of a step, and all that was found out about it before it is decided."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from graphcore.driver import Stream
from graphcore.moe.decisions.call_facts import CallFacts
from graphcore.moe.decisions.certificate import Certificate
from graphcore.moe.decisions.lookup_key import LookupKey
from graphcore.moe.decisions.resources import Resources
from graphcore.moe.manifests.manifest_registry import Published
from graphcore.moe.manifests.names import Phase
from graphcore.moe.slots.slot_pool import SlotPool
from graphcore.moe.steps.sighting import SightedGroup
from graphcore.moe.steps.step_work import StepLook, StepWork

Made = TypeVar("Made")


class Step(NamedTuple):
    """One call.

    Args:
        work: What runs.
        certificate: What it claims to be; None: nothing.
        stream: That it runs on.
        phase: That it counts as.
        prompt_rows: How many of its rows belong to prompts.
        uid: Of the work now.
    """

    work: StepWork
    certificate: Certificate | None
    stream: Stream
    phase: Phase
    prompt_rows: int
    uid: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look at the nodes of a step found; true as long as uid, pool and manifest are.

    Args:
        look: The nodes, and where the groups stand.
        groups: The groups.
        known: What was made of it already.
    """

    look: StepLook
    groups: tuple[SightedGroup, ...]
    known: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What ``make`` gives, which is made once for each key."""
        if key not in self.known:
            self.known[key] = make()
        made: Made = self.known[key]
        return made

    @property
    def names(self) -> tuple[str, ...]:
        """Of the groups."""
        return tuple(sighted.use.group for sighted in self.groups)


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What is known of one call.

    Args:
        step: The call.
        key: Of its variant.
        call: What deciding needs.
        seen: What a look at its nodes found.
        pool: Its slots; None without any.
        resources: What it uses of them; None where that was not asked or is not known.
        owners: The objects behind that.
        published: The manifest that held.
    """

    step: Step
    key: LookupKey
    call: CallFacts
    seen: Seen
    pool: SlotPool | None
    resources: Resources | None
    owners: tuple[object, ...]
    published: Published
