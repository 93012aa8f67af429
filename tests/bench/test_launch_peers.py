"""Peers capture the chain on their own stream and bind their own launch (with fakes of them)."""

import contextlib
import sys
import types

import pytest

from graphcore.bench.suites import launch_peers


class FakeChain:
    """Notes on which streams the chain's kernels were launched."""

    def __init__(self, failure=None):
        self.driver = types.SimpleNamespace(
            device=0,
            instantiate=lambda graph: 0x900,
            launch_graph=lambda *handles: handles,
        )
        self.graph = types.SimpleNamespace(handle=0x800)
        self.stream = types.SimpleNamespace(handle=0x700)
        self.launched_on = []
        self._failure = failure

    def launch_on(self, stream):
        self.launched_on.append(stream)
        if self._failure:
            raise self._failure


class FakeGraph:
    def __init__(self):
        self.launched = []

    def launch(self, stream):
        self.launched.append(stream)

    def replay(self):
        self.launched.append("current stream")


class FakeStream:
    ptr = cuda_stream = handle = 0x100

    def __init__(self, **options):
        self.calls = []
        self.graph = FakeGraph()

    def begin_capture(self):
        self.calls.append("begin")

    def end_capture(self):
        self.calls.append("end")
        return self.graph


@pytest.fixture
def cupy_stream(monkeypatch):
    stream = FakeStream()
    cuda = types.SimpleNamespace(
        Device=lambda device: contextlib.nullcontext(), Stream=lambda non_blocking: stream
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    return stream


def launch(bound):
    call, *arguments = bound
    return call(*arguments)


def test_cupy_captures_on_its_stream_and_launches_there(cupy_stream):
    chain = FakeChain()
    launch(launch_peers.cupy(chain))
    assert chain.launched_on == [0x100]
    assert cupy_stream.calls == ["begin", "end"]
    assert cupy_stream.graph.launched == [cupy_stream]


def test_a_failed_capture_of_cupy_is_ended_all_the_same(cupy_stream):
    with pytest.raises(RuntimeError, match="no"):
        launch_peers.cupy(FakeChain(RuntimeError("no")))
    assert cupy_stream.calls == ["begin", "end"]


def test_torch_captures_on_a_side_stream_that_becomes_its_current_one(monkeypatch):
    current, graph = [], FakeGraph()
    cuda = types.SimpleNamespace(
        Stream=lambda device: FakeStream(),
        CUDAGraph=lambda: graph,
        graph=lambda graph, stream: contextlib.nullcontext(),
        set_stream=current.append,
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    chain = FakeChain()
    launch(launch_peers.torch(chain))
    assert chain.launched_on == [0x100]
    assert len(current) == 1
    assert graph.launched == ["current stream"]


@pytest.mark.parametrize("home", ["cuda.core", "cuda.core.experimental"])
def test_cuda_core_builds_with_its_graph_builder_old_and_new(monkeypatch, home):
    graph, stream = FakeGraph(), object()
    builder = types.SimpleNamespace(
        stream=FakeStream(),
        begin_building=lambda: None,
        end_building=lambda: types.SimpleNamespace(complete=lambda: graph),
    )
    device = types.SimpleNamespace(
        set_current=lambda: None,
        create_graph_builder=lambda: builder,
        create_stream=lambda: stream,
    )
    monkeypatch.setitem(sys.modules, "cuda.core", types.SimpleNamespace())
    module = types.SimpleNamespace(Device=lambda ordinal: device)
    monkeypatch.setitem(sys.modules, home, module)
    chain = FakeChain()
    launch(launch_peers.cuda_core(chain))
    assert chain.launched_on == [0x100]
    assert graph.launched == [stream]


def test_the_bindings_are_bound_with_objects_made_once(monkeypatch):
    bindings = types.SimpleNamespace(
        cuGraphLaunch=lambda *handles: handles,
        CUgraphExec=lambda handle: ("exec", handle),
        CUstream=lambda handle: ("stream", handle),
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", bindings)
    bound = launch_peers.cuda_bindings(FakeChain())
    assert launch(bound) == (("exec", 0x900), ("stream", 0x700))


def test_the_unbound_call_of_our_driver_is_the_peer_without_a_device():
    assert launch(launch_peers.driver_call(FakeChain())) == (0x900, 0x700)
