"""Plans as JSON: the same plan comes back, here and in another process; other texts are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.kernels import ONE_BLOCK, axpy, fill_value
from helpers.plans import plans, set_condition, touch
from hypothesis import given, settings

from graphcore import ConfigurationError, GraphPlan, LaunchConfig, PlanError, kernel

KERNELS = [axpy, fill_value, set_condition]


def every_kind() -> GraphPlan:
    """A plan with every kind of node that can be saved."""
    inner = GraphPlan("inner")
    a = inner.buffer("a", (4,))
    inner.memset(a[1:], 1.0)
    plan = GraphPlan("saved")
    x, y = plan.buffer("x", (8, 4)), plan.buffer("y", (4, 8), strides=(1, 4))
    done, ready = plan.event("done"), plan.event("ready", external=True)
    more, kept = plan.condition("more"), plan.condition("kept", None)
    tmp = plan.allocate("tmp", (8, 4), "bfloat16")
    plan.wait(ready)
    config = LaunchConfig((2, 1, 1), (32, 1, 1), 128, (2, 1, 1), True, -1, True)
    with plan.annotate("layer 0"):
        plan.launch(axpy, config, float("nan"), x, y, 2**31 - 1)
        plan.launch(fill_value, ONE_BLOCK, None, 0.1, 4, reads=[], writes=[x[::-2, 1]])
    plan.memset(tmp, float("-inf"))
    plan.memcpy(x.whole.view("uint8")[:, 3:7], x.whole.view("uint8")[:, 8:12], name="bytes")
    plan.embed(inner, {"a": x[3]}, name="first")
    plan.embed(inner, {"a": x[4]})
    plan.launch(set_condition, ONE_BLOCK, more, 1)
    plan.launch(set_condition, ONE_BLOCK, kept, 1)
    with plan.while_loop(more) as body:
        body.memset(tmp[0], 0)
        with body.if_else(kept) as (then, other):
            then.memset(x, 0.0)
            other.launch(set_condition, ONE_BLOCK, more, 0)
    plan.deallocate(tmp)
    plan.record(done)
    plan.join(after=["bytes", "later"])
    plan.join(name="later", after=())
    return plan


def same(one: GraphPlan, other: GraphPlan) -> bool:
    return one.to_json() == other.to_json()


def test_every_kind_of_node_comes_back() -> None:
    plan = every_kind()
    again = GraphPlan.from_json(plan.to_json(), kernels=KERNELS)
    assert same(plan, again)
    assert [type(node.work) for node in again.nodes] == [type(node.work) for node in plan.nodes]
    assert [node.name for node in again.nodes] == [node.name for node in plan.nodes]
    assert [node.label for node in again.nodes] == [node.label for node in plan.nodes]
    assert [again.after_of(n) for n in again.nodes] == [plan.after_of(n) for n in plan.nodes]
    assert again.buffers == plan.buffers
    assert again.events == plan.events
    assert again.conditions == plan.conditions
    assert again.validate() == plan.validate()
    first, second = (node.work.plan for node in again.nodes if hasattr(node.work, "plan"))
    assert first is second, "embedded plans are saved once"
    assert again.nodes[2].work.kernel is axpy
    assert again.nodes[2].work.config == plan.nodes[2].work.config


@given(plans())
@settings(max_examples=50, deadline=None)
def test_any_plan_comes_back_with_its_order(plan: GraphPlan) -> None:
    again = GraphPlan.from_json(plan.to_json(), kernels=[touch])
    assert same(plan, again)
    assert [node.reads for node in again.nodes] == [node.reads for node in plan.nodes]
    assert [again.after_of(n) for n in again.nodes] == [plan.after_of(n) for n in plan.nodes]


def test_a_plan_that_came_back_can_be_written_on() -> None:
    again = GraphPlan.from_json(every_kind().to_json(), kernels=KERNELS)
    node = again.memset(again.buffers["x"], 0.0)
    assert node.name == "set x"
    assert again.join().name == "join 2"


def test_names_that_no_node_has_yet_are_still_awaited() -> None:
    plan = GraphPlan()
    plan.join(after="later")
    again = GraphPlan.from_json(plan.to_json())
    assert [problem.kind for problem in again.validate()] == ["order"]
    again.join(name="later", after=())
    assert again.after_of("join") == (1,)


def test_a_cycle_comes_back_and_is_told() -> None:
    plan = GraphPlan()
    plan.join(after="b", name="a")
    plan.join(after="a", name="b")
    assert [p.kind for p in GraphPlan.from_json(plan.to_json()).validate()] == ["cycle"]


# ---- kernels --------------------------------------------------------------------------------


def saved_fill() -> str:
    plan = GraphPlan()
    plan.launch(fill_value, ONE_BLOCK, plan.buffer("x", (4,)), 1.0, 4)
    return plan.to_json()


def test_without_a_given_kernel_it_comes_back_from_its_source_without_reference() -> None:
    made = GraphPlan.from_json(saved_fill()).nodes[0].work.kernel
    assert (made.name, made.parameters, made.source) == (
        fill_value.name,
        fill_value.parameters,
        fill_value.source,
    )
    with pytest.raises(ConfigurationError, match="fill_value has no Python reference"):
        made.run_reference(ONE_BLOCK, ())


def test_a_given_kernel_of_another_signature_is_refused() -> None:
    other = kernel("fill_value", "f64* x, f32 value, i32 n", "")
    with pytest.raises(ConfigurationError, match=r"fill_value.*\(f32\*, f32, i32\), got \(f64\*"):
        GraphPlan.from_json(saved_fill(), kernels=[other])


def test_a_given_kernel_of_other_source_is_taken_and_told(caplog: Any) -> None:
    other = kernel("fill_value", "f32* x, f32 value, i32 n", "// faster")
    with caplog.at_level("INFO", logger="graphcore"):
        again = GraphPlan.from_json(saved_fill(), kernels=[other])
    assert again.nodes[0].work.kernel is other
    assert "the given source differs from the saved one" in caplog.text


def test_of_several_given_kernels_the_one_of_the_saved_source_is_taken() -> None:
    other = kernel("fill_value", "f32* x, f32 value, i32 n", "// faster")
    again = GraphPlan.from_json(saved_fill(), kernels=[other, fill_value])
    assert again.nodes[0].work.kernel is fill_value


@pytest.mark.parametrize("kernels", [3, [None], ["fill_value"]])
def test_what_is_no_kernel_is_refused(kernels: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"kernels: expected graphcore\.Kernel"):
        GraphPlan.from_json(saved_fill(), kernels=kernels)


def test_one_kernel_may_be_given_by_itself() -> None:
    assert GraphPlan.from_json(saved_fill(), kernels=fill_value).nodes[0].work.kernel is fill_value


def test_a_kernel_without_source_must_be_given() -> None:
    plan = GraphPlan()
    plan.launch(set_condition, ONE_BLOCK, plan.condition("more"), 1)
    with pytest.raises(ConfigurationError, match=r"set_condition.*give it in kernels="):
        GraphPlan.from_json(plan.to_json())


# ---- what cannot be saved -------------------------------------------------------------------


def test_python_code_is_refused_by_the_name_of_its_node() -> None:
    for add in (
        lambda plan: plan.call(print, name="mine"),
        lambda plan: plan.callback(print, name="mine"),
    ):
        plan = GraphPlan()
        add(plan)
        with pytest.raises(PlanError, match="node 'mine' calls Python code, which cannot be"):
            plan.to_json()


def test_what_belongs_to_another_plan_is_refused() -> None:
    other, plan = GraphPlan(), GraphPlan()
    plan.memset(other.buffer("x", (4,)), 0.0, name="n")
    with pytest.raises(PlanError, match="'n': buffer 'x' belongs to another plan"):
        plan.to_json()


def test_a_body_is_saved_with_its_plan() -> None:
    plan = GraphPlan()
    with plan.if_then(plan.condition("more")) as body:
        pass
    with pytest.raises(PlanError, match="saved with the plan around it"):
        body.to_json()


# ---- bad texts ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "expected JSON"),
        ("{", "expected JSON"),
        (b"\xff", "expected JSON"),
        (None, "expected JSON"),
        ("[" * 100_000, "expected JSON"),
        ("[]", "expected format"),
        ("null", "expected format"),
        ('{"format": "graphcore-snapshot", "version": 1}', "expected format 'graphcore-plan'"),
        ('{"format": "graphcore-plan", "version": 2}', "expected version 1, got 2"),
        ('{"format": "graphcore-plan", "version": true}', "expected version 1, got True"),
        ('{"format": "graphcore-plan"}', "expected version 1, got None"),
        ('{"format": "graphcore-plan", "version": 1}', "'kernels' is missing"),
    ],
)
def test_a_foreign_text_is_refused_in_one_line(text: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^plan: .*{why}") as caught:
        GraphPlan.from_json(text)
    assert "\n" not in str(caught.value)


DAMAGE: list[Any] = [None, True, -1, 10**30, 1.5, "zzz", [], ["a"], {}, [[[]]]]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found += places(inner, (*path, index))
    return found


def damaged(text: str, path: tuple[Any, ...], value: Any) -> str:
    data = json.loads(text)
    inner = data
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return json.dumps(data)


def test_a_damaged_text_is_refused_or_still_a_plan() -> None:
    """Every field in turn replaced by what it is not: an error of ours, or a plan to validate."""
    text = every_kind().to_json()
    refused: list[str] = []
    for number, path in enumerate(places(json.loads(text))):
        value = DAMAGE[number % len(DAMAGE)]
        try:
            plan = GraphPlan.from_json(damaged(text, path, value), kernels=KERNELS)
        except ConfigurationError as error:
            refused.append(str(error))
        else:
            assert isinstance(plan.validate(), list)
            assert isinstance(plan.to_json(), str)
    assert len(refused) > 100
    assert not any("\n" in message for message in refused)


@pytest.mark.parametrize("missing", ["name", "work", "dst", "value", "reads", "writes"])
def test_a_missing_field_is_named(missing: str) -> None:
    plan = GraphPlan()
    plan.memset(plan.buffer("x", (4,)), 0.0)
    data = json.loads(plan.to_json())
    del data["plans"][0]["nodes"][0][missing]
    with pytest.raises(ConfigurationError, match=f"a field '{missing}' is missing"):
        GraphPlan.from_json(json.dumps(data))


def test_views_that_leave_their_buffer_come_back_and_are_told() -> None:
    plan = GraphPlan()
    plan.memset(plan.buffer("x", (4,)), 0.0)
    data = json.loads(plan.to_json())
    data["plans"][0]["buffers"][0]["shape"] = [2]
    again = GraphPlan.from_json(json.dumps(data))
    assert [problem.kind for problem in again.validate()] == ["out of bounds"]


# ---- another process ------------------------------------------------------------------------

_RUN = """
import sys
import numpy
from helpers.kernels import axpy, fill_value
import graphcore

