"""Result files: the schema that tables and later readers rely on."""

import json

import pytest

from graphcore.bench import provenance
from graphcore.bench.results import Report, row_of
from graphcore.bench.timings import Timings

TIMINGS = Timings(
    {
        "ours": [(2e-6, 2e-6), (2e-6, 2e-6)],
        "C loop": [(1e-6, 1e-6), (1e-6, 1e-6)],
        "torch": [(8e-6, 8e-6), (8e-6, 8e-6)],
        "CuPy": [(3e-6, 3e-6), (5e-6, 5e-6)],
    }
)


def row(allowance=0.0):
    return row_of(
        "n=16", TIMINGS, ours="ours", floor="C loop", peers=["torch", "CuPy"], allowance=allowance
    )


def report(**changes):
    fields = {
        "suite": "launch",
        "device": "NVIDIA H200",
        "driver": "cuda",
        "versions": {"python": "3.12.3"},
        "commit": "abc",
        "date": "2026-01-31",
        "rows": [row()],
        "notes": [{"left out": "cuda.core", "reason": "not installed"}],
    }
    return Report(**fields | changes)


def test_a_row_says_how_good_ours_is_against_floor_and_best_peer():
    assert row().as_json() == {
        "case": "n=16",
        "unit": "us",
        "ours": 2.0,
        "floor": 1.0,
        "peers": {"torch": 8.0, "CuPy": 4.0},
        "of_floor": 0.5,
        "vs_best_peer": 2.0,
        "spread": {
            "of_floor": [0.5, 0.5],
            "vs_best_peer": [1.5, 2.5],
            "ours_against_ours": [1.0, 1.0],
        },
        "error": None,
    }


def test_an_allowance_moves_the_floor_only():
    guarded = row(allowance=1e-6)
    assert (guarded.floor, guarded.of_floor) == (pytest.approx(2.0), pytest.approx(1.0))
    assert guarded.vs_best_peer == row().vs_best_peer


def test_a_report_has_the_fields_of_the_schema_in_order():
    assert list(report().as_json()) == [
        "suite",
        "device",
        "driver",
        "versions",
        "commit",
        "date",
        "rows",
        "notes",
    ]


def test_an_emulated_report_says_that_it_means_nothing():
    emulated = report(is_meaningless=True)
    assert "say nothing" in emulated.as_json()["meaningless"]
    assert emulated.table().endswith("say nothing about CUDA")
    assert "meaningless" not in report().as_json()


def test_writing_makes_the_folder_and_reads_back_equal(tmp_path):
    path = tmp_path / "h200" / "launch.json"
    report().write(path)
    assert json.loads(path.read_text()) == report().as_json()


def test_the_table_shows_rows_peers_and_what_was_left_out():
    table = report().table()
    assert "n=16" in table
    assert "torch 8.00" in table
    assert "left out cuda.core, reason not installed" in table


def test_the_commit_comes_from_the_environment_first(monkeypatch):
    monkeypatch.setenv("GRAPHCORE_COMMIT", "1234abcd")
    assert provenance.commit() == "1234abcd"


def test_a_commit_nobody_knows_is_unknown(monkeypatch):
    monkeypatch.delenv("GRAPHCORE_COMMIT", raising=False)
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() == "unknown"
