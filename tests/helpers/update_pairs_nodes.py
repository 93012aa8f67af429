"""Update pairs that differ in the parameters or attributes of one node: kernels, copies, fills."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from helpers.update_specs import (
    WIDE,
    Action,
    At,
    Copy,
    Fill,
    Kern,
    Side,
    Spec,
    chain,
)

from graphcore.driver.records import MemoryKind

Named = tuple[str, Spec, Spec]
DEVICE, HOST, UNIFIED = MemoryKind.DEVICE, MemoryKind.HOST, MemoryKind.UNIFIED

START = Kern("add_one", (At("c"), 4))


def one(name: str, before: Action, after: Action) -> Named:
    """A kernel, then the node that changes."""
    return name, chain(START, before), chain(START, after)


def kern(name: str = "add_one", *arguments: Any, **config: Any) -> Kern:
    return Kern(name, arguments or (At("a"), 16), replace(WIDE, **config))


# ---- kernels ------------------------------------------------------------------------------------


def arguments() -> Iterator[Named]:
    base = Kern("axpy", (2.0, At("a"), At("b"), 16))
    yield one("nothing", base, base)
    for name, values in {
        "float": (3.0, At("a"), At("b"), 16),
        "first address": (2.0, At("c"), At("b"), 16),
        "second address": (2.0, At("a"), At("c"), 16),
        "count": (2.0, At("a"), At("b"), 8),
        "interior address": (2.0, At("a", 256), At("b"), 16),
        "addresses swapped": (2.0, At("b"), At("a"), 16),
        "all": (-1.0, At("b", 64), At("c", 128), 4),
        "pinned address": (2.0, At("p"), At("b"), 16),
    }.items():
        yield one(name, base, replace(base, arguments=values))
    block = Kern("take_block", (bytes(24), At("a")))
    yield one("bytes of a structure", block, Kern("take_block", (bytes(range(24)), At("a"))))
    yield one("no argument at all", Kern("nothing", ()), Kern("nothing", ()))


def launch_shapes() -> Iterator[Named]:
    base = kern("write_shape", At("b"))
    for name, config in {
        "grid x": {"grid": (4, 1, 1)},
        "grid y": {"grid": (8, 2, 1)},
        "grid z": {"grid": (8, 1, 3)},
        "grid smaller": {"grid": (1, 1, 1)},
        "grid much larger": {"grid": (4096, 4, 2)},
        "block x": {"block": (64, 1, 1)},
        "block y": {"block": (32, 4, 1)},
        "block z": {"block": (32, 1, 2)},
        "block largest": {"block": (1024, 1, 1)},
        "block one": {"block": (1, 1, 1)},
        "shared": {"shared_bytes": 1024},
        "shared 48 KiB": {"shared_bytes": 48 * 1024},
        "shared 64 KiB": {"shared_bytes": 64 * 1024},
        "shared 200 KiB": {"shared_bytes": 200 * 1024},
        "grid and block": {"grid": (2, 2, 2), "block": (8, 8, 1)},
        "grid, block and shared": {"grid": (3, 1, 1), "block": (96, 1, 1), "shared_bytes": 64},
    }.items():
        changed = kern("write_shape", At("b"), **config)
        yield one(name, base, changed)
        yield one(f"{name}, back", changed, base)


def functions() -> Iterator[Named]:
    bodies = {
        "add_one": Kern("add_one", (At("a"), 16)),
        "scale": Kern("scale", (At("a"), 2.0, 16)),
        "axpy": Kern("axpy", (2.0, At("b"), At("a"), 16)),
        "nothing": Kern("nothing", ()),
        "write_shape": Kern("write_shape", (At("a"),)),
        "take_block": Kern("take_block", (bytes(range(24)), At("a"))),
        "copy_bytes": Kern("copy_bytes", (At("a"), At("b"), 16)),
    }
    for old, new in itertools.permutations(bodies, 2):
        yield one(f"{old} to {new}", bodies[old], bodies[new])
    first, second = (Kern(f"{name}_of_two", (At("a"), 16)) for name in ("first", "second"))
    yield one("the other of one module", first, second)
    yield one("the other of one module, back", second, first)
    yield one("another module, same signature", bodies["add_one"], first)
    changed = replace(second, config=replace(WIDE, grid=(2, 1, 1), shared_bytes=512))
    yield one("another function and shape", first, changed)


_ATTRIBUTES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cluster 2": {"cluster": (2, 1, 1)},
    "cluster 4": {"cluster": (4, 1, 1)},
    "cluster 8": {"cluster": (8, 1, 1)},
    "cooperative": {"cooperative": True},
    "low priority": {"priority": -1},
    "high priority": {"priority": -5},
    "programmatic": {"programmatic": True},
    "cooperative cluster": {"cooperative": True, "cluster": (2, 1, 1)},
    "cooperative priority": {"cooperative": True, "priority": -1},
    "cluster priority": {"cluster": (2, 1, 1), "priority": -2},
    "programmatic priority": {"programmatic": True, "priority": -3},
    "programmatic cluster": {"programmatic": True, "cluster": (2, 1, 1)},
}


def attributes() -> Iterator[Named]:
    made = {
        name: kern("write_cluster_size", At("b"), **config) for name, config in _ATTRIBUTES.items()
    }
    for old, new in itertools.product(made, made):
        yield one(f"{old} to {new}", made[old], made[new])
    square = {"grid": (4, 4, 1)}
    flat, tall = (
        kern("write_cluster_size", At("b"), **square, cluster=cluster)
        for cluster in ((4, 1, 1), (1, 4, 1))
    )
    yield one("cluster turned", flat, tall)
    for name in ("plain", "cluster 2", "cooperative"):
        wider = replace(made[name], config=replace(made[name].config, grid=(16, 1, 1)))
        yield one(f"{name}, another grid", made[name], wider)
    other = kern("write_shape", At("b"), cooperative=True)
    yield one("cooperative and another function", made["plain"], other)
    yield one("cooperative, another function", made["cooperative"], other)
    clustered = kern("write_shape", At("b"), cluster=(2, 1, 1))
    yield one("cluster and another function", made["plain"], clustered)
    yield one("cluster, another function", made["cluster 2"], clustered)
    yield one("cluster lost with the function", made["cluster 2"], kern("write_shape", At("b")))


def attributes_and_changes() -> Iterator[Named]:
    """What changes of a node that has launch attributes, which stay the same."""
    changes: dict[str, dict[str, Any]] = {
        "value": {"arguments": (At("a"), 9.0, 16)},
        "address": {"arguments": (At("b"), 5.0, 16)},
        "count": {"arguments": (At("a"), 5.0, 8)},
        "function": {"kernel": "scale"},
        "function of another layout": {"kernel": "write_shape", "arguments": (At("a"),)},
        "other function and value": {"kernel": "scale", "arguments": (At("a"), 3.0, 16)},
    }
    for name, config in _ATTRIBUTES.items():
        base = kern("fill_value", At("a"), 5.0, 16, **config)
        shape = kern("write_shape", At("a"), **config)
        for change, fields in changes.items():
            yield one(f"{name}, {change}", base, replace(base, **fields))
        for change, fields in {
            "grid": {"grid": (16, 1, 1)},
            "block": {"block": (64, 1, 1)},
            "shared": {"shared_bytes": 512},
        }.items():
            changed = replace(shape, config=replace(shape.config, **fields))
            yield one(f"{name}, {change}", shape, changed)


# ---- copies -------------------------------------------------------------------------------------

SIDES: dict[str, tuple[str, MemoryKind]] = {
    "device": ("b", DEVICE),
    "device as unified": ("b", UNIFIED),
    "pinned as host": ("p", HOST),
    "pinned as unified": ("p", UNIFIED),
    "pinned as device": ("p", DEVICE),
    "pageable": ("h", HOST),
}


A, B = At("a"), At("b")


def linear(dst: At = A, src: At = B, width: int = 64) -> Copy:
    return Copy(Side(dst), Side(src), width)


def copies_1d() -> Iterator[Named]:
    base = linear()
    for name, changed in {
        "nothing": base,
        "destination": linear(dst=At("c")),
        "source": linear(src=At("c")),
        "interior addresses": linear(At("a", 16), At("b", 100)),
        "both swapped": linear(At("b"), At("a")),
        "width less": linear(width=32),
        "width more": linear(width=4096),
        "width one": linear(width=1),
        "width odd": linear(width=63),
        "everything": linear(At("c", 3), At("a", 5), 7),
        "within one buffer": linear(At("b", 1024), At("b")),
    }.items():
        yield one(name, base, changed)


def _sided(side: str, name: str, buffer: str = "", width: int = 64) -> Copy:
    named, memory = SIDES[name]
    changed = Side(At(buffer or named), memory)
    other = Side(At("a"))
    return Copy(changed, other, width) if side == "dst" else Copy(other, changed, width)


def copy_memory() -> Iterator[Named]:
    for side in ("src", "dst"):
        for old, new in itertools.product(SIDES, SIDES):
            yield one(f"{side} {old} to {new}", _sided(side, old), _sided(side, new))
        for name, buffer in {
            "pinned as host": "q",
            "pinned as unified": "q",
            "device as unified": "c",
        }.items():
            moved = _sided(side, name, buffer, 32)
            yield one(f"{side} {name}, another address and width", _sided(side, name), moved)
    host = {name: Side(At(*SIDES[name][:1]), SIDES[name][1]) for name in SIDES}
    pinned = Side(At("q"), HOST)
    for old, new in itertools.product(("pinned as host", "pinned as unified", "pageable"), SIDES):
        before, after = Copy(pinned, host[old], 64), Copy(pinned, host[new], 64)
        yield one(f"to pinned from {old}, then {new}", before, after)
    up, down = _sided("src", "pinned as host"), _sided("dst", "pinned as host")
    yield one("upload to download", up, down)
    yield one("download to upload", down, up)
    yield one("upload to within the device", up, linear())
    yield one("within the host to upload", Copy(pinned, host["pageable"], 64), up)


def _flat(**changes: Any) -> Copy:
    """16 bytes of 4 rows, 64 bytes apart."""
    base = Copy(Side(At("a"), pitch=64), Side(At("b"), pitch=64), 16, 4)
    return replace(base, **changes)


def _solid(**changes: Any) -> Copy:
    """16 bytes of 4 rows of 2 slices, rows 64 bytes apart, slices 8 rows."""
    base = Copy(Side(At("a"), pitch=64, rows=8), Side(At("b"), pitch=64, rows=8), 16, 4, 2)
    return replace(base, **changes)


def copies_2d() -> Iterator[Named]:
    base = _flat()
    changes: dict[str, Copy] = {
        "nothing": base,
        "destination": _flat(dst=Side(At("c"), pitch=64)),
        "source": _flat(src=Side(At("c"), pitch=64)),
        "interior source": _flat(src=Side(At("b", 64), pitch=64)),
        "both addresses": _flat(dst=Side(At("b"), pitch=64), src=Side(At("a"), pitch=64)),
        "width": _flat(width=8),
        "width more": _flat(width=32),
        "height": _flat(height=3),
        "height more": _flat(height=8),
        "destination pitch": _flat(dst=Side(At("a"), pitch=128)),
        "source pitch": _flat(src=Side(At("b"), pitch=32)),
        "both pitches": _flat(dst=Side(At("a"), pitch=32), src=Side(At("b"), pitch=32)),
        "width and height": _flat(width=8, height=8),
        "transposed shape": _flat(width=4, height=16),
        "host source": _flat(src=Side(At("p"), HOST, 64)),
        "unified source": _flat(src=Side(At("b"), UNIFIED, 64)),
        "to 1-D of equal bytes": linear(),
        "to 1-D of a row": linear(width=16),
        "to a height of 1": _flat(height=1),
        "to 3-D": _solid(),
        "to contiguous": Copy(Side(At("a"), pitch=16), Side(At("b"), pitch=16), 16, 4),
    }
    for name, changed in changes.items():
        yield one(name, base, changed)
        if changed != base:
            yield one(f"{name}, back", changed, base)
    whole = Copy(Side(At("a"), pitch=16), Side(At("b"), pitch=16), 16, 4)
    moved = replace(whole, dst=Side(At("c"), pitch=16))
    yield one("contiguous, destination", whole, moved)
    yield one("contiguous, height", whole, replace(whole, height=2))
    yield one("contiguous, to 1-D of equal bytes", whole, linear())
    yield one("contiguous, from 1-D of equal bytes", linear(), whole)
    host = _flat(src=Side(At("p"), HOST, 64))
    yield one("from the host, another address", host, _flat(src=Side(At("q"), HOST, 64)))
    yield one("from the host, unchanged", host, host)


def copies_3d() -> Iterator[Named]:
    base = _solid()
    changes: dict[str, Copy] = {
        "nothing": base,
        "destination": _solid(dst=Side(At("c"), pitch=64, rows=8)),
        "source": _solid(src=Side(At("c"), pitch=64, rows=8)),
        "width": _solid(width=8),
        "height": _solid(height=2),
        "depth": _solid(depth=3),
        "depth of 1": _solid(depth=1),
        "height of 1": _solid(height=1),
        "width and depth": _solid(width=32, depth=4),
        "destination pitch": _solid(dst=Side(At("a"), pitch=32, rows=8)),
        "source rows": _solid(src=Side(At("b"), pitch=64, rows=4)),
        "host source": _solid(src=Side(At("p"), HOST, 64, 8)),
        "to 1-D": linear(),
    }
    for name, changed in changes.items():
        yield one(name, base, changed)
        if changed != base:
            yield one(f"{name}, back", changed, base)


# ---- fills --------------------------------------------------------------------------------------


def line(**changes: Any) -> Fill:
    return replace(Fill(At("a"), 7, 4, 16), **changes)


def rows(**changes: Any) -> Fill:
    """16 bytes of 4 rows, 64 bytes apart."""
    return replace(Fill(At("a"), 7, 1, 16, 4, 64), **changes)


def fills() -> Iterator[Named]:
    for name, changed in {
        "nothing": line(),
        "address": line(at=At("b")),
        "interior address": line(at=At("a", 256)),
        "pinned address": line(at=At("p")),
        "value": line(value=9),
        "value large": line(value=2**32 - 1),
        "value zero": line(value=0),
        "width less": line(width=8),
        "width more": line(width=1024),
        "element size 1": line(element_size=1),
        "element size 2": line(element_size=2),
        "element size 1, equal bytes": line(element_size=1, width=64),
        "element size 2, equal bytes": line(element_size=2, width=32),
        "address and value": line(at=At("b"), value=1),
        "address, value and width": line(at=At("c"), value=1, width=5),
        "everything": line(at=At("c", 2), value=1, width=5, element_size=2),
        "to 2-D": rows(),
        "to 2-D of equal elements": line(height=4, pitch=64),
        "to 2-D, contiguous": Fill(At("a"), 7, 4, 4, 4, 16),
        "pitch of one row": line(pitch=256),
    }.items():
        yield one(f"1-D {name}", line(), changed)
        if changed != line():
            yield one(f"1-D {name}, back", changed, line())


def fills_2d() -> Iterator[Named]:
    for name, changed in {
        "nothing": rows(),
        "address": rows(at=At("b")),
        "interior address": rows(at=At("a", 128)),
        "pinned address": rows(at=At("p")),
        "value": rows(value=9),
        "address and value": rows(at=At("c"), value=1),
        "width": rows(width=8),
        "width more": rows(width=32),
        "height": rows(height=3),
        "height more": rows(height=5),
        "pitch": rows(pitch=128),
        "pitch less": rows(pitch=32),
        "element size 4, equal bytes": rows(element_size=4, width=4),
        "element size 2": rows(element_size=2),
        "to a height of 1": rows(height=1),
        "width and height": rows(width=8, height=8),
        "address and height": rows(at=At("b"), height=3),
        "to contiguous": rows(pitch=16),
    }.items():
        yield one(f"2-D {name}", rows(), changed)
        if changed != rows():
            yield one(f"2-D {name}, back", changed, rows())
    whole = rows(pitch=16)
    yield one("2-D contiguous, address", whole, rows(pitch=16, at=At("b")))
    yield one("2-D contiguous, height", whole, rows(pitch=16, height=2))
    yield one("2-D contiguous, to 1-D of equal bytes", whole, Fill(At("a"), 7, 1, 64))
    yield one("2-D contiguous, from 1-D of equal bytes", Fill(At("a"), 7, 1, 64), whole)


FAMILIES: dict[str, Callable[[], Iterator[Named]]] = {
    "argument": arguments,
    "launch shape": launch_shapes,
    "function": functions,
    "attribute": attributes,
    "attribute kept": attributes_and_changes,
    "copy 1-D": copies_1d,
    "copy memory": copy_memory,
    "copy 2-D": copies_2d,
    "copy 3-D": copies_3d,
    "fill 1-D": fills,
    "fill 2-D": fills_2d,
}
