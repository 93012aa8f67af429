"""Layout: what holds for every drawing, whatever its links are."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from helpers.snapshots import drawing
from hypothesis import given, settings
from hypothesis import strategies as st

from graphcore.drawing.crossings import crossings, order_ranks
from graphcore.drawing.layout import COLUMN_GAP, Layout, lay_out
from graphcore.drawing.model import Drawing
from graphcore.drawing.order import in_cycle, ranks, topological


@st.composite
def drawings(draw: st.DrawFn, acyclic: bool = True) -> tuple[Drawing, list[tuple[float, float]]]:
    count = draw(st.integers(1, 24))
    index = st.integers(0, count - 1)
    links = draw(st.lists(st.tuples(index, index), max_size=40))
    if acyclic:
        # a random order of the indices, so that links also go from higher to lower ones
        order = draw(st.permutations(range(count)))
        links = [(order[min(a, b)], order[max(a, b)]) for a, b in links if a != b]
    sizes = [(float(draw(st.integers(40, 240))), 44.0) for _ in range(count)]
    return drawing(count, links), sizes


def overlaps(layout: Layout) -> list[tuple[int, int]]:
    return [
        (i, j)
        for (i, a), (j, b) in combinations(enumerate(layout.places), 2)
        if a.x < b.x + b.width
        and b.x < a.x + a.width
        and a.y < b.y + b.height
        and b.y < a.y + a.height
    ]


@given(drawings(acyclic=False))
@settings(deadline=None)
def test_no_two_boxes_overlap_and_all_lie_inside_the_picture(
    case: tuple[Drawing, list[tuple[float, float]]],
) -> None:
    layout = lay_out(*case)
    assert overlaps(layout) == []
    for place in layout.places:
        assert place.x >= 0
        assert place.y >= 0
        assert place.x + place.width <= layout.width
        assert place.y + place.height <= layout.height


@given(drawings())
@settings(deadline=None)
def test_links_go_down_a_column_or_to_a_later_one(
    case: tuple[Drawing, list[tuple[float, float]]],
) -> None:
    layout = lay_out(*case)
    for link in case[0].links:
        source, target = layout.places[link.source], layout.places[link.target]
        assert source.rank < target.rank
        assert source.column <= target.column
        if source.column == target.column:
            assert source.y + source.height < target.y


@given(drawings())
@settings(deadline=None)
def test_a_link_runs_from_its_source_to_its_target_and_through_no_other_box(
    case: tuple[Drawing, list[tuple[float, float]]],
) -> None:
    picture, sizes = case
    layout = lay_out(picture, sizes)
    assert len(layout.routes) == len(picture.links)
    for route in layout.routes:
        link = picture.links[route.link]
        source, target = layout.places[link.source], layout.places[link.target]
        (x, y, _), (end_x, end_y, _) = route.points[0], route.points[-1]
        assert (x, y) == (pytest.approx(source.x + source.width / 2, abs=0.2), source.y + 44)
        assert (end_x, end_y) == (pytest.approx(target.x + target.width / 2, abs=0.2), target.y)
        for (x1, y1, column1), (x2, y2, column2) in pairwise(route.points):
            if column1 == column2:
                assert y1 <= y2
            # a piece along a rank is upright; pieces between ranks touch no box
            if x1 == x2 and column1 == column2:
                inside = [
                    place
                    for place in layout.places
                    if place.x < x1 < place.x + place.width
                    and place.y < y2
                    and y1 < place.y + place.height
                ]
                assert inside == []


@given(drawings(acyclic=False))
@settings(deadline=None)
def test_the_same_drawing_is_laid_out_the_same_way(
    case: tuple[Drawing, list[tuple[float, float]]],
) -> None:
    assert lay_out(*case) == lay_out(*case)


def test_an_empty_drawing_has_an_empty_picture() -> None:
    layout = lay_out(Drawing(()), [])
    assert layout.places == ()
    assert layout.width > 0


def test_a_chain_is_straight() -> None:
    layout = lay_out(drawing(6, pairwise(range(6))), [(100.0, 44.0)] * 6)
    assert len({place.x for place in layout.places}) == 1
    assert [place.rank for place in layout.places] == list(range(6))


def test_a_long_chain_is_cut_into_columns_of_about_equal_height() -> None:
    layout = lay_out(drawing(36, pairwise(range(36))), [(200.0, 60.0)] * 36)
    columns = [place.column for place in layout.places]
    assert columns == sorted(columns)
    assert columns[-1] + 1 == len(layout.gutters) >= 3
    sizes = [columns.count(column) for column in range(columns[-1] + 1)]
    assert max(sizes) - min(sizes) <= 1
    assert layout.height < layout.width
    for place in layout.places:
        gutter = layout.gutters[place.column]
        assert place.x + place.width <= gutter - COLUMN_GAP / 2 + 0.5


def test_fork_and_join_need_no_crossing() -> None:
    pairs = [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4)]
    layout = lay_out(drawing(5, pairs), [(100.0, 44.0)] * 5)
    assert len({place.y for place in layout.places[1:4]}) == 1
    root, join = layout.places[0], layout.places[4]
    assert root.x == pytest.approx(layout.places[2].x) == pytest.approx(join.x)


def test_many_independent_boxes_wrap_instead_of_making_one_endless_row() -> None:
    layout = lay_out(drawing(100), [(200.0, 44.0)] * 100)
    assert layout.width < 2000
    assert overlaps(layout) == []


@given(drawings(), st.integers(1, 5))
def test_ranks_are_full_without_gaps_and_no_wider_than_asked(
    case: tuple[Drawing, list[tuple[float, float]]], widest: int
) -> None:
    count = len(case[0].boxes)
    pairs = [(link.source, link.target) for link in case[0].links]
    rank = ranks(count, pairs, widest)
    assert sorted(set(rank)) == list(range(max(rank) + 1))
    assert max(rank.count(value) for value in set(rank)) <= widest


@given(drawings())
def test_a_topological_order_holds_every_index_once_and_follows_the_links(
    case: tuple[Drawing, list[tuple[float, float]]],
) -> None:
    pairs = [(link.source, link.target) for link in case[0].links]
    order = topological(len(case[0].boxes), pairs)
    assert sorted(order) == list(range(len(case[0].boxes)))
    position = {index: at for at, index in enumerate(order)}
    assert all(position[source] < position[target] for source, target in pairs)
    assert not any(in_cycle(len(order), pairs))


def test_a_cycle_is_found_and_still_ordered() -> None:
    pairs = [(0, 1), (1, 2), (2, 1), (2, 3)]
    assert in_cycle(4, pairs) == [False, True, True, False]
    assert topological(4, pairs) == [0, 1, 2, 3]
    assert topological(3, [(2, 2), (1, 0), (0, 1)]) == [2, 0, 1]


def test_sweeps_untangle_crossed_links() -> None:
    rank = [0, 0, 0, 1, 1, 1]
    hops = [(0, 5), (1, 4), (2, 3)]
    down: list[list[int]] = [[5], [4], [3], [], [], []]
    assert crossings([[0, 1, 2], [3, 4, 5]], down) == 3
    assert crossings(order_ranks(rank, hops), down) == 0
