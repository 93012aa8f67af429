"""Contract: cases that have taken a process down, each in a process of its own."""

from __future__ import annotations

from helpers.contract import covers
from helpers.isolated import run_script

from graphcore.driver import Driver

_INVALIDATED_BODY = """
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
driver.begin_capture(bench.stream.handle, "thread_local")
bench.launch(add_one, x, 1)
status = driver.capture_status(bench.stream.handle)
handle = driver.create_conditional(status.graph, 1)
node = bench.add(status.graph, ConditionalParams(handle, "if"), status.frontier)
driver.begin_capture(side.handle, "thread_local", graph=driver.node_params(node).bodies[0])
bench.launch(add_one, x, 1, stream=side)
for action in (
    lambda: driver.synchronize_stream(side.handle),
    lambda: driver.end_capture(side.handle),
):
    try:
        action()
    except CudaError as error:
        print(error.code)
try:
    bench.keep_graph(driver.end_capture(bench.stream.handle))
except CudaError:
    pass
for stream in (bench.stream, side):
    assert driver.capture_status(stream.handle).state is CaptureState.NONE
    bench.launch(add_one, x, 1, stream=stream)
    driver.synchronize_stream(stream.handle)
assert bench.get(x, 1) == [3]
bench.close()
print("survived")
"""


@covers("begin_capture", "end_capture")
def test_ending_the_parent_of_an_invalidated_body_capture_leaves_the_process_alive(
    graphcore_driver: Driver,
) -> None:
    finished = run_script(_INVALIDATED_BODY, graphcore_driver.name)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == [
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        "survived",
    ]
