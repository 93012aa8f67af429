"""What the prediction says of an update, against what the driver answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers.contract import Bench, copy_1d, copy_2d, fill_1d
from helpers.graph_specs import WIDE, Child, Pieces, Spec, Step, build, with_step
from helpers.kernels import add_one, fill_value, write_cluster_size
from helpers.snapshots import kernel_node, node, snapshot

from graphcore.driver.records import (
    AllocParams,
    ConditionalHandle,
    ConditionalParams,
    FreeParams,
    KernelParams,
    MemoryKind,
    MemsetParams,
    NodeHandle,
    NodeParams,
    RawUpdate,
    UpdateResult,
)
from graphcore.graph import Difference, GraphSnapshot, first_difference, read, trap_differences

SUCCESS = UpdateResult.SUCCESS
TOPOLOGY = UpdateResult.TOPOLOGY_CHANGED
PARAMETERS = UpdateResult.PARAMETERS_CHANGED
UNSUPPORTED = UpdateResult.NOT_SUPPORTED


def compare(bench: Bench, old: Spec, new: Spec) -> tuple[Difference | None, RawUpdate]:
    """The prediction, and the driver's answer to the same update."""
    before, after = build(bench, old), build(bench, new)
    answer = bench.driver.update_exec(bench.instantiate(before), after)
    return first_difference(read(bench.driver, before), read(bench.driver, after)), answer


def agree(predicted: Difference | None, answer: RawUpdate) -> bool:
    if predicted is None:
        return answer.result is SUCCESS
    named: NodeHandle | None = None
    if predicted.named_by_driver and predicted.node is not None:
        named = predicted.node.handle
    return (predicted.result, named) == (answer.result, answer.node)


def kernel(bench: Bench, count: int = 16, **config: object) -> KernelParams:
    address = bench.alloc(4096)
    return bench.kernel_params(add_one, address, count, config=replace(WIDE, **config))  # type: ignore[arg-type]


Make = Callable[[Bench], tuple[Spec, Spec]]


def one(change: Callable[[Bench], tuple[object, object]]) -> Make:
    """A pair of graphs of a kernel and one further node, which changes."""

    def make(bench: Bench) -> tuple[Spec, Spec]:
        first, second = change(bench)
        start = Step(kernel(bench))
        return (start, Step(first, (0,))), (start, Step(second, (0,)))  # type: ignore[arg-type]

    return make


def _argument(bench: Bench) -> tuple[object, object]:
    return kernel(bench), kernel(bench, 8)


def _function(bench: Bench) -> tuple[object, object]:
    other = bench.kernel_params(fill_value, bench.alloc(64), 1.0, 4, config=WIDE)
    return kernel(bench), other


def _config(**changes: object) -> Make:
    return one(lambda bench: (kernel(bench), kernel(bench, **changes)))


def _fill(**changes: object) -> Make:
    def change(bench: Bench) -> tuple[object, object]:
        first = fill_1d(bench.alloc(4096), 1, 16)
        changes.setdefault("address", bench.alloc(4096))
        return first, replace(first, **changes)  # type: ignore[arg-type]

    return one(change)


def _fill_2d(**changes: object) -> Make:
    def change(bench: Bench) -> tuple[object, object]:
        first = MemsetParams(bench.alloc(4096), 1, 1, 16, 4, 64)
        return first, replace(first, **changes)  # type: ignore[arg-type]

    return one(change)


def _copy(width: int) -> Make:
    def change(bench: Bench) -> tuple[object, object]:
        a, b, c = (bench.alloc(4096) for _ in range(3))
        return copy_1d(a, b, 64), copy_1d(a, c, width)

    return one(change)


def _copy_2d(height: int) -> Make:
    def change(bench: Bench) -> tuple[object, object]:
        a, b = bench.alloc(4096), bench.alloc(4096)
        return copy_2d(a, b, 16, 4, 64, 64), copy_2d(a, b, 16, height, 64, 64)

    return one(change)


def _copy_source(bench: Bench) -> tuple[object, object]:
    a, b, host = bench.alloc(64), bench.alloc(64), bench.pin(bytes(64))
    return copy_1d(a, b, 64), copy_1d(a, host, 64, src_memory=MemoryKind.HOST)


