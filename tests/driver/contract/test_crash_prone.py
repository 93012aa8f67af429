"""Contract: cases that have taken a process down, each in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from helpers.contract import covers
from helpers.isolated import run_script

from graphcore.driver import Driver

_START = """
import sys
from graphcore.driver import open_driver
from graphcore.errors import CudaError
from graphcore.driver.records import CaptureState, ConditionalParams
from helpers.contract import Bench
from helpers.kernels import add_one

bench = Bench(open_driver(sys.argv[1]))
driver = bench.driver
x = bench.put([1])
side = bench.new_stream()

def attempt(action):
    try:
        return action()
    except CudaError as error:
        print(error.code.removeprefix("CUDA_ERROR_"))

def end(stream):
    graph = attempt(lambda: driver.end_capture(stream.handle))
    if graph is not None:
        print("graph")
        if graph not in bodies:
            bench.keep_graph(graph)

def finish():
    for stream in (bench.stream, side):
        assert driver.capture_status(stream.handle).state is CaptureState.NONE
        bench.launch(add_one, x, 1, stream=stream)
        driver.synchronize_stream(stream.handle)
    assert bench.get(x, 1) == [3]
    bench.close()
    print("survived")

bodies = ()
"""

_BODY = """
driver.begin_capture(bench.stream.handle, "thread_local")
bench.launch(add_one, x, 1)
status = driver.capture_status(bench.stream.handle)
handle = driver.create_conditional(status.graph, 1)
node = bench.add(status.graph, ConditionalParams(handle, "if"), status.frontier)
bodies = driver.node_params(node).bodies
driver.begin_capture(side.handle, "thread_local", graph=bodies[0])
bench.launch(add_one, x, 1, stream=side)
"""

_BREAK = {
    "isolation": """
outside = bench.new_event()
driver.record_event(outside.handle, bench.new_stream().handle)
attempt(lambda: driver.wait_event(side.handle, outside.handle))
""",
    "stream_wait": "attempt(lambda: driver.synchronize_stream(side.handle))\n",
    "device_wait": "attempt(driver.synchronize)\n",
}
_END = {
    "body_first": "end(side)\nend(bench.stream)\n",
    "parent_first": "end(bench.stream)\nend(side)\n",
}


def assert_survives(driver: Driver, script: str, said: Sequence[str]) -> None:
    finished = run_script(_START + script + "finish()\n", driver.name)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.split() == [*said, "survived"]


@covers("begin_capture", "end_capture")
@pytest.mark.parametrize("order", _END)
@pytest.mark.parametrize("broken", _BREAK)
def test_an_invalidated_capture_of_a_body_leaves_the_process_alive(
    graphcore_driver: Driver, broken: str, order: str
) -> None:
    ends = ["STREAM_CAPTURE_INVALIDATED"] * 2
    if broken != "device_wait":  # which breaks every capture of the device
        ends[order == "body_first"] = "graph"
    first = "ISOLATION" if broken == "isolation" else "UNSUPPORTED"
    script = _BODY + _BREAK[broken] + _END[order]
    assert_survives(graphcore_driver, script, [f"STREAM_CAPTURE_{first}", *ends])


@covers("begin_capture", "end_capture", "destroy_graph")
@pytest.mark.parametrize("broken", ["invalidated", "unjoined", "another_thread"])
def test_a_failed_capture_leaves_a_body_empty_and_its_graph_usable(
    graphcore_driver: Driver, broken: str
) -> None:
    script = (
        """
graph = bench.new_graph()
_, _, bodies = bench.add_conditional(graph, "if", default=1)
driver.begin_capture(bench.stream.handle, "thread_local", graph=bodies[0])
bench.launch(add_one, x, 1)
"""
        + _FAILURES[broken]
        + """
print(len(driver.nodes(bodies[0])))
bench.run(graph)
assert bench.get(x, 1) == [1]
"""
    )
    assert_survives(graphcore_driver, script, [*_FAILURE_WORDS[broken], "0"])


@covers("begin_capture", "end_capture", "destroy_graph")
@pytest.mark.parametrize("broken", ["invalidated", "unjoined", "another_thread"])
def test_a_given_graph_is_gone_with_its_failed_capture(
    graphcore_driver: Driver, broken: str
) -> None:
    script = (
        """
graph = driver.create_graph()
driver.begin_capture(bench.stream.handle, "thread_local", graph=graph)
bench.launch(add_one, x, 1)
"""
        + _FAILURES[broken]
        + "attempt(lambda: driver.destroy_graph(graph))\n"
    )
    assert_survives(graphcore_driver, script, [*_FAILURE_WORDS[broken], "INVALID_VALUE"])


_FAILURES = {
    "invalidated": _BREAK["device_wait"] + "end(bench.stream)\n",
    "unjoined": """
event = bench.new_event()
driver.record_event(event.handle, bench.stream.handle)
driver.wait_event(side.handle, event.handle)
bench.launch(add_one, x, 1, stream=side)
end(bench.stream)
""",
    "another_thread": """
from helpers.contract import in_thread
in_thread(lambda: end(bench.stream))
""",
}
_FAILURE_WORDS = {
    "invalidated": ["STREAM_CAPTURE_UNSUPPORTED", "STREAM_CAPTURE_INVALIDATED"],
    "unjoined": ["STREAM_CAPTURE_UNJOINED"],
    "another_thread": ["STREAM_CAPTURE_WRONG_THREAD"],
}
