"""Single nodes of an executable: set_params, bind_params, enable; what is known afterwards."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy
import pytest
import torch
from helpers.contract import Bench, copy_1d, fill_1d
from helpers.graph_specs import Child, Step, build
from helpers.kernels import (
    ONE_BLOCK,
    add_one,
    fill_value,
    write_cluster_size,
    write_shape,
)
from helpers.node_changes import filling, graph_of, launched
from helpers.tensors import device_of, filled, replay

import graphcore
from graphcore import (
    ConfigurationError,
    CudaError,
    Graph,
    LifecycleError,
    UpdateStatus,
)
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import (
    CopyOperand,
    Edge,
    EmptyParams,
    LaunchConfig,
    MemsetParams,
)
from graphcore.executable.retired import release_finished
from graphcore.resources.lifetime import OwnerSet

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
    driver.synchronize()  # other processes may keep the device from the fence behind the launch
    release_finished()
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
