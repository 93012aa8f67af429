"""In which order a call asks what of the driver: launch before destroy, new before old."""

from __future__ import annotations

import pytest

from graphcore.moe.decisions.driver_steps import DROP_STEPS, Step, driver_steps
from graphcore.moe.manifests.names import Kind

BEGIN, END, MAKE, UPDATE, LAUNCH, GRAPH, EXECUTABLE = Step

ROWS: dict[str, tuple[Kind, bool, bool, tuple[Step, ...]]] = {
    "capture, off": (Kind.CAPTURE, False, False, (BEGIN, END, MAKE, LAUNCH)),
    "capture, on": (Kind.CAPTURE, True, False, (BEGIN, END, MAKE, LAUNCH)),
    "replay, off": (Kind.REPLAY, False, False, (LAUNCH,)),
    "replay, on": (Kind.REPLAY, True, False, (LAUNCH,)),
    "update, off": (Kind.UPDATE, False, False, (BEGIN, END, UPDATE, GRAPH, LAUNCH)),
    "update, on": (Kind.UPDATE, True, False, (BEGIN, END, UPDATE, LAUNCH, GRAPH)),
    "re-instantiate, off": (Kind.REINSTANTIATE, False, False, (MAKE, EXECUTABLE, LAUNCH)),
    "re-instantiate, on": (Kind.REINSTANTIATE, True, False, (MAKE, EXECUTABLE, LAUNCH, GRAPH)),
    "re-instantiate, off, one live": (
        Kind.REINSTANTIATE, False, True, (EXECUTABLE, MAKE, LAUNCH),
    ),
    "re-instantiate, on, one live": (
        Kind.REINSTANTIATE, True, True, (EXECUTABLE, MAKE, LAUNCH, GRAPH),
    ),
    **{
        kind.name.lower(): (kind, True, False, ())
        for kind in (Kind.DIRECT, Kind.STAGED, Kind.DECLINED, Kind.FAILED)
    },
}  # fmt: skip


@pytest.mark.parametrize(("kind", "on", "one_live", "steps"), ROWS.values(), ids=ROWS)
def test_a_call_asks_in_order(
    kind: Kind, on: bool, one_live: bool, steps: tuple[Step, ...]
) -> None:
    found = driver_steps(kind, decode_boundary_overlap=on, only_one_live=one_live)
    assert found == steps
    assert found.count(LAUNCH) == bool(steps)


def test_every_kind_has_its_order() -> None:
    assert {kind for kind, *_ in ROWS.values()} == set(Kind)


def test_an_executable_goes_before_its_description() -> None:
    assert DROP_STEPS == (EXECUTABLE, GRAPH)
