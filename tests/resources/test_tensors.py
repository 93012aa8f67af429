"""describe(): every kind of tensor as address, shape, strides, type and device, or refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from helpers.tensors import device_of

from graphcore import CacheTypeError
from graphcore.driver import Driver
from graphcore.resources.buffer import Buffer
from graphcore.resources.dtypes import DTYPES, find_dtype
from graphcore.resources.tensors import TensorRef, contiguous_strides, describe, is_tensor


def test_torch_tensors_are_described_by_their_own_attributes(graphcore_driver: Driver) -> None:
    device = device_of(graphcore_driver)
    base = torch.arange(24.0, device=device).reshape(4, 6)
    ref = describe(base[1:, ::2])
    assert ref.address == base.data_ptr() + 6 * 4
    assert (ref.shape, ref.strides, ref.dtype, ref.itemsize) == ((3, 3), (6, 2), "float32", 4)
    assert (ref.size, ref.nbytes, ref.is_contiguous) == (9, 36, False)
    assert ref.device_kind == ("cpu" if graphcore_driver.is_emulated else "cuda")
    assert ref.device == graphcore_driver.device
    assert not ref.read_only


@pytest.mark.parametrize(
    "dtype", [name for name in DTYPES if hasattr(torch, name) and name not in ("uint16",)]
)
def test_every_torch_type_has_its_name_and_size(dtype: str) -> None:
    tensor = torch.empty(3, dtype=getattr(torch, dtype))
    ref = describe(tensor)
    assert (ref.dtype, ref.itemsize) == (dtype, tensor.element_size())


@pytest.mark.parametrize("dtype", [d.name for d in DTYPES.values() if d.is_numpy])
def test_numpy_arrays_are_described(dtype: str) -> None:
    array = numpy.ones((4, 6), dtype)[::2, ::-1]
    ref = describe(array)
    assert ref.address == array.ctypes.data
    assert (ref.shape, ref.strides) == ((2, 6), (12, -1))
    assert (ref.dtype, ref.itemsize, ref.device_kind) == (dtype, array.itemsize, "cpu")
    assert ref.owner is array


def test_a_description_is_its_own_description() -> None:
    ref = describe(numpy.ones(3))
    assert describe(ref) is ref


class _DeviceArray:
    """Speaks ``__cuda_array_interface__`` only."""

    def __init__(self, **changes: Any) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (2, 3),
            "typestr": "<f2",
            "data": (0x7000, False),
            **changes,
        }


def test_cuda_array_interfaces_are_described() -> None:
    ref = describe(_DeviceArray())
    assert (ref.address, ref.shape, ref.strides) == (0x7000, (2, 3), (3, 1))
    assert (ref.dtype, ref.device_kind, ref.device, ref.read_only) == ("float16", "cuda", 0, False)
    ref = describe(_DeviceArray(strides=(2, 4), data=(0x7000, True)))
    assert (ref.strides, ref.read_only) == ((1, 2), True)


def test_a_device_array_says_its_own_device_and_type() -> None:
    array: Any = _DeviceArray(typestr="<V2")
    array.device = SimpleNamespace(id=3)  # as CuPy's arrays
    array.dtype = SimpleNamespace(name="bfloat16")
    ref = describe(array)
    assert (ref.device, ref.dtype) == (3, "bfloat16")

    class Dlpack(_DeviceArray):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 4)

    assert describe(Dlpack()).device == 4


def _sparse() -> Any:
    return torch.eye(3).to_sparse()


def _quantised() -> Any:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


def _foreign_order() -> Any:
    return numpy.ones(3, numpy.dtype("float32").newbyteorder())


def _odd_strides() -> Any:
    return numpy.ones(3, [("a", "float32"), ("b", "uint8")])["a"]


def _fake() -> Any:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


REFUSED = {
    "sparse": (_sparse, "to_dense()"),
    "quantised": (_quantised, "int_repr()"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(3)]), "its parts"),
    "meta": (lambda: torch.ones(3, device="meta"), "device meta"),
    "conjugated": (lambda: torch.ones(3, dtype=torch.complex64).conj(), "resolve_conj()"),
    "negated": (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, "resolve_neg()"),
    "fake": (_fake, "memory"),
    "structured": (lambda: numpy.ones(3, [("a", "float32")]), "x.dtype: expected one of"),
    "text": (lambda: numpy.array(["a"]), "x.dtype: expected one of"),
    "byte_order": (_foreign_order, "native byte order"),
    "odd_strides": (_odd_strides, "multiples of the element size 4"),
    "list": (lambda: [1.0, 2.0], "got list"),
    "number": (lambda: 3, "got int"),
    "none": (lambda: None, "got NoneType"),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_plain_memory_is_refused_with_the_way_out(kind: str) -> None:
    make, words = REFUSED[kind]
    with pytest.raises(CacheTypeError) as caught:
        describe(make(), name="x")
    assert words in str(caught.value)
    assert str(caught.value).startswith("x")


def test_tensors_are_told_from_other_things() -> None:
    assert all(map(is_tensor, (torch.ones(1), numpy.ones(1), describe(numpy.ones(1)))))
    assert not any(map(is_tensor, ([1], 1, "x", None, {}, torch.nn.Linear(1, 1))))


@pytest.mark.parametrize(
    ("shape", "strides"), [((), ()), ((3,), (1,)), ((2, 3, 4), (12, 4, 1)), ((2, 0), (1, 1))]
)
def test_dense_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert contiguous_strides(shape) == strides


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [
        ((2, 3), (3, 1), True),
        ((2, 1), (1, 9), True),
        ((0, 3), (7, 7), True),
        ((2, 3), (1, 2), False),
    ],
)
def test_contiguity(shape: tuple[int, ...], strides: tuple[int, ...], dense: bool) -> None:
    assert TensorRef(64, shape, strides, "float32", 4, "cpu").is_contiguous is dense


@pytest.mark.parametrize(
    "dtype",
    ["float32", "torch.float32", torch.float32, numpy.float32, numpy.dtype("float32")],
    ids=repr,
)
def test_a_type_may_be_named_in_any_librarys_way(dtype: Any) -> None:
    assert find_dtype(dtype).name == "float32"


@pytest.mark.parametrize("dtype", ["float128", torch.qint8, object, 3], ids=repr)
def test_an_unknown_type_is_refused(dtype: Any) -> None:
    with pytest.raises(CacheTypeError, match="dtype: expected one of bool"):
        find_dtype(dtype)


NOT_MEMORY = {
    "a NumPy scalar": (numpy.float32(3), "scalar numpy.float32"),
    "a masked array": (numpy.ma.masked_array([1.0, 2.0], mask=[0, 1]), "MaskedArray"),
    "NumPy's class": (numpy.ndarray, "the class ndarray"),
    "torch's class": (torch.Tensor, "the class Tensor"),
    "our class": (Buffer, "the class Buffer"),
    "a byte-swapped interface": (_DeviceArray(typestr=">f4"), "native byte order"),
}


@pytest.mark.parametrize("case", NOT_MEMORY)
def test_what_only_looks_like_a_tensor_is_refused(case: str) -> None:
    wrong, message = NOT_MEMORY[case]
    with pytest.raises(CacheTypeError, match=f"x[.:].*{message}"):
        describe(wrong, name="x")


def test_a_byte_swapped_type_is_refused() -> None:
    with pytest.raises(CacheTypeError, match="dtype: expected native byte order, got >f4"):
        find_dtype(numpy.dtype(">f4"))
