"""Named pairs of graphs, the first made executable, the second offered to it; and their answers.

Deterministic: hand-made tables and seeded random ones. Left out: another context, of which one
device has one here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from helpers import update_pairs_graphs, update_pairs_nodes, update_pairs_random
from helpers.update_pairs_nodes import HOST, kern, line, linear, rows
from helpers.update_specs import (
    Alloc,
    At,
    Cond,
    Copy,
    Fill,
    Free,
    Host,
    Nested,
    Side,
    Spec,
    Wait,
    Workshop,
    chain,
    is_chain,
    walk,
)

from graphcore.driver.records import (
    ChildParams,
    ConditionalParams,
    GraphHandle,
    MemcpyParams,
    MemsetParams,
    NodeHandle,
    NodeKind,
    RawUpdate,
    UpdateResult,
)
from graphcore.errors import CudaError
from graphcore.graph import GraphDiff, diff, read

How = Literal[
    "built", "instantiated", "itself", "edited", "clone", "old destroyed", "twice",
    "launched", "uploaded",
]  # fmt: skip
"""How the second graph comes about, and what else is so when it is offered.

``instantiated``: it has an executable of its own. ``itself``: it is the first graph. ``edited``: it
is the first graph, changed in place. ``clone``: a changed clone of it. ``old destroyed``: the first
graph is gone. ``twice``: another graph (``via``) was offered before. ``launched`` and ``uploaded``:
the executable was, before the update.
"""


@dataclass(frozen=True)
class Pair:
    id: str
    family: str
    old: Spec
    new: Spec
    how: How = "built"
    via: Spec | None = None

    @property
    def is_about_topology(self) -> bool:
        """Whether only the topology of kernels differs."""
        return self.family in ("topology", "order", "edge")

    @property
    def has_one_result(self) -> bool:
        """Whether a run of it can be compared byte by byte (and ends)."""
        actions = [step.action for spec in (self.old, self.new) for step in walk(spec)]
        if any(isinstance(action, Wait) for action in actions):
            return False
        if not all(_is_balanced(spec) for spec in (self.old, self.new)):
            return False  # a second launch is refused while the first one's memory is not freed
        if any(isinstance(action, Cond) and action.form == "while" for action in actions):
            return False
        return is_chain(self.old) and is_chain(self.new)


def _is_balanced(spec: Spec) -> bool:
    counts = [sum(isinstance(step.action, kind) for step in walk(spec)) for kind in (Alloc, Free)]
    return counts[0] == counts[1]


# ---- pairs that come about in another way -------------------------------------------------------


def _ways() -> Iterator[tuple[str, How, Spec, Spec, Spec | None]]:
    changes: dict[str, tuple[Spec, Spec]] = {
        "argument": (chain(kern(), kern()), chain(kern(), kern("add_one", At("b"), 4))),
        "grid": (chain(kern()), chain(kern("add_one", At("a"), 16, grid=(2, 1, 1)))),
        "function": (chain(kern()), chain(kern("scale", At("a"), 2.0, 4))),
        "cooperative": (chain(kern()), chain(kern(cooperative=True))),
        "cluster": (
            chain(kern("write_cluster_size", At("b"), cluster=(2, 1, 1))),
            chain(kern("write_cluster_size", At("b"), cluster=(4, 1, 1))),
        ),
        "copy": (chain(linear()), chain(linear(src=At("c"), width=32))),
        "copy memory": (chain(linear()), chain(_from_host())),
        "fill": (chain(line()), chain(line(at=At("b"), value=1))),
        "fill to a plane": (chain(line()), chain(rows())),
        "plane of a fill": (chain(rows()), chain(rows(height=2))),
        "callback": (chain(Host(0)), chain(Host(1))),
    }
    ways: tuple[How, ...] = ("edited", "clone", "instantiated", "old destroyed")
    for name, (old, new) in changes.items():
        for how in ways:
            yield f"{name}, {how}", how, old, new, None
    memory, choice = chain(Alloc(64), Free(0)), chain(Cond("if", (chain(kern()),), 1))
    child = chain(kern(), Nested(chain(kern())))
    specs = {"kernels": chain(kern(), kern()), "memory": memory, "conditional": choice,
             "child": child, "plane": chain(rows()), "fill": chain(line())}  # fmt: skip
    for name, spec in specs.items():
        yield f"unchanged {name}, itself", "itself", spec, spec, None
        yield f"unchanged {name}, instantiated", "instantiated", spec, spec, None
        yield f"unchanged {name}, clone", "clone", spec, spec, None
        yield f"unchanged {name}, old destroyed", "old destroyed", spec, spec, None
    argument, wide = changes["argument"], changes["cluster"]
    for name, (old, new) in changes.items():
        yield f"{name}, back again", "twice", old, old, new
        yield f"{name}, again", "twice", old, new, new
    yield "after a refusal", "twice", argument[0], argument[1], chain(kern())
    yield "after another kind", "twice", argument[0], argument[1], chain(kern(), line())
    three = chain(kern("write_cluster_size", At("b"), cluster=(8, 1, 1)))
    yield "a third cluster size", "twice", wide[0], three, wide[1]


def _from_host() -> Copy:
    return Copy(Side(At("a")), Side(At("p"), HOST), 64)


# ---- all ----------------------------------------------------------------------------------------

_FAMILIES = (
    update_pairs_nodes.FAMILIES | update_pairs_graphs.FAMILIES | update_pairs_random.FAMILIES
)


@functools.cache
def every_pair() -> tuple[Pair, ...]:
    """All pairs, in a fixed order."""
    found = [
        Pair(f"{family}: {name}", family, old, new)
        for family, make in _FAMILIES.items()
        for name, old, new in make()
    ]
    found += [
        Pair(f"way: {name}", "way", old, new, how, via) for name, how, old, new, via in _ways()
    ]
    found += list(_launched(found))
    assert len({pair.id for pair in found}) == len(found)
    return tuple(found)


_OFTEN = ("attribute", "attribute kept", "memory", "allocated", "conditional")
_NOW_AND_THEN = ("argument", "launch shape", "function", "copy 1-D", "copy memory", "copy 2-D",
                 "copy 3-D", "fill 1-D", "fill 2-D", "child", "order", "event and call",
                 "random parameters", "way")  # fmt: skip


def _launched(pairs: list[Pair]) -> Iterator[Pair]:
    """Pairs again, the executable launched or uploaded before: lazily applied changes show."""
    for number, pair in enumerate(pairs):
        if not pair.has_one_result or pair.how != "built":
            continue
        is_wanted = pair.family in _OFTEN or "cluster" in pair.id
        if is_wanted or (pair.family in _NOW_AND_THEN and number % 3 == 0):
            yield replace(pair, id=f"launched: {pair.id}", family="launched", how="launched")
        if pair.family in ("attribute", "attribute kept", "allocated") and number % 4 == 0:
            yield replace(pair, id=f"uploaded: {pair.id}", family="uploaded", how="uploaded")


def families() -> tuple[str, ...]:
    return tuple(dict.fromkeys(pair.family for pair in every_pair()))


# ---- asking -------------------------------------------------------------------------------------


def ask(workshop: Workshop, pair: Pair) -> dict[str, Any]:
    """What the workshop's driver answers to a pair, as data.

    ``result`` and the ``node`` and ``from_node`` it names as paths in the new graph ("unknown"
    where it is not in there); or ``error``, the code, and at which ``stage``. ``applied``: whether
    a run after a success is a run of the new graph (None where that cannot be told).
    """
    row: dict[str, Any] = {"id": pair.id, "result": None, "stage": "build", "error": None}
    try:
        old = workshop.build(pair.old)
        row["stage"] = "instantiate"
        executable = workshop.driver.instantiate(old)
    except CudaError as error:
        return row | {"error": error.code}
    try:
        return row | _offer(workshop, pair, old, executable, row)
    except CudaError as error:
        return row | {"error": error.code}
    finally:
        with suppress(CudaError):  # after a launch that lost the context
            workshop.driver.destroy_exec(executable)


def _offer(
    workshop: Workshop, pair: Pair, old: GraphHandle, executable: Any, row: dict[str, Any]
) -> dict[str, Any]:
    driver = workshop.driver
    _use_before(workshop, pair, executable)
    if pair.via is not None:
        row["stage"] = "update before"
        driver.update_exec(executable, workshop.build(pair.via))
    row["stage"] = "build new"
    new = second_graph(workshop, pair, old)
    own = None
    if pair.how == "instantiated":
        row["stage"] = "instantiate new"
        own = driver.instantiate(new)
    if pair.how == "old destroyed":
        workshop.destroy(old)
    row["stage"] = "update"
    try:
        answer = driver.update_exec(executable, new)
        found = described(workshop, new, answer) | {"read_back": read_back(workshop, new, pair.new)}
        if answer.result is UpdateResult.SUCCESS and pair.has_one_result:
            row["stage"] = "run"
            found["applied"] = _is_applied(workshop, pair, executable, new)
        return found | {"stage": "update"}
    finally:
        if own is not None:
            driver.destroy_exec(own)


def predict(workshop: Workshop, pair: Pair) -> GraphDiff:
    """What a comparison of the two graphs says of the update, without an executable."""
    driver = workshop.driver
    old = workshop.build(pair.old)
    before = read(driver, old)
    if pair.via is not None:
        middle = diff(before, read(driver, workshop.build(pair.via)))
        before = before if middle.refusal is not None else middle.new
    return diff(before, read(driver, second_graph(workshop, pair, old)))


def _use_before(workshop: Workshop, pair: Pair, executable: Any) -> None:
    if pair.how == "launched":
        _contents_after(workshop, executable)
    elif pair.how == "uploaded":
        workshop.driver.upload(executable, workshop.stream.handle)
        workshop.driver.synchronize_stream(workshop.stream.handle)


def second_graph(workshop: Workshop, pair: Pair, old: GraphHandle) -> GraphHandle:
    """The graph that is offered."""
    if pair.how == "itself":
        return old
    if pair.how == "edited":
        workshop.edit(old, pair.old, pair.new)
        return old
    if pair.how == "clone":
        clone = workshop.keep(workshop.driver.clone_graph(old))
        workshop.edit(clone, pair.old, pair.new)
        return clone
    return workshop.build(pair.new)


def described(workshop: Workshop, new: GraphHandle, answer: RawUpdate) -> dict[str, Any]:
    """A driver's answer as data."""
    places = dict(_places(workshop, new, ()))
    named = {
        name: None if node is None else places.get(node, "unknown")
        for name, node in (("node", answer.node), ("from_node", answer.from_node))
    }
    return {"result": answer.result.value, **named}