plan = graphcore.GraphPlan.from_json(sys.stdin.read(), kernels=[axpy, fill_value])
x, y = numpy.zeros((4, 8), numpy.float32), numpy.ones((4, 8), numpy.float32)
driver = graphcore.open_driver("emulated")
with driver.stream() as stream:
    plan.build({"x": x, "y": y}, driver=driver).instantiate().launch(stream)
    stream.synchronize()
print(x.tolist(), y.tolist())
"""


def test_a_saved_plan_gives_the_same_result_in_another_process() -> None:
    import numpy

    import graphcore

    plan = GraphPlan("saved")
    x, y = plan.buffer("x", (4, 8)), plan.buffer("y", (4, 8))
    plan.launch(fill_value, ONE_BLOCK, x[1:3], 3.0, 16)
    plan.memset(x[:, 5], 7.0)
    plan.launch(axpy, ONE_BLOCK, 2.0, x, y, 32)
    plan.memcpy(x[0], y[2])
    arrays = {name: numpy.full((4, 8), value, "float32") for name, value in (("x", 0), ("y", 1))}
    plan.run(arrays, driver=graphcore.open_driver("emulated"))
    assert len(numpy.unique(arrays["y"])) == 3
    root = Path(__file__).parents[2]
    paths = [str(root / part) for part in ("", "tests", "kernels")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    found = subprocess.run(
        [sys.executable, "-c", _RUN],
        input=plan.to_json(),
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == f"{arrays['x'].tolist()} {arrays['y'].tolist()}"
