"""Fingerprints of real graphs: each single change is seen, named and told alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from helpers.contract import Bench, copy_1d, copy_2d, fill_1d
from helpers.graph_specs import Child, Spec, Step, build, with_step
from helpers.kernels import add_one, axpy, scale, set_value

from graphcore import Buffer, Graph, kernel
from graphcore.driver.records import (
    AllocParams,
    EmptyParams,
    EventParams,
    FreeParams,
    HostParams,
    KernelParams,
    LaunchConfig,
    MemcpyParams,
    NodeKind,
)
from graphcore.resources.fingerprint import Fingerprint
from graphcore.resources.lifetime import OwnerSet

WIDE = LaunchConfig((8, 1, 1), (32, 1, 1))

# the same name, signature and result from another source, and so from another module
add_one_again = kernel(
    "add_one",
    "f32* x, i32 n",
    add_one.source.replace("+= 1.0f", "+= 0.5f + 0.5f"),
    add_one.reference,
)

add_two = kernel(
    "add_two",
    "f32* x, i32 n",
    add_one.source.replace("add_one", "add_two").replace("1.0f", "2.0f"),
    lambda _, x, n: x.array(n).__iadd__(2),
)


def first_callback() -> None:
    """A host callback."""


def second_callback() -> None:
    """Another."""


class Setting:
    """A bench with what a base graph works on; ``spec`` is that graph, one node of each sort."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.a, self.b, self.c = (bench.alloc(4096) for _ in range(3))
        self.events = [bench.new_event() for _ in range(2)]
        self.spec: Spec = (
            Step(bench.kernel_params(add_one, self.a, 16, config=WIDE)),
            Step(bench.kernel_params(axpy, 2.0, self.a, self.b + 64, 16, config=WIDE), (0,)),
            Step(copy_1d(self.a, self.b, 64), (1,)),
            Step(copy_2d(self.a, self.b, 16, 4, 64, 64), (2,)),
            Step(fill_1d(self.a, 7, 16), (2,)),
            Step(HostParams(first_callback), (3, 4)),
            Step(EventParams(self.events[0].handle, NodeKind.EVENT_RECORD), (5,)),
            Step(EventParams(self.events[0].handle, NodeKind.EVENT_WAIT), (6,)),
            Step(EmptyParams(), (7,)),
            Step(Child((Step(bench.kernel_params(scale, self.c, 3.0, 16)),)), (8,)),
        )

    def kernel(self, index: int, *arguments: Any, of: Any = add_one, **config: Any) -> Spec:
        """The spec with another launch at ``index``."""
        shape = replace(WIDE, **config)
        return self.step(index, self.bench.kernel_params(of, *arguments, config=shape))

    def step(self, index: int, params: Any) -> Spec:
        return with_step(self.spec, index, params=params)

    def fingerprint(self, spec: Spec) -> Fingerprint:
        names = {"a": (self.a, 4096), "b": (self.b, 4096)}
        graph = Graph(self.bench.driver, build(self.bench, spec), owned=False)
        return graph.fingerprint(names)


def _copy(setting: Setting, **changed: Any) -> Spec:
    params = setting.spec[2].params
    assert isinstance(params, MemcpyParams)
    return setting.step(2, replace(params, **changed))


def _operand(setting: Setting, side: str, address: int) -> Spec:
    params = setting.spec[2].params
    return _copy(setting, **{side: replace(getattr(params, side), address=address)})


def _fill(setting: Setting, **changed: Any) -> Spec:
    return setting.step(4, replace(setting.spec[4].params, **changed))  # type: ignore[type-var]


def _inner(setting: Setting, *steps: Any) -> Spec:
    return setting.step(9, Child(tuple(Step(each) for each in steps)))


def _scaling(setting: Setting, factor: float) -> KernelParams:
    return setting.bench.kernel_params(scale, setting.c, factor, 16)


