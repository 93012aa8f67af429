"""graphcore.diff with names: a changed pointer is told by the buffer it points into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.contract import Bench, copy_1d
from helpers.graph_specs import Step, build
from helpers.kernels import add_one, axpy
from helpers.tensors import device_of, filled

import graphcore
from graphcore import CacheTypeError, ConfigurationError, Graph
from graphcore.driver import Driver
from graphcore.resources.lifetime import OwnerSet


def graph_of(bench: Bench, *params: Any, owners: OwnerSet | None = None) -> Graph:
    handle = build(bench, tuple(map(Step, params)))
    return Graph(bench.driver, handle, owners=owners, owned=False)


def told(a: Any, b: Any, names: Any = None) -> list[str]:
    changed = graphcore.diff(a, b, names).changed
    return [str(field) for change in changed for field in change.fields]


def test_pointers_and_sides_of_copies_are_told_by_name_and_offset(bench: Bench) -> None:
    first, second = filled(bench.driver, 1.0, 16), filled(bench.driver, 1.0, 16)
    at, to = first.data_ptr(), second.data_ptr()

    def graph(x: int, y: int) -> Graph:
        return graph_of(bench, bench.kernel_params(axpy, 1.0, x, y, 4), copy_1d(y, x, 16))

    one, other = graph(at, at + 32), graph(at + 16, to)
    names = {"keys": first, "values": second}
    assert told(one, other, names) == [
        f"argument 1: keys ({at:#x}) -> keys + 16 bytes ({at + 16:#x})",
        f"argument 2: keys + 32 bytes ({at + 32:#x}) -> values ({to:#x})",
        f"dst.address: keys + 32 bytes ({at + 32:#x}) -> values ({to:#x})",
        f"src.address: keys ({at:#x}) -> keys + 16 bytes ({at + 16:#x})",
    ]
    # the control: without names, and as before
    assert told(one, other)[0] == f"argument 1: {at:#x} -> {at + 16:#x}"
    assert told(one, other) == told(one.snapshot(), other.snapshot())
    assert told(one.snapshot(), other.snapshot(), names) == told(one, other, names)


def test_what_has_no_name_goes_by_the_label_under_which_a_graph_keeps_it(bench: Bench) -> None:
    x, y, z = (filled(bench.driver, 1.0) for _ in range(3))
    step = lambda tensor: bench.kernel_params(add_one, tensor.data_ptr(), 4)  # noqa: E731
    old = graph_of(bench, step(x), owners=OwnerSet().with_(x, label="first input"))
    new = graph_of(bench, step(y), owners=OwnerSet().with_(y, label="second input"))
    ends = f"({x.data_ptr():#x})", f"({y.data_ptr():#x})"
    assert told(old, new, {}) == [f"argument 0: first input {ends[0]} -> second input {ends[1]}"]
    assert told(old, new, {"mine": y}) == [f"argument 0: first input {ends[0]} -> mine {ends[1]}"]
    unknown = graph_of(bench, step(z))
    assert told(old, unknown, {}) == [f"argument 0: first input {ends[0]} -> {z.data_ptr():#x}"]
    with new.instantiate() as executable:
        assert told(old, executable, {}) == told(old, new, {})


def test_words_of_captured_torch_kernels_are_told_too(graphcore_driver: Driver) -> None:
    driver = graphcore_driver
    x, y, out = (torch.zeros(64, device=device_of(driver)) for _ in range(3))
    add = lambda source: torch.add(source, 1, out=out)  # noqa: E731
    graphs = [graphcore.capture_function(add, source, driver=driver) for source in (x, y)]
    found = graphcore.diff(*graphs, {"x": x, "y": y})
    (change,) = found.changed
    names = [(field.before_name, field.after_name) for field in change.fields]
    assert any("x" in before and "y" in after for before, after in names)
    for picture in (str(found), found.to_text(width=400), found.to_html_page()):
        assert "x (" in picture or "= x" in picture
    assert found.update_possible
    plain = graphcore.diff(*graphs)
    assert not any(field.before_name for change in plain.changed for field in change.fields)


def test_inner_graphs_are_told_as_the_outer_one(bench: Bench) -> None:
    x, y = filled(bench.driver, 1.0), filled(bench.driver, 1.0)
    outer = []
    for tensor in (x, y):
        inner = graph_of(bench, bench.kernel_params(add_one, tensor.data_ptr(), 4)).instantiate()
        with graphcore.capture(driver=bench.driver) as capture:
            inner.launch()
        outer.append(capture.graph)
    found = graphcore.diff(*outer, {"x": x, "y": y})
    (change,) = found.changed
    (field,) = change.fields
    assert (field.before_name, field.after_name) == ("x", "y")
    assert str(change.inner[0].changed[0].fields[0]).startswith("argument 0: x (")


@pytest.mark.parametrize(
    ("names", "error"),
    [([("x", 3)], ConfigurationError), ({"x": "no tensor"}, CacheTypeError)],
    ids=["no mapping", "no tensor"],
)
def test_names_that_are_none_are_refused(bench: Bench, names: Any, error: type[Exception]) -> None:
    x = filled(bench.driver, 1.0)
    graph = graph_of(bench, bench.kernel_params(add_one, x.data_ptr(), 4))
    with pytest.raises(error):
        graphcore.diff(graph, graph, names)
