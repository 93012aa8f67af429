"""What keeps a plan from being built is told before anything touches a GPU: kind and nodes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers.kernels import ONE_BLOCK, axpy, fill_value
from helpers.plans import set_condition

from graphcore import ConfigurationError, GraphPlan, PlanError, PlanProblem

Make = Callable[[GraphPlan], object]


def problems(make: Make) -> list[PlanProblem]:
    plan = GraphPlan("plan")
    plan.buffer("x", (8, 4))
    plan.buffer("y", (8, 4))
    make(plan)
    return plan.validate()


def foreign_buffer(plan: GraphPlan) -> None:
    plan.memset(GraphPlan().buffer("x", (8, 4)), 0.0, name="n")


def foreign_argument(plan: GraphPlan) -> None:
    other = GraphPlan().buffer("z", (4,))
    plan.launch(fill_value, ONE_BLOCK, other, 0.0, 4, reads=[], writes=[], name="n")


def past_the_end(plan: GraphPlan) -> None:
    plan.memset(plan.buffers["x"].whole.as_strided((33,)), 0.0, name="n")


def before_the_start(plan: GraphPlan) -> None:
    plan.memset(plan.buffers["x"].whole.as_strided((4,), offset=-1), 0.0, name="n")


def past_the_end_as_an_argument(plan: GraphPlan) -> None:
    view = plan.buffers["x"][7].as_strided((5,))
    plan.launch(fill_value, ONE_BLOCK, view, 0.0, 4, reads=[], writes=[], name="n")


def misaligned(plan: GraphPlan) -> None:
    plan.memset(replace(plan.buffers["x"][0, :2], offset=2), 0.0, name="n")


def another_type(plan: GraphPlan) -> None:
    plan.memcpy(plan.buffers["x"].whole.view("int32"), plan.buffers["y"], name="n")


def another_shape(plan: GraphPlan) -> None:
    plan.memcpy(plan.buffers["x"], plan.buffers["y"].whole.T, name="n")


def a_copy_onto_itself(plan: GraphPlan) -> None:
    x = plan.buffers["x"]
    plan.memcpy(x[1:], x[:-1], name="n")


def a_destination_of_shared_elements(plan: GraphPlan) -> None:
    x = plan.buffers["x"].whole.as_strided((8, 4), (0, 1))
    plan.memcpy(x, plan.buffers["y"], name="n")


def a_fill_of_no_rows(plan: GraphPlan) -> None:
    plan.memset(plan.buffers["x"][:4, :2].as_strided((2, 2, 2), (16, 8, 2)), 0.0, name="n")


def a_cycle(plan: GraphPlan) -> None:
    plan.join(after="b", name="a")
    plan.join(after="a", name="b")


def a_node_after_itself(plan: GraphPlan) -> None:
    plan.join(after="a", name="a")


def a_cycle_with_a_derived_node(plan: GraphPlan) -> None:
    plan.memset(plan.buffers["x"], 0.0, after="b", name="a")
    plan.memset(plan.buffers["x"], 0.0, name="b")


def a_name_that_never_comes(plan: GraphPlan) -> None:
    plan.join(after=["later"], name="n")


def a_name_twice(plan: GraphPlan) -> None:
    plan.join(name="n")
    plan.join(name="n")


def never_deallocated(plan: GraphPlan) -> None:
    plan.memset(plan.allocate("t", (4,)), 0.0)


def never_allocated(plan: GraphPlan) -> None:
    plan.deallocate(plan.buffers["x"], name="n")


def deallocated_twice(plan: GraphPlan) -> None:
    tmp = plan.allocate("t", (4,))
    plan.deallocate(tmp, name="one")
    plan.deallocate(tmp, name="two")


def used_before_its_allocation(plan: GraphPlan) -> None:
    tmp = plan.allocate("t", (4,))
    plan.memset(tmp, 0.0, after=(), name="n")
    plan.deallocate(tmp)


def used_after_its_end(plan: GraphPlan) -> None:
    tmp = plan.allocate("t", (4,))
    plan.deallocate(tmp)
    plan.memset(tmp, 0.0, name="n")


def used_beside_its_end(plan: GraphPlan) -> None:
    tmp = plan.allocate("t", (4,))
    plan.memset(tmp, 0.0, name="n")
    plan.deallocate(tmp, after="allocate t", name="end")


def never_recorded(plan: GraphPlan) -> None:
    plan.wait(plan.event("done"), name="n")


def recorded_too_late(plan: GraphPlan) -> None:
    done = plan.event("done")
    plan.wait(done, name="n")
    plan.record(done)


def a_foreign_event(plan: GraphPlan) -> None:
    plan.record(GraphPlan().event("done"), name="n")


def if_never_set(plan: GraphPlan) -> None:
    with plan.if_then(plan.condition("more"), name="n"):
        pass


def a_loop_without_end(plan: GraphPlan) -> None:
    more = plan.condition("more")
    plan.launch(set_condition, ONE_BLOCK, more, 1)
    with plan.while_loop(more, name="n") as body:
        body.memset(plan.buffers["x"], 0.0)


def a_condition_that_decides_nothing(plan: GraphPlan) -> None:
    plan.launch(set_condition, ONE_BLOCK, plan.condition("more"), 1, name="n")


def a_condition_of_two_nodes(plan: GraphPlan) -> None:
    more = plan.condition("more")
    plan.launch(set_condition, ONE_BLOCK, more, 1)
    for name in ("a", "b"):
        with plan.if_then(more, name=name):
            pass


def a_foreign_condition(plan: GraphPlan) -> None:
    more = GraphPlan().condition("more")
    plan.launch(set_condition, ONE_BLOCK, more, 1, name="n")


def a_condition_set_outside_the_body_that_it_decides_in(plan: GraphPlan) -> None:
    outer, inner = plan.condition("outer"), plan.condition("inner")
    plan.launch(set_condition, ONE_BLOCK, outer, 1)
    plan.launch(set_condition, ONE_BLOCK, inner, 1, name="n")
    with plan.if_then(outer, name="o") as body, body.if_then(inner, name="i"):
        pass


CASES: dict[str, tuple[Make, str, tuple[str, ...], str]] = {
    "foreign buffer": (foreign_buffer, "unknown buffer", ("n",), "'x' belongs to another plan"),
    "foreign argument": (foreign_argument, "unknown buffer", ("n",), "'z' belongs to another"),
    "past the end": (past_the_end, "out of bounds", ("n",), "bytes 0 to 131 of buffer 'x'"),
    "before the start": (before_the_start, "out of bounds", ("n",), "bytes -4 to 11"),
    "an argument past the end": (
        past_the_end_as_an_argument,
        "out of bounds",
        ("n",),
        "bytes 112 to 131 of buffer 'x', which has bytes 0 to 127",
    ),
    "misaligned": (misaligned, "dtype", ("n",), "byte 2 begins no element of 4 bytes"),
    "copy of another type": (another_type, "dtype", ("n",), "'x' is int32, src 'y' is float32"),
    "copy of another shape": (another_shape, "strides", ("n",), r"shape \[8, 4\].* has \[4, 8\]"),
    "copy onto itself": (a_copy_onto_itself, "strides", ("n",), "dst and src overlap"),
    "shared elements": (
        a_destination_of_shared_elements,
        "strides",
        ("n",),
        r"elements of dst 'x' share memory \(shape \[8, 4\], strides \[0, 1\]\)",
    ),
    "fill of no rows": (a_fill_of_no_rows, "strides", ("n",), r"\[2, 2, 2\] with strides"),
    "cycle": (a_cycle, "cycle", ("b", "a"), "b -> a -> b"),
    "after itself": (a_node_after_itself, "cycle", ("a",), "a -> a"),
    "half derived cycle": (
        a_cycle_with_a_derived_node,
        "cycle",
        ("b", "a"),
        "the order of 'b' is derived",
    ),
    "missing name": (a_name_that_never_comes, "order", ("n",), "no node is called that"),
    "name twice": (a_name_twice, "name", ("n",), "2 nodes are called 'n'"),
    "never deallocated": (never_deallocated, "allocation", ("allocate t",), "never deallocated"),
    "never allocated": (never_allocated, "allocation", ("n",), "'x' is given, so that"),
    "deallocated twice": (deallocated_twice, "allocation", ("one", "two"), "deallocated twice"),
    "before its allocation": (
        used_before_its_allocation,
        "allocation",
        ("allocate t", "n"),
        "may be used before it is allocated",
    ),
    "after its end": (
        used_after_its_end,
        "allocation",
        ("deallocate t", "n"),
        "may be used after its end",
    ),
    "beside its end": (
        used_beside_its_end,
        "allocation",
        ("end", "n"),
        "may be used after its end",
    ),
    "never recorded": (never_recorded, "event", ("n",), "'done' is never recorded"),
    "recorded too late": (recorded_too_late, "event", ("n",), "no record of event 'done'"),
    "foreign event": (a_foreign_event, "event", ("n",), "'done' belongs to another plan"),
    "never set": (if_never_set, "condition", ("n",), "nobody sets condition 'more'"),
    "loop without end": (a_loop_without_end, "condition", ("n",), "would never end"),
    "decides nothing": (
        a_condition_that_decides_nothing,
        "condition",
        ("n",),
        "'more' decides no conditional node",
    ),
    "two nodes": (a_condition_of_two_nodes, "condition", ("a", "b"), "decides 'a' already"),
    "foreign condition": (a_foreign_condition, "condition", ("n",), "belongs to another plan"),
    "set outside": (
        a_condition_set_outside_the_body_that_it_decides_in,
        "condition",
        ("o/body 0/i", "n"),
        "cannot be set outside 'o/body 0'",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_only_problem_is(case: str) -> None:
    make, kind, nodes, message = CASES[case]
    (problem,) = problems(make)
    assert (problem.kind, problem.nodes) == (kind, nodes)
    with pytest.raises(PlanError, match=message):
        raise PlanError(problem.message)
    assert "\n" not in str(problem)


def test_a_plan_without_problems_has_none() -> None:
    def right(plan: GraphPlan) -> None:
        x, y = plan.buffers["x"], plan.buffers["y"]
        done, ready, more = plan.event("done"), plan.event("r", external=True), plan.condition("m")
        tmp = plan.allocate("tmp", (8, 4))
        plan.wait(ready)
        plan.memset(x[:, 1], float("-inf"))
        plan.memcpy(tmp, x)
        plan.launch(set_condition, ONE_BLOCK, more, 1)
        with plan.while_loop(more) as body:
            body.memcpy(y[:, ::-1], x)
            body.launch(set_condition, ONE_BLOCK, more, 0)
        plan.launch(axpy, ONE_BLOCK, 1.0, tmp, y, 32)
        plan.deallocate(tmp)
        plan.record(done)
        plan.wait(done)
        plan.callback(print)

    assert problems(right) == []


@pytest.mark.parametrize(
    ("add", "what"),
    [
        (lambda body: body.allocate("t", (4,)), "memory nodes"),
        (lambda body: body.callback(print), "host callbacks"),
        (lambda body: body.record(body.event("e")), "event nodes"),
        (lambda body: body.wait(body.event("e", external=True)), "event nodes"),
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_body_cannot_hold(add: Callable[[GraphPlan], object], what: str, is_nested: bool) -> None:
    plan = GraphPlan()
    more = plan.condition("more")
    plan.launch(set_condition, ONE_BLOCK, more, 1)
    with plan.if_then(more, name="choice") as body:
        if is_nested:
            inner = GraphPlan("inner")
            add(inner)
            body.embed(inner, name="child")
        else:
            add(body)
    found = [problem for problem in plan.validate() if problem.kind == "body"]
    path = "choice/body 0/child/" if is_nested else "choice/body 0/"
    assert len(found) == 1
    assert found[0].nodes[0].startswith(path)
    assert f"a conditional node cannot hold {what}" in found[0].message


def test_a_child_graph_cannot_hold_memory_or_conditional_nodes() -> None:
    inner = GraphPlan("inner")
    inner.deallocate(inner.allocate("t", (4,)))
    more = inner.condition("more")
    inner.launch(set_condition, ONE_BLOCK, more, 1)
    with inner.if_then(more):
        pass
    assert inner.validate() == []
    plan = GraphPlan()
    plan.embed(inner)
    assert [(p.kind, p.nodes[0]) for p in plan.validate()] == [
        ("body", "inner/allocate t"),
        ("body", "inner/deallocate t"),
        ("body", "inner/if more"),
    ]


def test_an_embedded_plan_that_grows_a_buffer_afterwards_is_told() -> None:
    inner = GraphPlan("inner")
    inner.buffer("a", (4,))
    plan = GraphPlan()
    plan.embed(inner, {"a": plan.buffer("x", (4,))})
    inner.buffer("b", (4,))
    (problem,) = plan.validate()
    assert problem.kind == "argument"
    assert "buffer 'b' has no binding" in problem.message


def test_a_body_may_use_what_the_plan_allocates() -> None:
    plan = GraphPlan()
    tmp = plan.allocate("tmp", (4,))
    more = plan.condition("more")
    plan.launch(set_condition, ONE_BLOCK, more, 1)
    with plan.if_then(more, name="choice") as body:
        body.memset(tmp, 0.0)
    plan.deallocate(tmp, after="allocate tmp", name="end")
    (problem,) = plan.validate()
    assert problem.nodes == ("end", "choice")
    assert body.validate() == []


def test_nothing_is_copied_or_filled_where_a_view_has_no_elements() -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (0, 4))
    plan.memset(x, 0.0, after=())
    plan.memcpy(x[:, :2], x[:, 2:], after=())
    assert plan.validate() == []


@pytest.mark.parametrize(
    ("dropped", "message"),
    [
        ([0], "'t' is deallocated, and not allocated here"),
        ([0, 2], "'t' has no allocation node here"),
    ],
)
def test_an_allocation_that_is_missing_from_a_saved_plan_is_told(
    dropped: list[int], message: str
) -> None:
    plan = GraphPlan()
    tmp = plan.allocate("t", (4,))
    plan.memset(tmp, 0.0)
    plan.deallocate(tmp)
    data = json.loads(plan.to_json())
    nodes = data["plans"][0]["nodes"]
    data["plans"][0]["nodes"] = [n for index, n in enumerate(nodes) if index not in dropped]
    found = GraphPlan.from_json(json.dumps(data)).validate()
    assert {problem.kind for problem in found} == {"allocation"}
    assert any(message in problem.message for problem in found)


def test_an_allocation_node_of_a_given_buffer_in_a_saved_plan_is_told() -> None:
    plan = GraphPlan()
    plan.deallocate(plan.allocate("t", (4,)))
    data = json.loads(plan.to_json())
    data["plans"][0]["buffers"][0]["origin"] = "argument"
    (problem,) = GraphPlan.from_json(json.dumps(data)).validate()
    assert (problem.kind, problem.nodes) == ("allocation", ("allocate t",))


def test_check_raises_with_all_problems_and_shows_the_first_ten() -> None:
    plan = GraphPlan("wrong")
    for number in range(12):
        plan.join(after="missing", name=f"n{number}")
    with pytest.raises(PlanError, match="plan 'wrong' has 12 problems:") as caught:
        plan.check()
    assert caught.value.problems == tuple(plan.validate())
    text = str(caught.value)
    assert "order: 'n9'" in text
    assert "'n10'" not in text
    assert "and 2 more" in text
    assert isinstance(caught.value, ConfigurationError)


def test_check_of_a_right_plan_returns() -> None:
    plan = GraphPlan()
    plan.memset(plan.buffer("x", (4,)), 0.0)
    assert plan.check() is None


def test_problems_survive_pickling() -> None:
    plan = GraphPlan()
    plan.join(after="missing")
    with pytest.raises(PlanError) as caught:
        plan.check()
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.problems == caught.value.problems
    assert str(again) == str(caught.value)


def _copying() -> GraphPlan:
    inner = GraphPlan("copying")
    inner.memcpy(inner.buffer("to", (4,)), inner.buffer("origin", (4,)), name="copy")
    return inner


def _embeds_a_copy_of(first: int, second: int) -> Make:
    def make(plan: GraphPlan) -> None:
        row = plan.buffers["x"].reshape(32)
        bindings = {"to": row[first : first + 4], "origin": row[second : second + 4]}
        plan.embed(_copying(), bindings, name="outer")

    return make


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 3), (3, 0)])
def test_a_copy_whose_sides_two_bindings_make_one_memory_is_told(first: int, second: int) -> None:
    (found,) = problems(_embeds_a_copy_of(first, second))
    assert (found.kind, found.nodes) == ("strides", ("outer/copy",))
    assert "overlap in buffer 'x', which bindings 'to' and 'origin' share" in found.message


def test_a_copy_between_bindings_that_are_apart_is_no_problem() -> None:
    assert problems(_embeds_a_copy_of(0, 4)) == []


def test_bindings_of_plans_further_out_make_the_sides_of_a_copy_one_memory_once() -> None:
    """Told where they meet: by the middle plan's own bindings, or only by the outermost one's."""
    middle = GraphPlan("middle")
    memory, other = middle.buffer("memory", (8,)), middle.buffer("other", (4,))
    middle.embed(_copying(), {"to": memory[:4], "origin": memory[2:6]}, name="told")
    middle.embed(_copying(), {"to": memory[4:], "origin": other}, name="untold")

    def make(plan: GraphPlan) -> None:
        row = plan.buffers["x"].reshape(32)
        plan.embed(middle, {"memory": row[:8], "other": row[5:9]}, name="outer")

    assert [found.nodes for found in problems(make) if found.kind == "strides"] == [
        ("outer/untold/copy",),
        ("outer/told/copy",),
    ]
