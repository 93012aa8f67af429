"""The argument ``driver=`` of public calls: an open driver, not its name."""

from __future__ import annotations

from typing import Any

from graphcore.driver.api import Driver
from graphcore.errors import ConfigurationError


def checked_driver(driver: Any) -> Driver:
    """``driver``, if it is one.

    Raises:
        ConfigurationError: It is something else, a driver's name for example.
    """
    if isinstance(driver, Driver):
        return driver
    remedy = f"; pass graphcore.open_driver({driver!r})" if isinstance(driver, str) else ""
    raise ConfigurationError(f"driver: expected an open driver or None, got {driver!r}{remedy}")
