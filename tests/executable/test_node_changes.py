"""Single nodes of an executable: set_params, bind_params, enable; what is known afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from helpers.contract import Bench, copy_1d, copy_2d, fill_1d
from helpers.graph_specs import Child, Spec, Step, build
from helpers.kernels import (
    ONE_BLOCK,
    add_one,
    axpy,
    fill_value,
    scale,
    write_cluster_size,
    write_shape,
)
from helpers.tensors import device_of, filled, replay

import graphcore
from graphcore import (
    CacheTypeError,
    ConfigurationError,
    CudaError,
    Graph,
    GraphExec,
    LifecycleError,
    UpdateRefused,
    UpdateStatus,
)
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import (
    CopyOperand,
    Edge,
    EmptyParams,
    KernelParams,
    LaunchConfig,
    MemcpyParams,
    MemsetParams,
    NodeKind,
    NodeParams,
)
from graphcore.resources.buffer import Buffer
from graphcore.resources.lifetime import OwnerSet


def graph_of(bench: Bench, *steps: Any) -> Graph:
    spec: Spec = tuple(step if isinstance(step, Step) else Step(step) for step in steps)
    return Graph(bench.driver, build(bench, spec), owned=False)


def filling(bench: Bench, x: int, value: float) -> NodeParams:
    return bench.kernel_params(fill_value, x, value, 4)


def launched(executable: GraphExec, bench: Bench, address: int) -> list[float]:
    """What a launch leaves at ``address``, which is poisoned before."""
    bench.poison(address, 16)
    replay(executable, bench.stream)
    return bench.get(address, 4)


# ---- kernels ------------------------------------------------------------------------------------


def test_new_arguments_run_from_the_next_launch_on_and_the_graph_is_untouched(
    bench: Bench,
) -> None:
    x, y = bench.alloc(16), bench.alloc(16)
    graph = graph_of(bench, filling(bench, x, 1.0))
    before = graph.snapshot()
    executable = graph.instantiate()
    executable.set_params(0, [y, 3.0, 4])
    assert launched(executable, bench, y) == [3.0] * 4
    executable.set_params(0, {"value": 5.0, 0: x})
    assert launched(executable, bench, x) == [5.0] * 4
    assert graph.snapshot() == before


@pytest.mark.parametrize("way", ["record", "handle", "index", "record of the executable"])
def test_a_node_is_named_by_record_handle_or_index(bench: Bench, way: str) -> None:
    x, y = bench.alloc(16), bench.alloc(16)
    graph = graph_of(bench, filling(bench, x, 1.0), filling(bench, y, 2.0))
    executable = graph.instantiate()
    record = graph.snapshot().nodes[1]
    node = {
        "record": record,
        "handle": record.handle,
        "index": 1,
        "record of the executable": executable.snapshot().nodes[1],
    }[way]
    executable.set_params(node, {"value": 7.0})
    assert launched(executable, bench, y) == [7.0] * 4
    assert launched(executable, bench, x) == [1.0] * 4


def test_another_launch_shape_takes_effect(bench: Bench) -> None:
    out = bench.alloc(28)
    executable = graph_of(bench, bench.kernel_params(write_shape, out)).instantiate()
    executable.set_params(0, config=LaunchConfig((3, 2, 1), (64, 1, 1), 128))
    replay(executable, bench.stream)
    assert bench.get(out, 7, "int32") == [3, 2, 1, 64, 1, 1, 128]


def test_a_tensor_as_an_argument_is_kept_alive_until_the_node_is_changed_again(
    graphcore_driver: Driver,
) -> None:
    driver = graphcore_driver
    first = filled(driver, 0.0)
    function = driver.function(fill_value)
    with graphcore.capture(driver=driver) as capture:
        capture.keep(first, "first")
        arguments = fill_value.pack(first.data_ptr(), 1.0, 4)
        driver.launch(function, ONE_BLOCK, arguments, capture.stream.handle)
    executable = capture.graph.instantiate()
    second = filled(driver, 0.0)
    alive = weakref.ref(second)
    executable.set_params(0, {"x": second})
    assert second in executable.owners
    replay(executable, capture.stream)
    assert second.tolist() == [1.0] * 4
    del second
    gc.collect()
    assert alive() is not None
    third = filled(driver, 0.0)
    executable.set_params(0, {"x": third})
    gc.collect()
    assert alive() is None
    assert "first" in executable.owners.labels()
    executable.close()


def test_nodes_of_child_graphs_and_bodies_change_too(bench: Bench) -> None:
    x, y = bench.alloc(16), bench.alloc(16)
    inner = Child((Step(filling(bench, x, 1.0)),))
    handle = build(bench, (Step(Child((Step(inner),))),))
    _, _, bodies = bench.add_conditional(handle, "if", default=1)
    bench.add(bodies[0], filling(bench, y, 2.0))
    executable = Graph(bench.driver, handle, owned=False).instantiate()
    child, body = executable.snapshot().nodes
    assert child.child is not None
    deep = child.child.nodes[0].child
    assert deep is not None
    executable.set_params(deep.nodes[0], {"value": 8.0})
    executable.set_params(body.bodies[0].nodes[0].handle, {"value": 9.0})
    assert launched(executable, bench, x) == [8.0] * 4
    assert launched(executable, bench, y) == [9.0] * 4
    now = [node.arguments[1].value for node in executable.snapshot().walk() if node.kernel]
    assert now == [8.0, 9.0]


# ---- copies and fills ---------------------------------------------------------------------------


def test_operands_of_copies_and_fills_change(bench: Bench) -> None:
    x, y = bench.put([1.0, 2.0, 3.0, 4.0]), bench.put([5.0, 6.0, 7.0, 8.0])
    out, other = bench.alloc(16), bench.alloc(16)
    executable = graph_of(bench, copy_1d(out, x, 16), fill_1d(other, 0, 4)).instantiate()
    executable.set_params(0, src=y)
    assert launched(executable, bench, out) == [5.0, 6.0, 7.0, 8.0]
    executable.set_params(0, src=CopyOperand(x), width=8)
    bench.poison(out, 16)
    replay(executable, bench.stream)
    assert bench.get(out, 2) == [1.0, 2.0]
    executable.set_params(1, value=0x40000000, width=2)
    bench.poison(other, 16)
    replay(executable, bench.stream)
    assert bench.get(other, 2) == [2.0, 2.0]
    assert bench.get(other, 4)[2] != 2.0


def test_a_tensor_as_an_operand_is_kept_alive(bench: Bench) -> None:
    x, out = bench.put([1.0] * 4), bench.alloc(16)
    executable = graph_of(bench, copy_1d(out, x, 16)).instantiate()
    tensor = torch.full((4,), 6.0, device=device_of(bench.driver))
    executable.set_params(0, src=tensor)
    assert tensor in executable.owners
    assert launched(executable, bench, out) == [6.0] * 4


# ---- what is known afterwards -------------------------------------------------------------------


def test_snapshot_graph_and_fingerprint_say_what_runs_now(bench: Bench) -> None:
    x, y = bench.alloc(16), bench.alloc(16)
    graph = graph_of(bench, filling(bench, x, 1.0), Step(filling(bench, y, 2.0), (0,)))
    executable = graph.instantiate()
    assert executable.graph is graph
    same = executable.fingerprint()
    assert same.digest == graph.fingerprint().digest
    executable.set_params(1, {"x": x, "value": 4.0})
    now = executable.snapshot()
    assert [argument.value for argument in now.nodes[1].arguments][1:] == [4.0, 4]
    changed = executable.graph
    assert changed is not graph
    assert executable.graph is changed
    built = graph_of(bench, filling(bench, x, 1.0), Step(filling(bench, x, 4.0), (0,)))
    assert changed.fingerprint().digest == built.fingerprint().digest
    assert executable.fingerprint().digest == built.fingerprint().digest != same.digest
    # an executable of that graph does the same
    assert launched(changed.instantiate(), bench, x) == [4.0] * 4


def test_what_a_capture_embeds_is_what_runs_now(bench: Bench) -> None:
    x, y = bench.alloc(16), bench.alloc(16)
    executable = graph_of(bench, filling(bench, x, 1.0)).instantiate()
    executable.set_params(0, {"x": y, "value": 3.0})
    with graphcore.capture(driver=bench.driver) as capture:
        executable.launch(capture.stream)
    outer = capture.graph.instantiate()
    bench.poison(x, 16)
    assert launched(outer, bench, y) == [3.0] * 4
    assert bench.get(x, 1) != [1.0]


def test_later_updates_and_changes_build_on_each_other(bench: Bench) -> None:
    x, y = bench.alloc(16), bench.alloc(16)
    executable = graph_of(bench, filling(bench, x, 1.0), filling(bench, y, 1.0)).instantiate()
    executable.set_params(0, {"value": 2.0})
    assert executable.graph.snapshot().nodes[0].arguments[1].value == 2.0
    executable.set_params(0, {"x": y})  # on the copy that .graph made
    assert launched(executable, bench, y)[0] in (1.0, 2.0)
    # an update brings everything back to what its graph says
    second = graph_of(bench, filling(bench, x, 5.0), filling(bench, y, 6.0))
    assert executable.update(second).status is UpdateStatus.UPDATED
    assert executable.graph is second
    assert launched(executable, bench, x) == [5.0] * 4
    assert launched(executable, bench, y) == [6.0] * 4
    # and its nodes are known by the handles of either graph
    executable.set_params(second.snapshot().nodes[1], {"value": 7.0})
    assert launched(executable, bench, y) == [7.0] * 4
    assert [n.arguments[1].value for n in executable.snapshot().nodes] == [5.0, 7.0]
    # the same graph again undoes the change
    assert executable.update(second).status is UpdateStatus.UPDATED
    assert launched(executable, bench, y) == [6.0] * 4


def test_nodes_that_an_update_pairs_in_another_order_are_found(bench: Bench) -> None:
    """Exits are paired from the last to the first, so that a graph made in reverse is the same."""
    x, y = bench.alloc(16), bench.alloc(16)
    fill, add = filling(bench, x, 1.0), bench.kernel_params(add_one, x, 4)
    executable = graph_of(bench, fill, Step(add, (0,))).instantiate()
    new = bench.new_graph()
    second = bench.add(new, bench.kernel_params(add_one, y, 4))
    first = bench.add(new, filling(bench, y, 4.0))
    bench.driver.add_edges(new, [Edge(first, second)])
    other = Graph(bench.driver, new, owned=False)
    assert executable.update(other).status is UpdateStatus.UPDATED
    assert launched(executable, bench, y) == [5.0] * 4
    # node 1 of the graph is what fills
    executable.set_params(1, {"value": 10.0})
    assert launched(executable, bench, y) == [11.0] * 4
    assert [node.short_name for node in executable.snapshot().nodes] == ["add_one", "fill_value"]


def test_a_refused_update_after_changes_is_explained_from_what_runs_now(bench: Bench) -> None:
    x = bench.alloc(64)
    executable = graph_of(bench, fill_1d(x, 1, 4)).instantiate()
    executable.set_params(0, value=2)
    rows = MemsetParams(x, 2, 4, 2, height=2, pitch=16)
    outcome = executable.update(graph_of(bench, rows), reinstantiate=False)
    assert outcome.status is UpdateStatus.REFUSED
    assert outcome.field == "height"


def test_what_no_node_works_on_any_more_cannot_make_the_graph_stale(bench: Bench) -> None:
    x, y = filled(bench.driver, 0.0), filled(bench.driver, 0.0)
    steps = [bench.kernel_params(fill_value, x.data_ptr(), 1.0, 4) for _ in range(2)]
    handle = build(bench, tuple(map(Step, steps)))
    owners = OwnerSet().with_(x, label="x")
    executable = Graph(bench.driver, handle, owners=owners, owned=False).instantiate(guard="full")
    executable.set_params(0, {"x": y})
    x.data = filled(bench.driver, 5.0)
    assert [stale.label for stale in executable.check()] == ["x"]  # node 1 still writes there
    executable.set_params(1, {"x": y})
    assert executable.check() == []
    replay(executable, bench.stream)
    assert y.tolist() == [1.0] * 4


# ---- prepared changes ---------------------------------------------------------------------------


def test_a_prepared_change_runs_each_time_and_is_known(bench: Bench) -> None:
    x, y = bench.alloc(16), bench.alloc(16)
    executable = graph_of(bench, filling(bench, x, 1.0)).instantiate()
    bound = executable.bind_params(0)
    for address, value in ((y, 2.0), (x, 3.0), (y, 4.0)):
        bound(address, value, 4)
        assert launched(executable, bench, address) == [value] * 4
        assert [a.value for a in executable.snapshot().nodes[0].arguments][1:] == [value, 4]
    assert executable.graph.snapshot().nodes[0].arguments[1].value == 4.0
    executable.set_params(0, {"value": 9.0})  # another way in between
    assert launched(executable, bench, y) == [9.0] * 4
    bound(x, 5.0, 4)
    assert launched(executable, bench, x) == [5.0] * 4
    tensor = filled(bench.driver, 0.0)
    bound(tensor, 6.0, 4)  # what is no plain number goes the long way
    assert tensor in executable.owners
    replay(executable, bench.stream)
    assert tensor.tolist() == [6.0] * 4


def test_a_prepared_change_outlives_updates_and_says_where_its_node_is_gone(bench: Bench) -> None:
    x, y = bench.alloc(16), bench.alloc(16)
    executable = graph_of(bench, filling(bench, x, 1.0)).instantiate()
    bound = executable.bind_params(0)
    bound(x, 2.0, 4)
    executable.update(graph_of(bench, filling(bench, y, 3.0)))
    assert launched(executable, bench, y) == [3.0] * 4
    bound(x, 4.0, 4)
    assert launched(executable, bench, x) == [4.0] * 4
    outcome = executable.update(graph_of(bench, filling(bench, y, 3.0), EmptyParams()))
    assert outcome.status is UpdateStatus.REINSTANTIATED
    with pytest.raises(ConfigurationError, match="node is gone"):
        bound(x, 5.0, 4)
    executable.close()
    with pytest.raises(LifecycleError, match="closed"):
        bound(x, 5.0, 4)


def test_a_prepared_change_follows_into_a_new_executable_of_the_same_nodes(bench: Bench) -> None:
    x, y = bench.alloc(16), bench.alloc(16)

    def graph(size: int) -> Graph:
        config = LaunchConfig((4, 1, 1), (32, 1, 1), cluster=(size, 1, 1))
        cluster = bench.kernel_params(write_cluster_size, y, config=config)
        return graph_of(bench, filling(bench, x, 1.0), Step(cluster, (0,)))

    executable = graph(2).instantiate()
    bound = executable.bind_params(0)
    bound(x, 2.0, 4)
    executable.enable(1, False)
    assert executable.update(graph(4)).status is UpdateStatus.REINSTANTIATED
    assert executable.is_enabled(1) is False
    bound(x, 3.0, 4)
    assert launched(executable, bench, x) == [3.0] * 4


def test_a_wrong_value_of_a_prepared_change_is_explained_and_changes_nothing(bench: Bench) -> None:
    x = bench.alloc(16)
    executable = graph_of(bench, filling(bench, x, 1.0)).instantiate()
    bound = executable.bind_params(0)
    bound(x, 2.0, 4)
    for values, message in (
        ((x, "3", 4), "argument 1"),
        ((x, 3.0, 2**40), "argument 2"),
        ((x, 3.0), "expected 3 arguments"),
        ((-1, 3.0, 4), "argument 0"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            bound(*values)
    assert launched(executable, bench, x) == [2.0] * 4
    assert executable.snapshot().nodes[0].arguments[1].value == 2.0


def test_a_failed_prepared_change_is_not_taken_for_done() -> None:
    driver = EmulatedDriver()
    bench = Bench(driver)
    x = bench.alloc(16)
    executable = graph_of(bench, filling(bench, x, 1.0)).instantiate()
    bound = executable.bind_params(0)
    bound(x, 2.0, 4)
    driver.faults.inject("set_exec_node_params", code="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        bound(x, 3.0, 4)
    assert executable.snapshot().nodes[0].arguments[1].value == 2.0
    assert launched(executable, bench, x) == [2.0] * 4
    bound(x, 4.0, 4)
    assert launched(executable, bench, x) == [4.0] * 4


# ---- off and on ---------------------------------------------------------------------------------


def test_a_node_that_is_off_does_nothing_and_works_again(bench: Bench) -> None:
    x, y = bench.alloc(16), bench.alloc(16)
    executable = graph_of(bench, filling(bench, x, 1.0), copy_1d(y, x, 16)).instantiate()
    assert executable.is_enabled(0)
    executable.enable(0, False)
    assert (executable.is_enabled(0), executable.is_enabled(1)) == (False, True)
    assert launched(executable, bench, x) != [1.0] * 4
    executable.enable(0)
    assert executable.is_enabled(0)
    assert launched(executable, bench, x) == [1.0] * 4


def test_nodes_stay_off_over_updates(bench: Bench) -> None:
    x, y = bench.alloc(16), bench.alloc(16)

    def graph(value: float) -> Graph:
        return graph_of(bench, filling(bench, x, value), filling(bench, y, value))

    executable = graph(1.0).instantiate()
    executable.enable(1, False)
    assert executable.update(graph(2.0)).status is UpdateStatus.UPDATED
    assert executable.is_enabled(1) is False
    assert launched(executable, bench, x) == [2.0] * 4
    assert launched(executable, bench, y) != [2.0] * 4


def test_nodes_that_work_again_after_an_update_are_told(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = bench.alloc(16), bench.alloc(16)
    executable = graph_of(bench, filling(bench, x, 1.0)).instantiate()
    executable.enable(0, False)
    executable.update(graph_of(bench, filling(bench, x, 2.0), filling(bench, y, 2.0)))
    assert "1 nodes that were switched off do their work again" in caplog.text
    assert launched(executable, bench, x) == [2.0] * 4


@pytest.mark.parametrize(
    "enabled",
    [None, 0, "no", torch.zeros(2), numpy.zeros(2)],
    ids=["None", "int", "text", "tensor", "array"],
)
def test_what_is_no_bool_switches_nothing(bench: Bench, enabled: Any) -> None:
    executable = graph_of(bench, bench.kernel_params(add_one, bench.alloc(16), 4)).instantiate()
    with pytest.raises(ConfigurationError, match="enabled: expected a bool, got"):
        executable.enable(0, enabled)
    assert executable.is_enabled(0)


@pytest.mark.parametrize("kind", ["empty", "child"])
def test_only_kernels_copies_and_fills_are_switched_off(bench: Bench, kind: str) -> None:
    x = bench.alloc(16)
    step = EmptyParams() if kind == "empty" else Child((Step(filling(bench, x, 1.0)),))
    executable = graph_of(bench, step).instantiate()
    for call in (executable.enable, executable.is_enabled):
        with pytest.raises(ConfigurationError, match=f"kernel, memcpy or memset node, .*{kind}"):
            call(0)


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
