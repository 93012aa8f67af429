"""GraphExec: launching, guards and staleness, closing; and what a launch costs."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.contract import Bench
from helpers.graph_specs import Step, build
from helpers.isolated import run_script
from helpers.kernels import add_one, fill_value
from helpers.tensors import filled, poisoned, replay

import graphcore
from graphcore import (
    CacheTypeError,
    ConfigurationError,
    CudaError,
    Graph,
    GraphExec,
    LifecycleError,
    StaleGraphError,
)
from graphcore.driver import Driver, active
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import NodeKind
from graphcore.errors import GraphcoreWarning
from graphcore.interop import use_stream
from graphcore.resources.buffer import Buffer
from graphcore.resources.lifetime import OwnerSet


def adding(bench: Bench, address: int) -> GraphExec:
    handle = build(bench, (Step(bench.kernel_params(add_one, address, 4)),))
    return Graph(bench.driver, handle, owned=False).instantiate()


def filling(bench: Bench, address: int, value: float) -> Graph:
    handle = build(bench, (Step(bench.kernel_params(fill_value, address, value, 4)),))
    return Graph(bench.driver, handle, owned=False)


# ---- launching ----------------------------------------------------------------------------------


def test_each_launch_runs_the_graph_once(bench: Bench) -> None:
    x = bench.put([0.0] * 4)
    executable = adding(bench, x)
    replay(executable, bench.stream, times=3)
    assert bench.get(x, 4) == [3.0] * 4


def test_any_stream_may_be_given_from_launch_to_launch(bench: Bench) -> None:
    x = bench.put([0.0] * 4)
    executable = adding(bench, x)

    class Foreign:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, bench.stream.handle)

    streams: list[Any] = [bench.stream, bench.new_stream(), bench.stream.handle, Foreign(), None]
    for stream in [*streams, *streams]:
        replay(executable, stream)
    assert bench.get(x, 4) == [10.0] * 4


def test_without_a_stream_the_current_one_is_looked_up_each_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = bench.put([0.0] * 4)
    executable = adding(bench, x)
    bound: list[int] = []
    bind = bench.driver.bind_launch

    def noting(handle: Any, stream: Any) -> Any:
        bound.append(stream)
        return bind(handle, stream)

    monkeypatch.setattr(bench.driver, "bind_launch", noting)
    replay(executable)
    replay(executable)
    assert len(bound) == 1, "the same stream is bound once"
    with use_stream(bench.driver, bench.stream):
        replay(executable)
    replay(executable)
    assert bench.get(x, 4) == [4.0] * 4
    assert bound[1:] == [bench.stream.handle, bound[0]]


def test_uploading_ahead_changes_nothing_but_time(bench: Bench) -> None:
    x = bench.put([0.0] * 4)
    executable = adding(bench, x)
    executable.upload(bench.stream)
    executable.upload()
    bench.driver.synchronize()
    assert bench.get(x, 4) == [0.0] * 4
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [1.0] * 4


def test_a_failing_launch_raises_and_the_next_one_works() -> None:
    driver = EmulatedDriver()
    bench = Bench(driver)
    x = bench.put([0.0] * 4)
    executable = adding(bench, x)
    driver.faults.inject("bind_launch")
    with pytest.raises(CudaError):
        executable.launch(bench.stream)
    replay(executable, bench.stream)
    assert bench.get(x, 4) == [1.0] * 4


def test_an_error_in_the_bound_calls_result_is_raised_by_the_driver(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(bench.driver, "raise_launch", raised.append)
    results: list[Any] = [None, 0, (), 700]
    monkeypatch.setattr(bench.driver, "bind_launch", lambda *_: lambda: results.pop(0))
    executable = adding(bench, bench.alloc(16))
    for _ in range(4):
        executable.launch(bench.stream)
    assert raised == [700]


def test_an_exception_of_the_bound_call_is_given_to_the_driver_first(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = ZeroDivisionError("another library's")

    def failing() -> None:
        raise foreign

    asked: list[object] = []
    monkeypatch.setattr(bench.driver, "bind_launch", lambda *_: failing)
    monkeypatch.setattr(bench.driver, "raise_launch", asked.append)
    with pytest.raises(ZeroDivisionError, match="another library's"):
        adding(bench, bench.alloc(16)).launch(bench.stream)
    assert asked == [foreign]


@pytest.mark.parametrize("wrong", ["a stream", 2.5], ids=repr)
def test_what_is_no_stream_is_a_type_error_and_nothing_runs(bench: Bench, wrong: Any) -> None:
    x = bench.put([0.0] * 4)
    executable = adding(bench, x)
    for call in (executable.launch, executable.upload):
        with pytest.raises(CacheTypeError, match="stream: expected"):
            call(wrong)
    assert bench.get(x, 4) == [0.0] * 4


def test_a_stream_of_another_device_is_refused() -> None:
    one, two = (graphcore.open_driver("emulated", devices=2, device=n) for n in (0, 1))
    executable = Graph(one, one.create_graph()).instantiate()
    with pytest.raises(CacheTypeError, match="expected one of driver emulated:0"):
        executable.launch(two.stream())


def test_a_handle_of_another_device_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable = adding(bench, bench.alloc(16))
    monkeypatch.setattr(bench.driver, "stream_device", lambda _: bench.driver.device + 1)
    with pytest.raises(ConfigurationError, match="stream: expected one of device"):
        executable.launch(bench.stream.handle)


def test_a_closed_stream_is_refused(bench: Bench) -> None:
    executable = adding(bench, bench.alloc(16))
    stream = bench.driver.stream()
    stream.close()
    with pytest.raises(LifecycleError, match="expected an open stream"):
        executable.launch(stream)


def test_a_launch_in_a_capture_becomes_a_child_node_and_hands_over_its_owners(
    bench: Bench,
) -> None:
    class Resource:
        pass

    kept = Resource()
    watch = weakref.ref(kept)
    x = bench.put([0.0] * 4)
    handle = build(bench, (Step(bench.kernel_params(add_one, x, 4)),))
    owners = OwnerSet().with_(kept, label="kept")
    graph = Graph(bench.driver, handle, owners=owners, owned=False)
    executable = graph.instantiate()
    stream = bench.new_stream(blocking=True)
    # bound to the capture's stream before, so that the capture has to make it look again
    replay(executable, stream)
    with graphcore.capture(stream, driver=bench.driver) as capture:
        executable.launch(stream)
        executable.launch(stream)
    assert bench.get(x, 4) == [1.0] * 4
    kinds = [node.kind for node in capture.graph.snapshot().nodes]
    assert kinds == [NodeKind.CHILD, NodeKind.CHILD]
    executable.close()
    graph.close()
    del kept, executable, graph, owners
    gc.collect()
    assert watch() is not None
    with capture.graph.instantiate() as outer:
        replay(outer, bench.stream)
    assert bench.get(x, 4) == [3.0] * 4


def test_a_launch_in_a_capture_embeds_the_graph_of_the_last_update(bench: Bench) -> None:
    x = bench.put([0.0] * 4)
    executable = filling(bench, x, 1.0).instantiate()
    assert executable.update(filling(bench, x, 2.0), reinstantiate=False).is_current
    with graphcore.capture(driver=bench.driver) as capture:
        executable.launch()
    with capture.graph.instantiate() as outer:
        replay(outer, bench.stream)
    assert bench.get(x, 4) == [2.0] * 4


# ---- what a launch costs ------------------------------------------------------------------------


# in a process of its own: coverage and debuggers trace every line of this one
_COUNT = """
import sys, tracemalloc
from graphcore import Graph
from graphcore.driver.emulated import EmulatedDriver

