"""Charts of made-up results: places of bars, lines and marks are what the figures say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.svg_boxes import Box, Chart

from graphcore.bench import plots
from graphcore.bench.plot_launches import launch_lines
from graphcore.bench.plot_shares import of_floor, of_reading
from graphcore.bench.results import Row
from graphcore.bench.targets import Target, target_share
from graphcore.errors import ConfigurationError


def result(suite: str, rows: list[dict[str, Any]], notes: Any = ()) -> dict[str, Any]:
    return {
        "suite": suite, "device": "A device", "driver": "cuda", "versions": {}, "rows": rows,
        "commit": "0123456789abcdef", "date": "2026-01-01", "notes": list(notes),
    }  # fmt: skip


def row(case: str, ours: float, floor: float, unit: str = "us", **peers: float) -> dict[str, Any]:
    share = floor / ours if unit == "us" else ours / floor
    return {
        "case": case, "unit": unit, "ours": ours, "floor": floor, "peers": peers,
        "of_floor": share, "vs_best_peer": 1.0, "spread": {}, "error": None,
    }  # fmt: skip


# ---- launch -----------------------------------------------------------------------------------

LAUNCHES = [
    row("n=1", 2.0, 1.0, torch=4.0),
    row("n=1 guarded", 2.2, 1.2, torch=4.0),
    row("n=10", 20.0, 10.0, torch=5.0, CuPy=20.5),
    row("n=10 guarded", 22.0, 10.2, torch=5.0, CuPy=20.5),
    row("n=100", 200.0, 100.0, torch=6.0, CuPy=205.0),
]


def test_launches_are_lines_over_nodes_with_both_axes_logarithmic() -> None:
    chart = Chart(launch_lines(result("launch", LAUNCHES)))
    (floor, _) = chart.lines_of("floor")  # the line, and the one to its name
    (x0, y0), (x1, y1), (x2, y2) = floor
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)  # 1, 10, 100 nodes
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.2)  # 1, 10, 100 us
    assert y2 < y1 < y0
    guarded, _, ours, _ = chart.lines_of("ours")
    assert len(guarded) == 2
    assert [x for x, _ in ours] == [x0, x1, x2]
    decade = y0 - y1
    double = [below - above for (_, below), (_, above) in zip(floor, ours, strict=True)]
    assert double == pytest.approx([decade * 0.30103] * 3, abs=0.2)


def test_a_peer_that_was_not_measured_everywhere_has_the_points_it_has() -> None:
    chart = Chart(launch_lines(result("launch", LAUNCHES)))
    assert [len(chart.lines_of(kind)[0]) for kind in ("first", "second")] == [3, 2]
    assert {"6.00 us torch", "205.00 us CuPy", "200.00 us graphcore"} <= set(chart.words())
    assert "22.00 us graphcore, guarded" in chart.words()


def test_names_of_lines_that_end_at_one_place_stand_apart_in_order() -> None:
    peers = {f"peer {number}": 200.0 + number for number in range(6)}
    rows = [row(f"n={count}", 200.0, 199.0, **peers) for count in (1, 16)]
    chart = Chart(launch_lines(result("launch", rows)))
    assert chart.clashes() == []
    names = sorted((box for box in chart.texts if " us " in box.what), key=lambda box: box.top)
    values = [float(box.what.split()[0]) for box in names if box.left > 600]
    assert len(values) == 8
    assert values == sorted(values, reverse=True)


def test_launches_of_one_size_make_no_line_and_odd_cases_are_refused() -> None:
    assert launch_lines(result("launch", LAUNCHES[:2])) is None
    with pytest.raises(ConfigurationError, match=r"expected cases n=COUNT .* got 'whole'"):
        launch_lines(result("launch", [row("whole", 1.0, 1.0)]))
    with pytest.raises(ConfigurationError, match="expected times above 0"):
        launch_lines(result("launch", [row("n=1", 1.0, 0.0), LAUNCHES[2]]))


# ---- shares of the floor ----------------------------------------------------------------------


def told(case: str, target: Target, ours: float, floor: float) -> Any:
    return target.told(Row(case, "us", ours, floor, {"torch": 9.0}, floor / ours, 1.0, {}))


NOTES = [
    {"case": "wide: bytes moved", "unit": "GB/s", "ours": 1.0},
    {"about": "wide: the floor is torch add", "torch add": 80.0},
    told("wide", Target(of_floor=0.9, vs_best_peer=1.0), 100.0, 80.0),
    told("tiny", Target(vs_best_peer=1.0, most=2.5), 1.0, 1.2),
]
COPIES = result(
    "copy", [row("wide", 100.0, 80.0, torch=160.0, CuPy=320.0), row("tiny", 1.0, 1.2, CuPy=2.4)],
    NOTES,
)  # fmt: skip


def scale(chart: Chart) -> tuple[float, float]:
    """(where 0 is, where 1 is): a bar's left end, and the line of the floor."""
    (line,) = chart.lines_of("floor")
    return chart.bars_of("ours")[0].left, line[0][0]


def shares(chart: Chart, kind: str) -> list[float]:
    zero, one = scale(chart)
    return [round((bar.right - zero) / (one - zero), 2) for bar in chart.bars_of(kind)]


