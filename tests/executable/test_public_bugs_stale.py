"""Stale baked-in addresses, as users met them: prevented, or stopped before the launch by name.

Each case breaks a graph the way the reports tell. A guarded launch must raise, name the buffer and
write nothing; where graphcore keeps the memory itself, the launch must give the right values.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from helpers.contract import Bench
from helpers.graph_specs import Step, build
from helpers.kernels import axpy, fill_value
from helpers.tensors import device_of, filled, poisoned, replay

import graphcore
from graphcore import (
    Buffer,
    CapacityError,
    ConfigurationError,
    Graph,
    GraphExec,
    StaleGraphError,
    StaticInputs,
)
from graphcore.driver import Driver


@dataclass
class Case:
    """A graph, what makes it stale, and what the refusal has to say.

    ``keep`` is what a user would still hold.
    """

    executable: GraphExec
    output: torch.Tensor
    go_stale: Callable[[], object]
    words: str
    keep: Any = None


def adding(bench: Bench, source: int, output: torch.Tensor) -> Graph:
    """``output += source``, through addresses alone."""
    params = bench.kernel_params(axpy, 1.0, source, output.data_ptr(), 4)
    return Graph(bench.driver, build(bench, (Step(params),)), owned=False)


def captured(bench: Bench, step: Callable[..., Any], *args: Any) -> GraphExec:
    graph = graphcore.capture_function(step, *args, driver=bench.driver)
    return graph.instantiate(guard="full")


# ---- the examples -------------------------------------------------------------------------------


def input_replaced_by_a_new_tensor(bench: Bench) -> Case:
    x, out = filled(bench.driver, 1.0), poisoned(bench.driver)

    def step() -> None:
        out.copy_(x * 2)

    executable = captured(bench, step)

    def replace() -> None:
        nonlocal x
        x = filled(bench.driver, 5.0)

    return Case(executable, out, replace, "function's x: held object: expected the tensor at 0x")


def data_of_an_input_replaced(bench: Bench) -> Case:
    x, out = filled(bench.driver, 1.0), poisoned(bench.driver)
    executable = captured(bench, lambda given: out.copy_(given * 2), x)

    def replace() -> None:
        x.data = filled(bench.driver, 5.0)

    return Case(executable, out, replace, "argument 0: address: expected 0x", x)


def weight_of_a_module_replaced(bench: Bench) -> Case:
    layer = torch.nn.Linear(4, 4, device=device_of(bench.driver)).requires_grad_(False)
    x, out = filled(bench.driver, 1.0, 1, 4), poisoned(bench.driver, 1, 4)

    def step() -> None:
        out.copy_(layer(x))

    executable = captured(bench, step)

    def replace() -> None:
        layer.weight = torch.nn.Parameter(torch.zeros_like(layer.weight), requires_grad=False)

    return Case(executable, out, replace, "function's layer.weight: held object")


def entry_of_a_dictionary_replaced(bench: Bench) -> Case:
    batch = {"ids": filled(bench.driver, 1.0), "unused": filled(bench.driver, 1.0)}
    out = poisoned(bench.driver)
    executable = captured(bench, lambda given: out.copy_(given["ids"] * 2), batch)

    def replace() -> None:
        batch["ids"] = filled(bench.driver, 5.0)

    return Case(executable, out, replace, r"argument 0\['ids'\]: held object", batch)


def temporary_of_one_call(bench: Bench) -> Case:
    out = poisoned(bench.driver)
    temporary = bench.driver.alloc(64)
    graph = adding(bench, temporary, out)
    graph.watch({"temporary": (temporary, 64)})

    def give_back() -> None:
        bench.driver.free(temporary)

    return Case(graph.instantiate(guard="full"), out, give_back, "temporary: allocation: expected")


def temporary_allocated_again_at_its_address(bench: Bench) -> Case:
    out = poisoned(bench.driver)
    temporary = bench.driver.alloc(3 << 20)
    executable = adding(bench, temporary, out).instantiate(guard="full")

    def give_back_and_take() -> None:
        bench.driver.free(temporary)
        bench.alloc(3 << 20)

    words = rf"allocation {temporary:#x} \(argument 1 x of node 0 \(kernel axpy\)\)"
    return Case(executable, out, give_back_and_take, words)


def tensor_of_a_cache_that_evicts(bench: Bench) -> Case:
    @lru_cache(maxsize=1)
    def table(size: int) -> torch.Tensor:
        return filled(bench.driver, 1.0, size)

    out = poisoned(bench.driver)
    graph = adding(bench, table(4).data_ptr(), out)
    graph.watch({"table(4)": table(4)})
    executable = graph.instantiate(guard="owners")

    def evict() -> None:
        table(8)
        gc.collect()

    return Case(executable, out, evict, r"table\(4\): memory: expected 16 bytes", table)


class Cache:
    """A cache that makes new tensors where it should write into the old ones."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.ring = filled(driver, 1.0, 8)
        self.keys = filled(driver, 1.0)
        self.window = self.ring[:4]
        self.out = poisoned(driver)

    def clear(self) -> None:
        self.keys = filled(self.driver, 0.0)

    def slide(self) -> None:
        self.window = self.ring[2:6]

    def step(self) -> None:
        self.out.copy_(self.keys + self.window)


