"""What a GraphReuse is given and cannot be: refused by name before anything is made or launched."""

from __future__ import annotations

import copy
import pickle

import numpy
import pytest
from helpers.moe_steps import Scene

from graphcore import GraphPlan
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import CacheTypeError, ConfigurationError
from graphcore.moe import CallableStep, GraphReuse, Kind, PlanStep


@pytest.mark.parametrize(
    "option",
    [
        {"rank": -1}, {"rank": "0"}, {"rank": True}, {"owner": []}, {"patience_seconds": -1},
        {"patience_seconds": "10"}, {"patience_seconds": float("nan")}, {"patience_seconds": True},
    ],
    ids=str,
)  # fmt: skip
def test_what_no_reuse_can_be_made_with_is_refused_by_name(option):
    (name,) = option
    with pytest.raises(ConfigurationError, match=f"{name}: expected"):
        GraphReuse(driver=EmulatedDriver(), **option)


@pytest.mark.parametrize(
    "given",
    [
        {"prompt_rows": -1}, {"prompt_rows": 3}, {"prompt_rows": 1.0}, {"phase": "decode"},
        {"certificate": "main"},
    ],
    ids=str,
)  # fmt: skip
def test_what_no_step_can_be_is_refused_by_name_and_the_capture_stays(given):
    (name,) = given
    lane = Scene(EmulatedDriver()).lane()
    lane.kinds(3)
    lane.calls.clear()
    with pytest.raises(ConfigurationError, match=f"{name}: expected"):
        lane.scene.reuse.run(lane.step, stream=lane.scene.stream, **given)
    assert lane.calls == []
    assert lane.run().kind is Kind.REPLAY


@pytest.mark.parametrize("work", [lambda: None, None, "decode"], ids=["function", "None", "name"])
def test_what_is_no_step_is_refused_with_what_makes_one_and_the_capture_stays(work):
    lane = Scene(EmulatedDriver()).lane()
    lane.kinds(3)
    with pytest.raises(CacheTypeError, match=r"work: expected a step, as handle\.step"):
        lane.scene.reuse.run(work, stream=lane.scene.stream)
    assert lane.run().kind is Kind.REPLAY


NO_STEPS = {
    "identity": {"identity": ["decode"]},
    "function": {"function": None},
    "staged": {"staged": "later"},
    "tensors": {"tensors": [numpy.zeros(4)]},
    "rows": {"rows": 2.5},
    "rows below 0": {"rows": -1},
    "rows that are a bool": {"rows": True},
    "values": {"values": {"scales": [1.0]}},
    "capabilities": {"capabilities": [{}]},
}


@pytest.mark.parametrize("name", NO_STEPS)
def test_what_no_step_can_be_made_of_is_refused_by_name(name):
    whole = {"identity": "step", "function": int, "tensors": {"x": numpy.zeros(4)}}
    CallableStep(**whole, driver=EmulatedDriver())
    field = name.split()[0]
    with pytest.raises((CacheTypeError, ConfigurationError), match=rf"^{field}.*: expected"):
        CallableStep(**(whole | NO_STEPS[name]), driver=EmulatedDriver())


@pytest.mark.parametrize("given", [{"identity": []}, {"rows": "2"}, {"capabilities": ({},)}])
def test_what_no_step_of_a_plan_can_be_made_of_is_refused_by_name(given):
    (name,) = given
    plan = GraphPlan("fill")
    plan.memset(plan.buffer("x", (4,), "float64"), 0.0)
    whole = {"identity": "step", "plan": plan, "buffers": {"x": numpy.zeros(4)}}
    with pytest.raises((CacheTypeError, ConfigurationError), match=rf"^{name}.*: expected"):
        PlanStep(**(whole | given), driver=EmulatedDriver())


def test_a_value_that_can_change_in_place_is_refused_and_the_step_stays_what_it_was():
    step = CallableStep("step", int, tensors={"x": numpy.zeros(4)}, driver=EmulatedDriver())
    before = step.uid, step.records()
    with pytest.raises(CacheTypeError, match=r"values\['scales'\]: expected a hashable value"):
        step.set_value("scales", [1.0])
    assert (step.uid, step.records()) == before


@pytest.mark.parametrize("doubles", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_reuse_is_not_doubled_and_goes_on(doubles):
    lane = Scene(EmulatedDriver()).lane()
    lane.kinds(3)
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        doubles(lane.scene.reuse)
    assert lane.run().kind is Kind.REPLAY
