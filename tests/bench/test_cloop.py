"""The C loop that is the floor, over a launch call of our own."""

import ctypes
import shutil
import struct

import pytest

from graphcore.bench import cloop
from graphcore.driver.records import KernelParams, LaunchConfig
from graphcore.errors import DriverUnavailable

LaunchCall = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in cloop._COMPILERS), reason="no C compiler"
)


@needs_compiler
def test_the_loop_launches_as_often_as_asked_with_the_handles_given():
    seen = []
    loop = cloop.LaunchLoop(LaunchCall(lambda *handles: seen.append(handles) or 0))
    seconds = loop.seconds(0x10, 0x20, 5)
    assert seen == [(0x10, 0x20)] * 5
    assert 0 < seconds < 1


@needs_compiler
def test_a_failing_launch_stops_the_loop_and_is_told_by_its_code():
    seen = []
    loop = cloop.LaunchLoop(LaunchCall(lambda *handles: seen.append(handles) or 700))
    with pytest.raises(DriverUnavailable, match="answered 700"):
        loop.seconds(0x10, 0x20, 5)
    assert len(seen) == 1


def test_a_machine_without_a_compiler_is_told_which_were_looked_for(monkeypatch):
    monkeypatch.setattr(cloop.shutil, "which", lambda name: None)
    with pytest.raises(DriverUnavailable, match="none of cc, gcc, clang, nvcc is installed"):
        cloop.LaunchLoop(LaunchCall(lambda *handles: 0))


@needs_compiler
def test_a_loop_that_does_not_compile_shows_what_the_compiler_said(monkeypatch):
    monkeypatch.setattr(cloop, "_SOURCE", "int oops(")
    with pytest.raises(DriverUnavailable, match="failed"):
        cloop.LaunchLoop(LaunchCall(lambda *handles: 0))


SetCall = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 3)


@needs_compiler
def test_an_update_loop_updates_to_each_graph_in_turn_and_launches_after_each():
    seen = []
    loop = cloop.UpdateLoop(
        SetCall(lambda executable, graph, answer: seen.append((executable, graph)) or 0),
        LaunchCall(lambda *handles: seen.append(handles) or 0),
    )
    assert loop.seconds(0x10, [0xA, 0xB], 0x20, 3) > 0
    launch = (0x10, 0x20)
    assert seen == [(0x10, 0xA), launch, (0x10, 0xB), launch, (0x10, 0xA), launch]


@needs_compiler
def test_a_refused_update_stops_the_loop_before_the_launch():
    launched = []
    loop = cloop.UpdateLoop(
        SetCall(lambda *handles: 910), LaunchCall(lambda *handles: launched.append(handles) or 0)
    )
    with pytest.raises(DriverUnavailable, match="answered 910"):
        loop.seconds(0x10, [0xA, 0xB], 0x20, 3)
    assert launched == []


@needs_compiler
def test_a_node_loop_sets_every_node_to_the_two_parameter_sets_in_turn():
    seen = []

    def set_params(executable, node, params):
        fields = struct.unpack("=Q7I4x4Q", ctypes.string_at(params, 72))
        pointer = ctypes.cast(fields[8], ctypes.POINTER(ctypes.c_void_p))[0]
        seen.append((node, fields[0], fields[1:8], ctypes.string_at(pointer, 4)))
        return 0

    loop = cloop.NodeLoop(SetCall(set_params), LaunchCall(lambda *handles: 0))
    config = LaunchConfig((2, 3, 4), (5, 6, 7), 8)
    params = tuple(
        cloop.KernelNode(KernelParams(9, config, (data,))) for data in (b"aaaa", b"bbbb")
    )
    assert loop.seconds(0x10, [0xA, 0xB], params, 0x20, 2) > 0
    shape = (2, 3, 4, 5, 6, 7, 8)
    assert seen == [
        (0xA, 9, shape, b"aaaa"),
        (0xB, 9, shape, b"aaaa"),
        (0xA, 9, shape, b"bbbb"),
        (0xB, 9, shape, b"bbbb"),
    ]
