"""DLPack both ways: the same memory in every library, for every type, inside captures too."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from helpers.libraries import Library, array_library, torch_library
from helpers.tensors import filled, replay

import graphcore
from graphcore import CacheTypeError, ConfigurationError
from graphcore.driver import Driver
from graphcore.resources import dlpack
from graphcore.resources.buffer import Buffer
from graphcore.resources.dtypes import DTYPES
from graphcore.resources.tensors import TensorRef, describe

LIBRARIES: dict[str, Callable[[Driver], Library]] = {
    "torch": torch_library,
    "arrays": array_library,
}
DTYPE_NAMES = ["float32", "float16", "bfloat16", "int32", "int64", "uint8", "bool"]


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest, graphcore_driver: Driver) -> Library:
    return LIBRARIES[request.param](graphcore_driver)


LAYOUTS: dict[str, Callable[[Library, str], Any]] = {
    "dense": lambda library, dtype: library.make((3, 4), dtype),
    "strided": lambda library, dtype: library.make((3, 4), dtype)[:, ::2],
    "transposed": lambda library, dtype: library.make((3, 4), dtype).T,
    "offset": lambda library, dtype: library.make((3, 4), dtype)[1:, 1:],
    "broadcast": lambda library, dtype: _broadcast(library, library.make((4,), dtype)),
    "scalar": lambda library, dtype: library.make((), dtype),
}


def _broadcast(library: Library, array: Any) -> Any:
    if library.name == "torch":
        return array.expand(3, 4)
    return sys.modules[library.name].broadcast_to(array, (3, 4))


# ---- from a library to graphcore and back -------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_the_same_memory_goes_out_and_comes_back(
    library: Library, graphcore_driver: Driver, dtype: str, layout: str
) -> None:
    if dtype == "bfloat16" and not library.has_bfloat16:
        # torch's memory stands in; the library must refuse it rather than misread it
        other = torch_library(graphcore_driver).make((3, 4), dtype)
        with pytest.raises((TypeError, ValueError, RuntimeError, BufferError, ImportError)):
            library.take(Buffer.view(other))
        return
    array = LAYOUTS[layout](library, dtype)
    buffer = Buffer.view(array, driver=graphcore_driver)
    assert buffer.address == library.address(array)
    assert buffer.shape == tuple(array.shape)
    assert buffer.strides == library.strides_of(array)
    assert buffer.dtype == dtype
    back = library.take(buffer)
    assert library.address(back) == library.address(array)
    assert tuple(back.shape) == tuple(array.shape)
    assert library.strides_of(back) == library.strides_of(array)
    assert library.dtype_of(back) == dtype


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_a_buffer_of_ours_is_the_same_memory_in_every_library(
    library: Library, graphcore_driver: Driver, dtype: str
) -> None:
    if dtype == "bfloat16" and not library.has_bfloat16:
        return test_the_same_memory_goes_out_and_comes_back(
            library, graphcore_driver, dtype, "dense"
        )
    buffer = Buffer.allocate((2, 3), dtype, driver=graphcore_driver)
    buffer.write(1)
    taken = library.take(buffer)
    assert library.address(taken) == buffer.address
    assert tuple(taken.shape) == (2, 3)
    assert library.dtype_of(taken) == dtype
    # written through the library, read through graphcore
    taken[:] = 0
    graphcore_driver.synchronize()
    assert not buffer.read().any()
    return None


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 4)], ids=str)
def test_zero_size_memory_keeps_shape_and_dtype(
    library: Library, graphcore_driver: Driver, shape: tuple[int, ...]
) -> None:
    array = library.make(shape, "float16")
    view = Buffer.view(array)
    assert (view.shape, view.dtype, view.nbytes) == (shape, "float16", 0)
    for source in (view, Buffer.allocate(shape, "float16", driver=graphcore_driver)):
        taken = library.take(source)
        assert tuple(taken.shape) == shape
        assert library.dtype_of(taken) == "float16"


def test_a_tensor_that_requires_grad_is_taken_detached(graphcore_driver: Driver) -> None:
    leaf = filled(graphcore_driver, 1.0).requires_grad_()
    result = leaf * 2
    for tensor in (leaf, result):
        buffer = Buffer.view(tensor)
        assert buffer.address == tensor.data_ptr()
        taken = torch.from_dlpack(buffer)
        assert taken.data_ptr() == tensor.data_ptr()
        assert not taken.requires_grad
    # a description must not keep the history of a result alive
    kept: Any = describe(result).owner
    assert kept.grad_fn is None
    assert kept.data_ptr() == result.data_ptr()
    assert describe(leaf).owner is leaf


def test_read_only_memory_is_refused_as_a_write_operand_and_told_to_consumers() -> None:
    array = numpy.ones(4, "float32")
    array.flags.writeable = False
    ref = describe(array)
    assert ref.read_only
    with pytest.raises(ConfigurationError, match="dst: expected writable memory"):
        describe(array, writable=True, name="dst")
    buffer = Buffer.view(array)
    assert buffer.read_only
    with pytest.raises(ConfigurationError, match="dst: expected writable memory"):
        describe(buffer, writable=True, name="dst")
    assert not numpy.from_dlpack(buffer).flags.writeable
    assert numpy.from_dlpack(Buffer.view(numpy.ones(4, "float32"))).flags.writeable
    with pytest.raises(BufferError, match="unversioned request"):
        buffer.__dlpack__()
    with pytest.raises(BufferError, match=r"max_version=\(0, 8\)"):
        buffer.__dlpack__(max_version=(0, 8))


def test_tensors_pass_inside_a_capture_without_disturbing_it(
    library: Library, graphcore_driver: Driver
) -> None:
    buffer = Buffer.allocate(4, "float32", driver=graphcore_driver)
    buffer.write(1.0)
    array = library.make((4,), "float32")
    through_torch = torch.from_dlpack(buffer)
    through_torch.add_(1)
    buffer.write(1.0)
    with graphcore.capture(driver=graphcore_driver) as capture:
        inside = torch.from_dlpack(buffer)
        inside.add_(1)
        assert inside.data_ptr() == buffer.address
        view = Buffer.view(array)
        assert view.address == library.address(array)
        assert library.address(library.take(view)) == view.address
        assert describe(_Producer(view)).address == view.address
    assert len(capture.graph.snapshot().nodes) == 1
    with capture.graph.instantiate() as executable:
        replay(executable, times=2)
    assert buffer.read().tolist() == [3.0] * 4


# ---- reading other producers --------------------------------------------------------------------


class _Producer:
    """Speaks DLPack only, and notes what it is asked."""

    def __init__(self, buffer: Buffer, *, old: bool = False) -> None:
        self.buffer = buffer
        self.old = old
        self.streams: list[int | None] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.buffer.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> object:
        self.streams.append(stream)
        if self.old and options:
            raise TypeError("unexpected keyword max_version")
        return self.buffer.__dlpack__(stream=stream, **options)


@pytest.mark.parametrize("old", [False, True], ids=["versioned", "before_1.0"])
def test_any_producer_is_described_without_asking_for_order(
    graphcore_driver: Driver, old: bool
) -> None:
    buffer = Buffer.allocate((2, 3), "bfloat16", driver=graphcore_driver)
    producer = _Producer(buffer, old=old)
    ref = describe(producer)
    same = ("address", "shape", "strides", "dtype", "device_kind", "device")
    assert [getattr(ref, name) for name in same] == [
        getattr(describe(buffer), name) for name in same
    ]
    # -1 asks a device producer for no order; a CPU producer takes None only
    assert set(producer.streams) == {None if graphcore_driver.is_emulated else -1}
    address = buffer.address
    # the description keeps the memory
    del buffer, producer
    gc.collect()
    assert graphcore_driver.allocation_of(address) is not None
    del ref
    gc.collect()
    assert graphcore_driver.allocation_of(address) is None


class _Broken:
    def __init__(self, capsule: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.capsule = capsule
        self.device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **_: Any) -> object:
        if isinstance(self.capsule, Exception):
            raise self.capsule
        return self.capsule


def _capsule(**changes: int) -> object:
    """A capsule of a NumPy array with some fields of its tensor changed."""
    capsule = numpy.ones(4, "float32").__dlpack__(max_version=(1, 0))
    pointer = dlpack._get_pointer(capsule, b"dltensor_versioned")
    managed = dlpack._Versioned.from_address(pointer)
    for name, value in changes.items():
        setattr(managed if hasattr(managed, name) else managed.tensor, name, value)
    return capsule


BROKEN = {
    "refuses": (BufferError("no export"), "gives no DLPack: no export"),
    "no_capsule": ("text", "expected an unused DLPack capsule"),
    "newer_major": (_capsule(major=2), "expected DLPack 1.x, got 2."),
    "vulkan": (_capsule(device_type=7), "got DLPack device type 7"),
    "int128": (_capsule(code=0, bits=128), "type code 0, 128 bits"),
    "two_lanes": (_capsule(lanes=2), "2 lanes"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_producer_we_cannot_read_is_a_type_error(case: str) -> None:
    capsule, words = BROKEN[case]
    with pytest.raises(CacheTypeError) as caught:
        describe(_Broken(capsule), name="x")
    assert words in str(caught.value)
    assert str(caught.value).startswith("x: ")


@pytest.mark.parametrize(
    ("device_type", "kind", "device"),
    [(dlpack.CUDA, "cuda", 3), (dlpack.CUDA_MANAGED, "cuda", 3), (dlpack.CUDA_HOST, "cpu", 0)],
    ids=["cuda", "managed", "pinned"],
)
def test_devices_are_understood(device_type: int, kind: str, device: int) -> None:
    ref = describe(_Broken(_capsule(device_type=device_type), (device_type, 3)))
    assert (ref.device_kind, ref.device) == (kind, device)


def test_a_byte_offset_counts() -> None:
    capsule = _capsule(byte_offset=8)
    base = describe(_Broken(_capsule())).address
    assert describe(_Broken(capsule)).address % 16 == (base + 8) % 16


def test_missing_strides_mean_dense() -> None:
    capsule = numpy.ones((2, 3), "float32").__dlpack__(max_version=(1, 0))
    managed = dlpack._Versioned.from_address(dlpack._get_pointer(capsule, b"dltensor_versioned"))
    managed.tensor.strides = ctypes.POINTER(ctypes.c_int64)()
    assert describe(_Broken(capsule)).strides == (3, 1)


# ---- who keeps what alive -----------------------------------------------------------------------


class _Owner:
    pass


def _export(version: tuple[int, int] | None) -> tuple[object, weakref.ref[_Owner]]:
    owner = _Owner()
    memory = (ctypes.c_float * 4)()
    owner.memory = memory  # type: ignore[attr-defined]
    ref = TensorRef(ctypes.addressof(memory), (4,), (1,), "float32", 4, "cpu")
    return dlpack.make_capsule(ref, owner, version), weakref.ref(owner)


VERSIONS = [None, (0, 8), (1, 0), (1, 3)]


@pytest.mark.parametrize("version", VERSIONS, ids=str)
def test_a_capsule_nobody_consumes_lets_its_owner_go(version: tuple[int, int] | None) -> None:
    capsule, owner = _export(version)
    gc.collect()
    assert owner() is not None
    del capsule
    assert owner() is None


@pytest.mark.parametrize("version", VERSIONS, ids=str)
def test_a_consumer_keeps_the_owner_until_its_tensor_dies(version: tuple[int, int] | None) -> None:
    capsule, owner = _export(version)
    tensor = torch.from_dlpack(capsule)
    del capsule
    view = tensor[1:]
    del tensor
    gc.collect()
    assert owner() is not None
    del view
    assert owner() is None


def test_a_capsule_dies_quietly_while_an_exception_is_in_flight() -> None:
    capsule, owner = _export((1, 0))
    held = [capsule]
    del capsule

    def consume() -> None:
        only_reference = held.pop()
        raise KeyError(type(only_reference).__name__)

    with pytest.raises(KeyError, match="PyCapsule") as caught:
        consume()
    del caught
    gc.collect()
    assert owner() is None


def test_exports_alive_at_the_end_of_the_process_do_no_harm() -> None:
    script = """
import torch, graphcore
from graphcore.resources.buffer import Buffer
driver = graphcore.open_driver("emulated")
buffer = Buffer.allocate(4, driver=driver)
torch.kept = torch.from_dlpack(buffer)
capsule = buffer.__dlpack__()
print("end")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_every_type_goes_out_under_its_own_code() -> None:
    for name, dtype in DTYPES.items():
        memory = (ctypes.c_char * 64)()
        ref = TensorRef(
            ctypes.addressof(memory), (2,), (1,), name, dtype.itemsize, "cuda", device=5
        )
        capsule = dlpack.make_capsule(ref, memory, (1, 0))
        tensor, _ = dlpack._open(capsule, "test")
        assert (tensor.code, tensor.bits, tensor.lanes) == (dtype.code, 8 * dtype.itemsize, 1)
        assert (tensor.device_type, tensor.device_id) == (dlpack.CUDA, 5)
        # and back
        read = describe(_Broken(capsule, (dlpack.CUDA, 5)))
        assert (read.dtype, read.device_kind, read.device) == (name, "cuda", 5)
