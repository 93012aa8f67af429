"""Overlap of strided memory: the exact answers, against brute force and against NumPy's."""

from __future__ import annotations

import itertools

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphcore.resources import overlap as module
from graphcore.resources.overlap import overlap, overlaps_itself, span

sides = st.lists(st.tuples(st.integers(1, 5), st.integers(-12, 12)), max_size=4).map(tuple)


def places(view: tuple[tuple[int, int], ...]) -> list[int]:
    indices = itertools.product(*(range(size) for size, _ in view))
    steps = [stride for _, stride in view]
    return [sum(i * s for i, s in zip(index, steps, strict=True)) for index in indices]


@given(sides)
@settings(max_examples=500, deadline=None)
def test_a_view_overlaps_itself_exactly_where_two_indices_share_a_place(view):
    found = places(view)
    assert overlaps_itself(view) == (len(set(found)) < len(found))
    assert span(view) == (min(found), max(found))


@given(sides, sides, st.integers(-80, 80), st.sampled_from([1, 2, 3, 4, 8]))
@settings(max_examples=500, deadline=None)
def test_two_views_overlap_exactly_where_they_share_a_byte(first, second, distance, itemsize):
    def covered(view, start):
        return {start + place + byte for place in places(view) for byte in range(itemsize)}

    shared = covered(first, 0) & covered(second, distance)
    assert overlap(first, second, distance, itemsize) == bool(shared)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(numpy.s_[:, ::2], numpy.s_[:, 1::2], id="even and odd columns"),
        pytest.param(numpy.s_[:, :500], numpy.s_[:, 500:], id="left and right half"),
        pytest.param(numpy.s_[:, :501], numpy.s_[:, 500:], id="one column shared"),
        pytest.param(numpy.s_[::3, ::7], numpy.s_[1::3, ::5], id="different rows"),
        pytest.param(numpy.s_[::3, ::7], numpy.s_[::2, ::5], id="some elements shared"),
        pytest.param(numpy.s_[::-1], numpy.s_[:], id="the same, reversed"),
    ],
)
def test_large_interleaved_views_are_decided_as_numpy_decides_them(first, second):
    base = numpy.empty((1000, 1000), numpy.float32)
    one, other = base[first], base[second]
    distance = other.ctypes.data - one.ctypes.data
    described = [tuple(zip(each.shape, each.strides, strict=True)) for each in (one, other)]
    assert overlap(*described, distance, 4) == numpy.shares_memory(one, other)


def test_huge_views_are_decided_without_walking_them():
    assert not overlaps_itself(((2**31, 7), (7, 1)))
    assert overlaps_itself(((2**31, 7), (8, 1)))
    assert not overlap(((2**40, 8),), ((2**40, 8),), 4, 4)


def test_a_view_too_hard_to_decide_counts_as_overlapping(monkeypatch):
    view = ((50, 101), (50, 103), (50, 107), (50, 109))
    apart = ((3, 38), (2, 18), (2, 33), (5, 32))
    assert not overlaps_itself(apart)
    monkeypatch.setattr(module, "_MOST_STEPS", 0)
    assert overlaps_itself(view)
    assert overlaps_itself(apart)