def _kinds(bench: Bench) -> tuple[object, object]:
    return kernel(bench), fill_1d(bench.alloc(64), 0, 4)


def _topology(old: list[tuple[int, ...]], new: list[tuple[int, ...]]) -> Make:
    def make(bench: Bench) -> tuple[Spec, Spec]:
        params = kernel(bench)
        before, after = ([Step(params, needs) for needs in side] for side in (old, new))
        return tuple(before), tuple(after)

    return make


def _in_child(change: Make) -> Make:
    def make(bench: Bench) -> tuple[Spec, Spec]:
        old, new = change(bench)
        return (Step(Child(old)),), (Step(Child(new)),)

    return make


# what changes -> the driver's answer, and the field and index the prediction names
TABLE: list[tuple[str, Make, UpdateResult, str | None, int | None]] = [
    ("nothing", _config(), SUCCESS, None, None),
    ("argument", one(_argument), SUCCESS, None, None),
    ("function", one(_function), SUCCESS, None, None),
    ("grid", _config(grid=(4, 1, 1)), SUCCESS, None, None),
    ("block", _config(block=(64, 1, 1)), SUCCESS, None, None),
    ("shared memory", _config(shared_bytes=256), SUCCESS, None, None),
    ("priority", _config(priority=-1), SUCCESS, None, None),
    ("cluster", _config(cluster=(2, 1, 1)), SUCCESS, None, None),
    (
        "cooperative",
        _config(cooperative=True),
        UpdateResult.ATTRIBUTES_CHANGED,
        "cooperative",
        1,
    ),
    ("fill address", _fill(), SUCCESS, None, None),
    ("fill width", _fill(width=8), SUCCESS, None, None),
    ("fill value", _fill(value=2), SUCCESS, None, None),
    ("fill element size", _fill(element_size=1, value=1), SUCCESS, None, None),
    ("fill becomes 2-D", _fill(height=2, pitch=64), PARAMETERS, "height", 1),
    ("2-D fill value", _fill_2d(value=2), SUCCESS, None, None),
    ("2-D fill height", _fill_2d(height=3), PARAMETERS, "height", 1),
    ("copy address", _copy(64), SUCCESS, None, None),
    ("copy width", _copy(32), SUCCESS, None, None),
    ("copy source kind", one(_copy_source), PARAMETERS, "src.memory", 1),
    ("2-D copy unchanged", _copy_2d(4), SUCCESS, None, None),
    ("2-D copy height", _copy_2d(3), PARAMETERS, "height", 1),
    ("kind", one(_kinds), UpdateResult.NODE_TYPE_CHANGED, "kind", 1),
    ("node added", _topology([(), (0,)], [(), (0,), (1,)]), TOPOLOGY, "nodes", 2),
    ("node removed", _topology([(), (0,), (1,)], [(), (0,)]), TOPOLOGY, "nodes", None),
    ("edge added", _topology([(), (), (0,)], [(), (), (0, 1)]), TOPOLOGY, "edges", 2),
    ("edge removed", _topology([(), (0,)], [(), ()]), TOPOLOGY, "edges", 0),
    (
        "edge moved",
        _topology([(), (0,), (1,), (0, 2)], [(), (0,), (1,), (1, 2)]),
        TOPOLOGY,
        "dependencies",
        1,
    ),
    ("exit added", _topology([(), (0,), (1,)], [(), (0,), (0,)]), TOPOLOGY, "edges", 1),
    ("exit removed", _topology([(), (0,), (0,)], [(), (0,), (1,)]), TOPOLOGY, None, None),
    (
        "in a child graph",
        _in_child(_config(cooperative=True)),
        UpdateResult.ATTRIBUTES_CHANGED,
        "cooperative",
        0,
    ),
]


