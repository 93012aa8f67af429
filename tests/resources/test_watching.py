"""Watching memory without keeping it: what is told of it, and who hears when it goes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from helpers.tensors import filled

from graphcore import CacheTypeError, ConfigurationError
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.resources.buffer import Buffer
from graphcore.resources.tensors import describe
from graphcore.resources.watching import Alarm, Watch, life_of, watch_all


def heard(*watches: Watch) -> tuple[Alarm, list[int]]:
    rung: list[int] = []
    alarm = Alarm(lambda: rung.append(1))
    for watch in watches:
        alarm.hear(*watch.living())
    return alarm, rung


def test_a_watched_tensor_is_not_kept_and_its_end_is_heard(graphcore_driver: Driver) -> None:
    x = filled(graphcore_driver, 1.0)
    watch = Watch("x", x, graphcore_driver)
    _alarm, rung = heard(watch)
    assert watch.stale(graphcore_driver) is None
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    assert rung == [1]
    stale = watch.stale(graphcore_driver)
    assert stale is not None
    assert (stale.label, stale.field) == ("x", "memory")
    assert stale.actual == "memory that its owner has let go"


def test_a_view_that_is_left_keeps_the_memory_valid_and_quiet(graphcore_driver: Driver) -> None:
    x = filled(graphcore_driver, 1.0)
    watch = Watch("x", x, graphcore_driver)
    _alarm, rung = heard(watch)
    view = x[1:]
    del x
    gc.collect()
    assert watch.stale(graphcore_driver) is None
    del view
    gc.collect()
    assert rung
    assert watch.stale(graphcore_driver) is not None


def test_a_tensor_given_other_memory_is_heard_and_told(graphcore_driver: Driver) -> None:
    x = filled(graphcore_driver, 1.0)
    watch = Watch("x", x, graphcore_driver)
    _alarm, rung = heard(watch)
    x.data = x.detach().clone()
    gc.collect()
    assert rung == [1]
    assert watch.stale(graphcore_driver) is not None


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "moved, the old memory held": (lambda x: setattr(x, "data", x.detach().clone()), "address"),
    "shrunk": (lambda x: x.resize_(1), "nbytes"),
    "retyped": (lambda x: setattr(x, "data", x.detach().view(torch.int32)), "dtype"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_of_a_watched_tensor_is_named(graphcore_driver: Driver, change: str) -> None:
    act, field = CHANGES[change]
    x = filled(graphcore_driver, 1.0)
    view = x.detach()
    watch = Watch("x", x, graphcore_driver)
    act(x)
    stale = watch.stale(graphcore_driver)
    assert stale is not None
    assert stale.field == field
    assert view.data_ptr() == watch.extent[0]


def test_a_buffer_is_heard_when_it_is_closed(graphcore_driver: Driver) -> None:
    buffer = Buffer.allocate(4, driver=graphcore_driver)
    watch = Watch("scratch", buffer, graphcore_driver)
    _alarm, rung = heard(watch)
    exported = torch.from_dlpack(buffer)
    buffer.close()
    assert rung
    stale = watch.stale(graphcore_driver)
    assert stale is not None
    assert "closed" in stale.actual
    assert exported.numel() == 4


def test_raw_memory_is_told_by_its_allocation() -> None:
    driver = EmulatedDriver()
    address = driver.alloc(64)
    raw = Watch("raw", (address, 64), driver)
    described = Watch("ref", describe(Buffer.view(numpy.zeros(4))), driver)
    assert raw.living() == []
    assert raw.stale(driver) is None
    assert described.stale(driver) is None
    driver.free(address)
    assert driver.alloc(64) == address
    stale = raw.stale(driver)
    assert stale is not None
    assert stale.field == "allocation"


def test_memory_of_an_array_outlives_its_views() -> None:
    driver = EmulatedDriver()
    array = numpy.zeros(8)
    watch = Watch("tail", array[4:], driver)
    gc.collect()
    assert watch.stale(driver) is None
    del array
    gc.collect()
    assert watch.stale(driver) is not None


def test_what_cannot_be_held_weakly_is_told_by_its_allocation() -> None:
    class Slotted:
        __slots__ = ("buffer",)

        def __init__(self, buffer: Buffer) -> None:
            self.buffer = buffer

        def __graphcore_tensor__(self) -> Any:
            return self.buffer.__graphcore_tensor__()

    driver = EmulatedDriver()
    buffer = Buffer.allocate(4, driver=driver)
    watch = Watch("slotted", Slotted(buffer), driver)
    assert watch.stale(driver) is None
    del buffer
    gc.collect()
    stale = watch.stale(driver)
    assert stale is not None
    assert stale.field == "memory"


def test_what_has_attributes_but_no_weak_references_is_heard_all_the_same() -> None:
    class Chunk:  # as CuPy's pieces of a pool are
        __slots__ = ("__dict__",)

    chunk = Chunk()
    with pytest.raises(TypeError):
        weakref.ref(chunk)
    life = weakref.ref(life_of(chunk))
    assert life() is life_of(chunk)
    del chunk
    gc.collect()
    assert life() is None
    itself = EmulatedDriver()
    assert life_of(itself) is itself
    assert life_of(3) == 3


@pytest.mark.gpu
def test_a_cupy_array_given_back_to_its_pool_is_heard_and_told(graphcore_driver: Driver) -> None:
    if graphcore_driver.is_emulated:
        pytest.skip("CuPy has no memory on the emulated driver")
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.Device(graphcore_driver.device):
        x = cupy.ones(64, "float32")
        view = x[8:]
        watch = Watch("x", x, graphcore_driver)
        _alarm, rung = heard(watch)
        del x
        gc.collect()
        assert watch.stale(graphcore_driver) is None, "a view holds the chunk"
        del view
        gc.collect()
        again = cupy.ones(64, "float32")  # the pool gives out the same chunk
        assert rung == [1]
        stale = watch.stale(graphcore_driver)
        assert stale is not None
        assert stale.actual == "memory that its owner has let go"
        del again


def test_a_closed_alarm_hears_nothing(graphcore_driver: Driver) -> None:
    x, buffer = filled(graphcore_driver, 1.0), Buffer.allocate(4, driver=graphcore_driver)
    alarm, rung = heard(Watch("x", x, graphcore_driver), Watch("b", buffer, graphcore_driver))
    alarm.close()
    buffer.close()
    del x, buffer
    gc.collect()
    assert rung == []


def test_an_alarm_that_is_gone_is_not_kept_by_what_it_hears() -> None:
    buffer = Buffer.allocate(4, driver=EmulatedDriver())
    alarm = Alarm(lambda: None)
    alarm.hear(buffer, 3)
    gone = weakref.ref(alarm)
    del alarm
    gc.collect()
    assert gone() is None
    buffer.close()


@pytest.mark.parametrize("wrong", [["x"], "x", 3], ids=repr)
def test_names_that_are_no_mapping_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="names: expected a mapping"):
        watch_all(wrong, EmulatedDriver())


@pytest.mark.parametrize(
    ("wrong", "error"),
    [("text", CacheTypeError), (None, CacheTypeError), ((-1, 4), ConfigurationError)],
    ids=repr,
)
def test_what_is_no_memory_cannot_be_watched(wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="x"):
        watch_all({"x": wrong}, EmulatedDriver())
