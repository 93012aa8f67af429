"""The planner: what it decides, and that what it decided is the same copy."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import numpy
import pytest
from graphcore_kernels import CopyClass, _boxes
from graphcore_kernels._axes import Axis
from graphcore_kernels._boxes import BOX_BYTES
from graphcore_kernels._copy_arguments import MAX_AXES, shared_bytes, split_bytes
from graphcore_kernels._division import Magic, divide
from graphcore_kernels.copy_plan import CopyForm, CopyLayout, lay_out
from helpers.strided_views import CASES, Pair, View, dense, like, pair, pairs
from hypothesis import given, settings

from graphcore.errors import ConfigurationError


def lay_out_pair(copy: Pair) -> CopyLayout:
    return lay_out(
        copy.dst.sides,
        copy.src.sides,
        copy.dst.itemsize,
        copy.dst.start % 16,
        copy.src.start % 16,
    )


def byte_map(copy: Pair) -> dict[int, int]:
    """Destination byte -> source byte, relative to the first elements, from the definition."""
    itemsize = copy.dst.itemsize

    def bytes_of(view: View) -> numpy.ndarray:
        grids = numpy.indices(view.shape).reshape(len(view.shape), view.size)
        starts = numpy.array(view.strides, int).reshape(1, -1) @ grids * itemsize
        return (starts.reshape(-1, 1) + numpy.arange(itemsize)).ravel()

    return dict(zip(bytes_of(copy.dst).tolist(), bytes_of(copy.src).tolist(), strict=True))


def offset_of(axes: tuple[Axis, ...], index: int) -> int:
    offset = 0
    for size, stride in reversed(axes):
        index, inner = divmod(index, size)
        offset += inner * stride
    return offset


def planned_bytes(layout: CopyLayout) -> dict[int, int]:
    """Destination byte -> source byte, as the layout says."""
    if layout.form is CopyForm.CONTIGUOUS:
        nbytes = layout.head + layout.count * layout.word + layout.tail
        return {layout.dst_start + at: layout.src_start + at for at in range(nbytes)}
    moved = {}
    for index in range(layout.count):
        dst = layout.dst_start + offset_of(layout.dst_axes, index) * layout.word
        src = layout.src_start + offset_of(layout.src_axes, index) * layout.word
        moved.update({dst + byte: src + byte for byte in range(layout.word)})
    return moved


@given(pairs(most=4))
@settings(max_examples=300, deadline=None)
def test_a_layout_moves_each_byte_where_the_definition_says(copy):
    layout = lay_out_pair(copy)
    assert planned_bytes(layout) == byte_map(copy)
    if layout.form is not CopyForm.CONTIGUOUS:
        assert 1 <= len(layout.dst_axes) <= MAX_AXES
        assert (layout.boxes is not None) == (layout.form is CopyForm.TILE)
        assert all(axis.size > 1 for axis in (*layout.dst_axes, *layout.src_axes))
        assert math.prod(a.size for a in layout.src_axes) == layout.count


@given(pairs())
@settings(max_examples=300, deadline=None)
def test_every_word_that_moves_is_aligned(copy):
    layout = lay_out_pair(copy)
    if layout.count:
        assert (copy.dst.start + layout.dst_start + layout.head) % layout.word == 0
        assert (copy.src.start + layout.src_start + layout.head) % layout.word == 0
    assert layout.head < layout.word
    assert layout.tail < layout.word


@pytest.mark.parametrize(
    ("copy", "copy_class", "word", "axes"),
    [
        (CASES["one element"], CopyClass.CONTIGUOUS, 16, ()),
        (CASES["contiguous, odd"], CopyClass.CONTIGUOUS, 16, ()),
        (CASES["contiguous, both one element off"], CopyClass.CONTIGUOUS, 16, ()),
        (CASES["contiguous, source one element off"], CopyClass.CONTIGUOUS, 4, ((10007, 1, 1),)),
        (CASES["both reversed"], CopyClass.CONTIGUOUS, 16, ()),
        (CASES["reshape, dense"], CopyClass.CONTIGUOUS, 16, ()),
        (CASES["ten dimensions that merge"], CopyClass.CONTIGUOUS, 16, ()),
        (CASES["pitched rows"], CopyClass.ROWS, 16, ((61, 32, 24), (24, 1, 1))),
        (CASES["odd rows"], CopyClass.ROWS, 4, ((17, 1029, 1033), (1021, 1, 1))),
        (CASES["rows, misaligned"], CopyClass.ROWS, 4, ((33, 72, 64), (64, 1, 1))),
        (CASES["rows, misaligned by a byte"], CopyClass.ROWS, 1, ((9, 288, 256), (256, 1, 1))),
        (CASES["broadcast row"], CopyClass.ROWS, 16, ((41, 24, 0), (24, 1, 1))),
        (CASES["BSHD to BHSD"], CopyClass.ROWS, 16, None),
        (CASES["short rows"], CopyClass.SHORT_INNER, 4, ((401, 8, 3), (3, 1, 1))),
        (CASES["short rows, one word"], CopyClass.SHORT_INNER, 16, ((401, 2, 1),)),
        (CASES["transpose"], CopyClass.TRANSPOSE, 4, ((67, 45, 1), (45, 1, 67))),
        (CASES["5-D reverse"], CopyClass.TRANSPOSE, 4, None),
        (CASES["every second column"], CopyClass.GENERAL, 4, ((1850, 1, 2),)),
        (CASES["into every second column"], CopyClass.GENERAL, 4, ((1850, 2, 1),)),
        (CASES["broadcast column"], CopyClass.GENERAL, 4, ((41, 96, 1), (96, 1, 0))),
        (CASES["reshape of a transpose"], CopyClass.TRANSPOSE, 4, ((21, 20, 1), (20, 1, 21))),
    ],
)
def test_a_copy_is_classified_merged_and_widened(copy, copy_class, word, axes):
    layout = lay_out_pair(copy)
    assert (layout.copy_class, layout.word) == (copy_class, word)
    if axes is not None:
        pairs_ = zip(layout.dst_axes, layout.src_axes, strict=True)
        assert tuple((d.size, d.stride, s.stride) for d, s in pairs_) == axes


def test_shapes_without_common_axes_keep_an_axis_set_each():
    layout = lay_out_pair(CASES["reshape without common axes"])
    assert (layout.form, layout.word) == (CopyForm.SPLIT, 8)
    assert layout.dst_axes == ((15, 15), (14, 1))
    assert layout.src_axes == ((21, 12), (10, 1))


def test_sides_whose_common_axes_are_too_many_keep_their_own():
    dst = View((128, 4, 2, 2), (1, 128, 512, 1024), itemsize=2)
    src = View((4, 4, 4, 4, 8), (0, 1, 0, 4, 16), itemsize=2, shift=1)
    layout = lay_out_pair(Pair(dst, src))
    assert layout.form is CopyForm.SPLIT
    assert (len(layout.dst_axes), len(layout.src_axes)) == (5, 6)
    assert planned_bytes(layout) == byte_map(Pair(dst, src))


def test_the_same_copy_is_planned_once():
    sides = dense(7, 11).sides
    assert lay_out(sides, sides, 4, 0, 0) is lay_out(sides, sides, 4, 0, 0)


@pytest.mark.parametrize("row_counts", [(2, 64, 4000), (5000, 100_000)], ids=["small", "not"])
def test_row_counts_change_neither_class_nor_kernel(row_counts):
    layouts = [
        lay_out_pair(Pair(like(lambda a: a[:, :64], rows, 72), dense(rows, 64)))
        for rows in row_counts
    ]
    assert len({(layout.copy_class, layout.kernel_name) for layout in layouts}) == 1


BIG = [
    pytest.param(View((2, 2**30), (2**30 + 3, 1)), 64, id="2**31 elements"),
    pytest.param(View((2, 2**29), (2**29 + 3, 1)), 32, id="2**30 elements"),
    pytest.param(View((65536, 65537), (65540, 1)), 64, id="past 2**32 elements"),
]


@pytest.mark.parametrize(("dst", "bits"), BIG)
def test_copies_past_32_bits_use_64_bit_indices(dst, bits):
    layout = lay_out(dst.sides, View(dst.shape, (1, 0)).sides, 4, 0, 4)
    assert layout.form is CopyForm.SHARED
    assert (layout.word, layout.index_bits, layout.count) == (4, bits, dst.size)
    axis = layout.dst_axes[-1]
    code = {32: "I", 64: "Q"}[bits]
    packed = layout.arguments(0, 0)[3]
    columns = struct.unpack_from(f"<{3 * MAX_AXES}{code}", packed)
    size, multiplier, shift = (columns[at] for at in (0, MAX_AXES, 2 * MAX_AXES))
    assert size == axis.size
    for index in (0, size - 1, size, layout.count - 1):
        assert divide(index, Magic(multiplier, shift), bits) == index // size


def test_far_offsets_of_few_elements_need_64_bit_indices():
    far = View((2, 2), (2**31, 2))
    assert lay_out(far.sides, dense(2, 2).sides, 1).index_bits == 64
    back = View((2, 2), (-(2**31), 2))
    assert lay_out(dense(2, 2).sides, back.sides, 1).index_bits == 64
    near = View((2, 2), (2**31 - 3, 2))
    assert lay_out(near.sides, dense(2, 2).sides, 1).index_bits == 32


def test_wide_words_bring_far_offsets_back_to_32_bits():
    rows = View((2**16, 2**16), (2**16 + 16, 1))
    layout = lay_out(rows.sides, dense(2**16, 2**16).sides, 1)
    assert (layout.word, layout.index_bits) == (16, 32)


def test_more_than_eight_axes_are_refused_by_name():
    shape = (2,) * 9
    apart = View(shape, tuple(3 ** (9 - axis) for axis in range(9)))
    with pytest.raises(ConfigurationError, match=r"dst: expected at most 8 dim.*got 9"):
        lay_out(apart.sides, like(lambda a: a.T, *shape).sides, 4)
    assert lay_out(apart.sides[1:], like(lambda a: a.T, *shape[1:]).sides, 4).count == 256


@pytest.mark.parametrize(
    "dst",
    [
        pytest.param(View((4, 4), (0, 1)), id="broadcast rows"),
        pytest.param(View((4, 4), (1, 1)), id="sliding window"),
        pytest.param(View((4, 4), (2, -3)), id="crossing steps"),
    ],
)
def test_a_destination_that_overlaps_itself_is_refused(dst):
    with pytest.raises(ConfigurationError, match=r"dst: expected strides .* own, got shape"):
        lay_out(dst.sides, dense(*dst.shape).sides, 4)
    assert lay_out(dense(*dst.shape).sides, dst.sides, 4).count


def test_interleaved_steps_that_never_meet_are_accepted():
    dst = View((2, 3), (3, 2))
    assert lay_out(dst.sides, dense(2, 3).sides, 4).count == 6


def test_other_element_counts_are_refused():
    with pytest.raises(ConfigurationError, match=r"src: expected 12 elements .* got 10"):
        lay_out(dense(3, 4).sides, dense(10).sides, 4)


def test_no_elements_is_a_class_of_its_own():
    layout = lay_out(dense(3, 0).sides, dense(0, 7).sides, 4)
    assert (layout.copy_class, layout.count) == (CopyClass.EMPTY, 0)


@pytest.mark.parametrize("form", [CopyForm.SHARED, CopyForm.SPLIT])
@pytest.mark.parametrize("bits", [32, 64])
def test_packed_axes_have_the_size_that_the_signature_names(form, bits):
    name = "every second column" if form is CopyForm.SHARED else "reshape without common axes"
    layout = replace(lay_out_pair(CASES[name]), index_bits=bits)
    assert layout.form is form
    size_of = shared_bytes if form is CopyForm.SHARED else split_bytes
    assert len(layout.arguments(0, 0)[3]) == size_of(bits, bits)


def test_a_whole_copy_of_few_bytes_has_no_word_at_all():
    layout = lay_out_pair(pair(dense(3), dense(3), shift=8))
    assert (layout.head, layout.count, layout.tail) == (8, 0, 4)


FORMS = {
    "contiguous, odd": CopyForm.CONTIGUOUS,
    "contiguous, both one element off": CopyForm.CONTIGUOUS,
    "contiguous, shorter than a word": CopyForm.CONTIGUOUS,
    "contiguous, off by a byte": CopyForm.ROWS,
    "odd rows": CopyForm.FEW,
    "rows, misaligned by a byte": CopyForm.ROWS,
    "pitched rows": CopyForm.FEW,
    "short rows": CopyForm.FEW,
    "short rows, one word": CopyForm.SHARED,
    "BSHD to BHSD": CopyForm.SHARED,
    "every second column": CopyForm.SHARED,
    "broadcast column": CopyForm.SHARED,
    "broadcast row": CopyForm.REPEAT,
    "transpose": CopyForm.TILE,
    "5-D reverse": CopyForm.TILE,
    "8-D reverse": CopyForm.TILE,
    "reshape of a transpose": CopyForm.TILE,
    "reshape without common axes": CopyForm.SPLIT,
}


@pytest.mark.parametrize("name", FORMS)
def test_a_copy_takes_the_kernel_that_moves_long_runs(name):
    assert lay_out_pair(CASES[name]).form is FORMS[name]


def permuted(shape: tuple[int, ...], axes: tuple[int, ...]) -> CopyLayout:
    src = like(lambda a: a.transpose(axes), *shape)
    return lay_out(dense(*src.shape).sides, src.sides, 4)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        pytest.param((16384, 16384), (1, 0), id="transpose"),
        pytest.param((8, 32, 4096, 128), (0, 1, 3, 2), id="BHSD to BHDS"),
        pytest.param((64, 64, 64, 32, 16), (4, 3, 2, 1, 0), id="5-D reverse"),
        pytest.param((10**6, 3), (1, 0), id="three columns"),
        pytest.param((3, 10**6), (1, 0), id="into three columns"),
        pytest.param((10**5, 9, 9), (0, 2, 1), id="many small ones"),
    ],
)
def test_boxes_of_large_copies_have_runs_of_256_bytes_on_both_sides(shape, axes):
    boxes = permuted(shape, axes).boxes
    assert boxes is not None
    read = run_of(Axis(a.size, a.stride) for a in boxes.load)
    written = run_of(Axis(a.size, a.dst) for a in boxes.store)
    assert read * boxes.load_bytes >= 256
    assert written * boxes.store_bytes >= 256
    words = math.prod(a.size for a in boxes.load) * boxes.load_bytes
    assert BOX_BYTES * 3 // 4 <= words <= BOX_BYTES


def run_of(axes) -> int:
    """Units that lie side by side."""
    (_, unit), *_ = ordered = sorted(axes, key=lambda axis: axis.stride)
    run = unit
    for axis in ordered:
        if axis.stride != run:
            break
        run *= axis.size
    return run // unit


def test_boxes_that_divide_an_axis_unevenly_overlap_and_stay_inside():
    (first, second) = permuted((131, 1000), (1, 0)).boxes.steps
    for step, size in ((first, 131), (second, 1000)):
        assert step.last + step.extent == size
        assert (step.count - 1) * step.extent < size <= step.count * step.extent


def test_small_copies_have_small_boxes_so_that_many_blocks_have_one():
    small, large = (permuted((side, side), (1, 0)).boxes for side in (256, 4096))
    assert small.count >= 64
    assert math.prod(a.size for a in small.load) < math.prod(a.size for a in large.load)


def test_more_boxes_than_the_kernel_counts_are_no_boxes(monkeypatch):
    monkeypatch.setattr(_boxes, "_MOST_BOXES", 4)
    lay_out.cache_clear()
    try:
        assert permuted((500, 501), (1, 0)).form is CopyForm.SHARED
    finally:
        lay_out.cache_clear()


def test_rows_that_are_many_or_far_apart_or_of_three_axes_are_no_few_rows():
    def form_of(rows, apart):
        return lay_out(View((rows, 8), (apart, 1)).sides, dense(rows, 8).sides, 16).form

    assert form_of(8192, 9) is CopyForm.FEW
    assert form_of(8193, 9) is CopyForm.SHARED
    assert form_of(2, 2**31 - 8) is CopyForm.FEW
    assert form_of(2, 2**31) is CopyForm.SHARED
    blocks = View((4, 4, 8), (100, 9, 1)).sides
    assert lay_out(blocks, dense(4, 4, 8).sides, 16).form is CopyForm.SHARED


def test_single_words_of_long_rows_are_packed_where_the_destination_is_one_run():
    def form_of(columns, rows, *, pitch=0, itemsize=4):
        dst = View((rows, columns), (columns + pitch, 1))
        return lay_out(dst.sides, View(dst.shape, (columns + 8, 1)).sides, itemsize).form

    assert form_of(1021, 65) is CopyForm.PACKED
    assert form_of(513, 2**22) is CopyForm.PACKED
    assert form_of(1021, 64) is CopyForm.FEW  # small
    assert form_of(511, 200) is CopyForm.SHARED  # short rows
    assert form_of(1021, 65, pitch=4) is CopyForm.SHARED
    assert form_of(1021, 65, itemsize=8) is CopyForm.SHARED
    assert form_of(1021, 65, itemsize=2) is CopyForm.ROWS
    assert form_of(1020, 1000) is CopyForm.SHARED  # words of 16 bytes


def test_packed_rows_past_32_bits_have_64_bit_indices():
    bits = [
        lay_out(dense(rows, 1023).sides, View((rows, 1023), (1029, 1)).sides, 4).index_bits
        for rows in (2**21, 2**21 + 2**12)
    ]
    assert bits == [32, 64]


def test_rows_that_run_back_through_the_source_are_few_rows_with_a_negative_stride():
    layout = lay_out(dense(5, 8).sides, View((5, 8), (-8, 1)).sides, 16)
    assert layout.form is CopyForm.FEW
    count, row, _, _, to_next, from_next = layout.arguments(0, 0)[2:]
    assert (count, row, to_next, from_next) == (40, 8, 8, -8)


def test_copies_from_half_a_gigabyte_on_are_large():
    layouts = [lay_out(dense(n).sides, dense(n).sides, 1) for n in (499_999_999, 500_000_000)]
    assert [layout.is_large for layout in layouts] == [False, True]


def test_row_counts_change_no_kernel_of_packed_rows():
    layouts = [
        lay_out(dense(n, 1021).sides, View((n, 1021), (1029, 1)).sides, 4) for n in (65, 100_000)
    ]
    assert {layout.form for layout in layouts} == {CopyForm.PACKED}
    assert len({(layout.copy_class, layout.kernel_name) for layout in layouts}) == 1


@pytest.mark.parametrize("rows", [2, 64])
@pytest.mark.parametrize(
    "copy",
    [
        pytest.param(lambda n: (dense(n, 1021), like(lambda a: a[:, :1021], n, 1029)), id="odd"),
        pytest.param(lambda n: (dense(n, 64), View((n, 64), (0, 1))), id="repeated"),
        pytest.param(lambda n: (dense(64, n), like(lambda a: a.T, n, 64)), id="transpose"),
    ],
)
def test_row_counts_change_no_kernel_of_any_form(copy, rows):
    layouts = [lay_out(d.sides, s.sides, 4) for d, s in (copy(rows), copy(7))]
    assert len({(layout.copy_class, layout.kernel_name) for layout in layouts}) == 1
