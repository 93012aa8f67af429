"""Contract: loading kernels, launching them and host callbacks outside captures."""

from __future__ import annotations

import pytest
from helpers.contract import Bench, covers, refused
from helpers.kernels import (
    ONE_BLOCK,
    add_one,
    axpy,
    copy_bytes,
    write_cluster_size,
    write_shape,
)

from graphcore.driver import Kernel
from graphcore.driver.records import LaunchConfig
from graphcore.driver.tensor_map import TensorMap, encoded_address, with_address


@covers("function")
def test_a_kernel_is_loaded_once(bench: Bench) -> None:
    assert bench.driver.function(add_one) == bench.driver.function(add_one)
    assert bench.driver.function(add_one) != bench.driver.function(axpy)


@covers("function_info")
@pytest.mark.parametrize(
    ("kernel", "layout"),
    [
        (add_one, ((0, 8), (8, 4))),
        (axpy, ((0, 4), (8, 8), (16, 8), (24, 4))),
        (copy_bytes, ((0, 8), (8, 8), (16, 4))),
    ],
    ids=["add_one", "axpy", "copy_bytes"],
)
def test_function_info_tells_name_and_parameter_layout(
    bench: Bench, kernel: Kernel, layout: tuple[tuple[int, int], ...]
) -> None:
    info = bench.driver.function_info(bench.driver.function(kernel))
    assert info.name == kernel.name
    assert info.raw_name == kernel.name
    assert info.layout == layout


@covers("function_info")
def test_two_kernels_of_one_driver_share_the_context(bench: Bench) -> None:
    infos = [
        bench.driver.function_info(bench.driver.function(kernel)) for kernel in (add_one, axpy)
    ]
    assert infos[0].context == infos[1].context


@covers("encode_tensor_map")
def test_a_tensor_map_has_the_address_in_its_first_word_and_nowhere_else(bench: Bench) -> None:
    maps = [
        bench.driver.encode_tensor_map(TensorMap(bench.alloc(1024), 2, (64, 8), (128,), (64, 8)))
        for _ in range(2)
    ]
    first, second = maps
    assert [len(each) for each in maps] == [128, 128]
    assert encoded_address(first) != encoded_address(second)
    assert with_address(first, encoded_address(second)) == second


@covers("kernel_of")
def test_a_driver_knows_which_kernel_a_function_was_loaded_from(bench: Bench) -> None:
    assert bench.driver.kernel_of(bench.driver.function(add_one)) is add_one
    assert bench.driver.kernel_of(bench.driver.function(axpy)) is axpy


@covers("launch")
def test_arguments_that_are_not_the_kernels_are_refused(bench: Bench) -> None:
    x = bench.put([1])
    function = bench.driver.function(axpy)
    with refused("INVALID_VALUE"):
        bench.driver.launch(function, ONE_BLOCK, add_one.pack(x, 1), bench.stream.handle)
    assert bench.get(x, 1) == [1]


@covers("launch")
def test_a_launch_runs_the_kernel_on_its_arguments(bench: Bench) -> None:
    x, y = bench.put([1, 2, 3]), bench.put([10, 20, 30])
    bench.launch(axpy, 2.0, x, y, 3)
    assert bench.get(y, 3) == [12, 24, 36]
    assert bench.get(x, 3) == [1, 2, 3]


@covers("launch")
def test_a_kernel_sees_the_shape_it_was_launched_with(bench: Bench) -> None:
    out = bench.alloc(28)
    bench.launch(write_shape, out, config=LaunchConfig((2, 3, 4), (8, 2, 1), shared_bytes=128))
    assert bench.get(out, 7, "int32") == [2, 3, 4, 8, 2, 1, 128]


@covers("launch")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_kernel_sees_the_cluster_it_was_launched_with(bench: Bench, size: int) -> None:
    out = bench.alloc(4)
    config = LaunchConfig((4, 1, 1), (32, 1, 1), cluster=(size, 1, 1))
    bench.launch(write_cluster_size, out, config=config)
    assert bench.get(out, 1, "int32") == [size]


@covers("launch")
@pytest.mark.parametrize(
    "config",
    [
        LaunchConfig((2, 1, 1), (32, 1, 1), cooperative=True),
        LaunchConfig((2, 1, 1), (32, 1, 1), priority=-1),
        LaunchConfig((2, 1, 1), (32, 1, 1), programmatic=True),
    ],
    ids=["cooperative", "priority", "programmatic"],
)
def test_a_launch_takes_attributes(bench: Bench, config: LaunchConfig) -> None:
    x = bench.put([1, 2])
    bench.launch(add_one, x, 2, config=config)
    assert bench.get(x, 2) == [2, 3]


@covers("launch")
@pytest.mark.parametrize(
    ("config", "code"),
    [
        (LaunchConfig((0, 1, 1), (32, 1, 1)), "INVALID_VALUE"),
        (LaunchConfig((1, 70000, 1), (32, 1, 1)), "INVALID_VALUE"),
        (LaunchConfig((1, 1, 1), (2048, 1, 1)), "INVALID_VALUE"),
        (LaunchConfig((1, 1, 1), (512, 4, 1)), "INVALID_VALUE"),
        (LaunchConfig((1, 1, 1), (32, 1, 1), shared_bytes=2**20), "INVALID_VALUE"),
        (LaunchConfig((3, 1, 1), (32, 1, 1), cluster=(2, 1, 1)), "INVALID_CLUSTER_SIZE"),
    ],
    ids=["no_blocks", "grid_y", "block_x", "threads", "shared", "cluster_does_not_divide"],
)
def test_a_shape_the_device_cannot_run_is_refused(
    bench: Bench, config: LaunchConfig, code: str
) -> None:
    x = bench.put([1])
    with refused(code):
        bench.launch(add_one, x, 1, config=config)
    assert bench.get(x, 1) == [1]


@covers("launch_host")
def test_a_host_callback_runs_in_stream_order(bench: Bench) -> None:
    calls: list[str] = []
    bench.driver.launch_host(lambda: calls.append("first"), bench.stream.handle)
    bench.driver.launch_host(lambda: calls.append("second"), bench.stream.handle)
    bench.driver.synchronize_stream(bench.stream.handle)
    assert calls == ["first", "second"]
