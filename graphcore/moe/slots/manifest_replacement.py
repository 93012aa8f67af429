"""A manifest and the slots of its groups, replaced together while others run steps."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping

from graphcore.driver import active
from graphcore.errors import CaptureError, CudaError
from graphcore.moe.manifests.manifest import Manifest
from graphcore.moe.manifests.manifest_registry import ManifestRegistry, Publication
from graphcore.moe.slots.slot_group import SlotGroup
from graphcore.moe.slots.slot_pool import SlotPool
from graphcore.moe.slots.slot_succession import Succession, made_group, succession

_log = logging.getLogger("graphcore")


def replace_manifest(
    registry: ManifestRegistry,
    pool: SlotPool,
    manifest: Manifest,
    owners: Mapping[str, object],
    *,
    timeout: float | None = None,
) -> Publication:
    """Publishes ``manifest`` and gives ``pool`` the slots that it asks for, as one change.

    Admission is closed and users are waited for, then all work is; then the pool takes the groups
    over, and the manifest holds. Whoever had a lease used the old slots to the end; whoever gets
    one afterwards finds the new ones. Graphs that were captured before are of another generation,
    and are not replayed; admissions of before refuse.

    Groups whose banks are the same memory in the same form stay, with their residents, pins and
    addresses; those that changed are made anew and are empty; those that slots do not serve any
    more (an active adapter, pageable memory, no slots) are let go of. Where there is no room for
    old and new slots at once, old ones go first.

    Args:
        registry: Where the manifest is published; from here on the pool's groups are used under its
            leases.
        pool: The slots of the manifest that holds.
        manifest: The new one: other weights, other numbers of slots, an adapter made active or
            not (:meth:`graphcore.moe.Manifest.adapted`).
        owners: Name of a bank -> whose memory it is; banks that stay as they are need none.
        timeout: Seconds to wait for users; None: as long as it takes.

    Returns:
        As of :meth:`graphcore.moe.ManifestRegistry.replace`: refused and BUSY change nothing. ERROR
        is where the driver refused, or had no memory for the new slots: the old manifest holds,
        with the slots of before; those that had to go first are empty, or, where not even they find
        memory any more, gone.

    Raises:
        CaptureError: Inside a capture.
        ConfigurationError: It is no manifest of groups of banks; a bank that is new has no owner.
        LifecycleError: The registry was shut down or the pool closed, or this thread has a lease,
            or is changing a group, itself.
    """
    if active.current() is not None:
        raise CaptureError("replace_manifest: not while a graph is captured; do it before")
    pool.ownership = registry.ownership
    return registry.replace(
        manifest, allocate=lambda new: _succeed(pool, new, owners), timeout=timeout
    )


def _succeed(pool: SlotPool, manifest: Manifest, owners: Mapping[str, object]) -> None:
    """Gives ``pool`` the groups of ``manifest``, with nobody using any."""
    plan = succession(pool.groups, manifest.groups, owners, pool.driver)
    if plan.changes_nothing:
        return
    with active.outside_captures():
        pool.driver.synchronize()
        made = _make_beside(pool, plan)
        pool.take_over(_make_in_place(pool, plan) if made is None else made)


def _make_beside(pool: SlotPool, plan: Succession) -> dict[str, SlotGroup] | None:
    """The new groups, made beside the old ones; None where there may be room once those are gone.

    Behind it nothing holds what was made of them until then.
    """
    try:
        return plan.make(pool.driver)
    except (MemoryError, CudaError) as error:
        if not plan.gone:
            raise
        _log.info("slots: old ones go before new ones are made, since %s", error)
        return None


def _make_in_place(pool: SlotPool, plan: Succession) -> dict[str, SlotGroup]:
    """The new groups, made when the old ones are gone; else the old ones are there, empty."""
    # a group holds its memory, so none is kept here
    old = {name: (pool[name].sources, pool[name].slots) for name in plan.gone}
    order = tuple(pool)
    pool.take_over(plan.kept)
    try:
        return plan.make(pool.driver)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they hold what was made so far
        again = {name: made_group(name, *banks, pool.driver) for name, banks in old.items()}
        every = {**plan.kept, **again}
        pool.take_over({name: every[name] for name in order})
        raise
