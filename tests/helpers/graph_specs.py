"""Graphs as lists of (parameters, dependencies), and generated pairs that differ in one way."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from helpers.contract import Bench, copy_1d, copy_2d, fill_1d
from helpers.kernels import add_one, fill_value, scale

from graphcore.driver.records import (
    ChildParams,
    EmptyParams,
    GraphHandle,
    KernelParams,
    LaunchConfig,
    MemcpyParams,
    MemsetParams,
    NodeParams,
)

WIDE = LaunchConfig((8, 1, 1), (32, 1, 1))


@dataclass(frozen=True)
class Child:
    """A child graph, by its own spec."""

    spec: Spec


@dataclass(frozen=True)
class Step:
    """One node of a spec; ``after`` are indices of earlier steps."""

    params: NodeParams | Child
    after: tuple[int, ...] = ()


Spec = tuple[Step, ...]


def build(bench: Bench, spec: Spec) -> GraphHandle:
    """The graph of a spec, nodes in order."""
    graph = bench.new_graph()
    handles: list[Any] = []
    for step in spec:
        params = step.params
        if isinstance(params, Child):
            params = ChildParams(build(bench, params.spec))
        handles.append(bench.add(graph, params, [handles[index] for index in step.after]))
    return graph


class Pieces:
    """Buffers, and random steps and changes over them."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self.bench = bench
        self.random = random.Random(seed)
        self.a, self.b = bench.alloc(4096), bench.alloc(4096)

    def spec(self, most: int = 7, nested: bool = True) -> Spec:
        count = self.random.randint(2, most)
        return tuple(Step(self._params(nested), self._after(index)) for index in range(count))

    def _after(self, index: int) -> tuple[int, ...]:
        return tuple(
            sorted(self.random.sample(range(index), self.random.randint(0, min(index, 2))))
        )

    def _params(self, nested: bool) -> NodeParams | Child:
        choices: list[Callable[[], NodeParams | Child]] = [
            lambda: self.bench.kernel_params(add_one, self.a, 16, config=WIDE),
            lambda: self.bench.kernel_params(scale, self.b, 2.0, 16, config=WIDE),
            lambda: fill_1d(self.a, 7, 16),
            lambda: MemsetParams(self.b, 1, 1, 16, 4, 64),
            lambda: copy_1d(self.a, self.b, 64),
            lambda: copy_2d(self.a, self.b, 16, 4, 64, 64),
            EmptyParams,
        ]
        if nested:
            choices.append(lambda: Child(self.spec(3, nested=False)))
        return self.random.choice(choices)()

    def changed(self, spec: Spec) -> tuple[str, Spec]:
        """The name of a change, and the spec after it."""
        change = self.random.choice(_CHANGES)
        result = change(self, spec)
        return change.__name__.strip("_"), spec if result is None else result

    def pick(self, spec: Spec, *kinds: type) -> int | None:
        found = [index for index, step in enumerate(spec) if isinstance(step.params, kinds)]
        return self.random.choice(found) if found else None


def with_step(spec: Spec, index: int, **changes: Any) -> Spec:
    return (*spec[:index], replace(spec[index], **changes), *spec[index + 1 :])


def _with_params(
    pieces: Pieces, spec: Spec, kind: type, options: Sequence[dict[str, Any]]
) -> Spec | None:
    index = pieces.pick(spec, kind)
    if index is None:
        return None
    changed = replace(spec[index].params, **pieces.random.choice(options))  # type: ignore[type-var]
    return with_step(spec, index, params=changed)


def _kernel(pieces: Pieces, spec: Spec) -> Spec | None:
    index = pieces.pick(spec, KernelParams)
    if index is None:
        return None
    params = spec[index].params
    assert isinstance(params, KernelParams)
    options: list[dict[str, Any]] = [{"grid": (4, 1, 1)}, {"block": (64, 1, 1)}]
    options += [{"shared_bytes": 512}, {"cooperative": True}, {"cluster": (2, 1, 1)}]
    config = replace(params.config, **pieces.random.choice(options))
    return with_step(spec, index, params=replace(params, config=config))


def _function(pieces: Pieces, spec: Spec) -> Spec | None:
    index = pieces.pick(spec, KernelParams)
    other = pieces.bench.kernel_params(fill_value, pieces.b, 1.0, 16, config=WIDE)
    return None if index is None else with_step(spec, index, params=other)


def _copy(pieces: Pieces, spec: Spec) -> Spec | None:
    pitched = copy_2d(pieces.a, pieces.b, 16, 2, 64, 64)
    two_rows = {"dst": pitched.dst, "src": pitched.src, "width": 16, "height": 2}
    return _with_params(pieces, spec, MemcpyParams, [{"width": 8}, two_rows])


def _fill(pieces: Pieces, spec: Spec) -> Spec | None:
    options = [{"value": 3}, {"width": 8}, {"address": pieces.b}, {"height": 3, "pitch": 64}]
    return _with_params(pieces, spec, MemsetParams, options)


def _kind(pieces: Pieces, spec: Spec) -> Spec:
    index = pieces.random.randrange(len(spec))
    return with_step(spec, index, params=fill_1d(pieces.a, 9, 4))


def _node_added(pieces: Pieces, spec: Spec) -> Spec:
    return (*spec, Step(EmptyParams(), pieces._after(len(spec))))


def _node_removed(pieces: Pieces, spec: Spec) -> Spec | None:
    return spec[:-1] if len(spec) > 1 else None


def _edge_added(pieces: Pieces, spec: Spec) -> Spec | None:
    index = pieces.random.randrange(1, len(spec))
    missing = [at for at in range(index) if at not in spec[index].after]
    if not missing:
        return None
    return with_step(spec, index, after=(*spec[index].after, pieces.random.choice(missing)))


def _edge_removed(pieces: Pieces, spec: Spec) -> Spec | None:
    index = pieces.random.randrange(1, len(spec))
    return with_step(spec, index, after=spec[index].after[1:]) if spec[index].after else None


def _edge_moved(pieces: Pieces, spec: Spec) -> Spec | None:
    removed = _edge_removed(pieces, spec)
    return None if removed is None else _edge_added(pieces, removed)


def _steps_swapped(pieces: Pieces, spec: Spec) -> Spec:
    """Two steps trade what they do; between equal ones nothing changes."""
    one, other = (pieces.random.randrange(len(spec)) for _ in range(2))
    first, second = spec[one].params, spec[other].params
    return with_step(with_step(spec, one, params=second), other, params=first)


def _inside(pieces: Pieces, spec: Spec) -> Spec | None:
    index = pieces.pick(spec, Child)
    if index is None:
        return None
    child = spec[index].params
    assert isinstance(child, Child)
    return with_step(spec, index, params=Child(pieces.changed(child.spec)[1]))


_CHANGES: tuple[Callable[[Pieces, Spec], Spec | None], ...] = (
    _kernel,
    _function,
    _copy,
    _fill,
    _kind,
    _node_added,
    _node_removed,
    _edge_added,
    _edge_removed,
    _edge_moved,
    _steps_swapped,
    _inside,
)
