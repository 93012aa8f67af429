"""Versions that take turns, once it is known that all their launches have run."""

from __future__ import annotations

import gc
import weakref

from helpers.kernels import ONE_BLOCK, add_one

import graphcore
from graphcore.driver import Driver
from graphcore.executable.retired import release_finished


def graph_over(driver: Driver, buffer: graphcore.Buffer) -> graphcore.Graph:
    with graphcore.capture(driver=driver) as captured:
        packed = add_one.pack(buffer.address, 4)
        driver.launch(driver.function(add_one), ONE_BLOCK, packed, captured.stream.handle)
        captured.keep(buffer)
    return captured.graph


def test_owners_of_versions_that_took_turns_go_when_it_is_known_that_nothing_runs(
    graphcore_driver: Driver,
) -> None:
    buffers = [graphcore.Buffer.allocate((4,), driver=graphcore_driver) for _ in range(2)]
    first, second = (graph_over(graphcore_driver, buffer) for buffer in buffers)
    executable = first.instantiate()
    for graph in (second, first, second, first):
        executable.launch()
        executable.update(graph)
    executable.launch()
    fence = executable.fence()
    assert fence is not None
    graphcore_driver.synchronize()
    fence.wait()
    assert executable.settle(fence)
    given_up = weakref.ref(buffers.pop())
    second.close()
    assert release_finished() == 0
    del second, graph
    gc.collect()
    # the executable knows the switch back, and with it the graph; a new version ends that
    executable.update(graph_over(graphcore_driver, buffers[0]))
    executable.launch()
    graphcore_driver.synchronize()
    executable.close()
    gc.collect()
    assert given_up() is None
