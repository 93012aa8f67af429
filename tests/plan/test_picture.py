"""Plans drawn: a box per node, their order, races as links of their own kind, problems as notes."""

from __future__ import annotations

from helpers.kernels import ONE_BLOCK, axpy
from helpers.plans import set_condition

from graphcore import GraphPlan
from graphcore.drawing import RACE, Link


def racing() -> GraphPlan:
    plan = GraphPlan("racing")
    x, y = plan.buffer("x", (8,)), plan.buffer("y", (8,))
    plan.memset(x, 1.0, name="fill")
    with plan.annotate("layer 0"):
        plan.launch(axpy, ONE_BLOCK, 2.0, x, y[:8], 8, name="add")
    plan.memset(x[2:4], 0.0, after=(), name="clear")
    return plan


def test_a_node_is_a_box_with_what_it_does() -> None:
    box = racing().drawing().boxes[1]
    assert (box.label, box.kind, box.detail, box.group) == (
        "add",
        "kernel",
        "grid 1, block 32",
        "layer 0",
    )
    assert box.lines == ("a = 2.0", "x = x", "y = y", "n = 8")


def test_order_and_races_are_links_of_different_kinds() -> None:
    links = racing().drawing().links
    assert links == (Link(0, 1), Link(0, 2, RACE), Link(1, 2, RACE))


def test_problems_are_notes_at_their_nodes() -> None:
    boxes = racing().drawing().boxes
    (note,) = boxes[1].notes
    assert note.startswith("race: 'add' reads and 'clear' writes bytes 8 to 15 of buffer 'x'")
    assert len(boxes[2].notes) == 2


def test_every_kind_of_node_has_its_kind_of_box() -> None:
    plan = GraphPlan()
    x, more, done = plan.buffer("x", (8,)), plan.condition("more"), plan.event("done")
    tmp = plan.allocate("tmp", (8,))
    plan.memcpy(tmp, x)
    plan.memset(x, 1.0)
    plan.callback(print, reads=[x])
    plan.call(print, x)
    plan.record(done)
    plan.wait(done)
    plan.launch(set_condition, ONE_BLOCK, more, 1)
    with plan.if_else(more) as (then, _):
        then.memset(x, 1.0)
    plan.deallocate(tmp)
    plan.embed(GraphPlan("inner"))
    plan.join()
    boxes = plan.drawing().boxes
    assert [box.kind for box in boxes] == [
        "alloc",
        "memcpy",
        "memset",
        "host",
        "child",
        "event record",
        "event wait",
        "kernel",
        "conditional",
        "free",
        "child",
        "empty",
    ]
    details = {box.label: box.detail for box in boxes}
    assert details["if more"] == "if more, 2 bodies"
    assert details["inner"] == "0 nodes"
    assert details["allocate tmp"] == "32 B"
    lines = {box.label: box.lines for box in boxes}
    assert lines["copy x to tmp"] == ("dst tmp", "src x")
    assert lines["set x"] == ("dst x", "value 0x3f800000")
    assert lines["callback print"] == ("reads x",)
    assert lines["set_condition"] == ("handle = condition more", "value = 1")


def test_bodies_and_embedded_plans_lie_inside_their_box_with_their_races() -> None:
    inner = GraphPlan("inner")
    a, b = inner.buffer("a", (4,)), inner.buffer("b", (4,))
    inner.memset(a, 1.0)
    inner.memset(b, 1.0)
    plan = GraphPlan()
    x, more = plan.buffer("x", (8,)), plan.condition("more")
    plan.launch(set_condition, ONE_BLOCK, more, 1)
    with plan.if_then(more) as body:
        body.memset(x, 1.0)
        body.memset(x, 2.0, after=())
    plan.embed(inner, {"a": x[:4], "b": x[4:]})
    plan.embed(inner, {"a": x[:4], "b": x[2:6]})
    _, choice, apart, over = plan.drawing().boxes
    ((heading, drawn),) = choice.inner
    assert (heading, drawn.links) == ("body 0", (Link(0, 1, RACE),))
    assert drawn.boxes[0].title == "if more/body 0/set x"
    assert len(drawn.boxes[0].notes) == 1
    assert apart.inner[0][1].links == ()
    assert over.inner[0][1].links == (Link(0, 1, RACE),)
    assert over.lines == ("a = x, bytes 0:16, float32[4]", "b = x, bytes 8:24, float32[4]")


def test_a_plan_with_a_cycle_is_drawn_too() -> None:
    plan = racing()
    plan.join(after="b", name="a")
    plan.join(after="a", name="b")
    assert "cycle: nodes wait for each other" in plan._repr_html_()
    assert plan.to_svg().count('class="gc-box"') == 5
    assert [line.split()[0] for line in plan.to_text().splitlines()[-5:]] == list("01234")


def test_every_form_shows_the_race() -> None:
    plan = racing()
    assert "gc-race" in plan.to_svg()
    assert "gc-race" in plan._repr_html_()
    assert 'label="race"' in plan.to_dot()
    assert "n0 -. race .- n2" in plan.to_mermaid()
    table = plan.to_text(width=200).splitlines()
    assert table[0].startswith("cannot be built: 2 problems, the first: race: 'fill' writes")
    assert table[1].startswith("3 nodes, 1 edge (")
    assert table[-1].split() == ["2", "memset", "clear", "8", "B"], "a race is no order"
