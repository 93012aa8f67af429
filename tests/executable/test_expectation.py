"""capture(expect=...): what is missing of a number, a graph, a snapshot or a plan is named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from helpers.contract import copy_1d, fill_1d
from helpers.kernels import ONE_BLOCK, add_one, scale
from helpers.tensors import filled

import graphcore
from graphcore import CaptureError, ConfigurationError, Graph, GraphPlan
from graphcore.driver import LEGACY_STREAM, Driver, Kernel
from graphcore.resources.buffer import Buffer


class Launcher:
    """Launches our kernels on a stream, and work of other kinds."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.memory = Buffer.allocate(4, driver=driver)
        self.other = Buffer.allocate(4, driver=driver)
        for kernel in (add_one, scale):
            driver.function(kernel)

    def launch(self, kernel: Kernel, stream: Any) -> None:
        factor = () if kernel is add_one else (2.0,)
        arguments = kernel.pack(self.memory, *factor, 4)
        self.driver.launch(self.driver.function(kernel), ONE_BLOCK, arguments, int(stream))  # type: ignore[arg-type]

    def copy(self, stream: Any) -> None:
        self.driver.copy(copy_1d(self.other.address, self.memory.address, 16), int(stream))  # type: ignore[arg-type]

    def fill(self, stream: Any) -> None:
        self.driver.fill(fill_1d(self.memory.address, 0, 4), int(stream))  # type: ignore[arg-type]


@pytest.fixture
def launcher(graphcore_driver: Driver) -> Launcher:
    return Launcher(graphcore_driver)


def _captured(launcher: Launcher, step: Callable[[Any], None], **options: Any) -> Graph:
    with graphcore.capture(driver=launcher.driver, **options) as capture:
        step(capture.stream)
    return capture.graph


def _whole(launcher: Launcher) -> Callable[[Any], None]:
    def step(stream: Any) -> None:
        launcher.launch(add_one, stream)
        launcher.launch(add_one, stream)
        launcher.launch(scale, stream)
        launcher.copy(stream)
        launcher.fill(stream)

    return step


def _without_one(launcher: Launcher) -> Callable[[Any], None]:
    def step(stream: Any) -> None:
        launcher.launch(add_one, stream)
        launcher.launch(scale, stream)
        launcher.fill(stream)

    return step


FORMS: dict[str, Callable[[Graph], Any]] = {
    "graph": lambda graph: graph,
    "snapshot": lambda graph: graph.snapshot(),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_missing_of_another_graph_is_named_by_kernel_and_kind(
    launcher: Launcher, form: str
) -> None:
    whole = _captured(launcher, _whole(launcher))
    expected = FORMS[form](whole)
    again = _captured(launcher, _whole(launcher), expect=expected)
    assert len(again.snapshot().nodes) == 5
    stream = launcher.driver.stream(blocking=True)
    with pytest.raises(CaptureError) as caught:
        _captured(launcher, _without_one(launcher), stream=stream, expect=expected)
    words = str(caught.value)
    assert "of 5 expected nodes 2 are missing: kernel add_one (1 of 2), memcpy (1 of 1)" in words
    assert "the legacy stream" in words
    assert len(_captured(launcher, _whole(launcher), stream=stream).snapshot().nodes) == 5


def test_more_than_expected_is_no_error(launcher: Launcher) -> None:
    less = _captured(launcher, _without_one(launcher))
    more = _captured(launcher, _whole(launcher), expect=less)
    assert len(more.snapshot().nodes) == 5


def test_nodes_inside_a_child_graph_count(launcher: Launcher) -> None:
    whole = _captured(launcher, _whole(launcher))
    executable = whole.instantiate()
    outer = _captured(launcher, executable.launch, expect=whole)
    assert len(outer.snapshot().nodes) == 1


# ---- plans --------------------------------------------------------------------------------------


def _plan() -> GraphPlan:
    plan, inner = GraphPlan(), GraphPlan()
    z = inner.buffer("z", (4,), "float32")
    inner.launch(add_one, ONE_BLOCK, z, 4)
    x, y = (plan.buffer(name, (4,), "float32") for name in ("x", "y"))
    plan.launch(add_one, ONE_BLOCK, x, 4)
    plan.embed(inner, bindings={"z": x})
    plan.launch(scale, ONE_BLOCK, x, 2.0, 4)
    plan.memcpy(y, x)
    plan.memset(x, 0)
    return plan


def test_a_plan_says_which_of_its_nodes_are_missing(launcher: Launcher) -> None:
    assert len(_captured(launcher, _whole(launcher), expect=_plan()).snapshot().nodes) == 5
    with pytest.raises(CaptureError) as caught:
        _captured(launcher, _without_one(launcher), expect=_plan())
    assert "2 are missing: kernel add_one (1 of 2), memcpy (1 of 1)" in str(caught.value)


@pytest.mark.parametrize("work", ["memcpy", "memset"])
def test_a_copy_or_a_fill_of_a_plan_may_be_a_kernel_but_one_kernel_is_only_one(
    launcher: Launcher, work: str
) -> None:
    plan = GraphPlan()
    x, y = (plan.buffer(name, (4,), "float32") for name in ("x", "y"))
    plan.launch(add_one, ONE_BLOCK, x, 4)
    for target in (x, y):
        if work == "memcpy":
            plan.memcpy(target, x if target is y else y)
        else:
            plan.memset(target, 0)

    def step(stream: Any, kernels: int) -> None:
        launcher.launch(add_one, stream)
        for _ in range(kernels):
            launcher.launch(scale, stream)  # as the kernel that copies would be

    assert _captured(launcher, partial(step, kernels=2), expect=plan)
    with pytest.raises(CaptureError, match=rf"1 are missing: {work} \(1 of 2\)"):
        _captured(launcher, partial(step, kernels=1), expect=plan)


def test_the_bodies_of_a_plan_count(launcher: Launcher) -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (4,), "float32")
    with plan.if_then(plan.condition("more")) as body:
        body.launch(add_one, ONE_BLOCK, x, 4)
        body.launch(scale, ONE_BLOCK, x, 2.0, 4)
    with pytest.raises(CaptureError, match=r"conditional \(1 of 1\)") as caught:
        _captured(launcher, lambda stream: launcher.launch(scale, stream), expect=plan)
    assert "kernel add_one (1 of 1)" in str(caught.value)
    assert "kernel scale" not in str(caught.value)