N0, N1 = "node 0 (kernel add_one)", "node 1 (kernel axpy)"
CHANGES: dict[str, tuple[Callable[[Setting], Spec], list[str]]] = {
    "grid": (lambda s: s.kernel(0, s.a, 16, grid=(4, 1, 1)), [f"{N0}: grid was"]),
    "block": (lambda s: s.kernel(0, s.a, 16, block=(64, 1, 1)), [f"{N0}: block was"]),
    "shared memory": (
        lambda s: s.kernel(0, s.a, 16, shared_bytes=512),
        [f"{N0}: shared_bytes was"],
    ),
    "cluster": (lambda s: s.kernel(0, s.a, 16, cluster=(2, 1, 1)), [f"{N0}: cluster was"]),
    "cooperative": (lambda s: s.kernel(0, s.a, 16, cooperative=True), [f"{N0}: cooperative was"]),
    "pointer moved": (lambda s: s.kernel(0, s.a + 4, 16), [f"{N0}: argument 0 was a, is a + 4"]),
    "another buffer": (lambda s: s.kernel(0, s.b, 16), [f"{N0}: argument 0 was a, is b"]),
    "unnamed memory": (lambda s: s.kernel(0, s.c, 16), [f"{N0}: argument 0 was a, is allocation"]),
    "integer": (lambda s: s.kernel(0, s.a, 15), [f"{N0}: argument 1 was 0x10, is 0xf"]),
    "float": (
        lambda s: s.kernel(1, 2.5, s.a, s.b + 64, 16, of=axpy),
        [f"{N1}: argument 0 was 0x40000000, is 0x40200000"],
    ),
    "second pointer": (
        lambda s: s.kernel(1, 2.0, s.a, s.b + 68, 16, of=axpy),
        [f"{N1}: argument 2 was b + 64 bytes, is b + 68 bytes"],
    ),
    "another function": (
        lambda s: s.kernel(0, s.a, 16, of=add_two),
        [f"{N0}: function was add_one, is add_two", f"{N0}: source was"],
    ),
    "another module and source": (
        lambda s: s.kernel(0, s.a, 16, of=add_one_again),
        [f"{N0}: source was"],
    ),
    "copy destination": (
        lambda s: _operand(s, "dst", s.a + 8),
        ["node 2 (memcpy memcpy): dst was a, is a + 8 bytes"],
    ),
    "copy source": (
        lambda s: _operand(s, "src", s.b + 8),
        ["node 2 (memcpy memcpy): src was b, is b + 8 bytes"],
    ),
    "copy width": (lambda s: _copy(s, width=32), ["node 2 (memcpy memcpy): width was 64, is 32"]),
    "copy height": (
        lambda s: s.step(3, copy_2d(s.a, s.b, 16, 3, 64, 64)),
        ["node 3 (memcpy memcpy): height was 4, is 3"],
    ),
    "copy pitch": (
        lambda s: s.step(3, copy_2d(s.a, s.b, 16, 4, 128, 64)),
        ["node 3 (memcpy memcpy): dst.pitch was 64, is 128"],
    ),
    "fill value": (lambda s: _fill(s, value=8), ["node 4 (memset memset): value was 7, is 8"]),
    "fill width": (lambda s: _fill(s, width=8), ["node 4 (memset memset): width was 16, is 8"]),
    "fill element": (
        lambda s: _fill(s, element_size=2),
        ["node 4 (memset memset): element_size was 4, is 2"],
    ),
    "fill address": (
        lambda s: _fill(s, address=s.b),
        ["node 4 (memset memset): address was a, is b"],
    ),
    "callback": (
        lambda s: s.step(5, HostParams(second_callback)),
        ["node 5 (host host): callback was"],
    ),
    "another event": (
        lambda s: s.step(7, EventParams(s.events[1].handle, NodeKind.EVENT_WAIT)),
        ["node 7 (event_wait event wait): event was 0, is 1"],
    ),
    "event kind": (
        lambda s: s.step(7, EventParams(s.events[0].handle, NodeKind.EVENT_RECORD)),
        ["node 7 (event_wait event wait): kind was event_wait, is event_record"],
    ),
    "edge added": (
        lambda s: with_step(s.spec, 4, after=(0, 2)),
        ["node 4 (memset memset): dependencies was ((2,),), is ((0,), (2,))"],
    ),
    "edge removed": (
        lambda s: with_step(s.spec, 4, after=()),
        ["node 4 (memset memset): dependencies was ((2,),), is ()"],
    ),
    "edge moved": (
        lambda s: with_step(s.spec, 4, after=(1,)),
        ["node 4 (memset memset): dependencies was ((2,),), is ((1,),)"],
    ),
    "node added at the end": (
        lambda s: (*s.spec, Step(EmptyParams(), (9,))),
        ["graph: nodes was 10, is 11", "node 10 (empty empty): only the second graph has it"],
    ),
    "node added in the middle": (
        lambda s: _inserted(s.spec, 3, Step(fill_1d(s.b, 1, 4), (2,))),
        ["graph: nodes was 10, is 11", "node 3 (memset memset): only the second graph has it"],
    ),
    "node removed": (
        lambda s: s.spec[:-1],
        ["graph: nodes was 10, is 9", "node 9 (child child): only the first graph has it"],
    ),
    "inner argument": (
        lambda s: _inner(s, _scaling(s, 4.0)),
        ["node 9.0.0 (kernel scale): argument 1 was"],
    ),
    "inner node added": (
        lambda s: _inner(s, fill_1d(s.b, 1, 4), _scaling(s, 3.0)),
        [
            "graph 9.0.: nodes was 1, is 2",
            "node 9.0.0 (memset memset): only the second graph has it",
        ],
    ),
}


