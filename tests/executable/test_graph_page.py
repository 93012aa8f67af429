"""Pages and drawings of graphs: facts, memory, dependencies, and pointers told by name."""

from __future__ import annotations

import re
from html import unescape

import pytest
from helpers.contract import Bench
from helpers.graph_specs import Child, Step, build
from helpers.kernels import add_one, axpy, fill_value

import graphcore
from graphcore import CacheTypeError, ConfigurationError, Graph, LifecycleError
from graphcore.resources.lifetime import OwnerSet


def facts_of(page: str) -> dict[str, str]:
    pairs = re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", page)
    return {unescape(name): unescape(value) for name, value in pairs}


@pytest.fixture
def memory(bench: Bench) -> tuple[int, int]:
    return bench.alloc(256), bench.alloc(256)


@pytest.fixture
def graph(bench: Bench, memory: tuple[int, int]) -> Graph:
    """y += 2 x; then a child graph that adds one to y + 64 bytes."""
    x, y = memory
    child = Child((Step(bench.kernel_params(add_one, y + 64, 16)),))
    spec = (Step(bench.kernel_params(axpy, 2.0, x, y, 16)), Step(child, (0,)))
    return Graph(bench.driver, build(bench, spec), owned=False)


def test_pointers_are_told_by_the_names_that_are_given_in_inner_graphs_too(
    graph: Graph, memory: tuple[int, int]
) -> None:
    x, y = memory
    drawing = graph.drawing({"inputs": (x, 256), "sums": (y, 256)})
    assert drawing.boxes[0].notes == ("x = inputs", "y = sums")
    ((_, inner),) = drawing.boxes[1].inner
    assert inner.boxes[0].notes == ("x = sums + 64 bytes",)
    page = graph.to_html_page("Two steps", {"inputs": (x, 256), "sums": (y, 256)})
    assert "<b>x = inputs</b><b>y = sums</b>" in page
    assert "<b>x = sums + 64 bytes</b>" in page
    facts = facts_of(page)
    assert (facts["inputs"], facts["sums"]) == ("1 pointer", "2 pointers")


def test_without_names_memory_is_told_by_allocation(graph: Graph, memory: tuple[int, int]) -> None:
    x, _ = memory
    (first, second) = graph.drawing().boxes[0].notes
    assert re.match(rf"x = allocation {x:#x} \(\d+ bytes, buffer id ", first)
    assert second.startswith("y = allocation ")


def test_tensors_that_the_graph_keeps_name_its_pointers(bench: Bench) -> None:
    tensor = graphcore.Buffer.allocate((16,), driver=bench.driver)
    handle = build(bench, (Step(bench.kernel_params(fill_value, tensor.address, 1.0, 16)),))
    owners = OwnerSet().with_(tensor, label="keys of layer 3")
    graph = Graph(bench.driver, handle, owners=owners, owned=False)
    assert graph.drawing().boxes[0].notes == ("x = keys of layer 3",)
    assert "<b>x = keys of layer 3</b>" in graph._repr_html_()


def test_the_page_says_what_the_graph_is_takes_and_depends_on(
    graph: Graph, memory: tuple[int, int]
) -> None:
    names = {"inputs": (memory[0], 256), "sums": (memory[1], 256)}
    page = graph.to_html_page("Two steps", names)
    facts = facts_of(page)
    assert facts["nodes"] == "2 and 1 inside them"
    assert facts["of them"] == "2 kernels · 1 child"
    assert facts["edges"] == "1"
    assert facts["different kernels"] == "2"
    assert facts["driver"] == f"{graph.driver.name}, device {graph.driver.device}"
    assert facts["fingerprint"] == graph.fingerprint(names).digest
    assert facts["an executable"].endswith("KiB")
    assert facts["allocation nodes"] == "0 bytes"
    assert "<title>Two steps</title>" in page
    assert graph.to_html_page("Two steps", names, full=True).count('<g class="gc-box"') == 3


def test_bad_names_titles_and_closed_graphs_are_refused(graph: Graph) -> None:
    with pytest.raises(ConfigurationError, match="names: expected a mapping"):
        graph.drawing([("x", 3)])  # type: ignore[arg-type]
    with pytest.raises(CacheTypeError, match="x"):
        graph.to_html_page("page", {"x": "not a tensor"})
    with pytest.raises(ConfigurationError, match="title: expected text, got 3"):
        graph.to_html_page(3)  # type: ignore[arg-type]
    graph.close()
    with pytest.raises(LifecycleError, match="closed"):
        graph.drawing()
    with pytest.raises(LifecycleError, match="closed"):
        graph.to_html_page()
