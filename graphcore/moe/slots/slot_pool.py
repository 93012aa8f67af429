"""SlotPool: the slots of all groups of a model, who sits in them, and their life.

Steps run on the device and never ask the host. What the host does here (looking, pinning, growing)
waits for all work and belongs outside of captures. Not locked: a pool that is told who uses its
groups (``ownership``) changes them only while nobody does; else that is the caller's care.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

from graphcore_kernels import RoutePolicy

from graphcore.driver import Driver, active
from graphcore.driver.kept import default_driver
from graphcore.driver.records import StreamHandle
from graphcore.errors import CaptureError, ConfigurationError, LifecycleError
from graphcore.moe.manifests.manifest import ExpertGroup
from graphcore.moe.manifests.ownership import Ownership
from graphcore.moe.slots.bank_sources import manifest_sources
from graphcore.moe.slots.slot_counts import checked_slots
from graphcore.moe.slots.slot_group import SlotGroup, expert_count, need_of_slots
from graphcore.moe.slots.slot_state import SlotFault, SlotState, SlotTotals
from graphcore.moe.slots.slot_succession import made_group
from graphcore.moe.slots.stream_order import StreamOrder
from graphcore.resources.buffer import Buffer
from graphcore.resources.driver_argument import checked_driver
from graphcore.resources.exhaustion import telling_need

_serials = itertools.count(1)


class _Allocation(NamedTuple):
    """What is swapped as one when a pool grows: nobody sees half of it."""

    groups: dict[str, SlotGroup]
    serial: int
    generation: int


class SlotPool:
    """Device rows and tables of groups of experts.

    Args:
        groups: Group -> bank -> its experts, [experts, ...] in pinned host memory, or on the
            device: anything that describes such a tensor. They must stay as they are.
        n_slots: Slots of every group, or group -> slots; from 1 to the number of its experts.
        driver: Where; None is what :func:`graphcore.open_driver` would open.
        policy: How victims are chosen; fixed for good.
        ownership: Who uses the groups, by their names here. Then pinning, resetting, opening,
            closing and growing wait until nobody has a lease of the group, and leases of before
            are known to be stale; a thread that has one itself is refused (LifecycleError).

    Attributes:
        ownership: May be set later: a registry's, once the groups are published.
        order: In which steps on several streams follow each other, for whoever runs them.

    Raises:
        CacheTypeError: A bank is no tensor.
        ConfigurationError: Banks of a group that do not fit each other, a number of slots that
            cannot be, experts in pageable memory.
        CaptureError: Inside a capture.
        CudaError: Out of memory, or the driver refused; nothing is left of the pool.
    """

    def __init__(
        self,
        groups: Mapping[str, Mapping[str, Any]],
        n_slots: int | Mapping[str, int],
        *,
        driver: Driver | None = None,
        policy: RoutePolicy | None = None,
        ownership: Ownership | None = None,
    ) -> None:
        _refuse_inside_capture("SlotPool")
        if not groups:
            raise ConfigurationError("groups: expected at least one, got none")
        self.driver = default_driver() if driver is None else checked_driver(driver)
        self.policy = policy or RoutePolicy()
        self.ownership = ownership
        experts = {name: expert_count(name, banks) for name, banks in groups.items()}
        slots = checked_slots(n_slots, experts)
        with telling_need(lambda: need_of_slots(groups, slots)):
            made = {
                name: made_group(name, banks, slots[name], self.driver)
                for name, banks in groups.items()
            }
        self._pins: dict[str, dict[int, int]] = {name: {} for name in made}
        self._doubtful: set[str] = set()
        self.order = StreamOrder(self.driver)
        self._now = _Allocation(made, next(_serials), 0)
        self._is_closed = False

    @classmethod
    def of_manifest(
        cls,
        groups: Iterable[ExpertGroup],
        owners: Mapping[str, object],
        *,
        driver: Driver | None = None,
        policy: RoutePolicy | None = None,
        ownership: Ownership | None = None,
    ) -> SlotPool:
        """A pool for those groups of a manifest that have slots.

        Args:
            groups: Of the manifest.
            owners: Name of a bank -> whose memory it is; graphs keep them alive.
            driver: As for the pool itself.
            policy: As for the pool itself.
            ownership: As for the pool itself.

        Raises:
            ConfigurationError: As for the pool itself; a bank that is not active, lies in pageable
                memory, or has no owner.
        """
        driver = default_driver() if driver is None else checked_driver(driver)
        cached = [group for group in groups if group.slots]
        sources = manifest_sources(cached, owners, driver)
        slots = {group.name: group.slots for group in cached}
        return cls(sources, slots, driver=driver, policy=policy, ownership=ownership)

    # ---- what it is ----------------------------------------------------------------------------

    @property
    def groups(self) -> Mapping[str, SlotGroup]:
        """The groups by name, as they are now; others after :meth:`grow`."""
        if self._is_closed:
            raise LifecycleError("slot pool: expected an open pool, got a closed one")
        return self._now.groups

    @property
    def serial(self) -> int:
        """Of the allocations, given once in a process; another after :meth:`grow`."""
        return self._now.serial

    @property
    def generation(self) -> int:
        """How often they have been made anew."""
        return self._now.generation

    def __getitem__(self, name: str) -> SlotGroup:
        """One group.

        Raises:
            ConfigurationError: There is none of that name.
        """
        group = self.groups.get(name)
        if group is None:
            raise ConfigurationError(f"group: expected one of {sorted(self.groups)}, got {name!r}")
        return group

    def __iter__(self) -> Iterator[str]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def nbytes(self) -> int:
        """Device memory of all rows and tables."""
        return sum(group.nbytes for group in self.groups.values())

    def named_tensors(self) -> dict[str, Buffer]:
        """Every static tensor, by a name for reports."""
        return dict(itertools.chain.from_iterable(g.named_tensors() for g in self.groups.values()))

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    # ---- looking -------------------------------------------------------------------------------

    def state(self, name: str) -> SlotState:
        """A copy of the tables of a group, after all work."""
        group = self[name]
        _refuse_inside_capture("state")
        return group.tables.read()

    def residents(self) -> dict[str, dict[int, int]]:
        """Group -> expert -> slot, after all work."""
        return {name: self.state(name).residents() for name in self.groups}

    def totals(self, name: str) -> SlotTotals:
        """What the steps of a group came to since it was made or reset, after all work."""
        return self.state(name).totals

    def copied_nbytes(self, name: str) -> int:
        """Bytes that the misses of a group's steps have copied since it was made or reset.

        Without what was copied ahead: ``SiblingPrefetch.totals``.
        """
        return self.totals(name).misses * self[name].expert_nbytes

    def fault(self, name: str) -> SlotFault:
        """The first step of a group that was refused, and how many were, after all work."""
        return self.state(name).fault

    # ---- changing ------------------------------------------------------------------------------

    def clear_fault(self, name: str) -> None:
        """Forgets the refused steps of a group."""
        self._change(name, lambda state: state.changed({"fault": [0, 0, 0]}))

    def pin(self, name: str, experts: Iterable[int]) -> None:
        """Makes experts stay once they are resident; counted, an expert may be pinned again.

        Raises:
            ConfigurationError: An expert that the group does not have.
        """
        self._pin(name, experts, 1)

    def unpin(self, name: str, experts: Iterable[int]) -> None:
        """Takes back one :meth:`pin` of each expert.

        Raises:
            LifecycleError: An expert that is not pinned.
        """
        self._pin(name, experts, -1)

    def open_admission(self, name: str, is_open: bool = True) -> None:
        """Lets steps admit experts, or refuses every step of the group (status CLOSED)."""
        self._change(name, lambda state: state.changed({"is_open": [int(is_open)]}))

    def close_admission(self, name: str) -> None:
        """Refuses every step of the group from now on."""
        self.open_admission(name, False)

    def reset(self, name: str | None = None) -> None:
        """Empties the slots of a group, or of all; addresses, pins and admission stay.

        For experts whose contents have changed. After an error the groups before it are empty.
        """
        for each in list(self.groups) if name is None else [name]:
            self._change(each, SlotState.emptied)
            self._doubtful.discard(each)

    def doubt(self, name: str) -> None:
        """Notes that the copy of the newest step's misses may not have run; see :meth:`settle`."""
        self._doubtful |= {name}
        self.order.turn += 1

    def stands(self, stream: StreamHandle) -> bool:
        """Whether it is open and settled, and its newest step was on ``stream``.

        Where that was so it is so for as long as ``order.turn`` is the number that it was before.
        """
        return self.order.handle == stream and not (self._doubtful or self._is_closed)

    @property
    def is_settled(self) -> bool:
        """Whether no group has anything to settle; costs next to nothing."""
        return not self._doubtful

    def settle(self, name: str | None = None) -> bool:
        """Empties the slots of a step whose misses may not have been copied; else nothing.

        For whoever has the right to use the group, before it is captured and before a graph over it
        is launched: a graph's own admission would take the doubtful slots for good ones.

        Args:
            name: Of the group; None: of every one.

        Returns:
            Whether there was anything to settle.

        Raises:
            CaptureError: There is something to settle, inside a capture.
            CudaError: The driver refused; it is still to be settled.
        """
        doubtful = sorted(self._doubtful if name is None else self._doubtful & {name})
        for each in doubtful:
            self._rewrite(each, SlotState.without_pending)
            self._doubtful.discard(each)
        return bool(doubtful)

    def grow(self, n_slots: int | Mapping[str, int], *, timeout: float | None = None) -> None:
        """Gives groups more slots; who is resident stays. Waits for all work.

        With ``ownership`` it waits first until nobody uses those groups, and lets nobody use them
        meanwhile. Every address changes: serial and generation are others, admissions and leases of
        before refuse, and guarded executables over the old rows refuse their next launch. Old and
        new rows exist at once for a moment.

        Args:
            n_slots: Slots of every group, or group -> slots; none fewer than now.
            timeout: Seconds to wait for users; None: as long as it takes.

        Raises:
            ConfigurationError: Fewer slots than now, or more than experts.
            CaptureError: Inside a capture.
            CudaError: Out of memory, or the driver refused; the pool is as it was.
            LifecycleError: Still in use after ``timeout``, in use by this thread, or being changed
                already; nothing changed.
        """
        _refuse_inside_capture("grow")
        names = self._growing(n_slots)
        if names:
            with self._changing(names, timeout), active.outside_captures():
                # others may have grown it meanwhile
                self._grow(n_slots)

    def _growing(self, n_slots: int | Mapping[str, int]) -> dict[str, int]:
        """The groups that would have more slots than now, and how many."""
        groups = self.groups
        experts = {name: group.experts for name, group in groups.items()}
        now = {name: group.slots for name, group in groups.items()}
        slots = checked_slots(n_slots, experts, now)
        return {name: count for name, count in slots.items() if count > now[name]}

    def _grow(self, n_slots: int | Mapping[str, int]) -> None:
        more, old = self._growing(n_slots), self.groups
        if not more:
            return
        self.driver.synchronize()
        for name in more:
            self.settle(name)
        with telling_need(lambda: _need_to_grow(old, more)):
            made = {name: old[name].grown(slots, self.driver) for name, slots in more.items()}
        self.driver.synchronize()
        self.take_over({**old, **made}, grown=made)

    def take_over(self, groups: Mapping[str, SlotGroup], *, grown: Iterable[str] = ()) -> None:
        """Has these groups from now on, as one change; lets go of those that are not among them.

        For whoever uses all groups exclusively, after all work. Groups that stay keep residents,
        pins and addresses; admissions of before refuse.

        Args:
            groups: By name; open ones, of this pool's driver.
            grown: Names of new ones that hold what the old ones of these names held.
        """
        old, same = self.groups, set(grown)
        staying = {name for name, group in groups.items() if old.get(name) is group}
        self._pins = {
            name: self._pins.get(name, {}) if name in same | staying else {} for name in groups
        }
        self._doubtful &= staying
        self._now = _Allocation(dict(groups), next(_serials), self.generation + 1)
        self.order.turn += 1
        for name, group in old.items():
            if name not in staying:
                group.close()

    def close(self) -> None:
        """Lets go of the memory; graphs that use it keep it. A second call does nothing."""
        self._is_closed = True
        self.order.turn += 1
        groups, self._now = self._now.groups, self._now._replace(groups={})
        for group in groups.values():
            group.close()

    # ---- the rest ------------------------------------------------------------------------------

    def _changing(
        self, names: Iterable[str], timeout: float | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """A block in which nobody uses these groups, where it is known who does."""
        if self.ownership is None:
            return contextlib.nullcontext()
        return self.ownership.changing(names, timeout=timeout)

    def _change(self, name: str, change: Callable[[SlotState], SlotState]) -> None:
        _refuse_inside_capture("changing slots")
        with self._changing([self[name].name]):
            self._rewrite(name, change)

    def _rewrite(self, name: str, change: Callable[[SlotState], SlotState]) -> None:
        tables = self[name].tables
        _refuse_inside_capture("changing slots")
        tables.write(change(tables.read()))

    def _pin(self, name: str, experts: Iterable[int], by: int) -> None:
        _refuse_inside_capture("pinning")
        most, listed = self[name].experts, list(experts)
        for expert in listed:
            if not 0 <= expert < most:
                raise ConfigurationError(f"experts: expected 0 to {most - 1}, got {expert}")
        with self._changing([name]):
            counts = dict(self._pins.get(name, {}))
            for expert in listed:
                counts[expert] = counts.get(expert, 0) + by
                if counts[expert] < 0:
                    raise LifecycleError(f"unpin: expert {expert} of group {name} is not pinned")
            words = [int(counts.get(expert, 0) > 0) for expert in range(most)]
            self._rewrite(name, lambda state: state.changed({"pinned": words}))
            self._pins[name] = counts

    def __enter__(self) -> SlotPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._is_closed:
            return "<SlotPool closed>"
        slots = ", ".join(f"{g.name}: {g.slots} of {g.experts}" for g in self.groups.values())
        return f"<SlotPool serial {self.serial}, {self.nbytes} bytes, {slots:.200}>"


def _need_to_grow(groups: Mapping[str, SlotGroup], more: Mapping[str, int]) -> str:
    words = need_of_slots({name: groups[name].sources for name in more}, more)
    held = sum(groups[name].nbytes for name in more)
    return f"{words}; until they are filled, the old ones lie beside them ({held} bytes)"


def _refuse_inside_capture(action: str) -> None:
    if active.current() is not None:
        raise CaptureError(f"{action}: not while a graph is captured; do it before the capture")
