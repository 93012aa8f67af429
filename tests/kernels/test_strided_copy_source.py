"""The kernels' own source, run on the host: its index arithmetic against NumPy."""

from __future__ import annotations

import mmap
import shutil
from dataclasses import replace

import numpy
import pytest
from graphcore_kernels.copy_plan import CopyForm, CopyLayout, lay_out
from helpers.host_cuda import THREADS, HostKernels
from helpers.strided_views import CASES, Pair, View, dense, pairs, random_bytes
from hypothesis import HealthCheck, given, settings


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: neither g++ nor clang++ is on the path")
    return HostKernels(compiler, tmp_path_factory.mktemp("host_cuda"))


def aligned(content: numpy.ndarray) -> numpy.ndarray:
    """A copy of ``content`` at an address that is a multiple of 256."""
    room = numpy.empty(content.size + 255, numpy.uint8)
    start = -room.ctypes.data % 256
    room[start : start + content.size] = content
    return room[start : start + content.size]


def lay_out_at(copy: Pair, dst: int, src: int) -> CopyLayout:
    return lay_out(copy.dst.sides, copy.src.sides, copy.dst.itemsize, dst % 16, src % 16)


def check(kernels: HostKernels, copy: Pair, grid: int, index_bits: int | None) -> None:
    src = aligned(random_bytes(copy.src.buffer_size, 1))
    dst = aligned(random_bytes(copy.dst.buffer_size, 2))
    expected = copy.expected(dst, src)
    to, source = dst.ctypes.data + copy.dst.start, src.ctypes.data + copy.src.start
    layout = lay_out_at(copy, to, source)
    if index_bits and layout.form is not CopyForm.CONTIGUOUS:
        layout = replace(layout, index_bits=index_bits)
    kernels.run(layout, to, source, grid=grid)
    assert dst.tobytes() == expected.tobytes()


@pytest.mark.parametrize("index_bits", [32, 64])
@given(copy=pairs())
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_source_copies_random_views_as_numpy_does(kernels, index_bits, copy):
    check(kernels, copy, 1, index_bits)


@pytest.mark.parametrize("grid", [1, 3, 64])
@pytest.mark.parametrize("index_bits", [32, 64])
@pytest.mark.parametrize("name", CASES)
def test_the_source_copies_every_case_at_any_grid(kernels, name, index_bits, grid):
    check(kernels, CASES[name], grid, index_bits)


@pytest.mark.parametrize("word", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("form", CopyForm)
def test_the_source_has_every_form_and_word_and_writes_only_its_words(kernels, form, word):
    views = {
        CopyForm.CONTIGUOUS: (dense(5000), dense(5000)),
        CopyForm.SHARED: (View((50, 100), (1, 50)), View((50, 100), (201, 2))),
        CopyForm.SPLIT: (View((50, 100), (201, 2)), View((40, 125), (126, 1))),
    }[form]
    copy = Pair(*(replace(view, itemsize=word) for view in views))
    check(kernels, copy, 2, None)


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
    pytest.param(dense(ELEMENTS, itemsize=1), (1,), id="contiguous"),
    pytest.param(View((2**12 + 3, 2**20), (2**20 + 1, 1), itemsize=1), (0, 1), id="rows"),
]


@pytest.mark.skipif(not hasattr(mmap, "MAP_ANONYMOUS"), reason="needs sparse anonymous memory")
@pytest.mark.parametrize(("dst", "src_strides"), FAR)
def test_the_last_words_of_more_than_2_to_the_32_elements_arrive(kernels, dst, src_strides):
    # pages that no block touches are never made: only the first and last blocks are run
    src = View(dst.shape, src_strides, itemsize=1)
    memories = [mmap.mmap(-1, view.buffer_size, mmap.MAP_PRIVATE) for view in (dst, src)]
    try:
        to, source = (numpy.frombuffer(memory, numpy.uint8) for memory in memories)
        starts = to.ctypes.data + dst.start, source.ctypes.data + src.start
        layout = lay_out(dst.sides, src.sides, 1, starts[0] % 16, starts[1] % 16)
        assert layout.index_bits == 64
        grid = -(-layout.count // THREADS)
        last = src.start + sum((n - 1) * s for n, s in src.sides)
        source[src.start : src.start + 500] = random_bytes(500, 4)
        source[last - 499 : last + 1] = random_bytes(500, 5)
        for blocks in (range(1), range(grid - 1, grid)):
            kernels.run(layout, *starts, grid=grid, blocks=blocks)
        end = dst.start + sum((n - 1) * s for n, s in dst.sides)
        moved = min(((layout.count - 1) % THREADS + 1) * layout.word, 400)
        assert to[dst.start : dst.start + 200].tolist() == source[src.start :][:200].tolist()
        assert to[end - moved + 1 : end + 1].tolist() == source[last - moved + 1 :][:moved].tolist()
        assert not to[end + 1 :].any()
        del to, source
    finally:
        for memory in memories:
            memory.close()
