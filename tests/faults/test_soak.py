"""Random operations on graphs, caches and experts: right at every step, and memory flat."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from helpers.repository import ROOT
from helpers.soak import Soak, is_flat, main

from graphcore import GraphcoreWarning
from graphcore.driver import Driver, Stream
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.lent_streams import lane_of

STEPS = 300  # `make soak` does ten thousand
RECORD = ROOT / "benchmarks/results/h200/soak.json"
WORKSPACE = 34 << 20  # bytes of one stream's on an H200, in a pool of its own


@pytest.mark.exclusive  # compares the device's free memory
def test_random_operations_on_all_three_systems_are_right_and_leave_memory_flat(
    graphcore_driver: Driver,
) -> None:
    soak = Soak(graphcore_driver, seed=5)
    with warnings.catch_warnings():
        # a fault that a finalizer meets cannot be raised
        warnings.simplefilter("ignore", GraphcoreWarning)
        soak.run(STEPS // 5)
        before = soak.held()
        soak.run(STEPS - STEPS // 5)
        after = soak.held()
    blocks = after.pop("python blocks") - before.pop("python blocks")
    assert after == before
    assert blocks < 12_000, "Python's own memory grows"
    assert soak.done.keys() == soak.operations.keys(), "every operation was done"
    if graphcore_driver.is_emulated:
        assert soak.failed >= STEPS / 300


def test_a_soak_writes_down_what_it_has_held_and_says_where_that_grew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHCORE_DRIVER", "emulated")
    out = tmp_path / "soak.json"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphcoreWarning)
        assert main(40, 3, out) == 0
        found = json.loads(out.read_text())
        assert (found["steps"], len(found["held"])) == (40, 11)
        assert 20 < sum(found["done"].values()) <= 40, "without those that met a fault"
        assert is_flat(found["held"], 40)

        held, kept = Soak.held, []

        def growing(soak: Soak) -> dict[str, int]:
            kept.append(soak.driver.alloc(64))
            return held(soak)

        monkeypatch.setattr(Soak, "held", growing)
        assert main(40, 3) == 1


def test_ten_thousand_operations_on_a_device_left_memory_flat() -> None:
    found = json.loads(RECORD.read_text(encoding="utf-8"))
    assert (found["driver"], found["steps"], found["faults"]) == ("cuda", 10_000, 0)
    assert sum(found["done"].values()) == 10_000
    assert len(found["held"]) == 11
    assert is_flat(found["held"], 10_000)
    # a control: one workspace more in the last tenth
    grown = dict(found["held"][-1])
    grown["device bytes"] += WORKSPACE
    assert not is_flat([*found["held"][:-1], grown], 10_000)


class Furnishing(EmulatedDriver):
    """Something is kept for each stream that products were captured on, as torch does."""

    furnished = 0

    def capture_stream(self, *, blocking: bool = False, products: bool = False) -> Stream:
        stream = super().capture_stream(blocking=blocking, products=products)
        lane = lane_of(stream)
        assert lane is not None
        if products and not lane.belongings:
            lane.belongings.append(Kept())
            self.furnished += 1
        return stream


class Kept:
    def is_needed(self) -> bool:
        return True

    def is_burden(self) -> bool:
        return False


def test_runners_that_are_made_anew_leave_no_more_streams_with_a_workspace() -> None:
    driver = Furnishing()
    soak = Soak(driver, seed=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphcoreWarning)
        soak.held()
        before = driver.furnished
        for _ in range(4):
            soak.run(5)
            soak.held()
    assert driver.furnished == before == 1
    assert driver.capture_streams.idle > 4, "there were others to take"