@pytest.mark.parametrize(
    ("make", "result", "field", "index"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_the_prediction_is_the_drivers_answer(
    bench: Bench, make: Make, result: UpdateResult, field: str | None, index: int | None
) -> None:
    predicted, answer = compare(bench, *make(bench))
    assert answer.result is result
    assert agree(predicted, answer), (str(predicted), answer)
    if predicted is None:
        assert field is None
        return
    assert predicted.rule.startswith("an update keeps")
    if field is not None:
        assert (predicted.field, predicted.node_index) == (field, index)


def test_hundreds_of_generated_pairs_are_predicted(bench: Bench) -> None:
    answers: Counter[UpdateResult] = Counter()
    wrong = []
    for seed in range(400):
        pieces = Pieces(bench, seed)
        old = pieces.spec()
        name, new = pieces.changed(old)
        predicted, answer = compare(bench, old, new)
        answers[answer.result] += 1
        if not agree(predicted, answer):
            wrong.append((seed, name, str(predicted), answer))
    assert not wrong
    assert min(answers[result] for result in (SUCCESS, TOPOLOGY, PARAMETERS)) >= 10
    assert answers[UpdateResult.NODE_TYPE_CHANGED] >= 10


def test_two_changes_at_once_are_predicted_too(bench: Bench) -> None:
    wrong = []
    for seed in range(100):
        pieces = Pieces(bench, seed + 10_000)
        old = pieces.spec()
        first, middle = pieces.changed(old)
        if len(middle) < 2:
            continue
        second, new = pieces.changed(middle)
        predicted, answer = compare(bench, old, new)
        if (predicted is None) != (answer.result is SUCCESS):
            wrong.append((seed, first, second, str(predicted), answer))
    assert not wrong


def test_an_edge_reversed_between_equal_kernels_is_no_change(bench: Bench) -> None:
    graph, other = bench.new_graph(), bench.new_graph()
    params = kernel(bench)
    first = bench.add(graph, params)
    bench.add(graph, params, [first])
    second, last = bench.add(other, params), bench.add(other, params)
    from graphcore.driver.records import Edge

    bench.driver.add_edges(other, [Edge(last, second)])
    before, after = read(bench.driver, graph), read(bench.driver, other)
    assert after.edges == ((1, 0),)
    assert first_difference(before, after) is None
    assert bench.driver.update_exec(bench.instantiate(graph), other).result is SUCCESS


def test_a_cluster_change_is_accepted_not_applied_and_told_as_a_trap(bench: Bench) -> None:
    out = bench.alloc(4)
    graphs = []
    for size in (2, 4):
        graphs.append(bench.new_graph())
        config = replace(WIDE, cluster=(size, 1, 1))
        bench.add_kernel(graphs[-1], write_cluster_size, out, config=config)
    executable = bench.run(graphs[0])
    assert bench.get(out, 1, "int32") == [2]
    before, after = (read(bench.driver, graph) for graph in graphs)
    assert first_difference(before, after) is None
    (trap,) = trap_differences(before, after)
    assert (trap.field, trap.before, trap.after) == ("cluster", (2, 1, 1), (4, 1, 1))
    assert trap.result is SUCCESS
    assert trap.node is after.nodes[0]
    assert not trap.named_by_driver
    assert bench.driver.update_exec(executable, graphs[1]).result is SUCCESS
    bench.poison(out, 4)
    bench.replay(executable)
    assert bench.get(out, 1, "int32") == [2]  # the trap: 4 was asked for
    assert trap_differences(before, before) == []


def test_a_refused_update_has_no_traps(bench: Bench) -> None:
    old = (Step(kernel(bench)), Step(kernel(bench), (0,)))
    new = with_step(old, 0, params=kernel(bench, cluster=(2, 1, 1)))
    before = read(bench.driver, build(bench, old))
    assert len(trap_differences(before, read(bench.driver, build(bench, new)))) == 1
    more = with_step(new, 1, params=kernel(bench, cooperative=True))
    after = read(bench.driver, build(bench, more))
    assert trap_differences(before, after) == []


def test_a_trap_inside_a_child_graph_names_its_path(bench: Bench) -> None:
    inner = (Step(kernel(bench)), Step(kernel(bench), (0,)))
    changed = with_step(inner, 1, params=kernel(bench, cluster=(2, 1, 1)))
    before, after = (
        read(bench.driver, build(bench, (Step(fill_1d(bench.alloc(4), 0, 1)), Step(Child(spec)))))
        for spec in (inner, changed)
    )
    (trap,) = trap_differences(before, after)
    assert trap.path == (1, 1)
    assert trap.node_index == 1
    assert trap.node is not None
    assert after.nodes[1].child is not None
    assert trap.node is after.nodes[1].child.nodes[1]


def conditional(form: str, size: int, *bodies: GraphSnapshot) -> GraphSnapshot:
    params = ConditionalParams(ConditionalHandle(1), form, size)
    return snapshot([node(0, params, bodies=bodies)])


def owning(params: NodeParams, address: int = 64) -> GraphSnapshot:
    """A graph that allocates 16 bytes, works on something, and frees them."""
    steps = (AllocParams(16, address), params, FreeParams(address))
    nodes = [node(index, each) for index, each in enumerate(steps)]
    return snapshot(nodes, [(0, 1), (1, 2)])


BODY = snapshot([kernel_node(0)])
TWO = snapshot([kernel_node(0), kernel_node(1)])


@pytest.mark.parametrize(
    ("old", "new", "result", "field", "path"),
    [
        (conditional("if", 1, BODY), conditional("if", 1, BODY), SUCCESS, None, ()),
        (conditional("if", 1, BODY), conditional("while", 1, BODY), UNSUPPORTED, "form", (0,)),
        (conditional("if", 1, BODY), conditional("if", 2, BODY, BODY), UNSUPPORTED, "size", (0,)),
        (
            conditional("switch", 2, BODY, BODY),
            conditional("switch", 2, BODY, TWO),
            TOPOLOGY,
            "nodes",
            (0, 1, 1),
        ),
        (snapshot([node(0, AllocParams(8, 64))]), snapshot([node(0, AllocParams(16, 128))]),
         SUCCESS, None, ()),
        (owning(fill_1d(64, 0, 4)), owning(fill_1d(1 << 20, 0, 4), 1 << 20),
         UpdateResult.ERROR, "address", (1,)),
        (owning(fill_1d(64, 0, 4)), owning(fill_1d(64, 1, 4)), SUCCESS, None, ()),
        (owning(copy_1d(8, 64, 4)), owning(copy_1d(8, 4096, 4)),
         PARAMETERS, "src.address", (1,)),
        (snapshot([kernel_node(0)]), snapshot([kernel_node(0, context=2)]),
         UpdateResult.UNSUPPORTED_FUNCTION_CHANGE, "context", (0,)),
    ],
    ids=["same", "form", "size", "inside a body", "allocation", "fill of owned memory",
         "same fill", "copy of owned memory", "context"],
)  # fmt: skip
def test_rules_that_need_no_driver(
    old: GraphSnapshot,
    new: GraphSnapshot,
    result: UpdateResult,
    field: str | None,
    path: tuple[int, ...],
) -> None:
    found = first_difference(old, new)
    if field is None:
        assert found is None
        assert result is SUCCESS
        return
    assert found is not None
    assert (found.result, found.field, found.path) == (result, field, path)


def test_edges_of_another_kind_are_a_change_of_topology() -> None:
    nodes = [kernel_node(0), kernel_node(1)]
    plain = snapshot(nodes, [(0, 1)], edge_data=((0, 0, 0),))
    programmatic = snapshot(nodes, [(0, 1)], edge_data=((0, 0, 1),))
    found = first_difference(plain, programmatic)
    assert found is not None
    assert (found.result, found.field, found.node_index) == (TOPOLOGY, "edge data", 1)


def test_a_damaged_snapshot_with_a_cycle_is_no_endless_walk() -> None:
    cycle = snapshot([kernel_node(0), kernel_node(1)], [(0, 1), (1, 0)])
    found = first_difference(cycle, cycle)
    assert found is not None
    assert (found.result, found.node, found.rule) == (TOPOLOGY, None, "a graph has no cycle")


def test_a_difference_reads_as_a_sentence() -> None:
    found = first_difference(
        snapshot([kernel_node(0, "gemm")]),
        snapshot([node(0, fill_1d(1, 0, 1))]),
    )
    assert str(found) == (
        "node 0 (memset memset): kind changed from kernel to memset: "
        "an update keeps each node's kind"
    )
    fewer = first_difference(TWO, BODY)
    assert str(fewer) == "the graph: nodes: an update keeps the number of nodes (2, not 1)"


def test_the_first_node_without_a_like_is_named_as_ours() -> None:
    old = snapshot([kernel_node(0, "a"), kernel_node(1, "b")])
    new = snapshot([kernel_node(0, "a"), kernel_node(1, "x"), kernel_node(2, "b")])
    found = first_difference(old, new)
    assert found is not None
    assert (found.node_index, found.named_by_driver) == (1, False)
