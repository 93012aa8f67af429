"""Update pairs that differ in more than one node's parameters: kinds, topology, inner graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from helpers.update_pairs_nodes import (
    HOST,
    Named,
    kern,
    line,
    linear,
    rows,
)
from helpers.update_specs import (
    Action,
    Alloc,
    At,
    Cond,
    Copy,
    Empty,
    Fill,
    Free,
    Handle,
    Host,
    Kern,
    Made,
    Nested,
    Record,
    Side,
    Spec,
    Step,
    Wait,
    chain,
    shaped,
)

START = Alloc(64)
BODY = chain(kern())
FLAT = Copy(Side(At("a"), pitch=64), Side(At("b"), pitch=64), 16, 4)


# ---- kinds --------------------------------------------------------------------------------------

KINDS: dict[str, Action] = {
    "kernel": kern(),
    "memcpy": linear(),
    "memset": line(),
    "host": Host(0),
    "empty": Empty(),
    "child": Nested(BODY),
    "record": Record("e"),
    "wait": Wait("e"),
    "alloc": Alloc(128),
    "free": Free(0),
    "conditional": Cond("if", (BODY,)),
}


def kinds() -> Iterator[Named]:
    for old, new in itertools.product(KINDS, KINDS):
        # an allocation first, so that there is something to free
        first: Action = START if "free" in (old, new) else kern()
        yield f"{old} to {new}", chain(first, KINDS[old]), chain(first, KINDS[new])
    for old, new in itertools.permutations(("kernel", "memcpy", "memset", "host", "empty"), 2):
        before, after = (chain(KINDS[kind], kern("scale", At("a"), 2.0, 4)) for kind in (old, new))
        yield f"{old} to {new}, first", before, after


def events_and_calls() -> Iterator[Named]:
    for name, old, new in (
        ("another callback", Host(0), Host(1)),
        ("the same callback", Host(0), Host(0)),
        ("another event to record", Record("e"), Record("f")),
        ("the same event", Record("e"), Record("e")),
        ("another event to wait for", Wait("e"), Wait("f")),
        ("record becomes wait", Record("e"), Wait("e")),
        ("wait becomes record", Wait("e"), Record("e")),
        ("nothing to do", Empty(), Empty()),
    ):
        yield name, chain(kern(), old), chain(kern(), new)


# ---- topology -----------------------------------------------------------------------------------

SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "one": ((),),
    "two apart": ((), ()),
    "chain of 2": ((), (0,)),
    "reversed 2": ((1,), ()),
    "chain of 3": ((), (0,), (1,)),
    "fork": ((), (0,), (0,)),
    "join": ((), (), (0, 1)),
    "join, other order": ((), (), (1, 0)),
    "diamond": ((), (0,), (0,), (1, 2)),
    "diamond, other order": ((), (0,), (0,), (2, 1)),
    "ladder": ((), (0,), (1,), (0, 2)),
    "chain of 4": ((), (0,), (1,), (2,)),
    "shortcut": ((), (0,), (0, 1), (2,)),
}


def topology() -> Iterator[Named]:
    for old, new in itertools.permutations(SHAPES, 2):
        if abs(len(SHAPES[old]) - len(SHAPES[new])) > 1:
            continue
        before, after = (shaped([kern()] * len(SHAPES[name]), SHAPES[name]) for name in (old, new))
        yield f"{old} to {new}", before, after


def order() -> Iterator[Named]:
    """The same graph, made in another order; nodes of two kinds, or of two parameters."""
    two: dict[str, tuple[Action, Action]] = {
        "equal kernels": (kern(), kern()),
        "two kernels": (kern(), kern("scale", At("b"), 2.0, 4)),
        "kernel and fill": (kern(), line()),
        "fill and plane": (line(), rows()),
        "copy and plane": (linear(), FLAT),
        "cooperative or not": (kern(), kern(cooperative=True)),
        "clusters": (kern(cluster=(2, 1, 1)), kern(cluster=(4, 1, 1))),
        "callbacks": (Host(0), Host(1)),
    }
    for name, (first, second) in two.items():
        apart: tuple[tuple[int, ...], ...] = ((), ())
        yield f"{name} apart", shaped((first, second), apart), shaped((second, first), apart)
        yield f"{name} chained", chain(first, second), chain(second, first)
        linked = shaped((second, first), ((1,), ()))
        yield f"{name}, made the other way round", chain(first, second), linked
        joined = shaped((first, second, Empty()), ((), (), (0, 1)))
        swapped = shaped((first, second, Empty()), ((), (), (1, 0)))
        yield f"{name}, joined in the other order", joined, swapped
        moved = shaped((second, first, Empty()), ((), (), (1, 0)))
        yield f"{name}, made and joined in the other order", joined, moved


def edges() -> Iterator[Named]:
    """Programmatic edges, which are a node's attribute when it is made."""
    plain, ready = kern("scale", At("a"), 2.0, 4), kern("scale", At("a"), 2.0, 4, programmatic=True)
    yield "programmatic to plain", chain(kern(), ready), chain(kern(), plain)
    yield "both programmatic", chain(kern(), ready), chain(kern(), ready)
    for name, one, other in (
        ("first of a chain", (plain, ready, plain), (plain, plain, plain)),
        ("moved along a chain", (plain, ready, plain), (plain, plain, ready)),
        ("all of a chain", (plain, plain, plain), (plain, ready, ready)),
    ):
        yield name, chain(*one), chain(*other)
    changed = replace(ready, arguments=(At("b"), 3.0, 4))
    yield "programmatic, other arguments", chain(kern(), ready), chain(kern(), changed)


