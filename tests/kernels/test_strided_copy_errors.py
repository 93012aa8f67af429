"""What strided_copy refuses: by name, before anything is launched."""

from __future__ import annotations

import numpy
import pytest
from graphcore_kernels import strided_copy
from helpers.strided_views import View, dense

from graphcore.driver import open_driver
from graphcore.errors import CacheTypeError, ConfigurationError


def zeros(*shape, dtype=numpy.float32):
    return numpy.zeros(shape, dtype)


def read_only(*shape):
    array = zeros(*shape)
    array.flags.writeable = False
    return array


def shared_rows():
    base = zeros(8, 8)
    return base[:5], base[3:]


def identical():
    base = zeros(4, 4)
    return base, base


BAD = [
    pytest.param(
        lambda: (zeros(4), zeros(4, dtype=numpy.int32)),
        r"src\.dtype: expected float32 as dst has, got int32",
        id="element type",
    ),
    pytest.param(
        lambda: (zeros(4, 3), zeros(13)),
        r"src: expected 12 elements as dst \(4, 3\) has, got 13 in \(13,\)",
        id="element count",
    ),
    pytest.param(lambda: (zeros(0), zeros(1)), r"src: expected 0 elements", id="into nothing"),
    pytest.param(
        lambda: (read_only(4), zeros(4)), r"dst: expected writable memory", id="read-only"
    ),
    pytest.param(
        lambda: (numpy.lib.stride_tricks.as_strided(zeros(9), (3, 3), (0, 4)), zeros(3, 3)),
        r"dst: expected strides that give each element a place of its own.*\(0, 1\)",
        id="broadcast destination",
    ),
    pytest.param(shared_rows, r"src: expected memory apart from dst", id="shared rows"),
    pytest.param(identical, r"src: expected memory apart from dst", id="the same tensor"),
    pytest.param(
        lambda: (
            View((2,) * 9, tuple(3**n for n in range(9))).at(2**40, open_driver("emulated")),
            dense(*[2] * 9).at(2**41, open_driver("emulated")),
        ),
        r"(dst|src): expected at most 8 dimensions after merging, got 9",
        id="nine dimensions",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD)
@pytest.mark.parametrize("call", [strided_copy, strided_copy.plan], ids=["copy", "plan"])
def test_bad_operands_are_refused_by_name_and_nothing_is_written(call, make, message):
    dst, src = make()
    with pytest.raises(ConfigurationError, match=message):
        call(dst, src)
    if isinstance(dst, numpy.ndarray):
        assert not dst.any()


@pytest.mark.parametrize("name", ["dst", "src"])
def test_what_is_no_tensor_is_refused_by_name(name):
    operands = {"dst": zeros(3), "src": zeros(3), name: [1.0, 2.0, 3.0]}
    with pytest.raises(CacheTypeError, match=f"{name}: expected a torch, NumPy or CuPy tensor"):
        strided_copy(operands["dst"], operands["src"])


def test_tensors_of_two_devices_are_refused():
    cpu = dense(4).at(2**40, open_driver("emulated"))
    cuda = type(cpu)(2**41, (4,), (1,), "float32", 4, "cuda", 1)
    with pytest.raises(ConfigurationError, match=r"src\.device: expected cpu:0 .* got cuda:1"):
        strided_copy(cpu, cuda)


def test_a_stream_of_another_device_is_refused():
    driver = open_driver("emulated")
    cuda = [dense(4).at(2**40 + 1024 * place, driver) for place in range(2)]
    cuda = [type(each)(each.address, (4,), (1,), "float32", 4, "cuda", 1) for each in cuda]
    with driver.stream() as stream, pytest.raises(ConfigurationError, match="stream: expected"):
        strided_copy(*cuda, stream=stream)


def test_what_is_no_stream_is_refused():
    with pytest.raises(CacheTypeError, match="stream: expected"):
        strided_copy(zeros(3), numpy.ones(3, numpy.float32), stream="side")


def test_interleaved_columns_of_one_buffer_are_no_overlap():
    base = numpy.arange(40, dtype=numpy.float32).reshape(5, 8)
    odd = base[:, 1::2].copy()
    strided_copy(base[:, ::2], base[:, 1::2])
    assert (base[:, ::2] == odd).all()
    assert (base[:, 1::2] == odd).all()