def test_a_plan_that_is_captured_has_all_it_expects(launcher: Launcher) -> None:
    plan, driver = _plan(), launcher.driver
    buffers = {name: Buffer.allocate(4, driver=driver) for name in ("x", "y")}
    graph = plan.capture(buffers, driver=driver, expect=plan)
    assert len(graph.snapshot().nodes) == 5


# ---- where work goes that is not captured -------------------------------------------------------


def test_legacy_work_beside_a_non_blocking_stream_is_missed(launcher: Launcher) -> None:
    whole = _captured(launcher, lambda stream: launcher.launch(add_one, stream))
    with pytest.raises(CaptureError, match=r"kernel add_one \(1 of 1\)") as caught:
        _captured(
            launcher,
            lambda _: launcher.launch(add_one, LEGACY_STREAM),
            expect=whole,
            on_legacy_work="ignore",
        )
    assert "the legacy stream" in str(caught.value)


def test_a_library_that_uses_a_stream_of_its_own_is_missed(launcher: Launcher) -> None:
    own = launcher.driver.stream()
    with pytest.raises(CaptureError, match="expected at least 1 node, got 0") as caught:
        _captured(launcher, lambda _: launcher.launch(add_one, own), expect=1)
    assert "one that a library chose itself" in str(caught.value)


def test_an_empty_graph_says_where_work_may_have_gone(
    launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    own = launcher.driver.stream()
    with caplog.at_level(logging.WARNING, "graphcore"):
        _captured(launcher, lambda _: launcher.launch(add_one, own))
    assert "empty graph" in caplog.text
    assert "one that a library chose itself" in caplog.text


def test_a_function_is_captured_with_an_expectation(graphcore_driver: Driver) -> None:
    x = filled(graphcore_driver, 1.0)
    first = graphcore.capture_function(lambda: x.add_(1), driver=graphcore_driver)
    again = graphcore.capture_function(lambda: x.add_(2), driver=graphcore_driver, expect=first)
    assert len(again.snapshot().nodes) == 1
    with pytest.raises(CaptureError, match="1 are missing"):
        graphcore.capture_function(lambda: None, driver=graphcore_driver, expect=first)


def test_a_closed_graph_is_refused_before_anything_is_captured(launcher: Launcher) -> None:
    closed = _captured(launcher, _whole(launcher))
    closed.close()
    with pytest.raises(ConfigurationError, match="expect: expected an open graph"):
        graphcore.capture(driver=launcher.driver, expect=closed)