def clear_that_reallocates(bench: Bench) -> Case:
    cache = Cache(bench.driver)
    executable = captured(bench, cache.step)
    return Case(executable, cache.out, cache.clear, "function's self.keys: held object", cache)


def window_that_moves(bench: Bench) -> Case:
    cache = Cache(bench.driver)
    executable = captured(bench, cache.step)
    return Case(executable, cache.out, cache.slide, "function's self.window: held object", cache)


class Scratch:
    """A buffer that grows when more is asked for."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.buffer = Buffer.allocate(4, driver=driver)

    def of(self, size: int) -> Buffer:
        if size > self.buffer.shape[0]:
            self.buffer.close()
            self.buffer = Buffer.allocate(size, driver=self.driver)
        return self.buffer


def scratch_that_grew(bench: Bench) -> Case:
    scratch, out = Scratch(bench.driver), poisoned(bench.driver)
    with graphcore.capture(driver=bench.driver) as capture:
        capture.keep(scratch.of(4), "scratch")
        bench.launch(axpy, 1.0, scratch.of(4), out.data_ptr(), 4, stream=capture.stream)
    executable = capture.graph.instantiate(guard="owners")

    def grow_in_the_next_capture() -> None:
        with graphcore.capture(driver=bench.driver, mode="relaxed") as other:
            bench.launch(fill_value, scratch.of(8), 0.0, 8, stream=other.stream)

    return Case(executable, out, grow_in_the_next_capture, "scratch: memory: expected 16 bytes")


def arguments_dropped_by_the_builder(bench: Bench) -> Case:
    out = poisoned(bench.driver)
    held = [filled(bench.driver, 1.0)]
    graph = adding(bench, held[0].data_ptr(), out)
    graph.watch({"argument x": held[0]})

    def end_of_the_builder() -> None:
        held.clear()
        gc.collect()

    return Case(graph.instantiate(guard="owners"), out, end_of_the_builder, "argument x: memory")


def pool_dropped(bench: Bench) -> Case:
    # a pool of somebody else's: one allocation, of which the graph uses a piece
    out = poisoned(bench.driver)
    pool = bench.driver.alloc(1 << 20)
    graph = adding(bench, pool + 4096, out)
    graph.watch({"pool": (pool, 1 << 20)})

    def drop() -> None:
        bench.driver.free(pool)

    return Case(graph.instantiate(guard="full"), out, drop, "pool: allocation")


EXAMPLES: dict[str, Callable[[Bench], Case]] = {
    example.__name__.replace("_", " "): example
    for example in (
        input_replaced_by_a_new_tensor,
        data_of_an_input_replaced,
        weight_of_a_module_replaced,
        entry_of_a_dictionary_replaced,
        temporary_of_one_call,
        temporary_allocated_again_at_its_address,
        tensor_of_a_cache_that_evicts,
        clear_that_reallocates,
        window_that_moves,
        scratch_that_grew,
        arguments_dropped_by_the_builder,
        pool_dropped,
    )
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_guarded_launch_stops_a_stale_graph_by_the_buffers_name(
    bench: Bench, example: str
) -> None:
    case = EXAMPLES[example](bench)
    assert case.executable.check() == []
    replay(case.executable, bench.stream)
    case.output.fill_(float("nan"))
    bench.driver.synchronize()
    case.go_stale()
    for _ in range(2):
        with pytest.raises(StaleGraphError, match=f"nothing was launched: .*{case.words}"):
            case.executable.launch(bench.stream)
    bench.driver.synchronize()
    assert torch.isnan(case.output).all(), "nothing was launched"
    case.executable.close()


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_control_goes_on_as_long_as_nothing_goes_stale(bench: Bench, example: str) -> None:
    case = EXAMPLES[example](bench)
    for _ in range(2):
        case.output.fill_(0.0)
        gc.collect()
        replay(case.executable, bench.stream)
    assert case.executable.check() == []
    case.executable.close()


# ---- prevented: the graph keeps the memory ------------------------------------------------------


def _with_arguments(driver: Driver) -> tuple[Graph, float]:
    x, y = filled(driver, 3.0), filled(driver, 4.0)
    return graphcore.capture_function(lambda one, two: one * two, x, y, driver=driver), 12.0


def _with_variables(driver: Driver) -> tuple[Graph, float]:
    x, y = filled(driver, 3.0), filled(driver, 4.0)
    return graphcore.capture_function(lambda: x + y, driver=driver), 7.0


def _with_temporaries(driver: Driver) -> tuple[Graph, float]:
    x = filled(driver, 3.0)
    return graphcore.capture_function(lambda given: (given * 2 + 1) * given, x, driver=driver), 21.0


def _with_an_evicted_table(driver: Driver) -> tuple[Graph, float]:
    @lru_cache(maxsize=1)
    def table(size: int) -> torch.Tensor:
        return filled(driver, 3.0, size)

    graph = graphcore.capture_function(lambda given: given * 2, table(4), driver=driver)
    table(8)
    return graph, 6.0


@pytest.mark.parametrize(
    "build_graph", [_with_arguments, _with_variables, _with_temporaries, _with_an_evicted_table]
)
def test_what_the_builder_dropped_lives_as_long_as_the_graph(
    graphcore_driver: Driver, build_graph: Callable[[Driver], tuple[Graph, float]]
) -> None:
    graph, expected = build_graph(graphcore_driver)
    output = graph.outputs
    executable = graph.instantiate(guard="full")
    graph.close()
    gc.collect()
    if not graphcore_driver.is_emulated:
        torch.cuda.empty_cache()
    # what was freed would be given out again here
    others = [filled(graphcore_driver, -1.0) for _ in range(64)]
    output.fill_(float("nan"))
    replay(executable)
    assert output.tolist() == [expected] * 4
    assert all(other.tolist() == [-1.0] * 4 for other in others)
    executable.close()


def test_a_successor_of_what_the_graph_does_not_use_does_not_matter(bench: Bench) -> None:
    batch = {"ids": filled(bench.driver, 1.0), "unused": filled(bench.driver, 1.0)}
    out = poisoned(bench.driver)
    executable = captured(bench, lambda given: out.copy_(given["ids"] * 2), batch)
    batch["unused"] = filled(bench.driver, 2.0)
    del batch["ids"]
    replay(executable, bench.stream)
    assert out.tolist() == [2.0] * 4


# ---- another layout than captured ---------------------------------------------------------------


def test_another_token_layout_is_refused_before_the_replay_and_told_by_the_fingerprint(
    bench: Bench,
) -> None:
    driver = bench.driver
    tokens, out = filled(driver, 1.0, 4, 2), poisoned(driver, 4, 2)
    inputs = StaticInputs({"tokens": tokens}, fill={"tokens": 0.0}, driver=driver)

    def step(rows: int) -> None:
        out[:rows].copy_(tokens[:rows] * 2)

    graph = graphcore.capture_function(step, 4, driver=driver)
    with graph.instantiate() as executable:
        inputs.copy_(tokens=[[1.0, 2.0]])
        replay(executable, bench.stream)
        assert out.tolist() == [[2.0, 4.0], *[[0.0, 0.0]] * 3]
        with pytest.raises(CapacityError, match=r"tokens: expected at most \(4, 2\), got \(5, 2\)"):
            inputs.copy_(tokens=[[1.0, 2.0]] * 5)
        with pytest.raises(ConfigurationError, match="tokens: expected 2 axes"):
            inputs.copy_(tokens=[1.0, 2.0])
    before = graph.fingerprint({"tokens": tokens, "out": out})
    same = graphcore.capture_function(step, 4, driver=driver)
    assert before.compare(same.fingerprint({"tokens": tokens, "out": out})) == []
    other = graphcore.capture_function(step, 3, driver=driver)
    assert before.compare(other.fingerprint({"tokens": tokens, "out": out}))
