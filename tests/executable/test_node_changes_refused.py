"""Changes of single nodes that are refused, with what is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from helpers.contract import Bench, copy_1d, copy_2d, fill_1d
from helpers.kernels import (
    axpy,
    scale,
)
from helpers.node_changes import filling, graph_of, launched
from helpers.tensors import device_of, filled, replay

import graphcore
from graphcore import (
    CacheTypeError,
    ConfigurationError,
    Graph,
    LifecycleError,
    UpdateRefused,
)
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import (
    CopyOperand,
    EmptyParams,
    KernelParams,
    LaunchConfig,
    MemcpyParams,
    MemsetParams,
    NodeKind,
    NodeParams,
)
from graphcore.resources.buffer import Buffer

# ---- refused ------------------------------------------------------------------------------------


def _rows(bench: Bench, x: int) -> NodeParams:
    return MemsetParams(x, 1, 4, 2, height=2, pitch=16)


REFUSED: dict[str, tuple[Callable[[Bench, int], NodeParams], dict[str, Any], str]] = {
    "a fill's height": (_rows, {"height": 3}, "height: 2 -> 3"),
    "a copy of rows": (lambda _, x: copy_2d(x, x + 64, 8, 2, 16, 16), {"width": 4}, "1-D"),
    "a copy that gets rows": (lambda _, x: copy_1d(x, x + 64, 8), {"height": 2}, "height: 1 -> 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_does_not_change_in_one_node_is_explained(bench: Bench, name: str) -> None:
    x = bench.alloc(128)
    make, operands, message = REFUSED[name]
    executable = graph_of(bench, make(bench, x)).instantiate()
    before = executable.snapshot()
    with pytest.raises(UpdateRefused, match=message) as caught:
        executable.set_params(0, **operands)
    assert "GraphExec.update" in str(caught.value)
    assert "CUDA_ERROR_" in str(caught.value)
    assert executable.snapshot() == before


@pytest.mark.parametrize(
    "change", [{"cluster": (2, 1, 1)}, {"cooperative": True}, {"programmatic": True}]
)
def test_launch_attributes_that_a_node_keeps_silently_are_refused(
    bench: Bench, change: dict[str, Any]
) -> None:
    x = bench.alloc(16)
    executable = graph_of(bench, filling(bench, x, 1.0)).instantiate()
    config = replace(LaunchConfig((4, 1, 1), (32, 1, 1)), **change)
    with pytest.raises(UpdateRefused, match=f"config.{next(iter(change))}"):
        executable.set_params(0, config=config)


WRONG: dict[str, tuple[Callable[[Bench], tuple[tuple[Any, ...], dict[str, Any]]], type, str]] = {
    "too few arguments": (lambda _: ((0, [1]), {}), ConfigurationError, "expected 3 arguments"),
    "an unknown name": (lambda _: ((0, {"z": 1}), {}), ConfigurationError, "x, value, n, got 'z'"),
    "a number of another width": (
        lambda _: ((0, {"n": 2**40}), {}),
        ConfigurationError,
        "argument 2 .*32 bits",
    ),
    "a tensor of another dtype": (
        lambda bench: (
            (0, {"x": torch.zeros(4, dtype=torch.int32, device=device_of(bench.driver))}),
            {},
        ),
        ConfigurationError,
        r"argument 0 \(x\): dtype: expected float32, got int32",
    ),
    "arguments of another type": (lambda _: ((0, 7), {}), ConfigurationError, "sequence"),
    "operands of a copy": (lambda _: ((0,), {"src": 1}), ConfigurationError, "got 'src'"),
    "nothing": (lambda _: ((0,), {}), ConfigurationError, "something to change"),
    "nothing of a copy": (lambda _: ((1,), {}), ConfigurationError, "something to change"),
    "arguments of a copy": (lambda _: ((1, [1]), {}), ConfigurationError, "operands by name"),
    "an unknown operand": (lambda _: ((1,), {"value": 1}), ConfigurationError, "got 'value'"),
    "a negative size": (lambda _: ((1,), {"width": -1}), ConfigurationError, "width"),
    "a small tensor": (
        lambda bench: ((1,), {"src": filled(bench.driver, 1.0, 2)}),
        ConfigurationError,
        "at least 16 bytes",
    ),
    "no tensor": (lambda _: ((1,), {"src": "x"}), CacheTypeError, "src"),
    "a kind that does not change": (lambda _: ((2, [1]), {}), ConfigurationError, "node 2"),
    "an index past the end": (lambda _: ((3, [1]), {}), ConfigurationError, "got 3"),
    "a negative index": (lambda _: ((-1, [1]), {}), ConfigurationError, "got -1"),
    "no node": (lambda _: (("0", [1]), {}), CacheTypeError, "got str"),
    "a bool": (lambda _: ((True, [1]), {}), CacheTypeError, "got bool"),
    "no launch config": (lambda _: ((0,), {"config": 3}), ConfigurationError, "LaunchConfig"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_work_is_refused_before_anything_changes(bench: Bench, name: str) -> None:
    x, y = bench.alloc(16), bench.alloc(16)
    nodes = (filling(bench, x, 1.0), copy_1d(y, x, 16), EmptyParams())
    executable = graph_of(bench, *nodes).instantiate()
    before = executable.snapshot()
    make, error, message = WRONG[name]
    positional, named = make(bench)
    with pytest.raises(error, match=message):
        executable.set_params(*positional, **named)
    assert executable.snapshot() == before
    assert launched(executable, bench, x) == [1.0] * 4


def test_a_node_of_another_or_a_destroyed_graph_is_refused(bench: Bench) -> None:
    x = bench.alloc(16)
    executable = graph_of(bench, filling(bench, x, 1.0)).instantiate()
    other = graph_of(bench, filling(bench, x, 2.0)).snapshot().nodes[0]
    gone = bench.driver.create_graph()
    dead = bench.add(gone, filling(bench, x, 3.0))
    bench.driver.destroy_graph(gone)
    for node in (other, other.handle, dead):
        with pytest.raises(ConfigurationError, match="expected a node of this executable"):
            executable.set_params(node, {"value": 4.0})
        with pytest.raises(ConfigurationError, match="expected a node of this executable"):
            executable.enable(node, False)
    assert launched(executable, bench, x) == [1.0] * 4


def test_memory_of_another_driver_and_closed_buffers_are_refused(bench: Bench) -> None:
    x = bench.alloc(16)
    executable = graph_of(bench, filling(bench, x, 1.0)).instantiate()
    foreign = Buffer.allocate(4, driver=EmulatedDriver())
    with pytest.raises(ConfigurationError, match=r"driver|memory on"):
        executable.set_params(0, {"x": foreign})
    closed = Buffer.allocate(4, driver=bench.driver)
    closed.close()
    with pytest.raises(LifecycleError, match="closed"):
        executable.set_params(0, {"x": closed})
    read_only = numpy.zeros(4, "float32")
    read_only.flags.writeable = False
    with pytest.raises(ConfigurationError, match=r"writable|memory on"):
        executable.set_params(0, {"x": read_only})


def test_nothing_changes_in_a_capture_or_after_closing(bench: Bench) -> None:
    x = bench.alloc(16)
    executable = graph_of(bench, filling(bench, x, 1.0)).instantiate()
    calls: tuple[Callable[[], object], ...] = (
        lambda: executable.set_params(0, {"value": 2.0}),
        lambda: executable.bind_params(0),
        lambda: executable.enable(0, False),
        lambda: executable.is_enabled(0),
    )
    with graphcore.capture(driver=bench.driver):
        for call in calls:
            with pytest.raises(LifecycleError, match="capture is under way"):
                call()
    assert launched(executable, bench, x) == [1.0] * 4
    executable.close()
    for call in (*calls, executable.snapshot, executable.private_memory):
        with pytest.raises(LifecycleError, match="closed"):
            call()


def test_a_graph_that_cannot_be_copied_still_tells_by_its_snapshot(bench: Bench) -> None:
    x = bench.alloc(16)
    handle = bench.new_graph()
    _, _, bodies = bench.add_conditional(handle, "if", default=1)
    bench.add(bodies[0], filling(bench, x, 1.0))
    graph = Graph(bench.driver, handle, owned=False)
    executable = graph.instantiate()
    inner = executable.snapshot().nodes[0].bodies[0].nodes[0]
    executable.set_params(inner, {"value": 2.0})
    with pytest.raises(LifecycleError, match="conditional or memory nodes"):
        _ = executable.graph
    now = executable.snapshot().nodes[0].bodies[0].nodes[0]
    assert now.arguments[1].value == 2.0
    assert launched(executable, bench, x) == [2.0] * 4


def test_without_a_signature_an_argument_is_its_bytes(bench: Bench) -> None:
    """As with kernels of other libraries: a number has no width there, a tensor has an address."""
    x = bench.put([1.0] * 4)
    y = filled(bench.driver, 0.0)
    graph = graph_of(bench, bench.kernel_params(axpy, 2.0, x, y.data_ptr(), 4))
    executable = graph.instantiate()
    base = executable.snapshot()
    untyped = replace(base.nodes[0], kernel=None)
    executable._current._remember(replace(base, nodes=(untyped,)))
    executable.set_params(0, {0: numpy.float32(3).tobytes()})
    replay(executable, bench.stream)
    assert y.tolist() == [3.0] * 4
    other = filled(bench.driver, 0.0)
    executable.set_params(0, {2: other})
    replay(executable, bench.stream)
    assert other.tolist() == [3.0] * 4
    for wrong in ({3: 4}, {0: b"12"}, {0: other}):
        with pytest.raises(ConfigurationError, match="4 bytes"):
            executable.set_params(0, wrong)
    bound = executable.bind_params(0)
    packed = axpy.pack(5.0, x, other.data_ptr(), 4)
    other.zero_()
    bound(*packed)
    replay(executable, bench.stream)
    assert other.tolist() == [5.0] * 4


def test_the_kind_of_a_record_is_checked_too(bench: Bench) -> None:
    x = bench.alloc(16)
    executable = graph_of(bench, filling(bench, x, 1.0)).instantiate()
    record = executable.snapshot().nodes[0]
    wrong = replace(record, params=MemcpyParams(CopyOperand(x), CopyOperand(x), 4))
    assert wrong.kind is NodeKind.MEMCPY
    with pytest.raises(ConfigurationError, match="expected a node of this executable"):
        executable.set_params(wrong, src=x)
    assert isinstance(record.params, KernelParams)
    assert bench.driver.function(scale) != record.params.function


def test_a_node_given_by_name_is_refused_with_where_its_handle_is(bench: Bench) -> None:
    executable = graph_of(bench, fill_1d(bench.alloc(16), 0, 4)).instantiate()
    with pytest.raises(CacheTypeError, match=r"got str; graph\.plan_nodes\[name\] has the handles"):
        executable.enable("fill", False)
