"""Guards: which memory a graph depends on, who says that it went, and what a launch makes of it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers.contract import Bench
from helpers.graph_specs import Step, build
from helpers.kernels import add_one, fill_value
from helpers.tensors import device_of, filled, replay

import graphcore
from graphcore import (
    Buffer,
    CacheTypeError,
    ConfigurationError,
    Graph,
    LifecycleError,
    StaleGraphError,
)
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.interop import torch_memory
from graphcore.resources.lifetime import OwnerSet
from graphcore.resources.pools import Block, Blocks


def adding(bench: Bench, address: int, owners: OwnerSet | None = None) -> Graph:
    handle = build(bench, (Step(bench.kernel_params(add_one, address, 4)),))
    return Graph(bench.driver, handle, owners=owners, owned=False)


# ---- memory that nobody gave us -----------------------------------------------------------------


def test_a_full_guard_stops_a_launch_on_raw_memory_that_was_freed(bench: Bench) -> None:
    driver = bench.driver
    address = driver.alloc(64)
    executable = adding(bench, address).instantiate(guard="full")
    replay(executable, bench.stream)
    driver.synchronize()
    driver.free(address)
    with pytest.raises(StaleGraphError) as caught:
        executable.launch(bench.stream)
    words = f"allocation {address:#x} (argument 0 x of node 0 (kernel add_one)): memory"
    assert words in str(caught.value)


def test_memory_freed_and_allocated_again_since_the_guard_is_found(bench: Bench) -> None:
    driver, size = bench.driver, 3 * 2**20
    address = driver.alloc(size)
    executable = adding(bench, address).instantiate(guard="full")
    driver.free(address)
    again = driver.alloc(size)
    try:
        [stale] = executable.check()
        assert stale.field == ("allocation" if again == address else "memory")
        with pytest.raises(StaleGraphError):
            executable.launch(bench.stream)
    finally:
        driver.free(again)


def test_without_a_full_guard_the_first_check_looks_and_later_ones_compare(bench: Bench) -> None:
    driver = bench.driver
    address = driver.alloc(64)
    executable = adding(bench, address).instantiate()
    assert executable.check() == []
    driver.free(address)
    [stale] = executable.check()
    assert stale.operand == "argument 0 x of node 0 (kernel add_one)"


def test_watching_right_after_the_capture_sees_what_goes_before_the_instantiation(
    bench: Bench,
) -> None:
    driver = bench.driver
    address = driver.alloc(64)
    graph = adding(bench, address)
    assert not graph.is_watched
    graph.watch()
    driver.free(address)
    assert driver.alloc(64)
    executable = graph.instantiate(guard="full")
    assert graph.is_watched
    assert len(executable.check()) == 1
    assert len(graph.clone().instantiate().check()) == 1


def test_names_given_to_watch_are_what_messages_say(bench: Bench) -> None:
    driver = bench.driver
    address = driver.alloc(64)
    graph = adding(bench, address + 16)
    graph.watch({"scratch": (address, 64)})
    executable = graph.instantiate(guard="full")
    driver.free(address)
    with pytest.raises(StaleGraphError, match="launched: scratch: allocation: expected id"):
        executable.launch(bench.stream)


def test_the_graphs_own_memory_is_never_stale(graphcore_driver: Driver) -> None:
    x = filled(graphcore_driver, 1.0)
    out = filled(graphcore_driver, 0.0)

    def step() -> None:
        out.copy_((x * 2 + 1) * (x + 3))

    graph = graphcore.capture_function(step, driver=graphcore_driver)
    executable = graph.instantiate(guard="full")
    assert executable.check() == []
    replay(executable)
    assert executable.check() == []
    assert out.tolist() == [12.0] * 4


def test_an_update_brings_the_memory_of_the_new_graph(bench: Bench) -> None:
    driver = bench.driver
    old, new = driver.alloc(64), driver.alloc(64)
    executable = adding(bench, old).instantiate(guard="full")
    driver.free(old)
    with pytest.raises(StaleGraphError):
        executable.launch(bench.stream)
    assert executable.update(adding(bench, new)).is_current
    replay(executable, bench.stream)
    driver.free(new)
    with pytest.raises(StaleGraphError):
        executable.launch(bench.stream)


def test_a_piece_that_torch_took_back_is_named_by_its_operand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # one allocation of the driver, of which an allocator hands out pieces, as torch does
    driver = EmulatedDriver()
    bench = Bench(driver)
    segment = driver.alloc(4096)
    state = {"blocks": Blocks([Block(segment, 512, 16, is_live=True)])}

    class Pieces:
        def read(self) -> Blocks:
            return state["blocks"]

    monkeypatch.setattr("graphcore.executable.validity.blocks_of", lambda _: Pieces())
    executable = adding(bench, segment).instantiate(guard="full")
    replay(executable, bench.stream)
    state["blocks"] = Blocks([Block(segment, 512, 16, is_live=False)])
    with pytest.raises(StaleGraphError, match="given back to torch"):
        executable.launch(bench.stream)


@pytest.mark.gpu
def test_a_torch_tensor_dropped_after_the_capture_is_found(graphcore_driver: Driver) -> None:
    if graphcore_driver.is_emulated:
        pytest.skip("the emulated driver's recorder keeps the memory itself")
    bench = Bench(graphcore_driver)
    x = filled(graphcore_driver, 1.0, 300)
    torch.cuda.synchronize()
    executable = adding(bench, x.data_ptr()).instantiate(guard="full")
    replay(executable, bench.stream)
    del x
    gc.collect()
    with pytest.raises(StaleGraphError, match=r"argument 0 x of node 0 .*torch"):
        executable.launch(bench.stream)
    other = filled(graphcore_driver, 1.0, 301)
    assert len(executable.check()) == 1
    del other
    bench.close()


@pytest.mark.gpu
def test_a_tensor_read_by_torchs_own_kernels_is_found_when_it_is_dropped(
    graphcore_driver: Driver,
) -> None:
    if graphcore_driver.is_emulated:
        pytest.skip("the emulated driver's recorder keeps the memory itself")
    out = filled(graphcore_driver, 0.0)
    table = filled(graphcore_driver, 3.0)
    torch.add(table, 1, out=out)
    torch.cuda.synchronize()
    with graphcore.capture(driver=graphcore_driver) as capture:
        capture.keep(out, "out")
        torch.add(table, 1, out=out)
    executable = capture.graph.instantiate(guard="full")
    replay(executable)
    assert out.tolist() == [4.0] * 4
    del table
    gc.collect()
    with pytest.raises(StaleGraphError, match="raw word"):
        executable.launch()


# ---- owners that ring ---------------------------------------------------------------------------


def closing(driver: Driver, guard: Any) -> tuple[graphcore.GraphExec, Buffer, Bench]:
    buffer = Buffer.allocate(4, driver=driver)
    bench = Bench(driver)
    with graphcore.capture(driver=driver) as capture:
        capture.keep(buffer, "scratch")
        bench.launch(fill_value, buffer, 2.0, 4, stream=capture.stream)
    return capture.graph.instantiate(guard=guard), buffer, bench


@pytest.mark.parametrize("guard", ["owners", "full"])
def test_closing_a_buffer_stops_the_next_launch_by_its_name(
    graphcore_driver: Driver, guard: Any
) -> None:
    executable, buffer, bench = closing(graphcore_driver, guard)
    replay(executable, bench.stream)
    buffer.close()
    for _ in range(2):
        with pytest.raises(
            StaleGraphError, match=r"scratch: memory: expected \d+ bytes, got a closed buffer"
        ):
            executable.launch(bench.stream)
    bench.close()


def test_without_a_guard_a_closed_buffer_does_not_stop_a_launch(graphcore_driver: Driver) -> None:
    executable, buffer, bench = closing(graphcore_driver, None)
    buffer.close()
    replay(executable, bench.stream)
    assert [stale.label for stale in executable.check()] == ["scratch"]
    bench.close()


def test_watched_memory_that_goes_rings_under_a_guard_of_owners(bench: Bench) -> None:
    x = torch.ones(4, device=device_of(bench.driver))
    graph = adding(bench, x.data_ptr())
    graph.watch({"input": x})
    executable = graph.instantiate(guard="owners")
    replay(executable, bench.stream)
    assert x.tolist() == [2.0] * 4
    del x
    gc.collect()
    with pytest.raises(StaleGraphError, match="input: memory: expected 16 bytes, got memory that"):
        executable.launch(bench.stream)


def test_a_ring_that_meant_nothing_lets_the_launch_be_fast_again(bench: Bench) -> None:
    x = torch.ones(4, device=device_of(bench.driver))
    graph = adding(bench, x.data_ptr())
    graph.watch({"input": x})
    executable = graph.instantiate(guard="owners")
    view = x[:]
    other = Buffer.view(view)
    replay(executable, bench.stream)
    assert executable._bound_stream is bench.stream
    executable._validity._alarm.ring()  # type: ignore[union-attr]
    assert executable._bound_stream is not bench.stream
    replay(executable, bench.stream)
    assert executable._bound_stream is bench.stream
    assert other.is_closed is False


def test_an_executable_that_is_closed_or_gone_is_not_rung(bench: Bench) -> None:
    buffer = Buffer.allocate(4, driver=bench.driver)
    owners = OwnerSet().with_(buffer, label="b")
    closed = adding(bench, buffer.address, owners).instantiate(guard="owners")
    gone = adding(bench, buffer.address, owners).instantiate(guard="owners")
    closed.close()
    del gone
    gc.collect()
    buffer.close()
    with pytest.raises(LifecycleError, match="launch: expected an open executable"):
        closed.launch(bench.stream)


def test_after_an_update_the_owners_of_the_old_graph_do_not_ring(bench: Bench) -> None:
    one, two = (Buffer.allocate(4, driver=bench.driver) for _ in range(2))
    graphs = [
        adding(bench, each.address, OwnerSet().with_(each, label=label))
        for each, label in ((one, "one"), (two, "two"))
    ]
    executable = graphs[0].instantiate(guard="owners")
    assert executable.update(graphs[1]).is_current
    one.close()
    replay(executable, bench.stream)
    two.close()
    with pytest.raises(StaleGraphError, match="two: memory"):
        executable.launch(bench.stream)


# ---- streams ------------------------------------------------------------------------------------


def test_a_stream_that_was_closed_after_the_last_launch_is_noticed(bench: Bench) -> None:
    x = bench.put([0.0] * 4)
    executable = adding(bench, x).instantiate()
    stream = bench.driver.stream()
    replay(executable, stream)
    stream.close()
    with pytest.raises(LifecycleError, match="expected an open stream, got a closed one"):
        executable.launch(stream)
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [2.0] * 4


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (["x"], ConfigurationError),
        ("x", ConfigurationError),
        ({"x": "text"}, CacheTypeError),
        ({"x": (-1, 4)}, ConfigurationError),
    ],
    ids=repr,
)
def test_names_that_cannot_be_watched_are_refused_and_change_nothing(
    bench: Bench, names: Any, error: type[Exception]
) -> None:
    graph = adding(bench, bench.alloc(16))
    with pytest.raises(error):
        graph.watch(names)
    assert not graph.is_watched


@pytest.mark.parametrize("guard", ["all", "Full", 1, True, ["full"]], ids=repr)
def test_an_unknown_guard_is_refused(bench: Bench, guard: Any) -> None:
    with pytest.raises(ConfigurationError, match="guard: expected one of"):
        adding(bench, bench.alloc(16)).instantiate(guard=guard)


def test_a_closed_graph_cannot_be_watched(bench: Bench) -> None:
    graph = adding(bench, bench.alloc(16))
    graph.close()
    with pytest.raises(LifecycleError, match="graph: expected an open graph"):
        graph.watch()


def test_pieces_are_asked_for_on_a_device_only() -> None:
    assert torch_memory.blocks_of(EmulatedDriver()) is None


# ---- changes of single nodes --------------------------------------------------------------------


def test_a_node_pointed_elsewhere_is_compared_with_its_new_memory(bench: Bench) -> None:
    driver = bench.driver
    old, new = driver.alloc(64), driver.alloc(64)
    executable = adding(bench, old).instantiate(guard="full")
    replay(executable, bench.stream)
    executable.set_params(0, [new, 4])
    driver.synchronize()
    driver.free(old)
    replay(executable, bench.stream)
    assert executable.check() == []
    driver.free(new)
    with pytest.raises(StaleGraphError, match=f"allocation {new:#x}"):
        executable.launch(bench.stream)


def test_what_unchanged_nodes_point_into_stays_as_it_was_first_seen(bench: Bench) -> None:
    driver = bench.driver
    shared, own = driver.alloc(64), driver.alloc(64)
    steps = tuple(Step(bench.kernel_params(add_one, shared, 4)) for _ in range(2))
    graph = Graph(driver, build(bench, steps), owned=False)
    executable = graph.instantiate(guard="full")
    driver.free(shared)
    again = driver.alloc(64)
    executable.set_params(0, [own, 4])
    [stale] = executable.check()
    assert stale.label == f"allocation {shared:#x}"
    assert stale.operand == "argument 0 x of node 1 (kernel add_one)"
    driver.free(again)
    driver.free(own)


def test_a_buffer_given_to_a_node_rings_when_it_is_closed(bench: Bench) -> None:
    executable = adding(bench, bench.alloc(16)).instantiate(guard="owners")
    buffer = Buffer.allocate(4, driver=bench.driver)
    executable.set_params(0, [buffer, 4])
    replay(executable, bench.stream)
    buffer.close()
    with pytest.raises(StaleGraphError, match=r"memory: .*closed"):
        executable.launch(bench.stream)


# ---- graphs of other libraries ------------------------------------------------------------------


@pytest.mark.gpu
def test_a_graph_that_torch_captured_is_checked_like_ours(graphcore_driver: Driver) -> None:
    if graphcore_driver.is_emulated:
        pytest.skip("torch captures graphs of its own on a device only")
    x, out = filled(graphcore_driver, 1.0), filled(graphcore_driver, 0.0)
    torch.add(x, 1, out=out)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(captured):
        torch.add(x * 2, 1, out=out)
    graph = Graph.adopt(captured, graphcore_driver)
    graph.watch({"input": x})
    executable = graph.instantiate(guard="full")
    assert executable.check() == [], "memory of its private pool is its own"
    replay(executable)
    assert out.tolist() == [3.0] * 4
    del x
    gc.collect()
    with pytest.raises(StaleGraphError, match="input: memory"):
        executable.launch()


def test_a_borrowed_graph_is_checked_like_our_own(bench: Bench) -> None:
    address = bench.driver.alloc(64)
    handle = build(bench, (Step(bench.kernel_params(add_one, address, 4)),))
    executable = Graph.adopt(int(handle), bench.driver).instantiate(guard="full")
    assert executable.check() == []
    bench.driver.free(address)
    with pytest.raises(StaleGraphError, match=f"allocation {address:#x}"):
        executable.launch(bench.stream)
