"""The trace of steps: what took when, and that the host prepares behind the device where it may."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: the model of these tests is made of it")

from helpers.moe_decode import SETTINGS, SHAPE, Decoding, expected
from helpers.moe_steps import Scene
from helpers.tensors import cuda_driver
from helpers.timed_driver import TimedDriver

from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import CudaError
from graphcore.moe import DecodeRequest, GraphReuse, Kind, Row, Span, StepTrace
from graphcore.moe.reports.trace_events import HOST_LANES, hidden_seconds, to_json
from graphcore.testing import inject

PREPARING = 2e-3
NAMES = [f"boundary {boundary}, overlap {overlap}" for boundary, overlap in SETTINGS]
CAPTURED = {Kind.CAPTURE.value, Kind.UPDATE.value, Kind.REINSTANTIATE.value}
GRAPHS = {Kind.REPLAY.value, *CAPTURED}


def traced(driver: Driver, boundary: int, overlap: int, **more: Any) -> Decoding:
    """A decoding that a trace watches."""
    clock = {"clock": driver.clock} if isinstance(driver, TimedDriver) else {}

    def watch(reuse: GraphReuse) -> StepTrace:
        return StepTrace(driver, **clock).attach(reuse)

    return Decoding(driver, boundary, overlap, make_watch=watch, **more)


def by_step(spans: tuple[Span, ...], *lanes: str) -> dict[int, list[Span]]:
    found: dict[int, list[Span]] = {}
    for span in spans:
        if span.lane in lanes:
            found.setdefault(span.step, []).append(span)
    return found


# ---- what the options do -------------------------------------------------------------------------


@pytest.mark.parametrize(("boundary", "overlap"), SETTINGS, ids=NAMES)
def test_the_host_prepares_a_step_while_the_one_before_runs_with_the_option_and_never_without(
    boundary: int, overlap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = TimedDriver(graph_seconds=10e-3)
    driver.is_clock_of(monkeypatch)
    decoding = traced(driver, boundary, overlap)
    prepare = decoding.model.prepare

    def slowly(rows: tuple[Row, ...]) -> Any:
        driver.work(PREPARING)
        return prepare(rows)

    decoding.model.prepare = slowly
    decoding.run()
    spans = decoding.watch.spans
    host = by_step(spans, *HOST_LANES[:-1])
    device = {step: run for step, (run,) in by_step(spans, "device").items()}
    ahead = {step.ticket.number: step.ticket.is_ahead for step in decoding.steps}
    seen = 0
    for step, work in host.items():
        before = device.get(step - 1)
        # a step without a graph takes no simulated time
        if before is None or before.facts["kind"] not in GRAPHS:
            continue
        seen += 1
        assert before.seconds == pytest.approx(10e-3, rel=0.01)
        assert sum(span.seconds for span in work) > PREPARING
        if ahead[step]:
            assert all(span.lies_within(before) for span in work), step
        else:
            assert all(span.begin >= before.end for span in work), step
    assert seen > 12
    assert (sum(ahead.values()) > 12) == bool(overlap)
    if overlap and boundary:
        # captures and updates too lie behind the device
        updates = [span for span in spans if span.lane == "update" and ahead[span.step]]
        assert len(updates) >= 2
    _, hidden = decoding.watch.hidden
    assert (hidden > 12 * PREPARING) == bool(overlap)
    assert hidden == 0 or overlap


def test_decoding_ahead_takes_as_long_as_the_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {}
    for overlap in (0, 1):
        driver = TimedDriver(graph_seconds=10e-3)
        driver.is_clock_of(monkeypatch)
        decoding = traced(driver, 1, overlap)
        prepare = decoding.model.prepare
        decoding.model.prepare = lambda rows, p=prepare, d=driver: (d.work(PREPARING), p(rows))[1]
        decoding.run([DecodeRequest(1, 5, 20)])
        took[overlap] = driver.now
    # 19 steps through a graph, and the preparation of all 20, or of the first two
    assert took[0] > 19 * 10e-3 + 20 * PREPARING
    assert took[1] < 19 * 10e-3 + 4 * PREPARING


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [0, 1])
def test_on_a_device_too_the_host_prepares_behind_it_with_the_option_only(
    overlap: int,
) -> None:
    driver = cuda_driver()
    shape = replace(SHAPE, layers=6, hidden=256, heads=4, experts=32, expert_width=128)
    decoding = traced(driver, 1, overlap, slots=16, shape=replace(shape, positions=128))
    decoding.run([DecodeRequest(1, 5, 100), DecodeRequest(2, 9, 100)])
    trace = decoding.watch
    prepared = by_step(trace.spans, "prepare")
    device = {step: run for step, (run,) in by_step(trace.spans, "device").items()}
    slack = trace.uncertainty
    inside = [
        all(device[step - 1].begin - slack <= span.begin <= device[step - 1].end for span in spans)
        for step, spans in prepared.items()
        if step - 1 in device and device[step - 1].facts["kind"] in GRAPHS
    ]
    assert len(inside) > 80
    if overlap:
        assert sum(inside) > len(inside) / 2
    else:
        outside = [
            min(span.begin for span in spans) >= device[step - 1].end - slack
            for step, spans in prepared.items()
            if step - 1 in device
        ]
        assert all(outside)


def test_a_trace_changes_no_token(graphcore_driver: Driver) -> None:
    alone = expected(graphcore_driver)
    for boundary, overlap in SETTINGS:
        assert traced(graphcore_driver, boundary, overlap).run() == alone


# ---- what is in it -------------------------------------------------------------------------------


def test_every_step_has_its_parts_and_its_run_on_the_device(graphcore_driver: Driver) -> None:
    decoding = traced(graphcore_driver, 1, 1)
    decoding.run()
    spans = decoding.watch.spans
    steps = decoding.decode.totals.steps
    runs = by_step(spans, "device")
    assert sorted(runs) == list(range(1, steps + 1))
    assert all(len(each) == 1 for each in runs.values())
    kinds = {step: run.facts["kind"] for step, (run,) in runs.items()}
    assert kinds == {
        record.ticket.number: record.ticket.result.kind.value for record in decoding.steps
    }
    lanes = {span.lane for span in spans}
    assert lanes == {*HOST_LANES, "device"}
    for step, kind in kinds.items():
        parts = {span.lane for span in spans if span.step == step}
        assert {"prepare", "launch", "wait", "device"} <= parts
        assert ("update" in parts) == (kind in CAPTURED)
    ordered = [runs[step][0] for step in sorted(runs)]
    for before, after in pairwise(ordered):
        assert before.begin <= before.end <= after.end
    assert decoding.watch.lost == 0


def test_a_step_begins_on_the_device_when_it_is_launched_not_when_it_is_prepared(
    graphcore_driver: Driver,
) -> None:
    decoding = traced(graphcore_driver, 1, 0)
    decoding.run()
    spans = decoding.watch.spans
    launches = by_step(spans, "launch")
    for step, (run,) in by_step(spans, "device").items():
        assert run.begin >= launches[step][0].begin


def test_the_parts_of_plain_steps_are_there_without_a_decode(graphcore_driver: Driver) -> None:
    scene = Scene(graphcore_driver)
    trace = StepTrace(graphcore_driver).attach(scene.reuse)
    lane = scene.lane()
    lane.kinds(3)
    with trace.device("step", 4, scene.stream):
        lane.run()
    assert {span.lane for span in trace.spans if span.step == 2} == {
        "prepare", "capture", "update", "launch",
    }  # fmt: skip
    (run,) = by_step(trace.spans, "device")[4]
    assert run.facts["kind"] == Kind.REPLAY.value
    trace.detach(scene.reuse)
    trace.detach(scene.reuse)
    before = trace.spans
    lane.run()
    assert trace.spans == before


def test_the_report_has_device_times_of_a_trace(graphcore_driver: Driver) -> None:
    decoding = traced(graphcore_driver, 1, 1)
    decoding.run()
    report = decoding.reuse.report(decode=decoding.decode, trace=decoding.watch)
    device = {kind: (calls, seconds) for kind, calls, seconds in report.device_seconds}
    assert {kind: calls for kind, (calls, _) in device.items()} == {
        kind: total.calls for kind, total in report.totals.items()
    }
    calls, seconds = device[Kind.REPLAY]
    text = str(report)
    assert f"{seconds / calls * 1e6:.1f}" in text
    assert f" {report.overlap.ahead} of {report.overlap.steps}\n" in text
    assert "of it while the step before ran" in text
    assert "Why steps were not queued ahead" in report.to_html_page()


# ---- its form ------------------------------------------------------------------------------------


def test_the_file_is_what_trace_viewers_read(tmp_path: Any, graphcore_driver: Driver) -> None:
    decoding = traced(graphcore_driver, 1, 1)
    decoding.run()
    decoding.watch.write(tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    events = document["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(decoding.watch.spans)
    assert min(event["ts"] for event in complete) == 0
    for event in complete:
        assert {"name", "cat", "ts", "dur", "pid", "tid", "args"} <= event.keys()
        assert event["dur"] >= 0
    named = {(each["pid"], each["tid"]) for each in events if each["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in complete} <= named
    assert document["otherData"]["device_clock_uncertainty_us"] >= 0
    assert ("note" in document["otherData"]) == graphcore_driver.is_emulated


def test_a_trace_keeps_as_many_spans_as_it_is_told_and_counts_the_rest() -> None:
    driver = EmulatedDriver()
    trace = StepTrace(driver, most=3)
    for step in range(5):
        with trace.host("wait", step):
            pass
    assert [span.step for span in trace.spans] == [2, 3, 4]
    assert trace.lost == 2


def test_a_run_whose_events_cannot_be_read_is_counted_and_the_rest_stays() -> None:
    driver = EmulatedDriver()
    trace = StepTrace(driver)
    stream = driver.stream()
    for step in range(3):
        with trace.device("step", step, stream):
            pass
    with inject(driver, "elapsed_ms"):
        assert [span.step for span in trace.spans] == [0, 1]
    assert trace.lost == 1


def test_a_step_that_failed_leaves_no_run() -> None:
    driver = EmulatedDriver()
    trace = StepTrace(driver)
    stream = driver.stream()
    with pytest.raises(CudaError), trace.device("step", 1, stream), inject(driver, "alloc"):
        driver.alloc(8)
    assert trace.spans == ()


@pytest.mark.parametrize(
    ("host", "device", "hidden"),
    [
        ([(0, 10)], [(2, 4), (6, 8)], 4),
        ([(0, 2), (1, 4), (8, 9)], [(3, 20)], 2),
        ([(0, 2)], [(2, 4)], 0),
        ([], [(0, 1)], 0),
        ([(0, 1), (2, 3), (4, 5)], [(0.5, 4.5)], 2),
    ],
    ids=["inside", "overlapping", "apart", "no host", "across"],
)
def test_hidden_seconds_are_those_behind_the_step_before_and_count_once(
    host: list[tuple[float, float]], device: list[tuple[float, float]], hidden: float
) -> None:
    spans = [Span("prepare", "", 2, *each, {}) for each in host]
    spans += [Span("device", "", 1, *each, {}) for each in device]
    spans += [Span("wait", "", 2, 0, 100, {}), Span("device", "", 2, 0, 100, {})]
    total, found = hidden_seconds(spans)
    assert found == pytest.approx(hidden)
    union = sum(any(begin <= at / 100 < end for begin, end in host) for at in range(2000))
    assert total == pytest.approx(union / 100)


def test_an_empty_trace_is_a_file_too() -> None:
    assert [event["ph"] for event in json.loads(to_json([], {}))["traceEvents"]].count("X") == 0
