"""What a replay of GraphReuse costs the host: calls are counted, not timed."""

from __future__ import annotations

import os

import pytest
from helpers.isolated import run_script

from graphcore.moe.steps.fact_finder import is_disabled

# in a process of its own: coverage and debuggers trace every line of this one
_COUNT = """
import sys, tracemalloc
from helpers.moe_steps import Scene
from graphcore.driver.emulated import EmulatedDriver

driver = EmulatedDriver()
scene = Scene(driver)
scene.reuse.observers.clear()
lane = scene.LANE()
kinds = [lane.run().kind.value for _ in range(3)]
assert kinds == ["direct", "capture", "replay"], kinds

def bound():
    return None

driver.bind_launch = lambda executable, stream: bound
lane.executable._unbind()
run, step, stream, other = scene.reuse.run, lane.step, scene.stream, driver.stream()
for _ in range(3):
    run(step, stream=stream)
tracemalloc.start()
run(step, stream=stream)
before = tracemalloc.get_traced_memory()[0]
for _ in range(50):
    run(step, stream=stream)
grown = tracemalloc.get_traced_memory()[0] - before
tracemalloc.stop()

calls = []
def note(frame, event, argument):
    if event == "call":
        calls.append(frame.f_code.co_name)

sys.setprofile(note)
result = run(step, stream=GIVEN)
sys.setprofile(None)
print(result.kind.value, grown, *calls)
"""


def counted(stream: str, lane: str = "lane") -> list[str]:
    done = run_script(_COUNT.replace("GIVEN", stream).replace("LANE", lane))
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_replay_of_unchanged_slots_is_one_launch_and_few_looks() -> None:
    kind, grown, *calls = counted("stream")
    assert kind == "replay"
    assert int(grown) < 2000, "50 steps leave a few numbers behind, and no object each"
    assert (calls[0], calls.count("launch"), calls.count("bound")) == ("run", 1, 1)
    assert calls == ["run", "replay", "enter_again", "launch", "bound", "leave", "_noted", "note"]


def test_a_replay_of_a_plan_asks_it_whether_it_has_grown_and_no_more() -> None:
    kind, _, *calls = counted("stream", lane="plan_lane")
    assert kind == "replay"
    assert (calls[:2], calls[-6:]) == (
        ["run", "replay"],
        ["enter_again", "launch", "bound", "leave", "_noted", "note"],
    )
    assert calls[2:-6] == ["uid", "revision", "revisions", "obstacle"]


def test_a_step_on_another_stream_is_decided_anew_and_costs_what_that_does() -> None:
    _, _, *calls = counted("other")
    assert "find" in calls
    assert len(calls) > 100


@pytest.mark.parametrize("value", ["1", "0", "", "on"])
def test_whether_graphs_are_switched_off_is_read_as_the_environment_says_it(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("GRAPHCORE_DISABLE", value)
    assert is_disabled() is (os.environ["GRAPHCORE_DISABLE"] == "1")
    monkeypatch.delenv("GRAPHCORE_DISABLE")
    assert not is_disabled()