def test_bars_end_at_shares_of_the_floor_which_is_a_line_at_one() -> None:
    chart = Chart(of_floor(COPIES))
    assert shares(chart, "ours") == [0.8, 1.2]
    assert shares(chart, "peer") == [0.5, 0.5]  # the fastest of each
    assert {"of torch add", "160 us torch", "2.4 us CuPy", "1: the floor"} <= set(chart.words())
    assert "320 us CuPy" not in chart.words()
    assert chart.clashes() == []


def test_targets_are_marked_where_the_notes_of_the_run_have_them() -> None:
    def middles(chart: Chart) -> list[float]:
        zero, one = scale(chart)
        marks = chart.bars_of("target")
        return [round(((each.left + each.right) / 2 - zero) / (one - zero), 2) for each in marks]

    assert middles(Chart(of_floor(COPIES))) == [0.9, round(1.2 / 2.5, 2)]
    bare = Chart(of_floor({**COPIES, "notes": []}))
    assert middles(bare) == []
    assert "target" not in bare.words()


@pytest.mark.parametrize(
    ("target", "share"),
    [
        (Target(of_floor=0.93), 0.93),
        (Target(of_floor=0.93, vs_best_peer=1.0, most=2.5, error=2e-6), 0.93),
        (Target(vs_best_peer=1.0, most=2.5), 0.8),
        (Target(vs_best_peer=1.0), None),
    ],
    ids=str,
)
def test_a_told_target_is_read_back_as_a_share_of_the_floor(
    target: Target, share: float | None
) -> None:
    note = told("wide", target, 4.0, 2.0)
    assert target_share(note, "wide", 2.0) == share
    assert target_share(note, "wider", 2.0) is None
    assert target_share({"case": "wide", "ours": 1.0}, "wide", 2.0) is None


def test_products_are_drawn_against_their_ceilings_with_long_names(tmp_path: Path) -> None:
    cases = ["deepseek-up T=16384 zipf", "qwen3-up T=4096 tf32x3", "qwen3-layer T=512"]
    rows = [row(case, 100.0, 90.0, **{"transformers batched_mm": 950.0}) for case in cases]
    rows[1] = row(cases[1], 100.0, 230.0, torch=240.0)  # of a slower dense product
    notes = [{"about": f"{case}: the floor is streaming read"} for case in cases]
    notes += [told(case, Target(of_floor=2.2), 100.0, 90.0) for case in cases[1:2]]
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu/grouped.json").write_text(json.dumps(result("grouped", rows, notes)))
    made = plots.pictures(tmp_path)
    assert made.keys() == {"bench-grouped.svg", "bench-grouped-ceiling.svg"}
    chart = Chart(made["bench-grouped-ceiling.svg"])
    assert shares(chart, "ours") == [0.9, 2.3, 0.9]
    assert chart.words().count("of streaming read") == 3
    assert chart.clashes() == []


# ---- roofline ---------------------------------------------------------------------------------

DECODED = [
    row("big", 5000.0, 5100.0, "tokens/s", eager=100.0, compiled=2500.0),
    row("big plain", 2000.0, 2000.0, "tokens/s", eager=100.0),
    row("big one launch", 4000.0, 5100.0, "tokens/s", eager=100.0),
    row("big host", 5.0, 3.0, torch=6.0),
    row("small", 300.0, 300.0, "tokens/s", eager=100.0),
]
READ = [
    {"case": "big streaming read", "unit": "GB/s", "ours": 1000.0},
    {"case": "big ours compiled: bytes of a step", "unit": "MB", "ours": 100.0},
    {"case": "big ours plain: bytes of a step", "unit": "MB", "ours": 100.0},
    {"case": "small streaming read", "unit": "GB/s", "ours": 1000.0},
]


def test_decoding_is_a_share_of_what_reading_weights_k_and_v_allows() -> None:
    chart = Chart(of_reading(result("decode", DECODED, READ)))
    assert shares(chart, "ours") == [0.5, 0.4, 0.2]  # of 1000 GB/s over 100 MB: 10000 tokens/s
    assert shares(chart, "peer") == [0.25, 0.01]
    words = chart.words()
    assert {"100 MB a token", "10,000 tokens/s", "0.500", "5,000 tokens/s graphcore"} <= set(words)
    assert {"4,000 tokens/s graphcore in one launch", "0.010", "100 tokens/s eager"} <= set(words)
    assert chart.clashes() == []
    tops = [box.top for box in chart.texts if box.what.startswith("0.") and len(box.what) == 5]
    assert tops == sorted(tops)


def test_a_model_whose_bytes_were_not_told_is_left_out() -> None:
    assert "small" not in Chart(of_reading(result("decode", DECODED, READ))).words()


@pytest.mark.parametrize("lacking", ["streaming read", "bytes of a step"])
def test_without_bytes_or_the_ceiling_there_is_no_roofline(tmp_path: Path, lacking: str) -> None:
    notes = [note for note in READ if lacking not in note["case"]]
    path = tmp_path / "gpu/decode.json"
    path.parent.mkdir()
    path.write_text(json.dumps(result("decode", DECODED, notes)))
    assert plots.pictures(tmp_path).keys() == {"bench-decode.svg"}
    path.write_text(json.dumps(result("decode", DECODED, READ)))
    assert plots.pictures(tmp_path).keys() == {"bench-decode.svg", "bench-decode-roofline.svg"}


def test_boxes_that_only_touch_do_not_meet() -> None:
    box = Box("it", 0, 0, 10, 10)
    assert not box.meets(Box("beside", 10, 0, 20, 10))
    assert box.meets(Box("over", 9, 9, 20, 20))
