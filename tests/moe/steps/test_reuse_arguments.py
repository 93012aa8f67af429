"""What a GraphReuse is given and cannot be: refused by name before anything is made or launched."""

from __future__ import annotations

import copy
import pickle

import pytest
from helpers.moe_steps import Scene

from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import CacheTypeError, ConfigurationError
from graphcore.moe import GraphReuse, Kind


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
    [{"prompt_rows": -1}, {"prompt_rows": 3}, {"prompt_rows": 1.0}, {"phase": "decode"}],
    ids=str,
)
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


@pytest.mark.parametrize("doubles", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_reuse_is_not_doubled_and_goes_on(doubles):
    lane = Scene(EmulatedDriver()).lane()
    lane.kinds(3)
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        doubles(lane.scene.reuse)
    assert lane.run().kind is Kind.REPLAY
