"""Graphs to re-point: built of steps, captured, and with kernels whose structures hold words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from helpers.contract import Bench
from helpers.graph_specs import Step, build
from helpers.kernels import add_one
from helpers.tensors import replay

import graphcore
from graphcore import (
    Graph,
    GraphExec,
)
from graphcore.driver import Driver, kernel


def graph_of(bench: Bench, *steps: Any) -> Graph:
    spec = tuple(step if isinstance(step, Step) else Step(step) for step in steps)
    return Graph(bench.driver, build(bench, spec), owned=False)


def values(bench: Bench, address: int, count: int = 4) -> list[float]:
    return bench.get(address, count)


def run(executable: GraphExec, bench: Bench) -> None:
    replay(executable, bench.stream)


def captured(driver: Driver, step: Callable[[], object], **kept: Any) -> tuple[Graph, Any]:
    """A capture of ``step`` that keeps tensors under their names, and its stream."""
    capturing = graphcore.capture(driver=driver)
    capturing.warm_up(step, 2)
    with capturing:
        for name, tensor in kept.items():
            capturing.keep(tensor, name)
        step()
    return capturing.graph, capturing.stream


def run_packed(work: bytes) -> None:
    from graphcore.driver.kernel import Pointer

    x, tag, y = (int.from_bytes(work[at : at + 8], "little") for at in (0, 8, 16))
    Pointer(y, "float32").array(1)[0] = Pointer(x, "float32").array(1)[0] + (tag & 7)


def edge(source: Any, target: Any) -> Any:
    from graphcore.driver.records import Edge

    return Edge(source, target)


packed = kernel(
    "packed",
    "bytes:24 work",
    "struct Work { float* x; long long tag; float* y; }; "
    'extern "C" __global__ void packed(Work work) '
    "{ if (threadIdx.x == 0) { work.y[0] = work.x[0] + (float)(work.tag & 7); } }",
    lambda _config, work: run_packed(work),
)


def structure(*words: int) -> bytes:
    return b"".join(word.to_bytes(8, "little") for word in words)


def many(bench: Bench, x: int, out: int, touching: int, total: int) -> Graph:
    steps: list[Any] = [bench.kernel_params(add_one, x, 4) for _ in range(touching)]
    steps += [bench.kernel_params(add_one, out, 4) for _ in range(total - touching)]
    return graph_of(bench, *(Step(step, (i - 1,) if i else ()) for i, step in enumerate(steps)))
