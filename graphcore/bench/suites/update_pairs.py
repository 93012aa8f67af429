"""Pairs of chains for suite update: the same kernels on other memory, and steps between the two.

A step makes an executable run the other chain and launches it: whoever does not is found out.
"""

from __future__ import annotations

from collections.abc import Callable

from graphcore.bench.harness import Arm, Effort, python_arm
from graphcore.bench.suites import Request
from graphcore.bench.suites.chain import Chain
from graphcore.driver import Driver
from graphcore.errors import GraphcoreError

Pair = tuple[Chain, Chain]
"""Two chains of one length; executables begin with the first, so a first call takes the second."""

Step = Callable[[], object]


def pair_arm(pair: Pair, name: str, step: Step) -> Arm:
    """The arm of a step that was checked by :func:`check_pair`."""
    check_pair(name, step, pair)
    return python_arm(name, step)


def check_pair(name: str, step: Step, pair: Pair) -> None:
    """Two calls, of which the first must run the second chain and the second the first one.

    Raises:
        GraphcoreError: The arm ``name`` did something else.
    """
    for target, other in (pair[::-1], pair):
        target.clear()
        other.clear()
        step()
        found = target.sum(), other.sum()
        if found != (target.length, 0):
            raise GraphcoreError(
                f"bench update: arm {name}: expected one call to add {target.length} to one sum "
                f"and nothing to the other, got {found}"
            )


def effort(driver: Driver, request: Request) -> Effort:
    """So few calls in a burst that the device's queue stays far from full."""
    if driver.is_emulated:
        return Effort(rounds=2, bursts=1, calls=2)
    return Effort(rounds=request.rounds, bursts=8, calls=4)
