"""The argument ``driver=``: an open driver; a name is refused with the call that opens it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import graphcore
from graphcore import Buffer, ConfigurationError, Graph

CALLS: dict[str, Callable[[Any], object]] = {
    "capture": lambda driver: graphcore.capture(driver=driver).__enter__(),
    "Graph.adopt": lambda driver: Graph.adopt(1, driver=driver),
    "Buffer.allocate": lambda driver: Buffer.allocate(4, driver=driver),
    "Buffer.view": lambda driver: Buffer.view(Buffer.allocate(4), driver=driver),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_name_in_place_of_a_driver_is_refused_with_what_opens_it(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHCORE_DRIVER", "emulated")
    with pytest.raises(ConfigurationError, match=r"pass graphcore\.open_driver\('emulated'\)"):
        CALLS[call]("emulated")


@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_driver_is_refused(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHCORE_DRIVER", "emulated")
    with pytest.raises(ConfigurationError, match="driver: expected an open driver or None, got 7"):
        CALLS[call](7)
