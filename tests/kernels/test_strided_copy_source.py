"""The kernels' own source, run on the host: its index arithmetic against NumPy."""

from __future__ import annotations

import mmap
from dataclasses import replace

import numpy
import pytest
from graphcore_kernels.copy_plan import CopyForm, CopyLayout, lay_out
from helpers.host_cuda import THREADS, HostKernels
from helpers.strided_views import CASES, Pair, View, dense, like, pairs, random_bytes
from hypothesis import HealthCheck, given, settings


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return HostKernels(tmp_path_factory.mktemp("host_cuda"))


def aligned(content: numpy.ndarray) -> numpy.ndarray:
    """A copy of ``content`` at an address that is a multiple of 256."""
    room = numpy.empty(content.size + 255, numpy.uint8)
    start = -room.ctypes.data % 256
    room[start : start + content.size] = content
    return room[start : start + content.size]


def lay_out_at(copy: Pair, dst: int, src: int) -> CopyLayout:
    return lay_out(copy.dst.sides, copy.src.sides, copy.dst.itemsize, dst % 16, src % 16)


WITH_INDICES = (CopyForm.SHARED, CopyForm.SPLIT, CopyForm.ROWS, CopyForm.PACKED)


def check(
    kernels: HostKernels,
    copy: Pair,
    grid: int,
    index_bits: int | None,
    *,
    backwards: bool = False,
) -> CopyLayout:
    src = aligned(random_bytes(copy.src.buffer_size, 1))
    dst = aligned(random_bytes(copy.dst.buffer_size, 2))
    expected = copy.expected(dst, src)
    to, source = dst.ctypes.data + copy.dst.start, src.ctypes.data + copy.src.start
    layout = lay_out_at(copy, to, source)
    if index_bits and layout.form in WITH_INDICES:
        layout = replace(layout, index_bits=index_bits)
    kernels.run(layout, to, source, grid=grid, backwards=backwards)
    assert dst.tobytes() == expected.tobytes()
    return layout


@pytest.mark.parametrize("index_bits", [32, 64])
@given(copy=pairs())
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_source_copies_random_views_as_numpy_does(kernels, index_bits, copy):
    check(kernels, copy, 1, index_bits, backwards=index_bits == 64)


@pytest.mark.parametrize("grid", [1, 3, 64])
@pytest.mark.parametrize("index_bits", [32, 64])
@pytest.mark.parametrize("name", CASES)
def test_the_source_copies_every_case_at_any_grid(kernels, name, index_bits, grid):
    check(kernels, CASES[name], grid, index_bits, backwards=grid == 3)


OF_FORM = {
    CopyForm.CONTIGUOUS: (dense(5000), dense(5000)),
    CopyForm.ROWS: (replace(dense(2100), shift=1), dense(2100)),
    CopyForm.TILE: (dense(70, 90), View((70, 90), (1, 70))),
    CopyForm.FEW: (like(lambda a: a[:, :37], 50, 41), like(lambda a: a[::-1, :37], 50, 39)),
    CopyForm.SHARED: (View((50, 100), (1, 50)), View((50, 100), (2, 201))),
    CopyForm.SPLIT: (View((50, 100), (201, 2)), View((40, 125), (126, 1))),
}


