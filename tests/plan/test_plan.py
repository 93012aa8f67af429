"""Writing a plan: typed arguments, names, bodies, embedded plans; wrong ones are told at once."""

from __future__ import annotations

import struct
from typing import Any

import numpy
import pytest
from helpers.kernels import ONE_BLOCK, axpy, fill_value
from helpers.plans import set_condition

import graphcore
from graphcore import ConfigurationError, GraphPlan, LaunchConfig, PlanError, kernel
from graphcore.driver.records import MemsetParams
from graphcore.plan.records import Memset, PlanNode, View

typed = kernel(
    "typed",
    "f32* out, const i32* index, void* raw, const u8* data, i64 count, f32 factor, bool flag, "
    "bytes:4 blob",
    "",
)


def typed_arguments(plan: GraphPlan) -> list[Any]:
    return [
        plan.buffer("out", (4,)),
        plan.buffer("index", (4,), "int32"),
        plan.buffer("raw", (4,), "complex64"),
        None,
        7,
        0.5,
        True,
        b"abcd",
    ]


# ---- arguments ------------------------------------------------------------------------------


def test_arguments_are_kept_as_the_kernel_gets_them() -> None:
    plan = GraphPlan()
    given = typed_arguments(plan)
    given[4], given[5] = numpy.int64(9), numpy.float32(0.1)
    node = plan.launch(typed, ONE_BLOCK, *given)
    kept = node.work.arguments
    assert kept[:3] == tuple(buffer.whole for buffer in given[:3])
    assert kept[3:] == (0, 9, pytest.approx(0.1), True, b"abcd")
    assert [type(value) for value in kept[3:]] == [int, int, float, bool, bytes]
    assert kept[5] == float(numpy.float32(0.1)), "rounded to the parameter's width, once"


