"""Processes in turns: ready side by side, measured one at a time, one that dies leaves the rest."""

import time

import pytest

from graphcore.bench import turns
from graphcore.bench.turns import Lost, take_turns

BEGIN = """
import sys, time
from graphcore.bench.turns import Turn
turn = Turn()
print("what a library prints")
loaded = time.time()
"""
TAKES_ITS_TURN = f"""{BEGIN}
turn.wait()
began = time.time()
time.sleep(0.05)
turn.give({{"name": sys.argv[1], "loaded": loaded, "began": began, "ended": time.time()}})
"""
DIES_EARLY = f"{BEGIN}\nsys.exit(3)"
DIES_IN_ITS_TURN = f"{BEGIN}\nturn.wait()\nsys.exit(4)"
HANGS = f"{BEGIN}\ntime.sleep(60)"


def command(code, *arguments):
    return ["-c", code, *arguments]


@pytest.mark.parametrize("side_by_side", [True, False], ids=["side by side", "one by one"])
def test_each_measures_while_the_others_rest(side_by_side):
    names = ["first", "second", "third"]
    commands = {name: command(TAKES_ITS_TURN, name) for name in names}
    found = take_turns(commands, side_by_side=side_by_side)
    assert [found[name]["name"] for name in names] == names
    for one, next_one in (("first", "second"), ("second", "third")):
        assert found[one]["ended"] <= found[next_one]["began"]
    loaded = max(found[name]["loaded"] for name in names)
    # all are ready before the first measures, or else each starts when the one before is gone
    assert (loaded <= found["first"]["began"]) is side_by_side


def test_one_that_dies_is_told_and_the_others_measure():
    commands = {
        "early": command(DIES_EARLY),
        "late": command(DIES_IN_ITS_TURN),
        "whole": command(TAKES_ITS_TURN, "whole"),
    }
    found = take_turns(commands)
    assert list(found) == ["early", "late", "whole"]
    assert [str(found[name]) for name in ("early", "late")] == [
        "the process ended with status 3",
        "the process ended with status 4",
    ]
    assert found["whole"]["name"] == "whole"


def test_one_that_hangs_is_killed(monkeypatch):
    monkeypatch.setattr(turns, "_LONGEST_WAIT", 1.0)
    began = time.monotonic()
    lost = take_turns({"hangs": command(HANGS)})["hangs"]
    assert isinstance(lost, Lost)
    assert "status -9" in str(lost)
    assert time.monotonic() - began < 30
