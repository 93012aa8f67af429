"""The kernel of ``stage_plan.cu`` in Python: what the emulated driver runs."""

from __future__ import annotations

from graphcore.driver.kernel import Pointer
from graphcore.driver.records import LaunchConfig


def run(
    _config: LaunchConfig,
    offsets: Pointer,
    experts: Pointer,
    starts: Pointer,
    counts: Pointer,
    expert_count: int,
    room: int,
    chunks: int,
) -> None:
    """Lists the experts with rows, in their order; what is left of the room is nobody's."""
    bounds = offsets.array(expert_count + 1).tolist()
    hits = [expert for expert in range(expert_count) if bounds[expert] < bounds[expert + 1]]
    listed = hits[:room]
    left = room - len(listed)
    experts.array(room)[:] = [*listed, *[-1] * left]
    starts.array(room + 1)[:] = [*(bounds[each] for each in listed), *[bounds[-1]] * (left + 1)]
    each = room // chunks
    counts.array(chunks)[:] = [
        min(max(len(hits) - chunk * each, 0), each) for chunk in range(chunks)
    ]