# ---- which fault is told ------------------------------------------------------------------------

FAULTS: dict[str, tuple[Action, Action]] = {
    "cooperative": (kern(), kern(cooperative=True)),
    "plane of a fill": (rows(), rows(height=3)),
    "plane of a copy": (FLAT, replace(FLAT, height=3)),
    "memory": (linear(), replace(linear(), src=Side(At("p"), HOST))),
    "kind": (kern(), line()),
    "in a child": (Nested(chain(kern())), Nested(chain(kern(cooperative=True)))),
    "topology of a child": (Nested(BODY), Nested(chain(kern(), kern()))),
    "cluster": (kern(), kern(cluster=(2, 1, 1))),
    "conditional": (Cond("if", (BODY,)), Cond("while", (BODY,))),
    "alloc": (Alloc(64), Alloc(128)),
}


def several() -> Iterator[Named]:
    """Two faults at once: in a chain, and side by side."""
    apart: tuple[tuple[int, ...], ...] = ((), ())
    for one, other in itertools.product(FAULTS, FAULTS):
        (a, b), (c, d) = FAULTS[one], FAULTS[other]
        yield f"{one}, then {other}", chain(a, kern(), c), chain(b, kern(), d)
        if one <= other:
            yield f"{one} beside {other}", shaped((a, c), apart), shaped((b, d), apart)
    for name, (a, b) in FAULTS.items():
        more = shaped((b, kern(), kern()), ((), (0,), (0,)))
        yield f"{name} and an edge moved", chain(a, kern(), kern()), more
        yield f"{name} and a node more", chain(a, kern()), chain(b, kern(), kern())
        yield f"{name} first of two", chain(a, kern()), chain(b, kern())
        yield f"{name} last of two", chain(kern(), a), chain(kern(), b)


# ---- child graphs -------------------------------------------------------------------------------


def _changes() -> dict[str, tuple[Spec, Spec]]:
    """Changes of an inner graph, by name."""
    scaled = kern("scale", At("a"), 2.0, 4)
    return {
        "nothing": (chain(kern()), chain(kern())),
        "argument": (chain(kern()), chain(kern("add_one", At("b"), 4))),
        "grid": (chain(kern()), chain(kern(grid=(2, 1, 1)))),
        "function": (chain(kern()), chain(scaled)),
        "cooperative": (chain(kern()), chain(kern(cooperative=True))),
        "cluster": (
            chain(kern("write_cluster_size", At("b"), cluster=(2, 1, 1))),
            chain(kern("write_cluster_size", At("b"), cluster=(4, 1, 1))),
        ),
        "priority": (chain(kern()), chain(kern(priority=-2))),
        "fill value": (chain(line()), chain(line(value=3))),
        "plane of a fill": (chain(rows()), chain(rows(height=3))),
        "1-D to plane": (chain(line()), chain(rows())),
        "copy": (chain(linear()), chain(linear(dst=At("c"), width=8))),
        "plane of a copy": (chain(FLAT), chain(replace(FLAT, height=2))),
        "kind": (chain(kern()), chain(line())),
        "node more": (chain(kern()), chain(kern(), scaled)),
        "node less": (chain(kern(), scaled), chain(kern())),
        "edge more": (shaped((kern(), scaled), ((), ())), chain(kern(), scaled)),
        "order": (chain(kern(), scaled), chain(scaled, kern())),
        "last of three": (
            chain(kern(), scaled, rows()),
            chain(kern(), scaled, rows(width=8)),
        ),
        "emptied": (chain(kern()), ()),
        "filled": ((), chain(kern())),
    }