def test_reads_and_writes_follow_from_the_signature_unless_said() -> None:
    plan = GraphPlan()
    given = typed_arguments(plan)
    out, index, raw = (buffer.whole for buffer in given[:3])
    node = plan.launch(typed, ONE_BLOCK, *given)
    assert node.reads == (out, index, raw)
    assert node.writes == (out, raw)
    said = plan.launch(typed, ONE_BLOCK, *given, reads=index, writes=[out[1:], given[2]])
    assert said.reads == (index,)
    assert said.writes == (out[1:], raw)


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (0, "int32", "expected a view of float32, got int32"),
        (1, "float32", "expected a view of int32, got float32"),
        (1, "uint32", "expected a view of int32, got uint32"),
        (0, 4096, "expected a buffer of the plan .* got the number 4096"),
        (0, numpy.zeros(4, numpy.float32), r"got ndarray: declare it with plan\.buffer"),
        (0, 1.5, "expected a buffer of the plan"),
        (4, numpy.int32(7), "expected a 8-byte i64"),
        (4, 7.0, "expected a i64"),
        (4, 2**63, "fits 64 bits"),
        (4, True, "expected a i64"),
        (4, numpy.zeros((), numpy.int64), "expected a scalar, got ndarray"),
        (5, numpy.float64(0.5), "expected a 4-byte f32"),
        (5, "x", "expected a f32"),
        (6, 1, "expected a bool"),
        (7, b"abc", "expected 4 bytes"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused_by_its_index(
    place: int, value: Any, why: str
) -> None:
    plan = GraphPlan()
    given = typed_arguments(plan)
    if isinstance(value, str) and place < 2:
        value = plan.buffer("wrong", (4,), value)
    given[place] = value
    with pytest.raises(ConfigurationError, match=f"kernel typed: argument {place} .*{why}"):
        plan.launch(typed, ONE_BLOCK, *given)
    assert plan.nodes == ()


def test_a_32_bit_value_for_a_64_bit_parameter_is_refused_with_its_index() -> None:
    plan = GraphPlan()
    given = typed_arguments(plan)
    with pytest.raises(ConfigurationError, match=r"argument 4 \(count: i64\): expected a 8-byte"):
        plan.launch(typed, ONE_BLOCK, *given[:4], numpy.int32(1), *given[5:])


def test_a_torch_tensor_is_refused_on_either_side() -> None:
    torch = pytest.importorskip("torch")
    plan = GraphPlan()
    given = typed_arguments(plan)
    for place in (0, 4):
        wrong = [*given]
        wrong[place] = torch.zeros((), dtype=torch.int64)
        with pytest.raises(ConfigurationError, match=f"argument {place} .*Tensor"):
            plan.launch(typed, ONE_BLOCK, *wrong)


@pytest.mark.parametrize("count", [0, 7, 9])
def test_a_wrong_number_of_arguments_is_refused_with_the_signature(count: int) -> None:
    plan = GraphPlan()
    given = [*typed_arguments(plan), 1][:count]
    with pytest.raises(ConfigurationError, match=rf"8 arguments \(out: f32\*.*got {count}"):
        plan.launch(typed, ONE_BLOCK, *given)


@pytest.mark.parametrize("pointee", ["f16*", "const bf16*", "u64*", "bool*", "f64*", "i8*"])
def test_a_pointer_takes_views_of_its_type(pointee: str) -> None:
    names = {"f16": "float16", "bf16": "bfloat16", "u64": "uint64", "f64": "float64", "i8": "int8"}
    name = names.get(pointee.removeprefix("const ").removesuffix("*"), "bool")
    plan = GraphPlan()
    one = kernel("one", f"{pointee} x", "")
    plan.launch(one, ONE_BLOCK, plan.buffer("right", (4,), name))
    with pytest.raises(ConfigurationError, match=f"expected a view of {name}, got float32"):
        plan.launch(one, ONE_BLOCK, plan.buffer("wrong", (4,), "float32"))


def test_a_condition_needs_a_parameter_of_64_bits() -> None:
    plan = GraphPlan()
    more = plan.condition("more")
    with pytest.raises(ConfigurationError, match=r"argument 2 .*needs a u64"):
        plan.launch(fill_value, ONE_BLOCK, plan.buffer("x", (4,)), 1.0, more)


@pytest.mark.parametrize(
    "config",
    [
        (1, 32),
        None,
        LaunchConfig(1, 32),  # type: ignore[arg-type]
        LaunchConfig((0, 1, 1), (32, 1, 1)),
        LaunchConfig((1, 1, 1), (32, 1)),  # type: ignore[arg-type]
        LaunchConfig((1, 1, 1), (32, 1, 1), cluster=(-1, 1, 1)),
        LaunchConfig((1, 1, 1), (1.5, 1, 1)),  # type: ignore[arg-type]
        LaunchConfig((1, 65536, 1), (32, 1, 1)),
        LaunchConfig((1, 1, 1), (32, 33, 1)),
        LaunchConfig((1, 1, 1), (1, 1, 65)),
        LaunchConfig((3, 1, 1), (32, 1, 1), cluster=(2, 1, 1)),
    ],
)
def test_a_launch_shape_that_cannot_be_is_refused(config: Any) -> None:
    plan = GraphPlan()
    with pytest.raises(ConfigurationError, match="config"):
        plan.launch(fill_value, config, plan.buffer("x", (4,)), 1.0, 4)


def test_a_node_and_a_view_show_themselves_on_one_short_line() -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (1024, 1024))
    with plan.annotate("layer 0"):
        node = plan.memset(x[1], 0.0, name="clear")
    assert repr(node) == "<PlanNode 0 'clear' Memset in layer 0>"
    assert repr(x[1]) == "<View x, bytes 4096:8192, float32[1024]>"


def test_a_function_of_another_library_is_told_to_be_called() -> None:
    with pytest.raises(ConfigurationError, match=r"plan\.call"):
        GraphPlan().launch(print, ONE_BLOCK)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["reads", "writes"])
@pytest.mark.parametrize("value", ["x", 5, [3]])
def test_what_is_no_operand_is_refused(name: str, value: Any) -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (4,))
    with pytest.raises(ConfigurationError, match=rf"{name}(\[0\])?: expected"):
        plan.launch(fill_value, ONE_BLOCK, x, 1.0, 4, **{name: value})


# ---- fills ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "value", "bits"),
    [
        ("float32", 1.0, 0x3F800000),
        ("float32", 1, 1),
        ("float16", -2.0, 0xC000),
        ("bfloat16", 1.0, 0x3F80),
        ("bfloat16", 1.00390625, 0x3F80),
        ("bfloat16", 1.01171875, 0x3F82),
        ("bfloat16", float("-inf"), 0xFF80),
        ("int32", -1, 0xFFFFFFFF),
        ("uint8", 255, 255),
        ("bool", True, 1),
        ("int16", numpy.int16(-2), 0xFFFE),
        ("float32", numpy.float32(1.0), 0x3F800000),
    ],
)
def test_a_fill_has_the_bits_of_one_element(dtype: str, value: Any, bits: int) -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (4,), dtype)
    work = plan.memset(x, value).work
    assert work == Memset(x.whole, bits)


def test_bits_of_a_float_are_those_of_numpy() -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (1,), "float64")
    work = plan.memset(x, 0.0).work
    assert work.dst == x.whole.view("uint32")
    value = struct.unpack("<d", struct.pack("<II", 0x40000000, 0x40000000))[0]
    assert plan.memset(x, value).work.value == 0x40000000


