"""Signatures and arguments of kernels: what is packed, and what is refused by its index."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import numpy
import pytest

from graphcore.driver.kernel import Kernel, Parameter, Pointer, kernel
from graphcore.driver.records import LaunchConfig
from graphcore.errors import ConfigurationError

SCALARS = [
    ("bool", True, b"\x01"),
    ("i8", -2, b"\xfe"),
    ("u8", 255, b"\xff"),
    ("i16", -2, b"\xfe\xff"),
    ("u16", 258, b"\x02\x01"),
    ("i32", -2, b"\xfe\xff\xff\xff"),
    ("u32", 2**32 - 1, b"\xff" * 4),
    ("i64", -1, b"\xff" * 8),
    ("u64", 2**64 - 1, b"\xff" * 8),
    ("f16", 1.5, struct.pack("<e", 1.5)),
    ("f32", 1.5, struct.pack("<f", 1.5)),
    ("f64", 0.1, struct.pack("<d", 0.1)),
]


@pytest.mark.parametrize(("kind", "value", "data"), SCALARS, ids=[case[0] for case in SCALARS])
def test_a_scalar_is_packed_by_its_type_and_read_back(
    kind: str, value: object, data: bytes
) -> None:
    parameter = Parameter("x", kind)
    assert parameter.size == len(data)
    assert parameter.pack(0, value) == data
    assert parameter.unpack(data) == value


def test_structures_pass_as_their_bytes_and_pointers_as_addresses() -> None:
    made = kernel("k", "const f32* x, bytes:3 s, i32 * counts, void* raw", "")
    assert [p.type for p in made.parameters] == ["const f32*", "bytes:3", "i32*", "void*"]
    assert [p.is_read_only for p in made.parameters] == [True, False, False, False]
    packed = made.pack(0x10, b"abc", SimpleNamespace(address=0x20), 0)
    assert [len(data) for data in packed] == [p.size for p in made.parameters] == [8, 3, 8, 8]
    assert made.unpack(packed) == (
        Pointer(0x10, "float32"),
        b"abc",
        Pointer(0x20, "int32"),
        Pointer(0, "uint8"),
    )


def test_a_kernel_without_parameters_takes_no_arguments() -> None:
    assert kernel("k", "", "").pack() == ()


@pytest.mark.parametrize(
    ("signature", "said"),
    [
        ("float x", r"parameter 'x': unknown type 'float'; expected one of bool, i8"),
        ("i32", "unknown type ''"),
        ("i128* x", r"unknown type 'i128\*'"),
        ("bytes:many x", "unknown type 'bytes:many'"),
        ("bytes:16* x", r"unknown type 'bytes:16\*'"),
        ("const i32 n", "unknown type 'const i32'"),
        ("f32 *x", r"parameter '\*x': expected a name as in C, after its type"),
    ],
)
def test_a_signature_that_says_nothing_known_is_refused(signature: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        kernel("k", signature, "")


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("i32", 1.0, "expected a i32, got float 1.0"),
        ("i32", True, "expected a i32, got bool True"),
        ("i32", 2**31, "expected a value that fits 32 bits, got int 2147483648"),
        ("u8", -1, "expected a value that fits 8 bits, got int -1"),
        ("f32", "1", "expected a f32, got str '1'"),
        ("f32", False, "expected a f32, got bool False"),
        ("f32", 1e39, "expected a value that fits 32 bits"),
        ("f64", 10**400, "expected a value that fits 64 bits"),
        ("bool", 1, "expected a bool, got int 1"),
        ("u64", numpy.int32(1), "expected a 8-byte u64, got int32"),
        ("i32", numpy.float32(1), "expected a i32, got float32"),
        ("f32", numpy.int32(1), "expected a f32, got int32"),
        ("f32", numpy.zeros(4, "float32"), "expected a f32, one value, got ndarray"),
        ("f32*", -1, "expected an address .int. or an object with .address, got int -1"),
        ("f32*", 2**64, "expected an address"),
        ("f32*", True, "expected an address"),
        ("f32*", None, "expected an address"),
        ("bytes:4", b"abc", "expected 4 bytes, got bytes b'abc'"),
        ("bytes:4", 1, "expected 4 bytes, got int 1"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused_by_its_index(
    kind: str, value: object, said: str
) -> None:
    made = Kernel("k", (Parameter("n", "i32"), Parameter("x", kind)), "")
    with pytest.raises(ConfigurationError, match=rf"argument 1 \(x: .*\): {said}"):
        made.pack(0, value)


@pytest.mark.parametrize("value", [numpy.float32(1.5), numpy.array(1.5, "float32")])
def test_numpy_numbers_of_the_right_width_are_taken(value: object) -> None:
    assert Parameter("x", "f32").pack(0, value) == struct.pack("<f", 1.5)


def test_a_wrong_number_of_arguments_is_refused_with_the_names_expected() -> None:
    with pytest.raises(ConfigurationError, match=r"kernel k: expected 2 arguments \(x, n\), got 1"):
        kernel("k", "f32* x, i32 n", "").pack(0)


def test_a_kernel_without_a_reference_says_that_it_cannot_run_here() -> None:
    with pytest.raises(ConfigurationError, match="kernel k has no Python reference"):
        kernel("k", "", "").run_reference(LaunchConfig(grid=(1, 1, 1), block=(1, 1, 1)), ())


@pytest.fixture
def memory() -> numpy.ndarray:
    return numpy.arange(12, dtype="int32")


@pytest.mark.parametrize(
    ("first", "shape", "strides", "expected"),
    [
        (0, 3, None, [0, 1, 2]),
        (0, (2, 3), None, [[0, 1, 2], [3, 4, 5]]),
        (1, (2, 2), (6, 2), [[1, 3], [7, 9]]),
        (11, (3,), (-2,), [11, 9, 7]),
        (5, (2, 2), (0, -1), [[5, 4], [5, 4]]),
        (0, (2, 0), None, [[], []]),
        (4, (), None, 4),
    ],
    ids=["a number", "rows", "strided", "backwards", "repeated", "no elements", "one element"],
)
def test_a_pointer_is_seen_as_an_array_of_any_strides(
    memory: numpy.ndarray,
    first: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    expected: object,
) -> None:
    pointer = Pointer(memory.ctypes.data + 4 * first, "int32")
    assert pointer.array(shape, strides).tolist() == expected


def test_an_array_of_a_pointer_writes_the_memory_itself(memory: numpy.ndarray) -> None:
    Pointer(memory.ctypes.data + 44, "int32").array(2, (-3,))[:] = (-1, -2)
    assert memory[[11, 8]].tolist() == [-1, -2]
