"""The pytest plugin: one suite, two drivers, and what came of it.

Fixture ``graphcore_driver`` runs a test once on the emulated driver and once, marked ``gpu``, on
CUDA. A test marked ``gpu`` is skipped, with the reason, where no device is usable; one marked
``exclusive`` too runs beside no other gpu test of a parallel run. Those marked ``lengthy`` begin a
parallel run, so that nobody waits for them at its end; exclusive ones end it. Installed with
graphcore; ``-p graphcore.testing.plugin`` loads it from a checkout.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from graphcore.driver import Driver, open_driver
from graphcore.errors import DriverUnavailable
from graphcore.testing.exclusive import device_lock, lock_folder
from graphcore.testing.outcomes import Recorder


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("graphcore")
    group.addoption(
        "--graphcore-outcomes", metavar="FOLDER", type=Path,
        help="write the outcome of every test of a driver to FOLDER/<driver>.json",
    )  # fmt: skip
    group.addoption(
        "--graphcore-summary", metavar="FILE", type=Path,
        help="write commit, device, counts and skip reasons of the run to FILE (JSON)",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device (skipped where there is none)")
    config.addinivalue_line(
        "markers", "exclusive: a gpu test that no other gpu test of a parallel run may run beside"
    )
    config.addinivalue_line(
        "markers", "lengthy: takes many seconds (a compilation); a parallel run begins with it"
    )
    outcomes, summary = (
        config.getoption(name) for name in ("--graphcore-outcomes", "--graphcore-summary")
    )
    is_worker = hasattr(config, "workerinput")  # pytest-xdist: the controller sees every report
    if (outcomes or summary) and not is_worker:
        config.pluginmanager.register(Recorder(outcomes, summary), "graphcore-recorder")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the tests of a parallel run in order; give pytest-xdist ``--maxschedchunk=1``."""
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    if item.get_closest_marker("lengthy") is not None:
        return 0
    return 2 if item.get_closest_marker("exclusive") is not None else 1


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        reason = why_no_gpu()
        if reason is not None:
            pytest.skip(reason)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: waiting is in no test's time limit
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Lets a test marked ``exclusive`` have the device alone among the workers of pytest-xdist."""
    if item.get_closest_marker("gpu") is None or why_no_gpu() is not None:
        return (yield)
    exclusive = item.get_closest_marker("exclusive") is not None
    with device_lock(lock_folder(), exclusive=exclusive):
        return (yield)


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def graphcore_driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """An open driver: ``emulated``, then ``cuda`` (skipped with the reason where there is none)."""
    driver = open_driver(request.param)
    yield driver
    driver.close()


@functools.cache
def why_no_gpu() -> str | None:
    """Why no CUDA device is usable here; None where one is."""
    try:
        open_driver("cuda").close()
    except DriverUnavailable as error:
        return str(error)
    return None
