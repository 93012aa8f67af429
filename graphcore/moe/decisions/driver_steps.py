"""The order of driver calls for each kind of call, as data."""

from __future__ import annotations

from enum import Enum

from graphcore.moe.manifests.names import Kind


class Step(Enum):
    """One thing that is asked of the driver."""

    BEGIN_CAPTURE = "begin capture"
    END_CAPTURE = "end capture"
    INSTANTIATE = "instantiate"
    UPDATE = "update"
    LAUNCH = "launch"
    DESTROY_OLD_GRAPH = "destroy the old description"
    DESTROY_OLD_EXECUTABLE = "destroy the old executable"


_CAPTURE = (Step.BEGIN_CAPTURE, Step.END_CAPTURE)

DROP_STEPS = (Step.DESTROY_OLD_EXECUTABLE, Step.DESTROY_OLD_GRAPH)
"""How a capture goes."""


def driver_steps(
    kind: Kind, *, decode_boundary_overlap: bool = False, only_one_live: bool = False
) -> tuple[Step, ...]:
    """What a call asks of the driver, in order; a re-instantiation follows the refused update.

    With the option the old description is destroyed after the launch, which does not wait for that;
    without it before, as soon as the executable has the new one: until then a refusal is explained
    by what it runs.

    Args:
        kind: Of the call.
        decode_boundary_overlap: Whether the option is on.
        only_one_live: Whether the graph may have one live executable only (it allocates memory);
            else the new one is made before the old one goes, so that one is usable without memory.
    """
    if kind is Kind.CAPTURE:
        return (*_CAPTURE, Step.INSTANTIATE, Step.LAUNCH)
    if kind is Kind.REPLAY:
        return (Step.LAUNCH,)
    late = (Step.DESTROY_OLD_GRAPH,) if decode_boundary_overlap else ()
    if kind is Kind.UPDATE:
        if decode_boundary_overlap:
            return (*_CAPTURE, Step.UPDATE, Step.LAUNCH, *late)
        return (*_CAPTURE, Step.UPDATE, Step.DESTROY_OLD_GRAPH, Step.LAUNCH)
    if kind is Kind.REINSTANTIATE:
        change = (Step.INSTANTIATE, Step.DESTROY_OLD_EXECUTABLE)
        return (*(change[::-1] if only_one_live else change), Step.LAUNCH, *late)
    return ()
