"""What moe_grouped_gemm refuses: by name, before anything is launched."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy
import pytest
from graphcore_kernels import moe_grouped_gemm

from graphcore.driver import open_driver
from graphcore.errors import CacheTypeError, CapacityError, CaptureError, ConfigurationError
from graphcore.resources.tensors import TensorRef, contiguous_strides, describe

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8, "uint8": 1}


def at(place: int, *shape: int, dtype: str = "float32", **others) -> TensorRef:
    """Memory of nobody: what is refused is never touched."""
    options = {"address": 2**40 + place * 2**32, "strides": contiguous_strides(shape), **others}
    return TensorRef(
        shape=shape, dtype=dtype, itemsize=ITEMSIZES[dtype], device_kind="cpu", **options
    )


def operands(**others) -> dict:
    """A product of 6 rows, 3 experts, K 16, N 24, that would be done."""
    given = {
        "x": at(0, 6, 16),
        "weights": at(1, 5, 24, 16),
        "offsets": at(2, 4, dtype="int32"),
        "slots": at(3, 3, dtype="int32"),
        "out": at(4, 6, 24),
        "error": at(5, 1, dtype="int32"),
    }
    return {**given, **others}


def combining(**others) -> dict:
    """The same, combined: 3 tokens of 2 choices."""
    given = {
        "scatter": at(6, 6, dtype="int32"),
        "out": at(4, 3, 24),
        "workspace": at(7, moe_grouped_gemm.workspace_bytes(6, 24), dtype="uint8"),
    }
    return operands(**{**given, **others})


def swiglu(**others) -> dict:
    return operands(**{"activation": "swiglu", "out": at(4, 6, 12), **others})


def changed(name: str, **fields) -> dict:
    return operands(**{name: replace(operands()[name], **fields)})


BAD = {
    "x of no known type": (operands(x=at(0, 6, 16, dtype="int64")), "x.dtype: expected bfloat16"),
    "weights of another type": (
        operands(weights=at(1, 5, 24, 16, dtype="bfloat16")),
        "weights.dtype: expected float32 as x has, got bfloat16",
    ),
    "out of another type": (
        operands(out=at(4, 6, 24, dtype="bfloat16")),
        "out.dtype: expected float32 as x has, got bfloat16",
    ),
    "offsets of 64 bits": (
        operands(offsets=at(2, 4, dtype="int64")),
        "offsets.dtype: expected int32, got int64",
    ),
    "slots of 64 bits": (
        operands(slots=at(3, 3, dtype="int64")),
        "slots.dtype: expected int32, got int64",
    ),
    "gather of floats": (
        operands(gather=at(8, 6)),
        "gather.dtype: expected int32, got float32",
    ),
    "scatter of 64 bits": (
        combining(scatter=at(6, 6, dtype="int64")),
        "scatter.dtype: expected int32, got int64",
    ),
    "scale of integers": (
        operands(scale=at(8, 6, dtype="int32")),
        "scale.dtype: expected float32, got int32",
    ),
    "an error word of 64 bits": (
        operands(error=at(5, 1, dtype="int64")),
        "error.dtype: expected int32, got int64",
    ),
    "x of one axis": (operands(x=at(0, 16)), "x.shape: expected 2 axes, got (16,)"),
    "weights of two axes": (operands(weights=at(1, 24, 16)), "weights.shape: expected 3 axes"),
    "offsets of two axes": (
        operands(offsets=at(2, 2, 2, dtype="int32")),
        "offsets.shape: expected 1 axes, got (2, 2)",
    ),
    "another depth": (
        operands(x=at(0, 6, 20)),
        "x.shape: expected [rows, 16] for weights (5, 24, 16) in layout 'nk', got (6, 20)",
    ),
    "the other layout": (
        operands(layout="kn"),
        "x.shape: expected [rows, 24] for weights (5, 24, 16) in layout 'kn', got (6, 16)",
    ),
    "no depth": (
        operands(x=at(0, 6, 0), weights=at(1, 5, 24, 0)),
        "weights.shape: expected no empty axis",
    ),
    "no slots in the bank": (
        operands(weights=at(1, 0, 24, 16)),
        "weights.shape: expected no empty axis",
    ),
    "no experts": (
        operands(offsets=at(2, 1, dtype="int32"), slots=at(3, 0, dtype="int32")),
        "offsets.shape: expected one more than 1 to 512 experts, got (1,)",
    ),
    "no offsets": (
        operands(offsets=at(2, 0, dtype="int32")),
        "offsets.shape: expected one more than 1 to 512 experts, got (0,)",
    ),
    "too many experts": (
        operands(offsets=at(2, 514, dtype="int32"), slots=at(3, 513, dtype="int32")),
        "offsets.shape: expected one more than 1 to 512 experts, got (514,)",
    ),
    "slots of another count": (
        operands(slots=at(3, 4, dtype="int32")),
        "slots.shape: expected [3], got (4,)",
    ),
    "no slots for more experts than rows of the bank": (
        operands(slots=None, weights=at(1, 2, 24, 16)),
        "slots: expected a table, for 3 experts in 2 slots, got None",
    ),
    "scale of another count": (
        operands(scale=at(8, 7)),
        "scale.shape: expected [6], got (7,)",
    ),
    "scatter of another count than gather": (
        combining(gather=at(8, 12, dtype="int32")),
        "scatter.shape: expected [12], got (6,)",
    ),
    "rows that the tokens do not divide": (
        combining(out=at(4, 4, 24)),
        "out.shape: expected as many choices for each token: rows that divide 6, of scatter, got "
        "4 rows",
    ),
    "more tokens than routes": (
        combining(out=at(4, 12, 24)),
        "out.shape: expected as many choices for each token",
    ),
    "no tokens": (combining(out=at(4, 0, 24)), "out.shape: expected as many choices"),
    "out of another count of rows": (
        operands(out=at(4, 5, 24)),
        "out.shape: expected (6, 24), got (5, 24)",
    ),
    "out as long as x, not as gather": (
        operands(gather=at(8, 9, dtype="int32")),
        "out.shape: expected (9, 24), got (6, 24)",
    ),
    "out of another width": (
        operands(out=at(4, 6, 16)),
        "out.shape: expected (6, 24), got (6, 16)",
    ),
    "out as wide as gate and up": (
        swiglu(out=at(4, 6, 24)),
        "out.shape: expected (6, 12), got (6, 24)",
    ),
    "out of one axis": (
        operands(out=at(4, 144)),
        "out.shape: expected (6, 24), got (144,)",
    ),
    "two error words": (
        operands(error=at(5, 2, dtype="int32")),
        "error.shape: expected one element, got (2,)",
    ),
    "x transposed": (
        changed("x", strides=(1, 6)),
        "x.strides: expected the last axis dense, got (1, 6)",
    ),
    "rows of x at odd places": (
        changed("x", strides=(18, 1)),
        "x.strides: expected multiples of 4 elements, got (18, 1)",
    ),
    "rows of weights at odd places": (
        changed("weights", strides=(17 * 24, 17, 1)),
        "weights.strides: expected multiples of 4 elements",
    ),
    "slots at odd places": (
        changed("weights", strides=(16 * 24 + 2, 16, 1)),
        "weights.strides: expected multiples of 4 elements",
    ),
    "weights transposed": (
        changed("weights", strides=(16 * 24, 1, 24)),
        "weights.strides: expected the last axis dense",
    ),
    "out transposed": (
        changed("out", strides=(1, 6)),
        "out.strides: expected columns side by side, got (1, 6)",
    ),
    "rows of out that overlap": (
        changed("out", strides=(20, 1)),
        "out.strides: expected a place for each element, got (20, 1)",
    ),
    "every second offset": (
        changed("offsets", strides=(2,)),
        "offsets.strides: expected dense memory, got (2,)",
    ),
    "every second slot": (
        changed("slots", strides=(2,)),
        "slots.strides: expected dense memory, got (2,)",
    ),
    "x four bytes off": (
        changed("x", address=2**40 + 4),
        "x: expected an address that is a multiple of 16, got 0x10000000004",
    ),
    "weights eight bytes off": (
        changed("weights", address=2**41 + 8),
        "weights: expected an address that is a multiple of 16",
    ),
    "offsets a byte off": (
        changed("offsets", address=2**41 + 1),
        "offsets: expected an address that is a multiple of 4",
    ),
    "out a byte off": (
        changed("out", address=2**41 + 1),
        "out: expected an address that is a multiple of 4",
    ),
    "the workspace four bytes off": (
        combining(workspace=at(7, 2**16, dtype="uint8", address=2**45 + 4)),
        "workspace: expected an address that is a multiple of 16",
    ),
    "a depth of no whole chunks": (
        operands(x=at(0, 6, 18, strides=(20, 1)), weights=at(1, 5, 24, 18, strides=(480, 20, 1))),
        "weights.shape: expected K a multiple of 4, got 18",
    ),
    "columns of no whole chunks": (
        operands(
            x=at(0, 6, 16), weights=at(1, 5, 16, 22, strides=(384, 24, 1)), layout="kn",
            out=at(4, 6, 22),
        ),
        "weights.shape: expected N a multiple of 4, got 22",
    ),
    "half the columns of no whole chunks": (
        swiglu(weights=at(1, 5, 16, 28), layout="kn", out=at(4, 6, 14)),
        "weights.shape: expected N / 2 a multiple of 4, got 14",
    ),
    "odd columns of gate and up": (
        swiglu(weights=at(1, 5, 25, 16)),
        "weights.shape: expected N even: gate and up, got 25",
    ),
    "columns to combine by fours": (
        combining(weights=at(1, 5, 26, 16), out=at(4, 3, 26)),
        "out.shape: expected columns a multiple of 4 to combine, got 26",
    ),
    "an activation of no known name": (
        operands(activation="gelu"),
        "activation: expected None or 'swiglu', got 'gelu'",
    ),
    "gate and up nowhere known": (
        swiglu(gate_up="stacked"),
        "gate_up: expected 'concat' or 'interleaved', got 'stacked'",
    ),
    "a layout of no known name": (
        operands(layout="mk"),
        "layout: expected 'nk' or 'kn', got 'mk'",
    ),
    "a precision of no known name": (
        operands(precision="fp8"),
        "precision: expected 'ieee' or 'tf32x3' or 'tf32', got 'fp8'",
    ),
    "a form of no known name": (
        operands(form="square"),
        "form: expected one of direct, wide, tile64, tile128 for ieee in layout 'nk', got 'square'",
    ),
    "a form that the precision lacks": (
        operands(precision="tf32x3", form="flow"),
        "form: expected one of direct, wide, tile64, warpgroup64, warpgroup128 for tf32x3 in "
        "layout 'nk', got 'flow'",
    ),
    "a form that the layout lacks": (
        operands(weights=at(1, 5, 16, 24), layout="kn", form="direct"),
        "form: expected one of wide, tile64, tile128 for ieee in layout 'kn', got 'direct'",
    ),
    "x on another device": (
        changed("weights", device_kind="cuda", device=1),
        "weights.device: expected cpu:0 as x, got cuda:1",
    ),
    "the error word on another device": (
        changed("error", device_kind="cuda"),
        "error.device: expected cpu:0 as x, got cuda:0",
    ),
    "a read-only out": (
        changed("out", read_only=True),
        "out: expected writable memory",
    ),
    "a read-only error word": (
        changed("error", read_only=True),
        "error: expected writable memory",
    ),
    "out over x": (operands(out=at(0, 6, 24)), "out: expected memory apart from x"),
    "out over the weights' last row": (
        changed("out", address=2**40 + 2**32 + 5 * 24 * 16 * 4 - 4),
        "out: expected memory apart from weights",
    ),
    "the error word in out": (
        changed("error", address=2**40 + 4 * 2**32 + 8),
        "out: expected memory apart from error",
    ),
    "the error word in the offsets": (
        changed("error", address=2**40 + 2 * 2**32 + 12),
        "error: expected memory apart from offsets",
    ),
    "the workspace over scatter": (
        combining(workspace=at(6, 2**16, dtype="uint8")),
        "workspace: expected memory apart from scatter",
    ),
    "the workspace over scale": (
        combining(scale=at(8, 6), workspace=at(8, 2**16, dtype="uint8", address=2**40 + 2**35)),
        "workspace: expected memory apart from scale",
    ),
}  # fmt: skip


def call(given: dict, **others):
    given = {**given, "driver": open_driver("emulated"), **others}
    x, weights, offsets = (given.pop(name) for name in ("x", "weights", "offsets"))
    return moe_grouped_gemm.plan(x, weights, offsets, **given)


@pytest.mark.parametrize("name", BAD)
def test_bad_operands_are_refused_by_name(name):
    given, message = BAD[name]
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        call(given)


@pytest.mark.parametrize("make", [operands, combining, swiglu], ids=lambda make: make.__name__)
def test_the_operands_that_the_bad_ones_are_made_of_are_good(make):
    assert call(make()).launches


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_halves_have_no_choice_of_precision(name):
    given = operands(
        x=at(0, 6, 16, dtype=name), weights=at(1, 5, 24, 16, dtype=name),
        out=at(4, 6, 24, dtype=name),
    )  # fmt: skip
    assert call(given).launches
    with pytest.raises(ConfigurationError, match=rf"precision: expected 'ieee' for {name}, got"):
        call(given, precision="tf32")


def test_a_workspace_that_is_too_small_is_told_how_large_it_must_be():
    needed = moe_grouped_gemm.workspace_bytes(6, 24)
    assert needed == 256 + 6 * 24 * 4
    with pytest.raises(
        CapacityError, match=rf"workspace: expected {needed} bytes, got {needed - 1}"
    ):
        call(combining(workspace=at(7, needed - 1, dtype="uint8")))
    assert call(combining(workspace=at(7, needed, dtype="uint8"))).launches


@pytest.mark.parametrize("name", ["x", "weights", "offsets", "slots", "out", "error", "gather"])
def test_what_is_no_tensor_is_refused_by_name(name):
    with pytest.raises(CacheTypeError, match=f"{name}: expected a torch, NumPy or CuPy tensor"):
        call(operands(**{name: [1, 2, 3]}))


@pytest.mark.parametrize("name", ["x", "weights", "offsets"])
def test_what_is_needed_may_not_be_none(name):
    with pytest.raises(CacheTypeError, match=f"{name}: expected a torch, NumPy or CuPy tensor"):
        call(operands(**{name: None}))


def test_what_is_no_stream_is_refused():
    with pytest.raises(CacheTypeError, match="stream: expected"):
        call(operands(), stream="side")


def test_a_driver_of_another_device_is_refused():
    cuda = {
        name: replace(ref, device_kind="cuda", device=3)
        for name, ref in operands().items()
    }  # fmt: skip
    with pytest.raises(ConfigurationError, match=r"driver: expected .* cuda:3, got"):
        call(cuda)


@pytest.mark.parametrize("name", ["out", "error", "workspace"])
@pytest.mark.parametrize("call_or_plan", ["call", "plan"])
def test_inside_a_capture_nothing_is_allocated(name, call_or_plan):
    driver = open_driver("emulated")
    with driver.stream() as stream:
        driver.begin_capture(stream.handle, "thread_local")
        try:
            with pytest.raises(CaptureError, match=f"{name}: expected a tensor inside a capture"):
                call(combining(**{name: None}), driver=driver, stream=stream)
        finally:
            graph = driver.end_capture(stream.handle)
        assert driver.nodes(graph) == []
        driver.destroy_graph(graph)


def test_a_refused_product_has_written_nothing():
    x, weights = numpy.ones((4, 8), numpy.float32), numpy.ones((2, 8, 8), numpy.float32)
    offsets = numpy.array([0, 2, 4], numpy.int32)
    out, error = numpy.full((4, 9), 7, numpy.float32), numpy.zeros(1, numpy.int32)
    with pytest.raises(ConfigurationError, match=r"out\.shape"):
        moe_grouped_gemm(x, weights, offsets, None, out, error=error)
    assert (out == 7).all()
    fitting = numpy.full((4, 8), 7, numpy.float32)
    moe_grouped_gemm(x, weights, offsets, None, fitting, error=error)
    assert (fitting == 8).all()
    assert describe(error).size == 1
    assert not error.any()
