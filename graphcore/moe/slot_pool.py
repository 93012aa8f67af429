"""SlotPool: the slots of all groups of a model, who sits in them, and their life.

Steps run on the device and never ask the host. What the host does here (looking, pinning, growing)
waits for all work, belongs outside of captures, and is for whoever holds the groups exclusively.
Not locked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

from graphcore_kernels import RoutePolicy

from graphcore.driver import Driver, active
from graphcore.driver.kept import default_driver
from graphcore.errors import CaptureError, ConfigurationError, LifecycleError
from graphcore.moe.manifest import ExpertBank, ExpertGroup
from graphcore.moe.names import BankStatus, Location
from graphcore.moe.slot_group import SlotGroup, expert_count
from graphcore.moe.slot_state import SlotFault, SlotState, SlotTotals
from graphcore.resources.buffer import Buffer
from graphcore.resources.driver_argument import checked_driver
from graphcore.resources.dtypes import DTYPES
from graphcore.resources.tensors import TensorRef, contiguous_strides

_serials = itertools.count(1)


class SlotPool:
    """Device rows and tables of groups of experts.

    Args:
        groups: Group -> bank -> its experts, [experts, ...] in pinned host memory, or on the
            device: anything that describes such a tensor. They must stay as they are.
        n_slots: Slots of every group, or group -> slots; from 1 to the number of its experts.
        driver: Where; None is what :func:`graphcore.open_driver` would open.
        policy: How victims are chosen; fixed for good.

    Attributes:
        serial: Of the allocations, given once in a process; another after :meth:`grow`.
        generation: How often they have been made anew.

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
    ) -> None:
        _refuse_inside_capture("SlotPool")
        if not groups:
            raise ConfigurationError("groups: expected at least one, got none")
        self.driver = default_driver() if driver is None else checked_driver(driver)
        self.policy = policy or RoutePolicy()
        self.generation = 0
        experts = {name: expert_count(name, banks) for name, banks in groups.items()}
        slots = _checked_slots(n_slots, experts)
        made = {
            name: SlotGroup.make(
                name, banks, SlotState.empty(experts[name], slots[name]), self.driver
            )
            for name, banks in groups.items()
        }
        self._pins: dict[str, dict[int, int]] = {name: {} for name in made}
        self._doubtful: set[str] = set()
        self._groups: dict[str, SlotGroup] | None = made
        self.serial = next(_serials)

    @classmethod
    def of_manifest(
        cls,
        groups: Iterable[ExpertGroup],
        owners: Mapping[str, object],
        *,
        driver: Driver | None = None,
        policy: RoutePolicy | None = None,
    ) -> SlotPool:
        """A pool for those groups of a manifest that have slots.

        Args:
            groups: Of the manifest.
            owners: Name of a bank -> whose memory it is; graphs keep them alive.
            driver: As for the pool itself.
            policy: As for the pool itself.

        Raises:
            ConfigurationError: As for the pool itself; a bank that is not active, lies in pageable
                memory, or has no owner.
        """
        driver = default_driver() if driver is None else checked_driver(driver)
        cached = [group for group in groups if group.slots]
        sources = {
            group.name: {bank.name: _source(bank, owners, driver) for bank in group.banks}
            for group in cached
        }
        slots = {group.name: group.slots for group in cached}
        return cls(sources, slots, driver=driver, policy=policy)

    # ---- what it is ----------------------------------------------------------------------------

    @property
    def groups(self) -> Mapping[str, SlotGroup]:
        """The groups by name, as they are now; others after :meth:`grow`."""
        if self._groups is None:
            raise LifecycleError("slot pool: expected an open pool, got a closed one")
        return self._groups

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
        return self._groups is None

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
        self._doubtful.add(name)

    def settle(self, name: str) -> None:
        """Empties the slots of a step whose misses may not have been copied; else nothing.

        Raises:
            CaptureError: There is something to settle, inside a capture.
        """
        if name in self._doubtful:
            self._change(name, SlotState.without_pending)
            self._doubtful.discard(name)

    def grow(self, n_slots: int | Mapping[str, int]) -> None:
        """Gives groups more slots; who is resident stays. Waits for all work.

        Every address changes: serial and generation are others, admissions of before refuse, and
        guarded executables over the old rows refuse their next launch. Old and new rows exist at
        once for a moment.

        Args:
            n_slots: Slots of every group, or group -> slots; none fewer than now.

        Raises:
            ConfigurationError: Fewer slots than now, or more than experts.
            CaptureError: Inside a capture.
            CudaError: Out of memory, or the driver refused; the pool is as it was.
        """
        _refuse_inside_capture("grow")
        old = self.groups
        experts = {name: group.experts for name, group in old.items()}
        slots = _checked_slots(n_slots, experts, {name: g.slots for name, g in old.items()})
        more = [name for name, group in old.items() if slots[name] > group.slots]
        if not more:
            return
        self.driver.synchronize()
        for name in more:
            self.settle(name)
        made = {name: old[name].grown(slots[name], self.driver) for name in more}
        self.driver.synchronize()
        self._groups = {**old, **made}
        self.serial = next(_serials)
        self.generation += 1
        for name in more:
            old[name].close()

    def close(self) -> None:
        """Lets go of the memory; graphs that use it keep it. A second call does nothing."""
        groups, self._groups = self._groups, None
        for group in (groups or {}).values():
            group.close()

    # ---- the rest ------------------------------------------------------------------------------

    def _change(self, name: str, change: Callable[[SlotState], SlotState]) -> None:
        tables = self[name].tables
        _refuse_inside_capture("changing slots")
        tables.write(change(tables.read()))

    def _pin(self, name: str, experts: Iterable[int], by: int) -> None:
        group = self[name]
        counts = dict(self._pins[name])
        for expert in experts:
            if not 0 <= expert < group.experts:
                raise ConfigurationError(
                    f"experts: expected 0 to {group.experts - 1}, got {expert}"
                )
            counts[expert] = counts.get(expert, 0) + by
            if counts[expert] < 0:
                raise LifecycleError(f"unpin: expert {expert} of group {name} is not pinned")
        words = [int(counts.get(expert, 0) > 0) for expert in range(group.experts)]
        self._change(name, lambda state: state.changed({"pinned": words}))
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
        if self._groups is None:
            return "<SlotPool closed>"
        slots = ", ".join(f"{g.name}: {g.slots} of {g.experts}" for g in self._groups.values())
        return f"<SlotPool serial {self.serial}, {self.nbytes} bytes, {slots:.200}>"