@pytest.mark.parametrize("word", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("form", OF_FORM)
def test_the_source_has_every_form_and_word_and_writes_only_its_words(kernels, form, word):
    if form is CopyForm.ROWS and word == 16:
        pytest.skip("elements of 16 bytes that are aligned make aligned rows")
    copy = Pair(*(replace(view, itemsize=word) for view in OF_FORM[form]))
    assert check(kernels, copy, 2, None).form is form


@pytest.mark.parametrize("shift", [(0, 0), (0, 4), (8, 0), (12, 4), (1, 0), (3, 6), (5, 15)])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_rows_that_begin_anywhere_are_copied_whole(kernels, itemsize, shift):
    rows = like(lambda a: a[:, :, : 2400 // itemsize], 3, 5, 2400 // itemsize + 3)
    dst, src = (replace(rows, itemsize=itemsize, shift=each) for each in shift)
    layout = check(kernels, Pair(dst, src), 2, None)
    assert (layout.form is CopyForm.ROWS) == (layout.word <= 2)
    run = replace(dense(4801 // itemsize), itemsize=itemsize)
    check(kernels, Pair(replace(run, shift=shift[0]), replace(run, shift=shift[1])), 2, None)


PACKED = {
    "odd rows": ((131, 521), (529, 1)),
    "rows that are aligned alike": ((131, 521), (540, 1)),
    "rows backwards": ((131, 521), (-523, 1)),
    "the same row again": ((131, 521), (0, 1)),
    "rows of two pitches": ((5, 27, 521), (27 * 530 + 3, 529, 1)),
    "rows of three pitches": ((5, 3, 9, 521), (9 * 529 + 1, 5 * 9 * 531, 529, 1)),
}


@pytest.mark.parametrize("shift", [(0, 0), (4, 0), (0, 8), (12, 4), (8, 12)])
@pytest.mark.parametrize("name", PACKED)
def test_rows_of_single_words_that_make_one_run_are_copied_whole(kernels, name, shift):
    shape, strides = PACKED[name]
    copy = Pair(dense(*shape, shift=shift[0]), View(shape, strides, shift=shift[1]))
    for grid, index_bits, backwards in ((1, 32, False), (5, 64, True)):
        layout = check(kernels, copy, grid, index_bits, backwards=backwards)
        assert layout.form is CopyForm.PACKED


REPEATED = {
    "one row": (dense(37, 64), View((37, 64), (0, 1))),
    "few words often": (dense(1500, 8), View((1500, 8), (0, 1))),
    "a long row": (dense(3, 9000), View((3, 9000), (0, 1))),
    "in the middle": (dense(5, 30, 16), View((5, 30, 16), (16, 0, 1))),
    "twice": (dense(9, 5, 30, 16), View((9, 5, 30, 16), (0, 16, 0, 1))),
    "with gaps": (like(lambda a: a[:, :, :16], 7, 9, 24), View((7, 9, 16), (0, 32, 1))),
}


@pytest.mark.parametrize("grid", [1, 5, 40])
@pytest.mark.parametrize("name", REPEATED)
def test_words_that_are_repeated_arrive_everywhere(kernels, name, grid):
    assert check(kernels, Pair(*REPEATED[name]), grid, None).form is CopyForm.REPEAT


def permuted(shape, axes, *, pitch=0, **options):
    """The copy of a permuted dense tensor, whose rows may be ``pitch`` elements longer."""
    src = like(lambda a: a[..., : shape[-1]].transpose(axes), *shape[:-1], shape[-1] + pitch)
    return Pair(dense(*src.shape, **options), replace(src, **options))


TILED = {
    "aligned": permuted((128, 192), (1, 0)),
    "longer than boxes": permuted((2, 260, 196), (2, 1, 0)),
    "uneven": permuted((131, 97), (1, 0)),
    "uneven batches": permuted((9, 37, 41), (0, 2, 1)),
    "many small ones": permuted((300, 9, 9), (0, 2, 1)),
    "a few columns": permuted((2000, 3), (1, 0)),
    "into a few columns": permuted((3, 2000), (1, 0)),
    "reversed 5-D": permuted((12, 10, 9, 8, 16), (4, 3, 2, 1, 0)),
    "reversed 8-D": permuted((3,) * 8, (7, 6, 5, 4, 3, 2, 1, 0)),
    "pairs": permuted((40, 50, 2), (1, 0, 2)),
    "short runs": permuted((40, 50, 3), (1, 0, 2)),
    "padded rows": permuted((60, 64), (1, 0), pitch=4),
    "padded rows by one": permuted((60, 64), (1, 0), pitch=1),
    "every second": Pair(dense(60, 64), View((60, 64), (2, 120))),
    "backwards": Pair(dense(60, 64), View((60, 64), (-1, 60))),
    "rows backwards": Pair(dense(60, 64), View((60, 64), (1, -60))),
    "repeated in a box": Pair(dense(5, 3, 64), View((5, 3, 64), (1, 0, 5))),
    "off by an element": permuted((64, 64), (1, 0), shift=4),
}


DIRECT = (("pairs", 16), ("short runs", 16), ("every second", 16))


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", TILED)
def test_boxes_move_every_permutation_whatever_the_order_of_threads(kernels, name, itemsize):
    copy = Pair(*(replace(view, itemsize=itemsize) for view in (TILED[name].dst, TILED[name].src)))
    for grid, backwards in ((1, False), (7, True)):
        layout = check(kernels, copy, grid, None, backwards=backwards)
    # runs of 32 bytes, and words that lie as far apart, gain nothing
    assert (layout.form is CopyForm.TILE) == ((name, itemsize) not in DIRECT)


def test_a_copy_of_the_wrong_row_count_is_seen(kernels):
    copy = CASES["pitched rows"]
    src, dst = (aligned(random_bytes(v.buffer_size, 3)) for v in (copy.src, copy.dst))
    expected = copy.expected(dst, src)
    to, source = dst.ctypes.data + copy.dst.start, src.ctypes.data + copy.src.start
    layout = lay_out_at(copy, to, source)
    kernels.run(replace(layout, count=layout.count - 1), to, source)
    assert dst.tobytes() != expected.tobytes()


ELEMENTS = 2**32 + 3 * 2**20
FAR = [
    pytest.param(dense(ELEMENTS, itemsize=1), (1,), CopyForm.CONTIGUOUS, id="contiguous"),
    pytest.param(
        View((2**12 + 3, 2**20), (2**20 + 1, 1), itemsize=1), (0, 1), CopyForm.ROWS, id="rows"
    ),
    pytest.param(dense(ELEMENTS, itemsize=1), (2,), CopyForm.SHARED, id="every second"),
    pytest.param(
        dense(2**16 + 2**11, 2**16, itemsize=1), (1, 2**16 + 2**11), CopyForm.TILE, id="transpose"
    ),
]


@pytest.mark.skipif(not hasattr(mmap, "MAP_ANONYMOUS"), reason="needs sparse anonymous memory")
@pytest.mark.parametrize(("dst", "src_strides", "form"), FAR)
def test_the_last_words_of_more_than_2_to_the_32_elements_arrive(kernels, dst, src_strides, form):
    # pages that no block touches are never made: only the blocks of the first and last words run
    src = View(dst.shape, src_strides, itemsize=1)
    memories = [mmap.mmap(-1, view.buffer_size, mmap.MAP_PRIVATE) for view in (dst, src)]
    try:
        to, source = (numpy.frombuffer(memory, numpy.uint8) for memory in memories)
        starts = to.ctypes.data + dst.start, source.ctypes.data + src.start
        layout = lay_out(dst.sides, src.sides, 1, starts[0] % 16, starts[1] % 16)
        assert layout.form is form
        if form in WITH_INDICES:
            layout = replace(layout, index_bits=64)
        elements = numpy.array([(0,) * len(dst.shape), [size - 1 for size in dst.shape]])
        wanted = random_bytes(2, 4) | 1
        source[src.start + elements @ numpy.array(src.strides)] = wanted
        places = dst.start + elements @ numpy.array(dst.strides)
        grid, last = blocks_of_all(layout)
        for block in (0, last):
            kernels.run(layout, *starts, grid=grid, only=range(block, block + 1))
        assert to[places].tolist() == wanted.tolist()
        assert not to[places[1] + 1 :].any()
        del to, source
    finally:
        for memory in memories:
            memory.close()


def blocks_of_all(layout: CopyLayout) -> tuple[int, int]:
    """(a grid of which each thread moves one word at most, the block that moves the last)."""
    if layout.form is CopyForm.TILE:
        return layout.boxes.count, layout.boxes.count - 1
    count = layout.arguments(0, 0)[2] if layout.form is CopyForm.ROWS else layout.count
    return -(-count // THREADS), (count - 1) // THREADS
