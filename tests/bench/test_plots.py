"""Pictures of results: every arm is a bar, ours first, and the pictures on file are up to date."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.repository import ROOT
from helpers.svg_boxes import Chart, contrast

from graphcore.bench import plots, svg
from graphcore.bench.plot_bars import bars
from graphcore.errors import ConfigurationError

RESULTS = ROOT / "benchmarks/results"
PICTURES = sorted((ROOT / "docs/images").glob("bench-*.svg"))
ROW: dict[str, Any] = {
    "case": "n<1>", "unit": "us", "ours": 2.0, "floor": 1.0, "peers": {"torch": 4.0, "CuPy": None},
}  # fmt: skip
RESULT: dict[str, Any] = {
    "suite": "inspect", "device": "A device", "driver": "cuda", "versions": {}, "rows": [ROW],
    "commit": "0123456789abcdef", "date": "2026-01-01", "notes": [],
}  # fmt: skip


def test_a_case_has_a_bar_for_each_arm_that_was_measured_on_one_scale() -> None:
    drawn = bars(RESULT)
    found = [bar for bar in Chart(drawn).bars if bar.what != "paper"]
    assert [bar.what for bar in found] == ["ours", "floor", "peer"]
    widths = [bar.right - bar.left for bar in found]
    assert widths == [widths[2] / 2, widths[2] / 4, 378]
    assert "n&lt;1&gt;" in drawn
    assert "CuPy" not in drawn
    assert "us: smaller is better" in drawn
    assert "prefers-color-scheme:dark" in drawn


def test_rates_say_that_larger_is_better_and_a_case_of_zeros_is_drawn() -> None:
    row = {**ROW, "unit": "tokens/s", "ours": 0.0, "floor": None, "peers": {}}
    assert "tokens/s: larger is better" in bars({**RESULT, "rows": [row]})


def test_a_result_without_rows_has_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="inspect: expected rows, got none"):
        bars({**RESULT, "rows": []})
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu/inspect.json").write_text(json.dumps({**RESULT, "rows": []}))
    assert plots.pictures(tmp_path) == {}


@pytest.mark.parametrize("content", ["{", '{"rows": [{}]}', '{"rows": 3}', "[1]"])
def test_what_is_no_result_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu/odd.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"odd\.json: expected a result of a suite"):
        plots.pictures(tmp_path)


def test_a_picture_that_is_not_that_of_its_results_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plots.main([str(tmp_path), str(RESULTS), "--check"]) == 1
    assert "bench-launch.svg: not the picture of the results" in capsys.readouterr().out
    assert plots.main([str(tmp_path), str(RESULTS)]) == 0
    assert plots.main([str(tmp_path), str(RESULTS), "--check"]) == 0


def test_the_pictures_on_file_are_those_of_the_results() -> None:
    folder = ROOT / "docs/images"
    assert plots.main([str(folder), str(RESULTS), "--check"]) == 0
    pages = [ROOT / "docs" / name for name in ("peers.md", "benchmarks.md")]
    shown = "".join(page.read_text(encoding="utf-8") for page in pages)
    unshown = [path.name for path in PICTURES if f"(images/{path.name})" not in shown]
    assert unshown == [], "a picture of a new suite gets a section in docs/peers.md"


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_no_text_of_a_picture_on_file_meets_another_or_a_bar(path: Path) -> None:
    assert Chart(path.read_text(encoding="utf-8")).clashes() == []


def test_a_text_on_another_on_a_bar_or_beyond_the_edge_would_be_seen() -> None:
    body = [
        svg.text(100, 80, "one"), svg.text(110, 84, "two"), svg.text(880, 80, "beyond"),
        svg.bar(300, 100, 50, "ours"), svg.text(340, 110, "three"),
    ]  # fmt: skip
    found = Chart(svg.chart("title", "under", body, 120)).clashes()
    assert found == [("one", "two"), ("three", "ours"), ("beyond", "the edge")]


@pytest.mark.parametrize("column", [0, 1], ids=["light", "dark"])
def test_texts_and_lines_stand_out_from_their_paper(column: int) -> None:
    paper = svg.COLOURS["paper"][column]
    least = dict.fromkeys(("ink", "faint"), 4.5)
    least |= dict.fromkeys(("ours", "floor", "target", *svg.PEERS), 3.0)
    found = {kind: contrast(svg.COLOURS[kind][column], paper) for kind in least}
    assert {kind: found[kind] for kind in least if found[kind] < least[kind]} == {}
