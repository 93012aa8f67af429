"""Faults on purpose: a call of the emulated driver fails, as it might on a device some day."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import TYPE_CHECKING

from graphcore.driver import Driver
from graphcore.errors import ConfigurationError, GraphcoreWarning
from graphcore.testing.checks import full_code

if TYPE_CHECKING:
    from graphcore.driver.emulated.faults import Fault, Faults


class Injection:
    """A fault that waits in a driver. Made by :func:`inject`; in a ``with`` it ends with the block.

    ``fired`` counts the calls that failed. A block in which none did ends with a
    ``GraphcoreWarning``: what it tested was not put to the test.
    """

    def __init__(self, faults: Faults, fault: Fault) -> None:
        self._faults = faults
        self._fault = fault

    @property
    def fired(self) -> int:
        return self._fault.fired

    @property
    def is_spent(self) -> bool:
        """Whether as many calls have failed as were to."""
        return self._fault.fired == self._fault.count

    def cancel(self) -> None:
        """Lets the calls that have not failed yet go well; a second call does nothing."""
        self._faults.cancel(self._fault)

    def __enter__(self) -> Injection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()
        if kind is None and not self.fired:
            warnings.warn(
                f"inject: {self!r}: the block was left, and nothing failed in it: it did not call "
                f"{self._fault.call} often enough",
                GraphcoreWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        fault = self._fault
        return f"<Injection {fault.code} into {fault.call}: {fault.fired} of {fault.count} fired>"


def inject(
    driver: Driver,
    call: str,
    *,
    code: str = "CUDA_ERROR_UNKNOWN",
    count: int = 1,
    after: int = 0,
) -> Injection:
    """Makes a call of an emulated driver fail before it does anything.

    From then on, or in a block only: ``with inject(driver, "alloc", code="OUT_OF_MEMORY"): ...``.
    Faults of one call queue up, and fire in the order in which they were injected.

    Args:
        driver: An emulated driver.
        call: A method of :class:`graphcore.driver.Driver`: "alloc", "launch" (torch's operations in
            a capture count too), "instantiate", "launch_graph" (bound launches count too), ...
        code: Name of the CUDA error; the prefix ``CUDA_ERROR_`` may be left out.
        count: How many calls fail, at least 1.
        after: How many calls go well first.

    Raises:
        ConfigurationError: A driver that is not emulated, an unknown call or code, or a number that
            makes no sense.
    """
    faults: Faults | None = getattr(driver, "faults", None)
    if faults is None:
        raise ConfigurationError(
            f"driver: expected an emulated one, got {getattr(driver, 'name', driver)!r}; a device "
            "cannot be told to fail"
        )
    return Injection(faults, faults.inject(call, count, after, full_code(code)))
