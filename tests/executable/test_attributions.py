"""Graph.attributions: what each pointer points into, by names, owners, own memory, allocations."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers.contract import Bench, copy_1d
from helpers.graph_specs import Step, build
from helpers.kernels import add_one, axpy, fill_value
from helpers.tensors import cuda_driver, filled

import graphcore
from graphcore import CacheTypeError, ConfigurationError, Graph
from graphcore.driver import Driver
from graphcore.driver.records import AllocParams, FreeParams
from graphcore.resources.lifetime import OwnerSet


def told(graph: Any, **names: Any) -> list[str]:
    return [str(found) for found in graph.attributions(names or None)]


def graph_of(bench: Bench, *steps: Any, owners: OwnerSet | None = None) -> Graph:
    handle = build(bench, tuple(Step(step) for step in steps))
    return Graph(bench.driver, handle, owners=owners, owned=False)


def test_owners_are_told_by_their_labels_and_names_come_before_them(bench: Bench) -> None:
    x, y = filled(bench.driver, 1.0, 16), filled(bench.driver, 0.0, 16)
    owners = OwnerSet().with_(x, label="keys").with_(y, label="values")
    work = bench.kernel_params(axpy, 1.0, x.data_ptr() + 16, y.data_ptr(), 4)
    copy = copy_1d(y.data_ptr() + 32, x.data_ptr(), 16)
    graph = graph_of(bench, work, copy, owners=owners)
    assert told(graph) == [
        "x = keys + 16 bytes",
        "y = values",
        "dst = values + 32 bytes",
        "src = keys",
    ]
    assert told(graph, cache=x)[:2] == ["x = cache + 16 bytes", "y = values"]
    sources = [found.place.source for found in graph.attributions({"cache": x})]
    assert sources == ["name", "owner", "owner", "name"]


def test_an_executable_tells_what_runs_now(bench: Bench) -> None:
    x, y = filled(bench.driver, 1.0), filled(bench.driver, 0.0)
    owners = OwnerSet().with_(x, label="x")
    fill = bench.kernel_params(fill_value, x.data_ptr(), 1.0, 4)
    executable = graph_of(bench, fill, owners=owners).instantiate()
    executable.set_params(0, {"x": y})
    assert told(executable) == ["x = node 0 (kernel fill_value): argument 0 (x)"]
    executable.rebind([(y, x)])
    assert told(executable, mine=x) == ["x = mine"]


def test_the_end_of_a_buffer_belongs_to_the_next_one_or_to_none(bench: Bench) -> None:
    memory = bench.alloc(64)
    both = graph_of(
        bench,
        bench.kernel_params(add_one, memory + 16, 1),
        bench.kernel_params(add_one, memory + 32, 1),
    )
    first, second = told(both, a=(memory, 16), b=(memory + 16, 16))
    assert first == "x = b"
    assert second.startswith("x = allocation ")


def test_overlapping_labels_are_ambiguous_and_equal_ones_are_one(bench: Bench) -> None:
    x = filled(bench.driver, 0.0, 16)
    owners = OwnerSet().with_(x, label="whole").with_(x[8:], label="half").with_(x[:], label="same")
    at = x.data_ptr()
    steps = [bench.kernel_params(add_one, at + offset, 1) for offset in (0, 32)]
    assert told(graph_of(bench, *steps, owners=owners)) == [
        "x = whole",
        "x = ambiguous: whole + 32 bytes or half",
    ]


def test_two_owners_of_one_label_are_numbered(bench: Bench) -> None:
    x, y = filled(bench.driver, 0.0), filled(bench.driver, 0.0)
    owners = OwnerSet().with_(x, y, label="input")
    work = bench.kernel_params(axpy, 1.0, x.data_ptr(), y.data_ptr(), 4)
    assert told(graph_of(bench, work, owners=owners)) == ["x = input", "y = input (2)"]


def test_memory_of_the_graph_itself_is_told(graphcore_driver: Driver) -> None:
    driver = graphcore_driver
    x, out = filled(driver, 1.0, 64), filled(driver, 0.0, 64)
    step = lambda: out.copy_((x + 1) * (x + 2))  # noqa: E731
    capturing = graphcore.capture(driver=driver)
    capturing.warm_up(step, 2)
    with capturing:
        capturing.keep(x, "x")
        capturing.keep(out, "out")
        step()
    found = capturing.graph.attributions()
    names = {name for each in found for name, _ in each.place.matches}
    assert {"x", "out"} <= names
    assert any(name.startswith("private memory") for name in names)
    if driver.is_emulated:  # on a device the padding of structures may hold any old pointer
        assert {each.place.source for each in found} == {"owner", "graph"}


def test_allocations_of_the_graph_are_told(bench: Bench) -> None:
    graph = bench.new_graph()
    made = bench.add(graph, AllocParams(64))
    params = bench.driver.node_params(made)
    assert isinstance(params, AllocParams)
    work = bench.add_kernel(graph, fill_value, params.address + 8, 1.0, 4, after=[made])
    bench.add(graph, FreeParams(params.address), [work])
    assert told(Graph(bench.driver, graph, owned=False)) == [
        "x = graph allocation 0 + 8 bytes",
        "address = graph allocation 0",
    ]


def test_memory_that_was_freed_is_not_told_as_live(bench: Bench) -> None:
    address = bench.driver.alloc(1 << 22)  # so large that nothing else shares its allocation
    graph = graph_of(bench, bench.kernel_params(fill_value, address, 1.0, 4))
    (before,) = told(graph)
    assert before.startswith(f"x = allocation {address:#x}")
    bench.driver.free(address)
    after = told(graph)
    unknown = f"x = {address:#x}, in no memory that is known"
    assert after == ([] if bench.driver.is_emulated else [unknown])


def test_pages_and_drawings_use_the_same_words(bench: Bench) -> None:
    x = filled(bench.driver, 0.0)
    owners = OwnerSet().with_(x, label="layer 4 keys")
    graph = graph_of(bench, bench.kernel_params(add_one, x.data_ptr() + 4, 1), owners=owners)
    assert "layer 4 keys + 4 bytes" in graph.drawing().to_html()
    assert "cache + 4 bytes" in graph.drawing({"cache": x}).to_html()


@pytest.mark.parametrize(
    ("names", "error"), [({"x": "text"}, CacheTypeError), ([1], ConfigurationError)]
)
def test_names_of_another_kind_are_refused(bench: Bench, names: Any, error: type) -> None:
    x = bench.alloc(16)
    graph = graph_of(bench, bench.kernel_params(fill_value, x, 1.0, 4))
    with pytest.raises(error, match="names"):
        graph.attributions(names)


@pytest.mark.gpu
def test_tensors_of_torch_are_told_as_its_blocks_and_freed_ones_as_freed() -> None:
    driver = cuda_driver()
    bench = Bench(driver)
    x = torch.zeros(1000, device=f"cuda:{driver.device}")
    address = x.data_ptr()
    graph = graph_of(bench, bench.kernel_params(fill_value, address + 8, 1.0, 4))
    assert told(graph) == [f"x = torch block {address:#x} of 4000 bytes + 8 bytes"]
    del x
    gc.collect()
    (after,) = told(graph)
    assert after.startswith("x = freed torch block ")
    bench.close()


@pytest.mark.gpu
def test_memory_of_cupy_is_told_by_its_name_or_its_allocation() -> None:
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    driver = cuda_driver()
    bench = Bench(driver)
    with cupy.cuda.Device(driver.device):
        x = cupy.zeros(1000, "float32")
    graph = graph_of(bench, bench.kernel_params(fill_value, x.data.ptr + 8, 1.0, 4))
    assert told(graph, mine=x) == ["x = mine + 8 bytes"]
    (unnamed,) = told(graph)
    assert unnamed.startswith("x = allocation ")
    bench.close()
