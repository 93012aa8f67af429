"""Buffer: memory of a driver, its layout, its contents, and when it is given back."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import numpy
import pytest
import torch
from helpers.tensors import filled

import graphcore
from graphcore import CacheTypeError, ConfigurationError, CudaError, LifecycleError
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import GraphcoreWarning
from graphcore.resources.buffer import Buffer


def test_new_memory_has_the_layout_that_was_asked_for(graphcore_driver: Driver) -> None:
    buffer = Buffer.allocate((2, 3), "float16", driver=graphcore_driver)
    assert (buffer.shape, buffer.strides, buffer.dtype) == ((2, 3), (3, 1), "float16")
    assert (buffer.itemsize, buffer.nbytes, buffer.read_only) == (2, 12, False)
    assert buffer.driver is graphcore_driver
    found = graphcore_driver.allocation_of(buffer.address)
    assert found is not None
    assert found.base == buffer.address
    assert Buffer.allocate(5, torch.int64, driver=graphcore_driver).nbytes == 40


def test_contents_go_in_and_out(graphcore_driver: Driver) -> None:
    buffer = Buffer.allocate((2, 3), "float32", driver=graphcore_driver)
    buffer.write([[1, 2, 3], [4, 5, 6]])
    assert buffer.read().tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    buffer.write(numpy.array([7.0, 8.0, 9.0]))
    assert buffer.read().tolist() == [[7.0, 8.0, 9.0]] * 2
    buffer.write(0)
    assert buffer.read().tolist() == [[0.0] * 3] * 2
    empty = Buffer.allocate((0, 3), "float32", driver=graphcore_driver)
    empty.write(1)
    assert empty.read().shape == (0, 3)


@pytest.mark.parametrize("shape", [(-1,), (2, -3), "ab", 2.5, (1.5,)], ids=repr)
def test_a_shape_that_cannot_be_is_refused(graphcore_driver: Driver, shape: Any) -> None:
    with pytest.raises(ConfigurationError, match="shape: expected"):
        Buffer.allocate(shape, driver=graphcore_driver)


def test_an_unknown_type_is_refused_before_anything_is_allocated() -> None:
    driver = EmulatedDriver()
    free = driver.memory_info()[0]
    with pytest.raises(CacheTypeError, match="dtype: expected"):
        Buffer.allocate(4, "float99", driver=driver)
    assert driver.memory_info()[0] == free


def test_too_much_memory_is_the_drivers_error(graphcore_driver: Driver) -> None:
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        Buffer.allocate(2**50, driver=graphcore_driver)


def test_without_a_driver_the_kept_default_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHCORE_DRIVER", "emulated")
    one, two = Buffer.allocate(4), Buffer.allocate(4)
    assert one.driver is two.driver
    assert one.driver is not None
    assert one.driver.is_emulated


WRONG_CONTENTS = {
    "text": ("float32", "abc", "expected numbers"),
    "nothing": ("float32", None, "expected numbers"),
    "unequal lists": ("float32", [[1, 2], [3]], "expected numbers"),
    "complex into real": ("float32", [1j] * 4, "that float32 holds"),
    "too large": ("int8", [300] * 4, "that int8 holds"),
    "too large in an array": ("int8", numpy.array([300] * 4), "that int8 holds"),
    "negative into unsigned": ("uint8", -1, "that uint8 holds"),
    "a fraction": ("int32", [1.5] * 4, "that int32 holds"),
    "not a number": ("int32", float("nan"), "that int32 holds"),
    "two into bool": ("bool", 2, "that bool holds"),
    "numbers where bits are meant": ("bfloat16", [1.0] * 4, "expected the bits of bfloat16"),
}


@pytest.mark.parametrize("case", WRONG_CONTENTS)
def test_contents_that_the_type_does_not_hold_are_refused_and_nothing_is_written(
    graphcore_driver: Driver, case: str
) -> None:
    dtype, values, message = WRONG_CONTENTS[case]
    buffer = Buffer.allocate(4, dtype, driver=graphcore_driver)
    buffer.write(1)
    with pytest.raises(ConfigurationError, match=f"values: .*{message}"):
        buffer.write(values)
    assert buffer.read().tolist() == [1] * 4


@pytest.mark.parametrize(
    ("dtype", "values"),
    [("uint8", [1, 2, 3, 255]), ("int32", [1.0, 2.0, 3.0, 4.0]), ("bool", [True, 0, 1, False])],
)
def test_numbers_that_the_type_holds_are_written(
    graphcore_driver: Driver, dtype: str, values: list[Any]
) -> None:
    buffer = Buffer.allocate(4, dtype, driver=graphcore_driver)
    buffer.write(values)
    assert buffer.read().tolist() == values


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_buffer_is_not_copied(graphcore_driver: Driver, duplicate: Any) -> None:
    buffer = Buffer.allocate(4, driver=graphcore_driver)
    with pytest.raises(CacheTypeError, match="cannot be copied or pickled"):
        duplicate(buffer)


# ---- given back ---------------------------------------------------------------------------------


def is_allocated(driver: Driver, address: int) -> bool:
    return driver.allocation_of(address) is not None


def test_memory_goes_back_when_the_buffer_is_closed(graphcore_driver: Driver) -> None:
    with Buffer.allocate(4, driver=graphcore_driver) as buffer:
        address = buffer.address
        assert is_allocated(graphcore_driver, address)
    assert buffer.is_closed
    assert not is_allocated(graphcore_driver, address)
    buffer.close()


def test_memory_goes_back_when_the_buffer_is_dropped(graphcore_driver: Driver) -> None:
    buffer = Buffer.allocate(4, driver=graphcore_driver)
    address = buffer.address
    del buffer
    gc.collect()
    assert not is_allocated(graphcore_driver, address)


HOLDERS = {
    "torch": torch.from_dlpack,
    "view": Buffer.view,
    "capsule": lambda buffer: buffer.__dlpack__(),
    "description": lambda buffer: buffer.__graphcore_tensor__(),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_that_others_hold_outlives_the_buffer(graphcore_driver: Driver, holder: str) -> None:
    buffer = Buffer.allocate(4, driver=graphcore_driver)
    buffer.write(3.0)
    address = buffer.address
    held = HOLDERS[holder](buffer)
    buffer.close()
    del buffer
    gc.collect()
    assert is_allocated(graphcore_driver, address)
    assert graphcore_driver.read(address, 4) == numpy.float32(3).tobytes()
    del held
    gc.collect()
    assert not is_allocated(graphcore_driver, address)


def test_an_array_interface_keeps_the_memory_of_a_closed_buffer() -> None:
    driver = EmulatedDriver()
    buffer = Buffer.allocate(4, driver=driver)
    buffer.write(2.0)
    address = buffer.address
    array = numpy.asarray(buffer)
    buffer.close()
    del buffer
    gc.collect()
    assert array.tolist() == [2.0] * 4
    assert is_allocated(driver, address)
    del array
    gc.collect()
    assert not is_allocated(driver, address)


def test_memory_freed_inside_a_capture_goes_back_after_it(graphcore_driver: Driver) -> None:
    buffer = Buffer.allocate(4, driver=graphcore_driver)
    address = buffer.address
    x = filled(graphcore_driver, 1.0)
    with graphcore.capture(driver=graphcore_driver) as capture:
        buffer.close()
        del buffer
        x.add_(1)
    assert not is_allocated(graphcore_driver, address)
    assert len(capture.graph.snapshot().nodes) == 1


def test_a_free_that_fails_is_a_warning() -> None:
    driver = EmulatedDriver()
    buffer = Buffer.allocate(4, driver=driver)
    driver.faults.inject("free")
    with pytest.warns(GraphcoreWarning, match="while freeing a buffer"):
        buffer.close()


def test_a_closed_buffer_says_so_for_every_use(graphcore_driver: Driver) -> None:
    buffer = Buffer.allocate(4, driver=graphcore_driver)
    buffer.close()
    assert repr(buffer) == "<Buffer closed>"
    uses: list[Any] = [
        buffer.read,
        buffer.__dlpack__,
        buffer.__dlpack_device__,
        lambda: buffer.address,
        lambda: buffer.write(1),
        lambda: buffer.owner,
    ]
    for use in uses:
        with pytest.raises(LifecycleError, match="expected an open buffer"):
            use()


# ---- views and protocols ------------------------------------------------------------------------


def test_a_view_is_the_same_memory_and_keeps_its_tensor(graphcore_driver: Driver) -> None:
    tensor = filled(graphcore_driver, 1.0, 2, 4)[:, ::2]
    view = Buffer.view(tensor)
    assert view.owner is tensor
    assert view.address == tensor.data_ptr()
    assert f"{view.address:#x}" in repr(view)
    assert "float32[2, 2]" in repr(view)


def test_contents_of_a_view_need_a_driver_and_dense_memory(graphcore_driver: Driver) -> None:
    tensor = filled(graphcore_driver, 1.0, 2, 4)
    with pytest.raises(ConfigurationError, match=r"buffer\.read: .* without a driver"):
        Buffer.view(tensor).read()
    with pytest.raises(ConfigurationError, match=r"buffer\.write: expected contiguous"):
        Buffer.view(tensor[:, ::2], driver=graphcore_driver).write(0)
    view = Buffer.view(tensor, driver=graphcore_driver)
    view.write(5.0)
    assert tensor.tolist() == [[5.0] * 4] * 2
    assert Buffer.view(view).driver is graphcore_driver


def test_values_of_another_shape_or_for_read_only_memory_are_refused() -> None:
    driver = EmulatedDriver()
    buffer = Buffer.allocate((2, 3), driver=driver)
    buffer.write(1.0)
    with pytest.raises(ConfigurationError, match=r"values: expected shape \(2, 3\)"):
        buffer.write([1.0, 2.0])
    assert buffer.read().tolist() == [[1.0] * 3] * 2
    array = numpy.ones(3, "float32")
    array.flags.writeable = False
    with pytest.raises(ConfigurationError, match="read-only"):
        Buffer.view(array, driver=driver).write(0)
    assert array.tolist() == [1.0] * 3


def test_each_driver_has_its_array_interface(graphcore_driver: Driver) -> None:
    buffer = Buffer.allocate((2, 3), "float16", driver=graphcore_driver)
    here, elsewhere = "__array_interface__", "__cuda_array_interface__"
    if not graphcore_driver.is_emulated:
        here, elsewhere = elsewhere, here
    interface = getattr(buffer, here)
    assert interface["data"] == (buffer.address, False)
    assert (interface["shape"], interface["strides"]) == ((2, 3), (6, 2))
    assert interface["typestr"] == "<f2"
    assert not hasattr(buffer, elsewhere)
    other = Buffer.allocate(4, "bfloat16", driver=graphcore_driver)
    assert not hasattr(other, here), "NumPy has no name for this type"


def test_an_export_never_copies_and_never_moves(graphcore_driver: Driver) -> None:
    buffer = Buffer.allocate(4, driver=graphcore_driver)
    with pytest.raises(BufferError, match="copy: expected False or None"):
        buffer.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="dl_device: expected"):
        buffer.__dlpack__(dl_device=(9, 0))
    assert buffer.__dlpack__(copy=False, dl_device=buffer.__dlpack_device__()) is not None
    assert buffer.__dlpack__(stream=-1, max_version=(1, 0)) is not None