def _inserted(spec: Spec, at: int, step: Step) -> Spec:
    """``spec`` with one more step at ``at``, on which nothing depends."""
    moved = [
        replace(each, after=tuple(index + (index >= at) for index in each.after)) for each in spec
    ]
    return (*moved[:at], step, *moved[at:])


def test_there_are_at_least_25_changes() -> None:
    assert len(CHANGES) >= 25


@pytest.mark.parametrize("change", CHANGES)
def test_one_change_is_told_by_node_and_field_and_nothing_else_is(
    bench: Bench, change: str
) -> None:
    make, words = CHANGES[change]
    setting = Setting(bench)
    before, same = (setting.fingerprint(setting.spec) for _ in range(2))
    assert before == same, "the control: the same graph built twice"
    after = setting.fingerprint(make(setting))
    assert after.digest != before.digest
    lines = before.compare(after)
    assert len(lines) == len(words), lines
    for line, start in zip(lines, words, strict=True):
        assert line.startswith(start), lines
    assert len(after.compare(before)) == len(words)


def test_the_form_of_a_conditional_and_its_body_count(bench: Bench) -> None:
    def built(form: str, value: int) -> Fingerprint:
        graph = bench.new_graph()
        handle, _, (body,) = bench.add_conditional(graph, form)
        bench.add_kernel(body, set_value, handle, value)
        return Graph(bench.driver, graph, owned=False).fingerprint()

    # the handle is an argument of the kernel in the body: a number that differs
    first, form, body = built("if", 0), built("while", 0), built("if", 1)
    assert any("form was if, is while" in line for line in first.compare(form))
    assert any("node 0.0.0 (kernel set_value): argument 1" in line for line in first.compare(body))


def test_the_size_of_a_graphs_own_allocation_counts(bench: Bench) -> None:
    def built(size: int) -> Fingerprint:
        graph = bench.new_graph()
        node = bench.add(graph, AllocParams(size))
        params = bench.driver.node_params(node)
        assert isinstance(params, AllocParams)
        bench.add(graph, FreeParams(params.address), [node])
        return Graph(bench.driver, graph, owned=False).fingerprint()

    assert built(256) == built(256)
    assert built(256).compare(built(512)) == ["node 0 (alloc alloc): size was 256, is 512"]


def test_what_a_graph_keeps_counts_by_label_place_size_and_type(bench: Bench) -> None:
    buffer = Buffer.allocate(16, driver=bench.driver)
    other = Buffer.allocate(16, driver=bench.driver)
    handle = build(bench, (Step(bench.kernel_params(add_one, buffer, 4)),))

    def kept(*objects: Any) -> Fingerprint:
        owners = OwnerSet()
        for obj, label in objects:
            owners = owners.with_(obj, label=label)
        graph = Graph(bench.driver, handle, owners=owners, owned=False)
        return graph.fingerprint({"buffer": buffer, "other": other})

    first = kept((buffer, "x"))
    assert first == kept((buffer, "x"))
    assert first == kept((buffer, "x"), (object(), "no tensor"), (other, "")), "neither is known by"
    retyped = Buffer.view(memory(buffer, "int32"))
    assert first.compare(kept((retyped, "x"))) == [
        "graph: owner 'x' was (buffer, 64, float32), is (buffer, 64, int32)"
    ]
    assert first.compare(kept((other, "x"))) == [
        "graph: owner 'x' was (buffer, 64, float32), is (other, 64, float32)"
    ]
    assert first.compare(kept((buffer, "y"))) == [
        "graph: owner 'x' was (buffer, 64, float32), is gone",
        "graph: owner 'y' is new: (buffer, 64, float32)",
    ]


def memory(buffer: Buffer, dtype: str) -> Any:
    return replace(buffer.__graphcore_tensor__(), dtype=dtype)
