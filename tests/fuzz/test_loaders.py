"""Loaders of JSON fed garbage: an error of ours in one line, or something that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.garbage import bounded, damaged, texts
from helpers.kernels import ONE_BLOCK, axpy, count_down, set_value
from helpers.repository import ROOT
from helpers.snapshots import decode_step
from hypothesis import given
from hypothesis import strategies as st

from graphcore import ConfigurationError, GraphDiff, GraphPlan, GraphSnapshot, diff
from graphcore.bench import parts
from graphcore.bench.results import Report


def a_plan() -> GraphPlan:
    inner = GraphPlan("inner")
    inner.memset(inner.buffer("a", (4,))[1:], 1.0)
    plan = GraphPlan("good")
    x, y = plan.buffer("x", (4, 4)), plan.buffer("y", (4, 4), strides=(1, 4))
    counter = plan.buffer("counter", (1,), "int32")
    scratch = plan.allocate("scratch", (16,))
    with plan.annotate("layer 0"):
        plan.launch(axpy, ONE_BLOCK, 2.0, x, scratch, 16, name="add")
    plan.memcpy(y, x, after="add")
    plan.embed(inner, {"a": x[1]})
    more = plan.condition("more", default=1)
    with plan.while_loop(more) as body:
        chosen = plan.condition("chosen")
        body.launch(set_value, ONE_BLOCK, chosen, 1)
        with body.if_then(chosen) as taken:
            taken.memset(y, 0.0)
        body.launch(count_down, ONE_BLOCK, more, counter)
    plan.deallocate(scratch)
    plan.record(plan.event("done"))
    return plan


PLAN, SNAPSHOT = a_plan().to_json(), decode_step(layers=1, per_layer=3).to_json()
KERNELS = [axpy, count_down, set_value]


def refused_in_one_line(error: ConfigurationError) -> None:
    words = str(error)
    assert words
    assert "\n" not in words
    assert len(words) < 2000


def load_plan(text: Any) -> bool:
    """Whether it was taken; then all that a plan can do without a driver must work."""
    try:
        plan = GraphPlan.from_json(text, kernels=KERNELS)
    except ConfigurationError as error:
        refused_in_one_line(error)
        return False
    assert isinstance(plan.validate(), list)
    assert plan.to_svg().startswith("<svg")
    assert str(plan)
    again = GraphPlan.from_json(plan.to_json(), kernels=KERNELS)
    assert again.to_json() == plan.to_json()
    return True


def load_snapshot(text: Any) -> bool:
    """Whether it was taken; then all that a snapshot can do must work."""
    try:
        snapshot = GraphSnapshot.from_json(text)
    except ConfigurationError as error:
        refused_in_one_line(error)
        return False
    good = GraphSnapshot.from_json(SNAPSHOT)
    assert isinstance(diff(good, snapshot), GraphDiff)
    assert diff(snapshot, snapshot).is_empty
    assert snapshot.to_svg().startswith("<svg")
    assert snapshot.to_text(width=80)
    assert GraphSnapshot.from_json(snapshot.to_json()).to_json() == snapshot.to_json()
    return True


LOADERS = {"plan": (load_plan, PLAN), "snapshot": (load_snapshot, SNAPSHOT)}


@pytest.mark.parametrize("kind", LOADERS)
def test_what_was_written_is_taken(kind: str) -> None:
    load, good = LOADERS[kind]
    assert load(good)


@pytest.mark.parametrize("kind", LOADERS)
@bounded(150)
@given(data=st.data())
def test_a_text_that_is_none_is_refused_in_one_line(kind: str, data: Any) -> None:
    load, _ = LOADERS[kind]
    assert not load(data.draw(texts))


@pytest.mark.parametrize("kind", LOADERS)
@bounded(150)
@given(data=st.data())
def test_a_damaged_text_is_refused_in_one_line_or_works_like_any_other(
    kind: str, data: Any
) -> None:
    load, good = LOADERS[kind]
    load(data.draw(damaged(good)))


RESULT = (ROOT / "benchmarks/results/h200/memory.json").read_text(encoding="utf-8")


@bounded(150)
@given(text=st.one_of(texts, damaged(RESULT)))
def test_a_damaged_result_file_is_refused_by_its_name_or_read(
    tmp_path_factory: pytest.TempPathFactory, text: str | bytes
) -> None:
    path: Path = tmp_path_factory.mktemp("results") / "memory.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    try:
        found: Report | str = parts.read(path)
    except ConfigurationError as error:
        found = str(error)
    assert isinstance(found, Report) or str(path) in found