def test_a_nan_stays_one() -> None:
    plan = GraphPlan()
    bits = plan.memset(plan.buffer("x", (1,), "bfloat16"), float("nan")).work.value
    assert numpy.isnan(numpy.uint32(bits << 16).view(numpy.float32))


@pytest.mark.parametrize(
    ("dtype", "value", "why"),
    [
        ("float64", 1.0, "the 2 words of an element must be equal"),
        ("complex128", 1, "the 4 words"),
        ("int32", 1.0, "expected an int, the bits"),
        ("int8", 256, "fits 8 bits"),
        ("int8", -129, "fits 8 bits"),
        ("float16", 1e9, "too large for float16"),
        ("int32", True, "expected an int or a float"),
        ("int32", "x", "expected an int or a float"),
    ],
)
def test_a_value_that_no_memset_writes_is_refused(dtype: str, value: Any, why: str) -> None:
    plan = GraphPlan()
    with pytest.raises(ConfigurationError, match=why):
        plan.memset(plan.buffer("x", (4,), dtype), value)


# ---- names and labels -----------------------------------------------------------------------


def test_names_are_readable_and_unique() -> None:
    plan = GraphPlan()
    x, y = plan.buffer("x", (4,)), plan.buffer("y", (4,))
    done = plan.event("done")
    plan.memcpy(y, x)
    plan.memcpy(y, x)
    plan.memset(x, 0.0, name="mine")
    plan.launch(fill_value, ONE_BLOCK, x, 1.0, 4)
    plan.callback(lambda: None)
    plan.call(test_names_are_readable_and_unique)
    plan.record(done)
    plan.wait(done)
    plan.join(after="copy x to y 3")
    plan.memcpy(y, x)
    assert [node.name for node in plan.nodes] == [
        "copy x to y",
        "copy x to y 2",
        "mine",
        "fill_value",
        "callback function",
        "test_names_are_readable_and_unique",
        "record done",
        "wait done",
        "join",
        "copy x to y 4",
    ]


def test_layers_name_their_nodes() -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (3, 4))
    for number, row in enumerate(x):
        with plan.annotate(f"layer {number}"):
            plan.memset(row, 0.0)
            with plan.annotate("attention"):
                plan.memset(row, 1.0)
    labels = [node.label for node in plan.nodes]
    assert labels[:3] == ["layer 0", "layer 0/attention", "layer 1"]
    assert plan.join().label == ""
    with pytest.raises(ConfigurationError, match="label"), plan.annotate(3):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("name", ["", 3, b"x"])
def test_a_name_that_is_none_is_refused(name: Any) -> None:
    plan = GraphPlan()
    with pytest.raises(ConfigurationError, match="name"):
        plan.join(name=name)
    with pytest.raises(ConfigurationError, match="name of the buffer"):
        plan.buffer(name, (4,))


@pytest.mark.parametrize("make", ["buffer", "allocate", "condition", "event"])
def test_a_name_is_declared_once(make: str) -> None:
    plan = GraphPlan()
    extra = ((4,),) if make in ("buffer", "allocate") else ()
    getattr(plan, make)("a", *extra)
    with pytest.raises(PlanError, match=r"has a .* 'a' already"):
        getattr(plan, make)("a", *extra)


def test_declarations_are_found_by_name() -> None:
    plan = GraphPlan()
    x, tmp = plan.buffer("x", 4, "int8"), plan.allocate("tmp", (2, 3))
    done, more = plan.event("done"), plan.condition("more", None)
    assert plan.buffers == {"x": x, "tmp": tmp}
    assert (x.shape, x.origin, tmp.origin, tmp.nbytes) == ((4,), "argument", "allocated", 24)
    assert plan.events == {"done": done}
    assert plan.conditions == {"more": more}
    assert more.default is None
    plan.buffers.clear()
    assert plan.buffers, "a copy"


@pytest.mark.parametrize(
    ("arguments", "options", "why"),
    [
        (((-1,),), {}, "at least 0"),
        (("ab",), {}, "expected ints"),
        (((4, 2), "float31"), {}, "expected one of"),
        (((4, 2),), {"strides": (1,)}, "one for each of 2 axes"),
        (((4.5,),), {}, "expected ints"),
    ],
)
def test_a_buffer_that_cannot_be_is_refused(arguments: Any, options: Any, why: str) -> None:
    plan = GraphPlan()
    with pytest.raises(ConfigurationError, match=f"buffer 'x'.*{why}"):
        plan.buffer("x", *arguments, **options)
    assert plan.buffers == {}