def children() -> Iterator[Named]:
    for name, (old, new) in _changes().items():
        yield name, chain(kern(), Nested(old)), chain(kern(), Nested(new))
        twice = tuple(
            chain(kern(), Nested(chain(Kern("nothing", ()), Nested(spec)))) for spec in (old, new)
        )
        yield f"{name}, nested twice", twice[0], twice[1]
    host = (chain(kern(), Nested(chain(Host(number)))) for number in (0, 1))
    yield "callback", next(host), next(host)
    events = (chain(kern(), Nested(chain(Record(event)))) for event in "ef")
    yield "event", next(events), next(events)
    first, second = Nested(chain(kern())), Nested(chain(line()))
    yield "two swapped, apart", shaped((first, second), ((), ())), shaped((second, first), ((), ()))
    yield "two swapped, chained", chain(first, second), chain(second, first)
    many = chain(*[Nested(chain(kern("add_one", At("a"), n))) for n in range(1, 5)])
    more = chain(*[Nested(chain(kern("add_one", At("b"), n))) for n in range(2, 6)])
    yield "all of four", many, more
    worse = (*more[:2], Step(Nested(chain(kern(cooperative=True))), (1,)), more[3])
    yield "third of four", many, worse


# ---- conditional nodes --------------------------------------------------------------------------


def conditionals() -> Iterator[Named]:
    for name, (old, new) in _changes().items():
        yield (
            f"if {name}",
            chain(kern(), Cond("if", (old,), 1)),
            chain(kern(), Cond("if", (new,), 1)),
        )
    for name in ("argument", "cooperative", "kind", "node more", "plane of a fill", "cluster"):
        old, new = _changes()[name]
        yield f"while {name}", chain(Cond("while", (old,))), chain(Cond("while", (new,)))
        yield f"second body {name}", chain(Cond("if", (BODY, old))), chain(Cond("if", (BODY, new)))
        third_old, third_new = (
            Cond("switch", (BODY, BODY, old), 2),
            Cond("switch", (BODY, BODY, new), 2),
        )
        yield f"third case {name}", chain(third_old), chain(third_new)
        nested = [chain(Cond("if", (chain(kern(), Nested(spec)),), 1)) for spec in (old, new)]
        yield f"child in a body {name}", nested[0], nested[1]
    forms = {
        "if": Cond("if", (BODY,)),
        "if and else": Cond("if", (BODY, BODY)),
        "while": Cond("while", (BODY,)),
        "switch of 1": Cond("switch", (BODY,)),
        "switch of 2": Cond("switch", (BODY, BODY)),
        "switch of 3": Cond("switch", (BODY, BODY, BODY)),
    }
    for old_form, new_form in itertools.product(forms, forms):
        yield (
            f"{old_form} to {new_form}",
            chain(kern(), forms[old_form]),
            chain(kern(), forms[new_form]),
        )
    for form in ("if", "switch"):
        bodies = (BODY,) if form == "if" else (BODY, chain(line()))
        yield f"{form}: another default", chain(Cond(form, bodies, 0)), chain(Cond(form, bodies, 1))
    yield from _set_by_kernels()


def _set_by_kernels() -> Iterator[Named]:
    """A kernel sets the handle: its argument is another number in every graph."""

    def setting(value: int, body: Spec = BODY, default: int = 0) -> Spec:
        return chain(Kern("set_value", (Handle(1), value)), Cond("if", (body,), default))

    yield "set by a kernel, nothing", setting(1), setting(1)
    yield "set by a kernel, another value", setting(0), setting(1)
    yield "set by a kernel, another body", setting(1), setting(1, chain(line()))
    yield (
        "set by a kernel, other arguments",
        setting(1),
        setting(1, chain(kern("add_one", At("b"), 4))),
    )
    yield "set by a kernel, another default", setting(1), setting(1, default=1)
    stop = [
        chain(
            Cond(
                "while", (chain(kern("add_one", At("a"), n), Kern("set_value", (Handle(0), 0))),), 1
            )
        )
        for n in (4, 8)
    ]
    yield "while that its body stops", stop[0], stop[1]


