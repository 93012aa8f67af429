"""Update pairs drawn at random, from fixed seeds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from helpers.update_pairs_nodes import DEVICE, HOST, UNIFIED, Named
from helpers.update_specs import (
    WIDE,
    Action,
    At,
    Copy,
    Empty,
    Fill,
    Host,
    Kern,
    Nested,
    Record,
    Side,
    Spec,
    Step,
)


def random_copy(draw: random.Random) -> Copy:
    """Any copy within the buffers."""
    sides = []
    height, depth = draw.choice(((1, 1), (1, 1), (2, 1), (4, 1), (2, 2)))
    for buffers in (("a", "c"), ("b", "p")):
        name = draw.choice(buffers)
        memory = draw.choice((HOST, UNIFIED)) if name == "p" else DEVICE
        pitch, slices = (64, 4) if height * depth > 1 else (0, 0)
        place = At(name, 64 * draw.randrange(4))
        sides.append(Side(place, memory, pitch, slices if depth > 1 else 0))
    return Copy(sides[0], sides[1], draw.choice((8, 16, 32)), height, depth)


def random_fill(draw: random.Random) -> Fill:
    size = draw.choice((1, 2, 4))
    height = draw.choice((1, 1, 2, 4))
    place = At(draw.choice("abc"), 64 * draw.randrange(4))
    return Fill(place, draw.randrange(200), size, draw.choice((4, 8)), height, 64 * (height > 1))


def random_kernel(draw: random.Random) -> Kern:
    name, arguments = draw.choice(
        (
            ("add_one", (At(draw.choice("abc")), 16)),
            ("scale", (At(draw.choice("abc")), float(draw.randrange(1, 4)), 16)),
            ("write_shape", (At(draw.choice("abc")),)),
            ("write_cluster_size", (At(draw.choice("abc")),)),
        )
    )
    config: dict[str, Any] = {"grid": (draw.choice((4, 8, 16)), 1, 1)}
    if draw.random() < 0.2:
        config["cluster"] = (draw.choice((2, 4)), 1, 1)
    if draw.random() < 0.15:
        config["cooperative"] = True
    if draw.random() < 0.2:
        config["priority"] = -draw.randrange(1, 4)
    return Kern(name, arguments, replace(WIDE, **config))


def _random_action(draw: random.Random, depth: int) -> Action:
    makers: list[Callable[[], Action]] = [
        lambda: random_kernel(draw),
        lambda: random_kernel(draw),
        lambda: random_copy(draw),
        lambda: random_fill(draw),
        Empty,
        lambda: Host(draw.randrange(4)),
        lambda: Record(draw.choice("ef")),
    ]
    if depth:
        makers += [lambda: Nested(_random_spec(draw, 3, depth - 1))]
    return draw.choice(makers)()


def _random_spec(draw: random.Random, most: int, depth: int = 1) -> Spec:
    steps = []
    for index in range(draw.randint(1, most)):
        after = draw.sample(range(index), draw.randint(0, min(index, 2)))
        steps.append(Step(_random_action(draw, depth), tuple(sorted(after))))
    return tuple(steps)


def _like(draw: random.Random, action: Action) -> Action:
    """Another action of the same kind."""
    match action:
        case Kern():
            return random_kernel(draw)
        case Copy():
            return random_copy(draw)
        case Fill():
            return random_fill(draw)
        case Nested(spec):
            return Nested(tuple(replace(step, action=_like(draw, step.action)) for step in spec))
        case Host():
            return Host(draw.randrange(4))
        case Record():
            return Record(draw.choice("ef"))
    return action


def random_parameters(count: int, seed: int) -> Iterator[Named]:
    """One topology and kinds, other parameters at some nodes."""
    draw = random.Random(seed)
    for number in range(count):
        old = _random_spec(draw, 6)
        share = draw.choice((0.3, 0.6, 1.0))
        new = tuple(
            replace(step, action=_like(draw, step.action)) if draw.random() < share else step
            for step in old
        )
        yield f"{number}", old, new


def random_everything(count: int, seed: int) -> Iterator[Named]:
    """Some nodes changed, and perhaps a kind, an edge, the order."""
    draw = random.Random(seed)
    for number in range(count):
        old = _random_spec(draw, 6)
        steps = list(old)
        for _ in range(draw.randint(1, 3)):
            _change(draw, steps)
        yield f"{number}", old, tuple(steps)


def _change(draw: random.Random, steps: list[Step]) -> None:
    index = draw.randrange(len(steps))
    step = steps[index]
    roll = draw.random()
    if roll < 0.5:
        steps[index] = replace(step, action=_like(draw, step.action))
    elif roll < 0.65:
        steps[index] = replace(step, action=_random_action(draw, 1))
    elif roll < 0.75 and step.after:
        steps[index] = replace(step, after=step.after[1:])
    elif roll < 0.85 and index:
        source = draw.randrange(index)
        steps[index] = replace(step, after=tuple(dict.fromkeys((*step.after, source))))
    else:
        other = draw.randrange(len(steps))
        first, second = steps[index].action, steps[other].action
        steps[index] = replace(steps[index], action=second)
        steps[other] = replace(steps[other], action=first)


FAMILIES: dict[str, Callable[[], Iterator[Named]]] = {
    "random parameters": lambda: random_parameters(150, 11),
    "random": lambda: random_everything(100, 12),
}