def test_a_buffer_takes_dtypes_of_torch_and_numpy() -> None:
    torch = pytest.importorskip("torch")
    plan = GraphPlan()
    assert plan.buffer("a", (1,), torch.bfloat16).dtype == "bfloat16"
    assert plan.buffer("b", (1,), numpy.dtype("int64")).itemsize == 8
    assert plan.buffer("c", (1,), numpy.float16).dtype == "float16"


def test_an_allocation_of_nothing_is_refused_and_leaves_no_name() -> None:
    plan = GraphPlan()
    with pytest.raises(ConfigurationError, match="0 bytes"):
        plan.allocate("tmp", (0, 4))
    with pytest.raises(PlanError, match="no node"):
        plan.allocate("tmp", (4,), after=7)
    assert plan.buffers == {}
    assert plan.nodes == ()


@pytest.mark.parametrize("default", [-1, 2**32, 1.0, "x"])
def test_a_default_of_no_condition_is_refused(default: Any) -> None:
    with pytest.raises(ConfigurationError, match="32 bits"):
        GraphPlan().condition("more", default)


# ---- bodies ---------------------------------------------------------------------------------


def test_bodies_share_buffers_and_are_nodes_of_their_own() -> None:
    plan = GraphPlan()
    x, more, which = plan.buffer("x", (4,)), plan.condition("more"), plan.condition("which")
    with plan.if_else(more) as (then, other):
        then.memset(x, 1.0)
        other.memset(x, 2.0)
        tmp = other.buffer("y", (4,))
    with plan.switch(which, 3) as bodies:
        for body in bodies:
            body.memset(tmp, 0.0)
    choice, switch = plan.nodes
    assert (choice.name, choice.work.form, len(choice.work.bodies)) == ("if more", "if", 2)
    assert (switch.name, switch.work.form, len(switch.work.bodies)) == ("switch which", "switch", 3)
    assert choice.work.bodies[1].name == "if more/body 1"
    assert choice.work.bodies[0].is_body
    assert "y" in plan.buffers


def test_a_block_that_fails_adds_nothing() -> None:
    plan = GraphPlan()
    x, more = plan.buffer("x", (4,)), plan.condition("more")
    with pytest.raises(ConfigurationError), plan.while_loop(more) as body:
        body.memset(x, "no value")
    assert plan.nodes == ()
    with plan.while_loop(more):
        pass
    assert plan.nodes[0].name == "while more"


def test_the_plan_around_an_open_body_takes_no_nodes() -> None:
    plan = GraphPlan()
    x, more = plan.buffer("x", (4,)), plan.condition("more")
    with plan.if_then(more) as body:
        with pytest.raises(PlanError, match="block of 'if more' is open; add what it runs"):
            plan.memset(x, 0.0)
        with pytest.raises(PlanError, match="still open"), plan.if_then(more):
            pass
        body.memset(x, 0.0)
    plan.memset(x, 1.0)
    assert len(plan) == 2


def test_what_is_no_condition_or_count_is_refused() -> None:
    plan = GraphPlan()
    with pytest.raises(ConfigurationError, match="condition: expected what"), plan.if_then(True):  # type: ignore[arg-type]
        pass
    with pytest.raises(ConfigurationError, match="count"), plan.switch(plan.condition("c"), 0):
        pass
    for method in (plan.record, plan.wait):
        with pytest.raises(ConfigurationError, match="event: expected what"):
            method("done")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="function: expected a callable"):
        plan.callback(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="function: expected a callable"):
        plan.call(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="warmup"):
        plan.call(print, warmup=-1)
    with pytest.raises(ConfigurationError, match="buffer: expected a buffer"):
        plan.deallocate("x")  # type: ignore[arg-type]
    assert plan.nodes == ()


# ---- embedded plans -------------------------------------------------------------------------


def doubling() -> GraphPlan:
    plan = GraphPlan("doubling")
    x, y = plan.buffer("x", (4,)), plan.buffer("y", (4,))
    plan.launch(axpy, ONE_BLOCK, 2.0, x, y, 4)
    return plan


def test_an_embedded_plan_reads_and_writes_the_memory_of_its_bindings() -> None:
    plan = GraphPlan()
    big = plan.buffer("big", (4, 4))
    node = plan.embed(doubling(), {"x": big[0], "y": big[2]})
    assert node.name == "doubling"
    assert node.reads == (big[0], big[2])
    assert node.writes == (big[2],)


