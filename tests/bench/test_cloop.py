"""The C loop that is the floor, over a launch call of our own."""

import ctypes
import shutil

import pytest

from graphcore.bench import cloop
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
