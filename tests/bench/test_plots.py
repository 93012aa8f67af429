"""Pictures of results: every arm is a bar, ours first, and the pictures on file are up to date."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.repository import ROOT

from graphcore.bench import plots
from graphcore.errors import ConfigurationError

RESULTS = ROOT / "benchmarks/results"
ROW: dict[str, Any] = {
    "case": "n<1>", "unit": "us", "ours": 2.0, "floor": 1.0, "peers": {"torch": 4.0, "CuPy": None},
}  # fmt: skip
RESULT: dict[str, Any] = {
    "suite": "launch", "device": "A device", "driver": "cuda", "versions": {}, "rows": [ROW],
    "commit": "0123456789abcdef", "date": "2026-01-01", "notes": [],
}  # fmt: skip


def test_a_case_has_a_bar_for_each_arm_that_was_measured_on_one_scale() -> None:
    drawn = plots.picture(RESULT)
    bars = re.findall(r'width="([\d.]+)" height="13" rx="2" class="(\w+)"', drawn)
    assert [kind for _, kind in bars] == ["ours", "floor", "peer"]
    widths = [float(width) for width, _ in bars]
    assert widths == [plots.BAR / 2, plots.BAR / 4, float(plots.BAR)]
    assert "n&lt;1&gt;" in drawn
    assert "CuPy" not in drawn
    assert "us: smaller is better" in drawn
    assert "prefers-color-scheme:dark" in drawn


def test_rates_say_that_larger_is_better_and_a_case_of_zeros_is_drawn() -> None:
    row = {**ROW, "unit": "tokens/s", "ours": 0.0, "floor": None, "peers": {}}
    assert "tokens/s: larger is better" in plots.picture({**RESULT, "rows": [row]})


def test_a_result_without_rows_has_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="launch: expected rows, got none"):
        plots.picture({**RESULT, "rows": []})
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
    shown = (ROOT / "docs/peers.md").read_text(encoding="utf-8")
    unshown = [path.name for path in folder.glob("bench-*.svg") if path.name not in shown]
    assert unshown == [], "a picture of a new suite gets a section in docs/peers.md"
