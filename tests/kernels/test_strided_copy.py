"""strided_copy against NumPy on both drivers, bit for bit, guard bytes included."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
from graphcore_kernels import CopyClass, strided_copy
from graphcore_kernels.copy_plan import CopyForm
from helpers.strided_views import (
    CASES,
    DTYPES,
    SPECIAL_FLOATS,
    Pair,
    View,
    dense,
    device_buffers,
    like,
    pairs,
    random_bytes,
)
from hypothesis import HealthCheck, given, settings

from graphcore.driver import Driver


def copied(driver: Driver, copy: Pair, dst: numpy.ndarray, src: numpy.ndarray) -> bytes:
    """The destination buffer after the copy; the source must be as before."""
    with device_buffers(driver, dst, src) as (to, source), driver.stream() as stream:
        strided_copy(copy.dst.at(to, driver), copy.src.at(source, driver), stream)
        stream.synchronize()
        assert driver.read(source, src.size) == src.tobytes()
        return driver.read(to, dst.size)


def check(driver: Driver, copy: Pair) -> None:
    dst = random_bytes(copy.dst.buffer_size, 1)
    src = random_bytes(copy.src.buffer_size, 2)
    expected = copy.expected(dst, src).tobytes()
    assert expected != dst.tobytes() or not copy.dst.size
    assert copied(driver, copy, dst, src) == expected


@pytest.mark.parametrize("name", CASES)
def test_every_case_copies_as_numpy_does(graphcore_driver, name):
    check(graphcore_driver, CASES[name])


@pytest.mark.parametrize("itemsize", DTYPES)
@pytest.mark.parametrize("name", ["odd rows", "short rows", "transpose", "every second column"])
def test_every_element_width_copies_as_numpy_does(graphcore_driver, name, itemsize):
    copy = CASES[name]
    check(
        graphcore_driver,
        Pair(replace(copy.dst, itemsize=itemsize), replace(copy.src, itemsize=itemsize)),
    )


@given(copy=pairs())
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_random_views_copy_as_numpy_does(graphcore_driver, copy):
    dst = random_bytes(copy.dst.buffer_size, 3)
    src = random_bytes(copy.src.buffer_size, 4)
    expected = copy.expected(dst, src).tobytes()
    assert copied(graphcore_driver, copy, dst, src) == expected


@pytest.mark.parametrize("name", ["contiguous, odd", "transpose", "odd rows", "broadcast column"])
def test_no_bit_pattern_is_changed(graphcore_driver, name):
    copy = CASES[name]
    src = numpy.resize(numpy.array(SPECIAL_FLOATS, "<u4"), copy.src.buffer_size // 4 + 1)
    src = src.view(numpy.uint8)[: copy.src.buffer_size]
    dst = numpy.zeros(copy.dst.buffer_size, numpy.uint8)
    after = numpy.frombuffer(copied(graphcore_driver, copy, dst, src), numpy.uint8)
    assert after.tobytes() == copy.expected(dst, src).tobytes()
    seen = set(copy.dst.array(after).view("<u4").ravel().tolist())
    assert seen <= set(SPECIAL_FLOATS)
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("dst", "src"),
    [
        pytest.param(dense(0), dense(0), id="one empty axis"),
        pytest.param(dense(3, 0, 5), dense(0, 2), id="other shapes"),
        pytest.param(View((0, 4), (0, 0)), dense(4, 0), id="zero strides"),
    ],
)
def test_no_elements_means_no_launch(graphcore_driver, dst, src):
    buffer = random_bytes(256)
    plan = strided_copy.plan(dst.at(0, graphcore_driver), src.at(0, graphcore_driver))
    assert plan.kernel is None
    assert plan.copy_class is CopyClass.EMPTY
    assert copied(graphcore_driver, Pair(dst, src), buffer, buffer) == buffer.tobytes()


def test_a_plan_launches_again_and_sees_changed_contents(graphcore_driver):
    copy = CASES["transpose"]
    dst, first, second = (
        random_bytes(size, seed)
        for seed, size in enumerate(
            (copy.dst.buffer_size, copy.src.buffer_size, copy.src.buffer_size)
        )
    )
    driver = graphcore_driver
    with device_buffers(driver, dst, first) as (to, source), driver.stream() as stream:
        plan = strided_copy.plan(copy.dst.at(to, driver), copy.src.at(source, driver))
        assert driver.read(to, dst.size) == dst.tobytes()
        for content in (first, second):
            driver.write(source, content.tobytes())
            plan.launch(stream)
            stream.synchronize()
            assert driver.read(to, dst.size) == copy.expected(dst, content).tobytes()


def planned_rows(driver, rows, columns):
    view = like(lambda a: a[:, :columns], rows, columns + 8)
    return strided_copy.plan(dense(rows, columns).at(2**40, driver), view.at(2**41, driver))


@pytest.mark.parametrize("columns", [64, 61])
@pytest.mark.parametrize("row_counts", [(2, 65, 1070), (5000, 70_000)], ids=["small", "large"])
def test_the_launch_shape_depends_on_the_class_and_on_whether_the_copy_is_small(
    graphcore_driver, row_counts, columns
):
    plans = [planned_rows(graphcore_driver, rows, columns) for rows in row_counts]
    assert len({(plan.kernel, plan.config(graphcore_driver)) for plan in plans}) == 1
    assert (plans[0].layout.form is CopyForm.FEW) == (row_counts[0] == 2)
    assert {plan.copy_class for plan in plans} == {CopyClass.ROWS}
    assert {plan.layout.is_small for plan in plans} == {row_counts[0] == 2}
    threads = plans[0].config(graphcore_driver)
    assert (threads.grid == (64, 1, 1)) == (row_counts[0] == 2)


def test_rows_that_make_one_run_have_many_blocks_where_they_are_large(graphcore_driver):
    plans = [planned_rows(graphcore_driver, rows, 1021) for rows in (65, 5000, 131072, 200_000)]
    assert {plan.layout.form for plan in plans} == {CopyForm.PACKED}
    grids = [plan.config(graphcore_driver).grid[0] for plan in plans]
    assert grids[0] == grids[1] < grids[2] == grids[3]


def planned_run(driver, count, src_strides=None):
    view = View((count // 64, 64), src_strides or (64, 1))
    run = dense(count // 64, 64)
    return strided_copy.plan(run.at(2**40, driver), view.at(2**41, driver))


@pytest.mark.parametrize("src_strides", [(64, 1), (0, 1)], ids=["contiguous", "repeated"])
def test_large_copies_have_many_blocks_whatever_their_size(graphcore_driver, src_strides):
    counts = (2**20, 2**26, 2**27, 2**29)
    plans = [planned_run(graphcore_driver, count, src_strides) for count in counts]
    threads = [
        config.grid[0] * config.block[0]
        for config in (plan.config(graphcore_driver) for plan in plans)
    ]
    assert [plan.layout.is_large for plan in plans] == [False, False, True, True]
    assert threads[0] == threads[1] < threads[2] == threads[3]
    assert len({plan.kernel for plan in plans}) == 1


def test_rows_of_narrow_words_have_more_threads_than_whole_ones(graphcore_driver):
    whole, narrow = (
        planned_rows(graphcore_driver, 70_000, columns).config(graphcore_driver)
        for columns in (64, 61)
    )
    assert narrow.grid[0] * narrow.block[0] > whole.grid[0] * whole.block[0]


def test_boxes_are_never_small(graphcore_driver):
    view = like(lambda a: a.T, 8, 8)
    plan = strided_copy.plan(
        dense(8, 8).at(2**40, graphcore_driver), view.at(2**41, graphcore_driver)
    )
    assert not plan.layout.is_small


def test_without_a_stream_a_copy_is_ordered_before_what_waits_for_the_device(graphcore_driver):
    copy = CASES["pitched rows"]
    dst, src = random_bytes(copy.dst.buffer_size), random_bytes(copy.src.buffer_size, 1)
    driver = graphcore_driver
    with device_buffers(driver, dst, src) as (to, source):
        strided_copy(copy.dst.at(to, driver), copy.src.at(source, driver))
        driver.synchronize()
        assert driver.read(to, dst.size) == copy.expected(dst, src).tobytes()


def test_numpy_arrays_are_copied_where_they_lie():
    src = numpy.arange(24, dtype=numpy.float32).reshape(4, 6)
    dst = numpy.full((6, 8), numpy.nan, numpy.float32)
    strided_copy(dst[::-1, 1:5], src.T)
    assert (dst[::-1, 1:5] == src.T).all()
    assert numpy.isnan(dst[:, [0, 5, 6, 7]]).all()


def test_a_packed_structures_field_is_copied_although_it_is_misaligned():
    packed = numpy.zeros(50, dtype=numpy.dtype([("flag", "u1"), ("value", "<f4"), ("rest", "V7")]))
    values = numpy.frombuffer(packed.tobytes(), numpy.uint8).copy()
    field = numpy.ndarray((50,), "<f4", buffer=values, offset=1, strides=(12,))
    src = numpy.arange(50, dtype=numpy.float32)
    strided_copy(field, src)
    assert (field == src).all()
    assert not values.reshape(50, 12)[:, [0, 5, 6, 7, 8, 9, 10, 11]].any()
