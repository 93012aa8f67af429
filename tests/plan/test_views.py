"""Views of plan buffers: as NumPy makes them, byte for byte, or a refusal."""

from __future__ import annotations

import json
from typing import Any

import numpy
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from graphcore import ConfigurationError, GraphPlan
from graphcore.plan.records import PlanBuffer, View
from graphcore.plan.views import as_view


def buffer(*shape: int, dtype: str = "float32") -> PlanBuffer:
    return GraphPlan().buffer("x", shape, dtype)


def twin(view: View) -> numpy.ndarray[Any, Any]:
    """A NumPy array whose memory stands for the whole buffer."""
    return numpy.arange(view.size, dtype=view.dtype).reshape(view.shape)


def assert_same(view: View, array: numpy.ndarray[Any, Any], base: numpy.ndarray[Any, Any]) -> None:
    assert view.shape == array.shape
    assert view.dtype == array.dtype.name
    assert view.itemsize == array.dtype.itemsize
    if array.size:
        start = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        assert view.offset == start
        steps = [s for s, n in zip(view.strides, view.shape, strict=True) if n > 1]
        wanted = [s for s, n in zip(array.strides, array.shape, strict=True) if n > 1]
        assert [step * view.itemsize for step in steps] == wanted


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_basic_indexing_is_numpys(data: st.DataObject) -> None:
    shape = data.draw(arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    index = data.draw(arrays.basic_indices(shape, allow_newaxis=True))
    x = buffer(*shape)
    base = twin(x.whole)
    entries = index if isinstance(index, tuple) else (index,)
    # with an ellipsis NumPy gives an array, also of one element
    whole = entries if ... in entries else (*entries, ...)
    assert_same(x[index], base[whole], base)


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_an_index_of_an_index_is_numpys(data: st.DataObject) -> None:
    x = buffer(6, 5, 4)
    base = twin(x.whole)
    view, array = x.whole, base
    for _ in range(2):
        index = data.draw(arrays.basic_indices(array.shape, allow_ellipsis=False))
        entries = index if isinstance(index, tuple) else (index,)
        view, array = view[entries], array[(*entries, ...)]
    assert_same(view, array, base)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_reshape_is_numpys_and_never_a_copy(data: st.DataObject) -> None:
    shape = data.draw(arrays.array_shapes(min_dims=1, max_dims=4, max_side=6))
    x = buffer(*shape)
    base = twin(x.whole)
    axes = data.draw(st.permutations(range(len(shape))))
    index = data.draw(arrays.basic_indices(shape, allow_ellipsis=False))
    entries = index if isinstance(index, tuple) else (index,)
    view = x.whole[entries]
    array = base[(*entries, ...)]
    if view.shape and data.draw(st.booleans()) and len(view.shape) == len(axes):
        view, array = view.transpose(*axes), array.transpose(axes)
    count = view.size
    assume(count)
    first = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    wanted = data.draw(st.sampled_from([(count,), (first, count // first), (first, -1), (-1, 1)]))
    try:
        expected = array.reshape(wanted, copy=False)
    except ValueError:
        with pytest.raises(ConfigurationError, match="would need a copy"):
            view.reshape(*wanted)
    else:
        assert_same(view.reshape(wanted), expected, base)


def test_a_reshape_of_nothing_keeps_the_number_of_elements() -> None:
    assert buffer(0, 4).whole.reshape(2, 0, 3).shape == (2, 0, 3)
    with pytest.raises(ConfigurationError, match="0 elements do not fit"):
        buffer(0, 4).whole.reshape(2)
    assert buffer(1).whole.reshape(()).shape == ()


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((-1, -1), "only one size may be -1"),
        ((5, -1), "12 elements do not fit"),
        ((5, 2), "12 elements do not fit"),
        ((-2,), "at least -1"),
        ((2.0, 6), "expected ints"),
    ],
)
def test_a_shape_of_another_number_of_elements_is_refused(shape: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        buffer(3, 4).whole.reshape(shape)


@pytest.mark.parametrize(
    ("old", "new", "shape"),
    [
        ("float32", "int32", (4, 8)),
        ("float32", "uint8", (4, 8)),
        ("uint8", "float32", (4, 8)),
        ("float64", "uint16", (3,)),
        ("int16", "float64", (2, 8)),
    ],
)
def test_another_element_type_is_numpys_view(old: str, new: str, shape: tuple[int, ...]) -> None:
    x = buffer(*shape, dtype=old)
    base = twin(x.whole)
    assert_same(x.whole.view(new), base.view(new), base)
    rows = base[1:] if len(shape) > 1 else base
    assert_same(x[1:].view(new) if len(shape) > 1 else x.whole.view(new), rows.view(new), base)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda x: x[:, 0].view("uint8"), "dense last axis"),
        (lambda x: x[0, :3].view("float64"), "do not divide"),
        (lambda x: x[0, 1:3].view("float64"), "do not divide"),
        (lambda x: x[0, 0].view("uint8"), "dense last axis"),
        (lambda x: x.whole.view("float31"), "expected one of"),
    ],
)
def test_bytes_that_make_no_elements_are_refused(made: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        made(buffer(4, 4))


def test_transposes_and_permutations_are_numpys() -> None:
    x = buffer(2, 3, 4)
    base = twin(x.whole)
    assert_same(x.whole.T, base.T, base)
    assert_same(x.whole.transpose(), base.transpose(), base)
    assert_same(x.whole.permute(2, 0, 1), base.transpose(2, 0, 1), base)
    assert_same(x.whole.transpose((0, -1, 1)), base.transpose(0, -1, 1), base)


@pytest.mark.parametrize("axes", [(0, 1), (0, 1, 1), (0, 1, 3), (0, 1, -4), ("a", 1, 2)])
def test_a_permutation_that_is_none_is_refused(axes: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigurationError, match="each of 3 axes once"):
        buffer(2, 3, 4).whole.permute(*axes)


def test_as_strided_counts_from_the_view_and_checks_no_bounds() -> None:
    x = buffer(4, 8)
    made = x[1].as_strided((2, 3), (1, 2), 4)
    assert (made.offset, made.shape, made.strides) == (8 * 4 + 16, (2, 3), (1, 2))
    assert x.whole.as_strided((100,)).extent == (0, 400)
    with pytest.raises(ConfigurationError, match="a stride for each of 2 axes"):
        x.whole.as_strided((2, 3), (1,))
    with pytest.raises(ConfigurationError, match="at least 0"):
        x.whole.as_strided((-2,))


def test_loops_go_over_the_first_axis() -> None:
    x = buffer(3, 4)
    assert [row.offset for row in x] == [0, 16, 32]
    assert len(x) == 3
    assert [cell.offset for cell in x[1]] == [16, 20, 24, 28]
    with pytest.raises(TypeError, match="no length"):
        len(x[0, 0])


def test_a_buffer_is_arranged_as_the_view_of_all_of_it() -> None:
    x = buffer(3, 4)
    assert x.whole.whole == x.whole
    assert x.T == x.whole.T
    assert x.reshape(4, 3) == x.whole.reshape(4, 3)
    assert x.permute(1, 0) == x.transpose(1, 0) == x.T
    assert x.view("int32") == x.whole.view("int32")
    assert x.as_strided((2,), (3,), 1) == x.whole.as_strided((2,), (3,), 1)


def test_a_view_says_what_it_is() -> None:
    x = buffer(3, 4)
    assert str(x.whole) == "x"
    assert str(x[1, 2:]) == "x, bytes 24:32, float32[2]"


@pytest.mark.parametrize(
    ("index", "why"),
    [
        (3, "out of range for axis 0 of size 3"),
        ((0, -5), "out of range for axis 1 of size 4"),
        ((0, 0, 0), "does not fit 2 axes"),
        ((..., ...), "does not fit"),
        ("a", "expected ints, slices"),
        (True, "expected ints, slices"),
        ([0, 1], "expected ints, slices"),
        (numpy.array([0, 1]), "expected ints, slices"),
        (1.0, "expected ints, slices"),
        (slice(0, 2, 0), "zero"),
        (slice("a", None), "slice indices"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(index: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=f"view of x: .*{why}"):
        buffer(3, 4)[index]


def test_a_numpy_integer_is_an_index() -> None:
    assert buffer(3, 4)[numpy.int64(1)].offset == 16


@pytest.mark.parametrize("tensor", [numpy.zeros(3), 5, "x", None])
def test_what_is_no_buffer_is_no_view(tensor: Any) -> None:
    with pytest.raises(ConfigurationError, match="dst: expected a buffer of the plan"):
        as_view(tensor, "dst")


def test_a_tensor_is_told_where_it_belongs() -> None:
    with pytest.raises(ConfigurationError, match=r"plan\.buffer"):
        as_view(numpy.zeros(3), "dst")


FAR = 1 << 62


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((2,), (1 << 70,), 0),
        ((2,), (-(1 << 70),), 0),
        ((1,), (1 << 70,), 0),
        ((0,), (1,), 1 << 70),
        ((1,), (1,), -(1 << 70)),
        ((1 << 40, 1 << 40), (0, 0), 0),
        ((FAR,), (1,), 0),
    ],
)
def test_what_no_address_reaches_is_refused(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (4,))
    with pytest.raises(ConfigurationError, match=r"view of x: expected bytes .* within 2"):
        x.as_strided(shape, strides, offset)
    if not offset:
        with pytest.raises(ConfigurationError, match=r"buffer 'y': expected bytes .* within 2"):
            plan.buffer("y", shape, strides=strides)
    plan.memset(x.as_strided((4,), (2,)), 0.0)
    data = json.loads(plan.to_json())
    node = data["plans"][0]["nodes"][0]
    node["dst"][1:4] = [offset * 4, shape, strides]
    with pytest.raises(ConfigurationError, match=r"plan: view of x: expected bytes .* within 2"):
        GraphPlan.from_json(json.dumps(data))
    data["plans"][0]["buffers"][0] |= {"shape": [1 << 62], "strides": [1]}
    with pytest.raises(ConfigurationError, match=r"plan: buffer 'x': expected bytes .* within 2"):
        GraphPlan.from_json(json.dumps(data))


def test_a_buffer_beyond_any_real_memory_is_planned_and_checked() -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (1 << 20, 1 << 20, 1 << 10), "bfloat16")
    plan.memset(x[: 1 << 19], 0)
    plan.memset(x[1 << 19 :], 0)
    plan.memset(x[1 << 18 : 3 << 18], 0, after=())
    problems = plan.validate()
    assert [problem.byte_range for problem in problems] == [
        ("x", 1 << 49, 1 << 50),
        ("x", 1 << 50, 3 << 49),
    ]