def _refuse_inside_capture(action: str) -> None:
    if active.current() is not None:
        raise CaptureError(f"{action}: not while a graph is captured; do it before the capture")


def _checked_slots(
    n_slots: int | Mapping[str, int],
    experts: Mapping[str, int],
    least: Mapping[str, int] | None = None,
) -> dict[str, int]:
    if isinstance(n_slots, Mapping):
        unknown = sorted(set(n_slots) - set(experts))
        if unknown:
            raise ConfigurationError(f"n_slots: expected names of groups, got {unknown}")
    slots: dict[str, int] = {}
    for name, most in experts.items():
        low = (least or {}).get(name, 1)
        count = n_slots.get(name, least and low) if isinstance(n_slots, Mapping) else n_slots
        if not isinstance(count, int) or isinstance(count, bool) or not low <= count <= most:
            raise ConfigurationError(
                f"n_slots: expected {low} to {most} slots for group {name}, got {count!r}"
            )
        slots[name] = count
    return slots


def _source(bank: ExpertBank, owners: Mapping[str, object], driver: Driver) -> TensorRef:
    if bank.location is Location.PAGEABLE or bank.status is not BankStatus.ACTIVE:
        raise ConfigurationError(
            f"bank {bank.name}: expected an active one that the device can read, got one in "
            f"{bank.location.value}, {bank.status.value}"
        )
    if bank.name not in owners:
        raise ConfigurationError(f"owners: expected one of bank {bank.name}, got none")
    itemsize = DTYPES[bank.dtype].itemsize
    strides = contiguous_strides(bank.shape)
    if bank.expert_stride is not None:
        if bank.expert_stride % itemsize:
            raise ConfigurationError(
                f"bank {bank.name}: expected an expert_stride of whole elements of {itemsize} "
                f"bytes, got {bank.expert_stride}"
            )
        strides = (bank.expert_stride // itemsize, *strides[1:])
    on_device = bank.location is Location.DEVICE and not driver.is_emulated
    return TensorRef(
        address=bank.address,
        shape=bank.shape,
        strides=strides,
        dtype=bank.dtype,
        itemsize=itemsize,
        device_kind="cuda" if on_device else "cpu",
        device=bank.device or 0 if on_device else 0,
        owner=owners[bank.name],
    )
