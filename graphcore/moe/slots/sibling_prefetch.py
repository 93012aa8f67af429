"""SiblingPrefetch: later layers' missing experts copied on a second stream beside earlier layers.

The router of a layer, applied early to what a layer before it computes, guesses which experts it
will choose. The guess is admitted like a step of its own; what the layer then misses it copies as
always, so a wrong guess costs time and never changes a result.

Three events of each group order the two streams:

* ``handoff_done``, on the compute stream: the guess is written; copying waits for it.
* ``compute_done``, on the compute stream: the products that read the slots are done; copying waits
  for it before any slot gets another expert.
* ``stage_done``, on the copy stream: the experts are there and the guess was read; the layer waits
  for it before its own admission.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

from graphcore_kernels import Operand, choose_place

from graphcore.driver import active
from graphcore.driver.records import StreamHandle
from graphcore.driver.streams import Event
from graphcore.errors import CaptureError, ConfigurationError, CudaError, LifecycleError
from graphcore.moe.decisions.static_tensors import StaticTensors
from graphcore.moe.slots.admission import SlotAdmission
from graphcore.moe.slots.slot_pool import SlotPool
from graphcore.resources.tensors import describe

_COUNTS = {"totals": ("int64", (4,)), "fault": ("int32", (3,))}


class PrefetchTotals(NamedTuple):
    """What the guesses for a group came to; an expert counts once in a guess.

    Args:
        guesses: That were admitted.
        routes: In them.
        resident: Experts that were there already.
        copied: Experts that were copied ahead.
        nbytes: That these copies moved.
        refused: Guesses that were not admitted (an expert that does not exist, closed admission,
            too few slots that may go): nothing was copied for them.
    """

    guesses: int
    routes: int
    resident: int
    copied: int
    nbytes: int
    refused: int


class _Events(NamedTuple):
    handoff_done: Event
    compute_done: Event
    stage_done: Event


@dataclass(frozen=True, slots=True)
class _Guesses:
    """The guesses for one group, and what orders them."""

    ids: tuple[Operand, ...]
    admissions: tuple[SlotAdmission, ...]
    counts: StaticTensors
    events: _Events


class SiblingPrefetch:
    """Copies guessed experts of later layers beside the layers before them. Not locked.

    A step is a block of :meth:`step`, run eagerly or captured whole: the copies fork from the
    compute stream and join it again. Within it, for each layer, in this order: write the guesses
    for later layers and :meth:`hand_off` each; :meth:`await_stage` of the layer's own group; its
    admission and products; :meth:`computed`. A group may get several guesses in a step, one from
    each of the layers before it.

    Args:
        pool: Whose slots.
        guesses: Group -> guessed experts, int32 or int64 [rows, top_k] at a fixed address; or a
            list of such tensors, one for each guess of a step. Each expert may push another out
            of its slot, and counts as used: guess few.

    Raises:
        CacheTypeError: Guesses that are no tensor.
        CapacityError: Guesses that may need more slots than there are.
        CaptureError: Inside a capture.
        ConfigurationError: No guesses, an unknown group, or tensors that do not fit.
        CudaError: Out of memory.
    """

    def __init__(self, pool: SlotPool, guesses: Mapping[str, Any]) -> None:
        if active.current() is not None:
            raise CaptureError("SiblingPrefetch: not while a graph is captured; make it before")
        if not guesses:
            raise ConfigurationError("guesses: expected those for at least one group, got none")
        self.pool, self.driver = pool, pool.driver
        self._groups = {name: self._group(name, ids) for name, ids in guesses.items()}
        self._copying = self.driver.stream()
        self._is_stepping = self._is_closed = False
        self._handed: set[str] = set()  # whose stage nobody has waited for yet
        self._computed: set[str] = set()  # whose products were noted in this step

    def _group(self, name: str, guesses: Any) -> _Guesses:
        listed = guesses if isinstance(guesses, (list, tuple)) else [guesses]
        if not listed:
            raise ConfigurationError(f"guesses[{name!r}]: expected at least one tensor, got none")
        counts = StaticTensors(self.driver, _COUNTS)
        for tensor in counts.tensors.values():
            tensor.write(0)
        admissions = [SlotAdmission(self.pool, name, ids, counts=counts.tensors) for ids in listed]
        operands = [Operand(ids, describe(ids)) for ids in listed]
        events = _Events(*(self.driver.event() for _ in range(3)))
        return _Guesses(tuple(operands), tuple(admissions), counts, events)

    # ---- a step --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, stream: Any = None) -> Iterator[SiblingPrefetch]:
        """A step; behind the block the compute stream has waited for every copy.

        Args:
            stream: The compute stream at the end of the block; see :meth:`hand_off`.

        Raises:
            CudaError: The driver refused an event. What was copied is then settled by the next
                admission of the group, outside of captures.
            LifecycleError: A step within a step, or the prefetch is closed.
        """
        self.begin()
        try:
            yield self
        except BaseException:
            with contextlib.suppress(CudaError):  # the first error is the one to tell
                self._join(stream)
            raise
        else:
            self._join(stream)
        finally:
            self.abandon()

    def begin(self) -> None:
        """Begins a step, for whoever cannot hold a block open; :meth:`end` or :meth:`abandon` it.

        Raises:
            LifecycleError: A step within a step, or the prefetch is closed.
        """
        if self._is_stepping or self.is_closed:
            state = "closed" if self.is_closed else "inside a step"
            raise LifecycleError(f"sibling prefetch: expected it open and idle, got it {state}")
        self._computed, self._is_stepping = set(), True

    def end(self, stream: Any = None) -> None:
        """Ends a step: the compute stream waits for every copy. As behind the block of a step."""
        try:
            self._join(stream)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Ends a step that cannot go on; the next admissions settle what it left."""
        for name in self._handed:  # its copies may still be under way
            self.pool.doubt(name)
        self._handed, self._is_stepping = set(), False

    @property
    def is_stepping(self) -> bool:
        return self._is_stepping

    def hand_off(self, name: str, stream: Any = None, *, index: int = 0) -> None:
        """Copies the missing experts of the guess for a group, beside what follows.

        Args:
            name: Of the group, whose guess has been written on ``stream``.
            stream: The compute stream: anything that is a stream. None: the capture under way on
                this thread, else torch's or CuPy's current stream where the guess is theirs, else
                the legacy one.
            index: Which of the group's guesses.

        Raises:
            CaptureError: The group has to be settled, inside a capture.
            ConfigurationError: There are no guesses for the group, or ``stream`` is another
                device's.
            CudaError: The driver refused; the next admission of the group settles what was left.
            LifecycleError: Outside of a step, or the pool has grown or is closed.
        """
        group, compute = self._find(name), self._compute(name, stream)
        if not 0 <= index < len(group.admissions):
            raise ConfigurationError(
                f"index: expected 0 to {len(group.admissions) - 1} for group {name}, got {index}"
            )
        events, copying = group.events, self._copying
        try:
            self.driver.record_event(events.handoff_done.handle, compute)
            copying.wait(events.handoff_done)
            if name in self._computed:
                copying.wait(events.compute_done)
            self._handed.add(name)
            group.admissions[index].launch(copying)
            copying.record(events.stage_done)
        except BaseException:  # copies may be under way that nobody can be told to wait for
            self.pool.doubt(name)
            raise

    def await_stage(self, name: str, stream: Any = None) -> None:
        """Makes the compute stream wait for the copies of a group, before its own admission.

        Nothing where the group has no guess in this step. Args and errors as for :meth:`hand_off`.
        """
        compute = self._compute(name, stream)
        if name in self._handed:
            self.driver.wait_event(compute, self._groups[name].events.stage_done.handle)
            self._handed.discard(name)

    def computed(self, name: str, stream: Any = None) -> None:
        """Notes that the products over a group's slots are launched.

        Args and errors as for :meth:`hand_off`.
        """
        compute = self._compute(name, stream)
        if name in self._groups:
            self.driver.record_event(self._groups[name].events.compute_done.handle, compute)
            self._computed.add(name)

    # ---- looking -------------------------------------------------------------------------------

    @property
    def groups(self) -> tuple[str, ...]:
        """Those that there are guesses for."""
        return tuple(self._groups)

    def totals(self, name: str) -> PrefetchTotals:
        """What the guesses for a group came to since this was made, after all work."""
        tensors = self._find(name).counts.tensors
        guesses, routes, resident, copied = tensors["totals"].read().tolist()
        refused = int(tensors["fault"].read()[2])
        nbytes = copied * self.pool[name].expert_nbytes
        return PrefetchTotals(guesses, routes, resident, copied, nbytes, refused)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """Lets go of its stream, events and counts; graphs keep what they use."""
        if not self._is_closed:
            self._is_closed = True
            self._copying.close()
            for group in self._groups.values():
                for admission in group.admissions:
                    admission.close()
                group.counts.close()
                for event in group.events:
                    event.close()

    # ---- the rest ------------------------------------------------------------------------------

    def _find(self, name: str) -> _Guesses:
        group = self._groups.get(name)
        if group is None:
            raise ConfigurationError(f"group: expected one of {sorted(self._groups)}, got {name!r}")
        return group

    def _compute(self, name: str, stream: Any) -> StreamHandle:
        if not self._is_stepping:
            raise LifecycleError("sibling prefetch: expected to be inside of step(), got outside")
        group = self._groups.get(name) or next(iter(self._groups.values()))
        return choose_place(stream, group.ids, self.driver).stream

    def _join(self, stream: Any) -> None:
        for name in sorted(self._handed):
            self.await_stage(name, stream)

    def __enter__(self) -> SiblingPrefetch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
