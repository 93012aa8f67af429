"""Rows of strided views: what memcpy and memset nodes take of them, against NumPy."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphcore.plan.rows import Rows, dense_rows

COPIES = {
    "dense": ((4, 8), [(8, 1), (8, 1)], Rows(128, 1, 1, (0, 0), (0, 0), (0, 0))),
    "one_element": ((), [(), ()], Rows(4, 1, 1, (0, 0), (0, 0), (0, 0))),
    "axes_of_one": ((1, 8, 1), [(99, 1, 7), (3, 1, 5)], Rows(32, 1, 1, (0, 0), (0, 0), (0, 0))),
    "pitched": ((4, 6), [(8, 1), (10, 1)], Rows(24, 4, 1, (32, 40), (0, 0), (0, 0))),
    "one_side_pitched": ((4, 6), [(6, 1), (8, 1)], Rows(24, 4, 1, (24, 32), (0, 0), (0, 0))),
    "three_dimensions": (
        (2, 3, 4),
        [(40, 8, 1), (60, 10, 1)],
        Rows(16, 3, 2, (32, 40), (5, 6), (0, 0)),
    ),
    "both_transposed": ((6, 4), [(1, 8), (1, 10)], Rows(24, 4, 1, (32, 40), (0, 0), (0, 0))),
    "both_backwards": ((8,), [(-1,), (-1,)], Rows(32, 1, 1, (0, 0), (0, 0), (-28, -28))),
    "one_transposed": ((4, 4), [(4, 1), (1, 4)], None),
    "one_backwards": ((8,), [(1,), (-1,)], None),
    "broadcast": ((4, 8), [(8, 1), (0, 1)], None),
    "single_elements": ((8,), [(1,), (2,)], None),
    "slices_off_the_rows": ((2, 3, 4), [(41, 8, 1), (24, 4, 1)], None),
    "four_dimensions": ((2, 2, 2, 4), [(400, 90, 20, 1), (32, 16, 8, 2)], None),
}


@pytest.mark.parametrize("case", COPIES)
def test_the_rows_of_a_copy_are(case: str) -> None:
    shape, sides, expected = COPIES[case]
    assert dense_rows(shape, sides, 4) == expected


def test_rows_farther_apart_than_cuda_takes_are_none() -> None:
    assert dense_rows((2, 4), [(2**29, 1), (4, 1)], 4) is None
    assert dense_rows((2, 4), [(2**29 - 1, 1), (4, 1)], 4) is not None


def test_fills_take_rows_of_one_element() -> None:
    assert dense_rows((8,), [(3,)], 4, least=1) == Rows(4, 8, 1, (12,), (0,), (0,))


_axis = st.tuples(st.integers(1, 4), st.sampled_from([-6, -2, -1, 0, 1, 2, 4, 5, 24]))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.tuples(_axis, _axis), max_size=4))
def test_a_copy_by_rows_moves_what_numpy_moves(axes: list[tuple[tuple[int, int], ...]]) -> None:
    shape = tuple(count for (count, _), _ in axes)
    sides = [tuple(pair[side][1] for pair in axes) for side in (0, 1)]
    places = [_places(shape, steps) for steps in sides]
    rows = dense_rows(shape, sides, 1, least=1)
    if rows is None or len(set(places[0].ravel())) < places[0].size:
        return
    for side in (0, 1):
        assert sorted(_places_of(rows, side)) == sorted(places[side].ravel())
    pairs = set(zip(*(place.ravel().tolist() for place in places), strict=True))
    assert set(zip(_places_of(rows, 0), _places_of(rows, 1), strict=True)) == pairs


def _places(shape: tuple[int, ...], steps: tuple[int, ...]) -> numpy.ndarray:
    index = numpy.indices(shape) if shape else numpy.zeros((0,), int)
    return sum((axis * step for axis, step in zip(index, steps, strict=True)), numpy.array(0))


def _places_of(rows: Rows, side: int) -> list[int]:
    return [
        rows.starts[side] + (z * rows.slices[side] + y) * rows.pitches[side] + x
        for z in range(rows.depth)
        for y in range(rows.height)
        for x in range(rows.width)
    ]
