"""Every driver call of every operation fails with every code that it can give.

The error is one of graphcore's and says which call answered what; nothing is left behind, and the
next operation is right. Long operations meet one code at each place, ``FAULTS=all`` every code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.every_fault import CALLS, Faulted, each_fault
from helpers.fault_codes import OF_ITSELF, codes_of, unlisted
from helpers.fault_sites import CACHES, EXPERTS, GRAPHS

from graphcore import CaptureError, CudaError, GraphcoreError
from graphcore.driver import active
from graphcore.driver.codes import code_names
from graphcore.driver.emulated import EmulatedDriver

# what no finalizer can raise is a warning
pytestmark = [
    pytest.mark.filterwarnings("ignore::graphcore.GraphcoreWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def one_of(call: str) -> Iterator[str]:
    """Codes of ``call`` in turn, one for each time it is asked for."""
    while True:
        yield from codes_of(call)


class InTurn:
    """One code for each place, so that a long operation meets all of them in the end."""

    def __init__(self) -> None:
        self._codes = {call: one_of(call) for call in CALLS}

    def __call__(self, call: str) -> tuple[str, ...]:
        return (next(self._codes[call]),)


def errors_behind(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def says(faulted: Faulted[Any]) -> bool:
    """Whether the error, or one behind it, carries the code, names it and the call."""
    return any(
        isinstance(error, CudaError | CaptureError)
        and error.code == faulted.code
        and faulted.code in str(error)
        for error in errors_behind(faulted.error)
    )


def check_all(make: Callable[[EmulatedDriver], Any], codes: Callable[[str], Any]) -> dict[str, int]:
    """Does the operation of ``make`` with each fault; how many raised, and how many did not."""
    right = make(EmulatedDriver()).again()
    counted = {"raised": 0, "made good": 0}
    for driver, faulted in each_fault(make, lambda site: site.operate(), codes):
        site, where = faulted.state, faulted.where
        assert active.current() is None, where
        if faulted.error is None:
            counted["made good"] += 1
        else:
            counted["raised"] += 1
            assert isinstance(faulted.error, GraphcoreError), (where, faulted.error)
            assert says(faulted), (where, faulted.error)
            assert str(faulted.error).count("\n") < 12, where
        assert site.again() == right, where
        driver.faults.clear()
    return counted


@pytest.mark.parametrize("make", GRAPHS.values(), ids=GRAPHS)
def test_an_operation_on_graphs_with_every_code_at_every_call_says_so_and_is_right_the_next_time(
    make: Callable[[EmulatedDriver], Any],
) -> None:
    counted = check_all(make, codes_of)
    assert counted["raised"] >= 3


@pytest.mark.parametrize("make", [*CACHES.values(), *EXPERTS.values()], ids=[*CACHES, *EXPERTS])
def test_a_step_with_a_code_at_every_call_says_so_and_is_right_the_next_time(
    make: Callable[[EmulatedDriver], Any],
) -> None:
    counted = check_all(make, codes_of if os.environ.get("FAULTS") == "all" else InTurn())
    assert counted["raised"] >= 1


CREATING = (
    "capture a function",
    "capture with a branch",
    "build a plan",
    "instantiate, guarded",
    "clone",
    "memory",
    "an output",
)


@pytest.mark.parametrize("name", CREATING)
def test_what_makes_something_new_has_made_nothing_where_any_call_fails(
    name: str,
) -> None:
    failed = 0
    for driver, faulted in each_fault(GRAPHS[name], lambda site: site.operate(), InTurn()):
        if faulted.error is not None and "destroy" not in faulted.call and faulted.call != "free":
            failed += 1
            assert faulted.leaves_nothing(driver), faulted.where
    assert failed >= 1


def test_every_call_of_the_driver_has_its_codes_and_every_code_is_one_of_cudas() -> None:
    made_of_others = {"bind_launch", "raise_launch", "synchronize", "close"}
    assert unlisted() == made_of_others
    assert OF_ITSELF.keys() == set(CALLS) - made_of_others
    known = set(code_names())
    for call in OF_ITSELF:
        codes = codes_of(call)
        assert len(codes) == len(set(codes)) >= 3
        assert set(codes) <= known
    assert sum(len(codes_of(call)) for call in OF_ITSELF) > 350
