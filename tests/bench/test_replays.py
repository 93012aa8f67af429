"""Arms by the device's clock: every call runs as often as it is counted, captured or called."""

import pytest
import torch

from graphcore.bench.replays import Replayed, cached_bytes, replayed, seconds_of, torch_device
from graphcore.driver import open_driver


@pytest.fixture
def counted(graphcore_driver):
    device = torch_device(graphcore_driver)
    sums = [torch.zeros((), device=device) for _ in range(3)]
    with graphcore_driver.stream(blocking=True) as stream:
        calls = [lambda stream, each=each: each.add_(1) for each in sums]
        yield graphcore_driver, stream, sums, calls


@pytest.mark.parametrize("is_captured", [True, False], ids=["captured", "called"])
def test_a_burst_runs_its_calls_in_turn_as_often_as_asked(counted, is_captured):
    driver, stream, sums, calls = counted
    made = replayed("it", driver, stream, calls, is_captured=is_captured)
    assert (made.executable is None) == (driver.is_emulated or not is_captured)
    driver.synchronize()
    for each in sums:
        each.zero_()
    driver.synchronize()
    assert made.arm().burst(6) > 0
    assert [float(each) for each in sums] == [2.0, 2.0, 2.0]


def test_a_burst_of_fewer_calls_than_there_are_counts_its_share_only(counted, monkeypatch):
    driver, stream, sums, calls = counted
    del sums
    made = Replayed("it", driver, stream, calls, None)
    monkeypatch.setattr(type(driver), "elapsed_ms", lambda *_: 3000.0)
    assert made.arm().burst(3) == pytest.approx(3.0)
    assert made.arm().burst(1) == pytest.approx(1.0)
    assert made.arm(share=0.5).burst(9) == pytest.approx(4.5 / 3)


def test_what_a_call_raises_is_raised_before_anything_is_timed():
    def broken(stream):
        raise RuntimeError("no such kernel")

    driver = open_driver("emulated")
    with driver.stream() as stream, pytest.raises(RuntimeError, match="no such kernel"):
        replayed("it", driver, stream, [broken])


def test_facts_of_the_device(graphcore_driver):
    assert seconds_of(graphcore_driver, lambda: None) >= 0
    assert (cached_bytes(graphcore_driver) == 0) == graphcore_driver.is_emulated