def _places(
    workshop: Workshop, graph: GraphHandle, path: tuple[int, ...]
) -> Iterator[tuple[NodeHandle, list[int]]]:
    driver = workshop.driver
    for index, node in enumerate(driver.nodes(graph)):
        yield node, [*path, index]
        if driver.node_kind(node) not in (NodeKind.CHILD, NodeKind.CONDITIONAL):
            continue
        params = driver.node_params(node)
        if isinstance(params, ChildParams):
            yield from _places(workshop, params.graph, (*path, index))
        elif isinstance(params, ConditionalParams):
            for number, body in enumerate(params.bodies):
                yield from _places(workshop, body, (*path, index, number))


def read_back(workshop: Workshop, graph: GraphHandle, spec: Spec) -> list[str]:
    """Copies and fills that the driver reads as something else than they were made as."""
    found = []
    for index, (node, step) in enumerate(zip(workshop.driver.nodes(graph), spec, strict=True)):
        if not isinstance(step.action, (Copy, Fill)):
            continue
        made, read = workshop.params(step.action, {}, 0), workshop.driver.node_params(node)
        assert isinstance(made, (MemcpyParams, MemsetParams))
        if made != read:
            found.append(f"{index}: {_difference(made, read)}")
    return found


def _difference(made: Any, read: Any) -> str:
    if type(made) is not type(read):
        return f"{type(made).__name__} became {type(read).__name__}"
    names = [name for name in made.__slots__ if getattr(made, name) != getattr(read, name)]
    words = []
    for name in names:
        was, now = getattr(made, name), getattr(read, name)
        if name in ("dst", "src"):
            inner = [field for field in was.__slots__ if getattr(was, field) != getattr(now, field)]
            words += [f"{name}.{f} {getattr(was, f)} became {getattr(now, f)}"
                      for f in inner if f != "address"]  # fmt: skip
            words += [f"{name}.address"] if "address" in inner else []
        else:
            words.append(f"{name} {was} became {now}" if name != "address" else name)
    return ", ".join(words)


def _is_applied(workshop: Workshop, pair: Pair, updated: Any, new: GraphHandle) -> bool | None:
    """Whether a run of the updated executable is a run of the new graph."""
    driver = workshop.driver
    try:
        fresh = driver.instantiate(new)
    except CudaError:  # what may be instantiated once is made already
        fresh = driver.instantiate(workshop.build(pair.new))
    try:
        return _contents_after(workshop, updated) == _contents_after(workshop, fresh)
    finally:
        with suppress(CudaError):
            driver.destroy_exec(fresh)


def _contents_after(workshop: Workshop, executable: Any) -> tuple[Any, ...]:
    workshop.fill_buffers()
    workshop.driver.launch_graph(executable, workshop.stream.handle)
    workshop.driver.synchronize_stream(workshop.stream.handle)
    return workshop.contents()