driver = EmulatedDriver()
stream = driver.stream()

def bound():
    return None

driver.bind_launch = lambda executable, stream: bound
executable = Graph(driver, driver.create_graph()).instantiate(guard="owners")
launch = executable.launch
launch(stream)
tracemalloc.start()
launch(stream)
before = tracemalloc.get_traced_memory()[0]
tracemalloc.reset_peak()
launch(stream)
peak = tracemalloc.get_traced_memory()[1]
tracemalloc.stop()

calls = []
def note(frame, event, argument):
    if event == "call":
        calls.append(frame.f_code.co_name)
    elif event == "c_call":
        calls.append(argument.__name__)

sys.setprofile(note)
launch(stream)
sys.setprofile(None)
print(peak - before, *calls)
"""


def test_a_launch_makes_the_bound_call_and_no_other_and_allocates_nothing() -> None:
    done = run_script(_COUNT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "launch", "bound", "setprofile"]


# the stream that is current is the legacy one, whose launches captures that begin wait for
_ON_LEGACY = ["bound", "pop"]


def test_a_launch_without_a_stream_looks_at_the_current_one_and_at_nothing_else() -> None:
    done = run_script(_COUNT.replace("launch(stream)", "launch()"))
    assert done.returncode == 0, done.stderr
    _, *calls = done.stdout.split()
    assert calls[:3] == ["launch", "launch_there", "current_stream"]
    assert calls[-len(_ON_LEGACY) - 1 :] == [*_ON_LEGACY, "setprofile"]
    assert not {"_bind", "_handle_of", "refuse_legacy_work", "launches_on"} & set(calls)


# torch that has begun with CUDA, whose current stream is read by one call
_BESIDE_TORCH = """
import sys, types
def read(device):
    return 0
