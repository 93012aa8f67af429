"""DeviceClock: a device's times on the host's clock, however late the host sees them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import EventHandle, StreamHandle
from graphcore.moe.reports.device_clock import DeviceClock

SKEW = 7.5  # of the device's clock against the host's


class _Device(EmulatedDriver):
    """Whose events come ``late`` after they are recorded, and are seen ``unseen`` after that."""

    def __init__(self, late: Iterator[float], unseen: Iterator[float]) -> None:
        super().__init__()
        self.now, self.late, self.unseen = 0.0, late, unseen
        self.times: dict[EventHandle, float] = {}

    def clock(self) -> float:
        return self.now

    def record_event(
        self, event: EventHandle, stream: StreamHandle, *, external: bool = False
    ) -> None:
        super().record_event(event, stream, external=external)
        self.now += next(self.late)
        self.times[event] = self.now + SKEW

    def synchronize_event(self, event: EventHandle) -> None:
        super().synchronize_event(event)
        self.now += next(self.unseen)

    def elapsed_ms(self, start: EventHandle, end: EventHandle) -> float:
        return (self.times[end] - self.times[start]) * 1e3


def forever(*values: float) -> Iterator[float]:
    while True:
        yield from values


def test_a_quiet_device_is_met_to_within_the_time_that_one_event_takes() -> None:
    driver = _Device(forever(2e-6), forever(4e-6))
    clock = DeviceClock(driver, driver.clock)
    assert clock.uncertainty == pytest.approx(6e-6)
    event, stream = driver.event(timing=True), driver.stream()
    stream.record(event)
    assert clock.time_of(event) == pytest.approx(driver.times[event.handle] - SKEW, abs=3e-6)


def test_events_that_come_late_and_are_seen_late_leave_what_all_of_them_allow() -> None:
    # one comes at once and is seen late, the next comes late and is seen at once: 1 ms wide each
    driver = _Device(forever(1e-6, 1e-3), forever(1e-3, 2e-6))
    clock = DeviceClock(driver, driver.clock)
    assert clock.uncertainty == pytest.approx(3e-6)


@pytest.mark.parametrize("is_late", [True, False], ids=["comes late", "seen late"])
def test_what_is_known_of_an_event_moves_its_time_and_those_that_follow_no_further_than_it_must(
    is_late: bool,
) -> None:
    driver = _Device(forever(1e-3 if is_late else 1e-6), forever(1e-6 if is_late else 1e-3))
    clock = DeviceClock(driver, driver.clock)
    assert clock.uncertainty == pytest.approx(1.001e-3)
    stream, found = driver.stream(), []
    for wait in (1.0, 2.0, 3.0):
        driver.now += wait
        event = driver.event(timing=True)
        stream.record(event)
        time = driver.times[event.handle] - SKEW
        if is_late:
            clock.not_before(event, time - 10e-6)
        else:
            clock.not_after(event, time + 10e-6)
        found.append(clock.time_of(event) - time)
    sign = -1 if is_late else 1
    assert found == pytest.approx([sign * 10e-6] * 3, abs=1e-9)


def test_a_clock_that_runs_away_is_followed() -> None:
    driver = _Device(forever(1e-6), forever(1e-6))
    clock = DeviceClock(driver, driver.clock)
    stream = driver.stream()
    for number in range(1, 20):
        driver.now += 1.0
        event = driver.event(timing=True)
        stream.record(event)
        driver.times[event.handle] += number * 50e-6
        clock.not_after(event, driver.now + 5e-6)
        assert clock.time_of(event) == pytest.approx(driver.now, abs=6e-6)
