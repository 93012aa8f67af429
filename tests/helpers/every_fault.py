"""One fault at a time, at every call that an operation makes of the emulated driver."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Generic, TypeVar

import pytest

from graphcore.driver import Driver, active
from graphcore.driver.emulated import EmulatedDriver, faults
from graphcore.errors import GraphcoreError
from graphcore.testing import inject

State = TypeVar("State")

# what nobody asks for in an operation, and what only looks at a result
CALLS = sorted(Driver.__abstractmethods__ - {"raise_launch", "synchronize", "close"})
_NEVER = 1 << 40


Codes = Callable[[str], Sequence[str]]


def _unknown(call: str) -> tuple[str, ...]:
    return ("CUDA_ERROR_UNKNOWN",)


@dataclass(frozen=True)
class Faulted(Generic[State]):
    """An operation during which one call failed; ``error`` is None where it was swallowed."""

    where: str
    state: State
    error: BaseException | None
    before: tuple[int, ...]
    call: str = ""
    code: str = ""

    @property
    def is_noted(self) -> bool:
        """Whether the error says what it left, or is an interrupt, which nobody can undo."""
        notes = getattr(self.error, "__notes__", ())
        return isinstance(self.error, KeyboardInterrupt) or bool(notes)

    def leaves_nothing(self, driver: EmulatedDriver) -> bool:
        """Whether the driver has the handles that it had before, and no capture is under way."""
        if handles(driver) != self.before:
            gc.collect()
        return handles(driver) == self.before and active.current() is None and gc.isenabled()


def each_fault(
    prepare: Callable[[EmulatedDriver], State],
    operate: Callable[[State], object],
    codes: Codes = _unknown,
) -> Iterator[tuple[EmulatedDriver, Faulted[State]]]:
    """Does ``operate`` on a fresh state again and again, each time with another call failing.

    With each of the ``codes`` of the call in turn.
    """
    for call, count in _counts(prepare, operate).items():
        # of many calls alike the first, one in the middle and the last
        places = sorted({0, count // 2, count - 1} & set(range(count)))
        for after, code in product(places, codes(call)):
            driver = EmulatedDriver()
            state = prepare(driver)
            before = handles(driver)
            error: BaseException | None = None
            with inject(driver, call, code=code, after=after) as fault:
                try:
                    operate(state)
                except (GraphcoreError, KeyboardInterrupt) as raised:
                    error = _without_frames(raised)
            assert fault.fired == 1, (call, after)
            where = f"{call} after {after}" + f" with {code}" * (codes is not _unknown)
            yield driver, Faulted(where, state, error, before, call, code)


def _without_frames(error: BaseException) -> BaseException:
    """The error, and those behind it, without the frames that keep what they worked on alive."""
    behind: BaseException | None = error
    while behind is not None:
        behind.__traceback__ = None
        behind = behind.__cause__ or behind.__context__
    return error


def _counts(
    prepare: Callable[[EmulatedDriver], State], operate: Callable[[State], object]
) -> dict[str, int]:
    """How often each call is made."""
    driver = EmulatedDriver()
    state = prepare(driver)
    waiting = {call: driver.faults.inject(call, after=_NEVER) for call in CALLS}
    operate(state)
    driver.faults.clear()
    return {call: _NEVER - fault.good_calls for call, fault in waiting.items()}


def handles(driver: EmulatedDriver) -> tuple[int, ...]:
    """How many graphs, nodes, executables, streams and events there are, and free bytes.

    Streams that wait for the next capture are not counted: nobody has them.
    """
    machine = driver._machine
    tables = (
        machine.graphs._graphs, machine.graphs._nodes, machine.executables,
        machine.streams._streams, machine.streams.events,
    )  # fmt: skip
    counts = [len(table._items) for table in tables]
    counts[3] -= driver.capture_streams.idle
    return (*counts, machine.memory.free_bytes(driver.device))


def interrupts_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected faults are Ctrl-C from here on."""
    monkeypatch.setattr(faults, "cuda_error", lambda *_, **__: KeyboardInterrupt("injected"))
