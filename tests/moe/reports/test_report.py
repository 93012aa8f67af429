"""The report of a GraphReuse: every number is the one of what was run, whole and in words."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers.moe_steps import EXPERTS, HIDDEN, INTER, LAYERS, SLOTS, Scene

from graphcore.driver import Driver
from graphcore.moe import Kind, Reason, ReuseReport, StagedTotals, Way

EXPERT_BYTES = 4 * (2 * INTER * HIDDEN + HIDDEN * INTER)
HOSTILE = "<script>alert(1)</script>"


def calls(report: ReuseReport) -> dict[tuple[Kind, Reason], int]:
    return {(line.kind, line.reason): line.calls for line in report.outcomes}


def test_every_call_counts_once_by_kind_and_reason(graphcore_driver: Driver) -> None:
    scene = Scene(graphcore_driver)
    lane = scene.lane()
    results = [lane.run() for _ in range(5)]
    lane.move_output()
    results += [lane.run() for _ in range(4)]
    report = scene.reuse.report()
    assert calls(report) == Counter((each.kind, each.reason) for each in results)
    assert sum(line.calls for line in report.outcomes) == report.counters.calls == 9
    assert {kind: total.calls for kind, total in report.totals.items()} == Counter(
        each.kind for each in results
    )


def test_hits_admissions_and_bytes_are_those_of_the_slots(graphcore_driver: Driver) -> None:
    scene = Scene(graphcore_driver)
    lane = scene.lane()
    admitted = 0
    for _ in range(6):
        lane.run()
        admitted += sum(each.outcome().misses for each in lane.layers.admissions.values())
    report = scene.reuse.report()
    assert report.admissions == admitted > 0
    assert report.moved_bytes == admitted * EXPERT_BYTES
    assert report.hit_rate == report.hits / (report.hits + admitted)
    assert [(each.name, each.slots, each.experts) for each in report.groups] == [
        (name, SLOTS, EXPERTS) for name in LAYERS
    ]
    assert report.pool_bytes == scene.pool.nbytes


def test_steps_whose_ids_name_no_expert_are_told_with_what_was_wrong(
    graphcore_driver: Driver,
) -> None:
    scene = Scene(graphcore_driver)
    lane = scene.lane()
    for _ in range(3):
        lane.run()
    assert [each.fault.count for each in scene.reuse.report().groups] == [0] * len(LAYERS)
    lane.choose([EXPERTS + 7, EXPERTS + 8])
    scene.reuse.run(lane.step)
    report = scene.reuse.report()
    assert [each.fault.count for each in report.groups] == [1] * len(LAYERS)
    assert report.groups[0].fault.status.name == "INVALID_ROUTE"
    assert f"1 ({report.groups[0].fault.status.reason})" in str(report)


def test_a_declined_boundary_says_why(graphcore_driver: Driver) -> None:
    scene = Scene(graphcore_driver)
    lane = scene.lane()
    lane.kinds(3)
    lane.move_output()
    lane.run()
    (line,) = scene.reuse.report().declined()
    assert (line.kind, line.reason, line.way) == (Kind.DECLINED, Reason.PROPERTIES, Way.DIRECT)
    assert "the option decode_boundary_overlap is on (it is off)" in line.detail
    assert line.last == 4
    assert line.detail in str(scene.reuse.report())


def test_an_updated_boundary_is_told_and_is_not_declined(graphcore_driver: Driver) -> None:
    scene = Scene(graphcore_driver, decode_boundary_overlap=1)
    lane = scene.lane()
    lane.kinds(3)
    home = lane.out
    other = lane.move_output()
    lane.run()
    for target in (home, other, home):
        lane.move_output(target)
        lane.run()
    report = scene.reuse.report()
    assert not list(report.declined())
    assert [(line.kind, line.calls, line.last) for line in report.boundaries] == [
        (Kind.UPDATE, 2, 7), (Kind.UPDATE, 2, 6),
    ]  # fmt: skip


def test_variants_have_their_memory_and_those_that_went_their_cause(
    graphcore_driver: Driver,
) -> None:
    scene = Scene(graphcore_driver, max_entries=1)
    first, second = scene.lane(), scene.lane(name="other")
    first.kinds(4)
    second.kinds(2)
    report = scene.reuse.report()
    sizes = {line.name: (line.nodes, line.bytes, line.uses) for line in report.variants}
    assert sizes["decode: decode, main, 2 rows"] == (None, None, 0)
    nodes, nbytes, uses = sizes["other: decode, main, 2 rows"]
    assert nodes > 0
    assert nbytes == scene.reuse.cache.bytes == report.graph_bytes > 0
    assert uses == 2  # made and launched
    (gone,) = report.departures
    assert gone.name == "decode: decode, main, 2 rows"
    assert gone.cause == "the number of entries"
    assert gone.cause in str(report)


def test_times_are_of_the_host_and_of_the_device_where_a_trace_measured_it(
    graphcore_driver: Driver,
) -> None:
    scene = Scene(graphcore_driver)
    scene.lane().kinds(3)
    report = scene.reuse.report()
    seconds = report.totals[Kind.CAPTURE].seconds
    assert min(seconds.capture, seconds.update, seconds.launch) > 0
    assert f"{seconds.capture * 1e6:.1f}" in str(report)
    assert "device" not in str(report).split("Time of a call")[1].splitlines()[1]
    assert ("say nothing about a GPU" in str(report)) is graphcore_driver.is_emulated


def test_the_parts_of_a_call_follow_each_other_and_come_to_its_seconds(
    graphcore_driver: Driver,
) -> None:
    scene = Scene(graphcore_driver, decode_boundary_overlap=1)
    lane = scene.lane()
    lane.kinds(3)
    lane.move_output()
    lane.run()
    expected = [
        ["prepare", "launch"],
        ["prepare", "capture", "update", "launch"],
        ["launch"],
        ["prepare", "capture", "update", "launch", "cleanup"],
    ]
    for record, names in zip(scene.seen, expected, strict=True):
        parts = record.parts
        seen = [part.name for part in parts if not (record.result.kind is Kind.REPLAY
                                                    and part.name == "prepare")]  # fmt: skip
        assert seen == names
        times = [time for part in parts for time in (part.begin, part.end)]
        assert times == sorted(times)
        for part in parts:
            if part.name != "prepare":
                took = getattr(record.result.seconds, part.name)
                assert took >= part.end - part.begin > 0


def test_a_reuse_without_a_pool_or_a_step_has_a_report_too(graphcore_driver: Driver) -> None:
    scene = Scene(graphcore_driver)
    scene.reuse.pool = None
    report = scene.reuse.report()
    assert (report.hit_rate, report.groups, report.counters.calls) == (None, (), 0)
    assert "no pool of slots" in str(report)
    assert "gc-stack" not in report.to_html_page().split("</style>")[1]


def test_a_hostile_name_of_a_graph_stays_a_name(graphcore_driver: Driver) -> None:
    scene = Scene(graphcore_driver)
    scene.lane(name=HOSTILE).run()
    report = scene.reuse.report()
    for markup in (report.to_html_page(), report._repr_html_()):
        assert "<script" not in markup
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in markup
    assert HOSTILE in str(report)


@pytest.mark.parametrize("form", ["page", "fragment"])
def test_page_and_fragment_show_what_the_text_says(form: str, graphcore_driver: Driver) -> None:
    scene = Scene(graphcore_driver)
    scene.lane().kinds(4)
    report = scene.reuse.report()
    markup = report.to_html_page() if form == "page" else report._repr_html_()
    for heading in ("Outcomes", "Time of a call", "Variants", "Experts by group"):
        assert heading in markup
        assert heading in str(report)
    assert markup.startswith("<!doctype html>" if form == "page" else "<style>")


def test_what_went_through_scratch_memory_is_told_apart(graphcore_driver: Driver) -> None:
    scene = Scene(graphcore_driver)
    scene.lane().kinds(2)
    staged = {"layers.0": StagedTotals(passes=3, routes=12, experts=7, nbytes=7 * EXPERT_BYTES)}
    plain, report = scene.reuse.report(), scene.reuse.report(staged=staged)
    assert report.staged_bytes == 7 * EXPERT_BYTES
    assert report.moved_bytes == plain.moved_bytes
    assert "Experts through scratch memory" in str(report)
    assert "through scratch" not in str(plain)


def test_a_reason_of_many_groups_is_cut_on_the_page_and_whole_in_the_values(
    graphcore_driver: Driver,
) -> None:
    scene = Scene(graphcore_driver)
    lane = scene.lane()
    lane.step.obstacle = "".join(f"group {number} will not; " for number in range(60))
    lane.kinds(1)
    report = scene.reuse.report()
    (line,) = report.declined()
    assert line.detail == lane.step.obstacle
    assert line.detail not in str(report)
    assert "group 5 will not" in str(report)
    assert "more characters" in report.to_html_page()