@pytest.mark.parametrize(
    ("bindings", "error", "why"),
    [
        ({"x": "row"}, PlanError, "buffer 'y' has no binding"),
        ({"x": "row", "y": "row", "z": "row"}, PlanError, r"'z' is no argument .*has x, y"),
        ({"x": "row", "y": "column"}, ConfigurationError, r"strides \[1\], .* strides \[4\]"),
        ({"x": "row", "y": "whole"}, ConfigurationError, r"float32 \[4\] .*float32 \[4, 4\]"),
        ({"x": "row", "y": "other"}, ConfigurationError, "its binding is int32"),
        ({"x": "row", "y": "text"}, ConfigurationError, r"bindings\['y'\]: expected a buffer"),
    ],
)
def test_bindings_that_do_not_fit_are_refused(
    bindings: dict[str, str], error: type[Exception], why: str
) -> None:
    plan = GraphPlan()
    big = plan.buffer("big", (4, 4))
    views: dict[str, Any] = {
        "row": big[0],
        "column": big[:, 0],
        "whole": big,
        "other": big[1].view("int32"),
        "text": "big",
    }
    with pytest.raises(error, match=why):
        plan.embed(doubling(), {name: views[value] for name, value in bindings.items()})
    assert plan.nodes == ()


def test_a_plan_cannot_contain_itself() -> None:
    plan, inner = GraphPlan("outer"), GraphPlan("inner")
    inner.embed(plan)
    for what in (plan, inner):
        with pytest.raises(PlanError, match="would contain itself"):
            plan.embed(what)
    more = plan.condition("more")
    with plan.if_then(more) as body, pytest.raises(PlanError, match="would contain itself"):
        body.embed(plan)
    with pytest.raises(PlanError, match="is a body"):
        GraphPlan().embed(plan.nodes[0].work.bodies[0])


@pytest.mark.parametrize("what", [None, 5, numpy.zeros(3), GraphPlan])
def test_what_is_no_graph_cannot_be_embedded(what: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected a GraphPlan or a Graph"):
        GraphPlan().embed(what)


def test_a_plan_says_itself_what_it_does() -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (4,))
    with pytest.raises(ConfigurationError, match="says itself"):
        plan.embed(GraphPlan(), reads=[x])


def test_a_graph_is_embedded_with_what_is_said_of_it() -> None:
    driver = graphcore.open_driver("emulated")
    stream = driver.stream()
    memory = driver.alloc(16)
    with graphcore.capture(stream, driver=driver, on_legacy_work="ignore") as capture:
        driver.fill(MemsetParams(memory, 0, 4, 4), stream.handle)
    plan = GraphPlan()
    x = plan.buffer("x", (4,))
    node = plan.embed(capture.graph, writes=[x])
    assert node.work.graph is capture.graph
    assert node.writes == (x.whole,)
    with pytest.raises(ConfigurationError, match="has its addresses already"):
        plan.embed(capture.graph, {"x": x})
    driver.free(memory)


# ---- as an object ---------------------------------------------------------------------------


def test_a_plan_is_shown_as_a_table() -> None:
    plan = GraphPlan("demo")
    x, y = plan.buffer("x", (8, 4)), plan.buffer("y", (8, 4), "int8")
    plan.memset(x, 0.0)
    plan.memset(y, 0)
    plan.join()
    assert repr(plan).splitlines() == [
        "GraphPlan plan 'demo', buffers: x float32[8, 4], y int8[8, 4]",
        "3 nodes, 2 edges (2 memset · 1 empty)",
        "#  kind    name   work   after",
        "0  memset  set x  128 B",
        "1  memset  set y  32 B",
        "2  empty   join          0 1",
    ]
    assert repr(GraphPlan()).startswith("GraphPlan plan, buffers: none\n0 nodes")


def test_a_plan_counts_and_lists_its_nodes_and_is_never_false() -> None:
    plan = GraphPlan()
    assert plan
    assert len(plan) == 0
    node = plan.join()
    assert list(plan) == [node]
    assert isinstance(node, PlanNode)


def test_a_buffer_is_true_however_small() -> None:
    plan = GraphPlan()
    x = plan.buffer("x", (0,))
    assert x
    assert x.whole
    assert isinstance(x.whole, View)
    assert plan.memset(x, 0.0).writes == (x.whole,)


def test_a_plan_name_is_text() -> None:
    with pytest.raises(ConfigurationError, match="name: expected a str"):
        GraphPlan(3)  # type: ignore[arg-type]


def test_conditions_are_set_by_kernels_that_take_their_handle() -> None:
    plan = GraphPlan()
    more = plan.condition("more")
    node = plan.launch(set_condition, ONE_BLOCK, more, 1)
    assert node.work.arguments == (more, 1)
    assert node.reads == node.writes == ()
