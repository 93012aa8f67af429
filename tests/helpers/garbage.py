"""Texts that are nearly right: a good JSON text with some of it replaced, dropped, doubled or cut.

``FUZZ=20 pytest tests/fuzz`` makes twenty times as many examples, other ones each time.
"""

from __future__ import annotations

import json
import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

FACTOR = int(os.environ.get("FUZZ", "1"))


def bounded(examples: int) -> settings:
    """As many examples, always the same ones; more and others with ``FUZZ``."""
    return settings(
        max_examples=examples * FACTOR,
        deadline=None,
        derandomize=FACTOR == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=12),
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
texts = st.one_of(
    st.text(max_size=60), st.binary(max_size=60), anything.map(json.dumps), st.just("[" * 5000)
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside ``value``."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found: list[tuple[Any, ...]] = []
    for key, each in inner:
        found.append((*path, key))
        if isinstance(each, dict | list):
            found += places(each, (*path, key))
    return found


def _holder(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        value = value[key]
    return value


@st.composite
def damaged(draw: Any, good: str) -> str | bytes:
    """``good`` with one to four damages, or with bytes changed."""
    if draw(st.integers(0, 4)) == 0:
        raw = bytearray(good.encode())
        for _ in range(draw(st.integers(1, 3))):
            raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
        return bytes(raw[: draw(st.integers(0, len(raw)))] if draw(st.booleans()) else raw)
    value = json.loads(good)
    for _ in range(draw(st.integers(1, 4))):
        found = places(value)
        if not found:
            break
        path, other = draw(st.sampled_from(found)), draw(st.sampled_from(found))
        holder, key = _holder(value, path), path[-1]
        how = draw(st.sampled_from(["replace", "swap", "drop", "double"]))
        if how == "replace":
            holder[key] = draw(anything)
        elif how == "swap":  # something right in the wrong place
            holder[key] = json.loads(json.dumps(_holder(value, other)[other[-1]]))
        elif how == "drop":
            del holder[key]
        elif isinstance(holder, list):
            holder.append(holder[key])
    return json.dumps(value)
