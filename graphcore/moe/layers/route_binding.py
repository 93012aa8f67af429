"""RouteBinding: a place for life for the routes of steps of one shape, and what is planned of them.

A graph that is replayed on the word of GraphReuse needs to say where its ids lie. The router of a
model writes them wherever torch has room; a step that is bound copies them here.
"""

from __future__ import annotations

import torch
from torch.utils.dlpack import from_dlpack

from graphcore.driver import active
from graphcore.moe.decisions.slots_needed import slots_needed
from graphcore.moe.layers.torch_capture import refuse_inside_capture
from graphcore.moe.slots.admission import SlotAdmission
from graphcore.moe.slots.group_use import GroupUse
from graphcore.moe.slots.slot_pool import SlotPool
from graphcore.resources.buffer import Buffer


class RouteBinding:
    """Ids of ``rows`` rows of a group, and their admission where each of their routes has a slot.

    Args:
        pool: Whose slots.
        name: Of the group.
        rows: Of a step.
        top_k: Experts of a row.

    Attributes:
        use: What a step of GraphReuse says of the group.

    Raises:
        CaptureError: Inside a capture.
        CudaError: Out of memory.
    """

    def __init__(self, pool: SlotPool, name: str, rows: int, top_k: int) -> None:
        refuse_inside_capture("binding a step")
        self._pool, self._serial = pool, pool.serial
        group = pool[name]
        self._ids = Buffer.allocate((rows, top_k), "int64", driver=pool.driver)
        with torch.inference_mode(False):  # a tensor born in it could not be written outside of it
            self._view = from_dlpack(self._ids)
        fits = slots_needed(rows * top_k, group.experts) <= group.slots
        self._admission = SlotAdmission(pool, name, self._ids) if fits else None
        self.use = GroupUse(name, self._ids, self._admission)

    @property
    def is_current(self) -> bool:
        """Whether the slots are those that it was made for."""
        return not self._pool.is_closed and self._serial == self._pool.serial

    @property
    def outputs(self) -> int:
        """Where the outputs of the route plan go; 0: where there is room."""
        return 0 if self._admission is None else self._admission.plan_buffer.address

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """Copies the ids of a step here, and gives them as int64."""
        active.keep(self._ids, f"{self.use.group} ids")
        if self._admission is not None:
            active.keep(self._admission.plan_buffer, f"{self.use.group} routes")
        return self._view.copy_(ids)