sys.modules["torch"] = types.SimpleNamespace(
    cuda=types.SimpleNamespace(is_initialized=lambda: True),
    _C=types.SimpleNamespace(_cuda_getCurrentRawStream=read),
)
EmulatedDriver = type("Device", (EmulatedDriver,), {"is_emulated": False})
"""


def test_beside_torch_a_launch_without_a_stream_asks_torch_and_allocates_nothing() -> None:
    imported = "from graphcore.driver.emulated import EmulatedDriver\n"
    script = _COUNT.replace(imported, imported + _BESIDE_TORCH).replace(
        "launch(stream)", "launch()"
    )
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "launch", "launch_there", "read", *_ON_LEGACY, "setprofile"]


def test_a_launch_without_a_stream_looks_closer_while_another_thread_captures(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = bench.put([0.0] * 4)
    executable = adding(bench, x)
    replay(executable)
    looked: list[Any] = []
    bind = GraphExec._bind

    def looking(self: GraphExec, stream: Any) -> None:
        looked.append(stream)
        bind(self, stream)

    monkeypatch.setattr(GraphExec, "_bind", looking)
    replay(executable)
    assert not looked
    other = active.ActiveCapture(bench.driver, bench.stream.handle, "thread_local")
    active.UNDER_WAY.append(other)  # type: ignore[attr-defined]
    try:
        replay(executable)
        replay(executable)
    finally:
        active.UNDER_WAY.remove(other)  # type: ignore[attr-defined]
    assert looked == [None] * 2
    replay(executable)
    replay(executable)
    assert looked == [None] * 3
    assert bench.get(x, 4) == [6.0] * 4


# ---- validity -----------------------------------------------------------------------------------


def guarded(driver: Driver, guard: Any) -> tuple[GraphExec, torch.Tensor, torch.Tensor]:
    x, y = filled(driver, 1.0), poisoned(driver)
    y.copy_(x * 2)
    with graphcore.capture(driver=driver) as capture:
        capture.keep(x, "input")
        capture.keep(y, "result")
        y.copy_(x * 2)
    y.fill_(float("nan"))
    return capture.graph.instantiate(guard=guard), x, y


@pytest.mark.parametrize("guard", [None, "owners", "full"])
def test_a_valid_graph_launches_under_every_guard(graphcore_driver: Driver, guard: Any) -> None:
    executable, x, y = guarded(graphcore_driver, guard)
    assert executable.check() == []
    x.fill_(3.0)
    replay(executable)
    assert y.tolist() == [6.0] * 4
    assert repr(executable).endswith(f"guard={guard}>") is (guard is not None)


def test_a_full_guard_refuses_a_moved_tensor_by_name_and_launches_nothing(
    graphcore_driver: Driver,
) -> None:
    executable, x, y = guarded(graphcore_driver, "full")
    x.data = x.detach().clone()
    with pytest.raises(StaleGraphError, match="input: address: expected 0x"):
        executable.launch()
    graphcore_driver.synchronize()
    assert torch.isnan(y).all()
    [stale] = executable.check()
    assert (stale.label, stale.field) == ("input", "address")


def test_without_a_guard_only_check_tells(graphcore_driver: Driver) -> None:
    executable, x, y = guarded(graphcore_driver, None)
    x.data = x.detach().clone()
    assert [stale.label for stale in executable.check()] == ["input"]
    executable.mark_stale("moved", label="keys")
    replay(executable)
    assert y.tolist() == [2.0] * 4, "the graph keeps the old memory alive"
    assert [stale.label for stale in executable.check()] == ["keys", "input"]


@pytest.mark.parametrize("guard", ["owners", "full"])
def test_a_marked_graph_refuses_every_launch_until_it_is_updated(
    graphcore_driver: Driver, guard: Any
) -> None:
    executable, _, y = guarded(graphcore_driver, guard)
    executable.mark_stale("was rebound to another tensor", label="layer 4 keys")
    for _ in range(2):
        with pytest.raises(StaleGraphError, match=r"layer 4 keys: .*was rebound"):
            executable.launch()
    graphcore_driver.synchronize()
    assert torch.isnan(y).all()
    assert executable.update(executable.graph).is_current
    assert executable.check() == []
    replay(executable)
    assert y.tolist() == [2.0] * 4


def test_a_guard_of_owners_does_not_look_at_each_tensor(graphcore_driver: Driver) -> None:
    executable, x, y = guarded(graphcore_driver, "owners")
    x.data = x.detach().clone()
    replay(executable)
    assert y.tolist() == [2.0] * 4


def test_a_closed_buffer_is_stale_but_its_memory_lives(graphcore_driver: Driver) -> None:
    driver = graphcore_driver
    buffer = Buffer.allocate(4, driver=driver)
    bench = Bench(driver)
    with graphcore.capture(driver=driver) as capture:
        capture.keep(buffer, "scratch")
        bench.launch(fill_value, buffer, 2.0, 4, stream=capture.stream)
    executable = capture.graph.instantiate()
    address = buffer.address
    buffer.close()
    [stale] = executable.check()
    assert (stale.label, stale.field) == ("scratch", "memory")
    assert driver.allocation_of(address) is not None
    replay(executable)
    assert bench.get(address, 4) == [2.0] * 4
    bench.close()


# ---- the end ------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("kind", ["graph", "executable", "capture"])
def test_what_owns_a_handle_is_not_copied(
    graphcore_driver: Driver, kind: str, duplicate: Callable[[Any], Any]
) -> None:
    with graphcore.capture(driver=graphcore_driver) as capture:
        pass
    with capture.graph.instantiate() as executable:
        original = {"graph": capture.graph, "executable": executable, "capture": capture}[kind]
        with pytest.raises(CacheTypeError, match="cannot be copied or pickled"):
            duplicate(original)


def test_a_closed_executable_says_so_for_every_use(bench: Bench) -> None:
    x = bench.put([0.0] * 4)
    executable = adding(bench, x)
    graph = executable.graph
    replay(executable, bench.stream)
    with executable:
        assert not executable.is_closed
    assert executable.is_closed
    uses: dict[str, Any] = {
        "launch": lambda: executable.launch(bench.stream),
        "upload": executable.upload,
        "check": executable.check,
        "update": lambda: executable.update(graph),
        "handle": lambda: executable.handle,
        "graph": lambda: executable.graph,
    }
    for name, use in uses.items():
        with pytest.raises(LifecycleError, match=f"{name}: expected an open executable"):
            use()
    executable.mark_stale("too late")
    executable.close()
    assert repr(executable) == "<GraphExec closed>"
    assert bench.get(x, 4) == [1.0] * 4


def test_an_executable_closed_or_dropped_in_a_capture_is_destroyed_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = EmulatedDriver()
    bench = Bench(driver)
    x = bench.put([0.0] * 4)
    destroyed: list[int] = []
    destroy = driver.destroy_exec

    def noting(handle: Any) -> None:
        destroyed.append(handle)
        destroy(handle)

    monkeypatch.setattr(driver, "destroy_exec", noting)
    closed, dropped = adding(bench, x), adding(bench, x)
    with graphcore.capture(driver=driver) as capture:
        closed.close()
        del dropped
        bench.launch(add_one, x, 4, stream=capture.stream)
        assert destroyed == []
    assert len(destroyed) == 2
    assert len(capture.graph.snapshot().nodes) == 1


def test_a_destroy_that_fails_is_a_warning() -> None:
    driver = EmulatedDriver()
    executable = Graph(driver, driver.create_graph()).instantiate()
    driver.faults.inject("destroy_exec")
    with pytest.warns(GraphcoreWarning, match="while destroying an executable"):
        executable.close()


def test_a_failing_instantiation_leaves_the_graph_usable() -> None:
    driver = EmulatedDriver()
    bench = Bench(driver)
    x = bench.alloc(16)
    graph = filling(bench, x, 4.0)
    driver.faults.inject("instantiate", code="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        graph.instantiate()
    with graph.instantiate() as executable:
        replay(executable, bench.stream)
    assert bench.get(x, 4) == [4.0] * 4