# ---- memory nodes -------------------------------------------------------------------------------


def memory() -> Iterator[Named]:
    pair = chain(Alloc(64), Free(0))
    yield "the same sizes", pair, pair
    yield "a larger one", pair, chain(Alloc(4096), Free(0))
    yield "a smaller one", chain(Alloc(4096), Free(0)), pair
    yield (
        "with a kernel",
        chain(Alloc(64), kern(), Free(0)),
        chain(Alloc(64), kern("add_one", At("b"), 4), Free(0)),
    )
    yield "never freed", chain(Alloc(64), kern()), chain(Alloc(64), kern())
    yield "one more", pair, chain(Alloc(64), Alloc(64), Free(0))
    yield "freed later", chain(Alloc(64), Free(0), kern()), chain(Alloc(64), kern(), Free(0))
    yield "none any more", pair, chain(kern(), kern())
    yield "new", chain(kern(), kern()), pair
    yield (
        "cooperative beside it",
        chain(Alloc(64), kern(), Free(0)),
        chain(Alloc(64), kern(cooperative=True), Free(0)),
    )


def allocated() -> Iterator[Named]:
    """Nodes that work on memory the graph itself allocates."""
    here = Made(0)
    users: dict[str, tuple[Action, ...]] = {
        "kernel": (Kern("fill_value", (here, 5.0, 4)),),
        "kernels": (Kern("fill_value", (here, 5.0, 4)), Kern("axpy", (2.0, here, At("b"), 4))),
        "fill": (Fill(here, 7, 4, 4),),
        "copy to it": (Copy(Side(here), Side(At("b")), 16),),
        "copy from it": (Kern("fill_value", (here, 5.0, 4)), Copy(Side(At("a")), Side(here), 16)),
        "fill and copy": (Fill(here, 7, 4, 4), Copy(Side(At("a")), Side(here), 16)),
    }
    for name, actions in users.items():
        old = chain(Alloc(64), *actions, Free(0))
        yield name, old, old
        yield f"{name}, another size", old, chain(Alloc(1 << 22), *actions, Free(0))
        changed = tuple(_other_value(action) for action in actions)
        yield f"{name}, other values", old, chain(Alloc(64), *changed, Free(0))
        yield f"{name}, never freed", chain(Alloc(64), *actions), chain(Alloc(64), *actions)
        plain = chain(Alloc(64), *(_at_plain(action) for action in actions), Free(0))
        yield f"{name}, to other memory", old, plain
        yield f"{name}, from other memory", plain, old
    child = chain(Alloc(64), Nested(chain(kern())), Free(0))
    yield "child beside it", child, child
    two = chain(Alloc(64), Alloc(128), Kern("fill_value", (Made(1), 5.0, 4)), Free(1), Free(0))
    yield "two", two, two
    swapped = chain(Alloc(128), Alloc(64), Kern("fill_value", (here, 5.0, 4)), Free(0), Free(1))
    yield "two swapped", two, swapped


def _other_value(action: Action) -> Action:
    if isinstance(action, Kern) and action.kernel == "fill_value":
        return replace(action, arguments=(action.arguments[0], 9.0, 4))
    return replace(action, value=9) if isinstance(action, Fill) else action


def _at_plain(action: Action) -> Action:
    """The same with plain memory in the place of the graph's own."""
    match action:
        case Kern():
            values = tuple(At("c") if isinstance(v, Made) else v for v in action.arguments)
            return replace(action, arguments=values)
        case Fill():
            return replace(action, at=At("c"))
        case Copy():
            sides = (
                Side(At("c")) if isinstance(s.at, Made) else s for s in (action.dst, action.src)
            )
            return Copy(*sides, action.width)
    return action


FAMILIES: dict[str, Callable[[], Iterator[Any]]] = {
    "kind": kinds,
    "event and call": events_and_calls,
    "topology": topology,
    "order": order,
    "edge": edges,
    "several": several,
    "child": children,
    "conditional": conditionals,
    "memory": memory,
    "allocated": allocated,
}
