"""Suites in parts: cases apart, results joined, a case that dies leaves the others."""

import json
import subprocess
import types
from dataclasses import replace
from pathlib import Path

import pytest

from graphcore.bench import command, main, parts
from graphcore.bench.results import Report, Row
from graphcore.errors import ConfigurationError


def part(case, **changes):
    row = Row(
        case=case,
        unit="tokens/s",
        ours=900.0,
        floor=910.0,
        peers={"torch graph": 800.0},
        of_floor=0.99,
        vs_best_peer=1.12,
        spread={"of_floor": [0.98, 1.0]},
        error=0.0,
    )
    whole = Report(
        suite="decode",
        device="NVIDIA H200",
        driver="cuda",
        versions={"torch": "2.11.0"},
        commit="a" * 40,
        date="2026-01-31",
        rows=[row],
        notes=[{"case": f"{case} nodes", "unit": "nodes", "ours": 313}],
    )
    return replace(whole, **changes)


def test_a_result_is_read_as_it_was_written(tmp_path):
    for report in (part("llama-1b"), part("t5-base", is_meaningless=True)):
        report.write(tmp_path / "it.json")
        assert parts.read(tmp_path / "it.json") == report


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"rows": [1]}'], ids=range(4))
def test_what_is_no_result_is_refused_by_name(tmp_path, text):
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"odd\.json: expected a result"):
        parts.read(path)


def test_joined_parts_keep_their_order_and_tell_of_older_commits():
    whole = parts.joined([part("smollm2", commit="b" * 40), part("llama-1b")])
    assert [row.case for row in whole.rows] == ["smollm2", "llama-1b"]
    assert whole.commit == "a" * 40
    assert {"about": "smollm2: of commit bbbbbbbbbbbb, 2026-01-31"} in whole.notes
    assert sum("about" in note for note in whole.notes) == 1


@pytest.mark.parametrize(
    "changes",
    [{"suite": "launch"}, {"device": "H100"}, {"driver": "emulated"}, {"versions": {}}],
    ids=["suite", "device", "driver", "versions"],
)
def test_parts_that_do_not_belong_together_are_refused(changes):
    with pytest.raises(ConfigurationError, match=f"parts: expected one {next(iter(changes))}"):
        parts.joined([part("smollm2"), part("llama-1b", **changes)])


def test_files_of_parts_are_joined_by_a_command(tmp_path, capsys):
    paths = [tmp_path / f"{case}.json" for case in ("smollm2", "llama-1b")]
    for path in paths:
        part(path.stem).write(path)
    assert parts.main([str(tmp_path / "whole.json"), *map(str, paths)]) == 0
    whole = json.loads((tmp_path / "whole.json").read_text())
    assert [row["case"] for row in whole["rows"]] == ["smollm2", "llama-1b"]
    assert "llama-1b" in capsys.readouterr().out


@pytest.fixture
def processes(monkeypatch):
    """Stands in for the processes: the second case dies."""
    asked = []

    def run(arguments, check):
        options = arguments[arguments.index("bench") + 1 :]
        asked.append(options)
        case, path = options[options.index("--only") + 1], options[options.index("--out") + 1]
        if case != "llama-1b":
            part(case).write(Path(path))
        return types.SimpleNamespace(returncode=-9 if case == "llama-1b" else 0)

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_a_case_that_dies_is_a_note_and_the_others_are_written(processes, tmp_path, capsys):
    path = tmp_path / "decode.json"
    arguments = ["decode", "--rounds", "9", "--without", "torch graph", "--driver", "cuda"]
    cases = ["--only", "smollm2", "--only", "llama-1b", "--only", "t5-base"]
    assert main([*arguments, *cases, "--out", str(path)]) == 0
    report = json.loads(path.read_text())
    assert [row["case"] for row in report["rows"]] == ["smollm2", "t5-base"]
    assert {"left out": "llama-1b", "reason": "exit status -9"} in report["notes"]
    for options in processes:
        assert options[:3] == ["decode", "--rounds", "9"]
        assert options[options.index("--without") + 1] == "torch graph"
        assert options[options.index("--driver") + 1] == "cuda"


def test_the_result_is_kept_after_every_case(processes):
    kept = []
    parts.run_parts(["smollm2", "llama-1b", "t5-base"], ["decode"], kept.append)
    assert [[row.case for row in report.rows] for report in kept] == [
        ["smollm2"],
        ["smollm2"],
        ["smollm2", "t5-base"],
    ]


def test_without_any_result_there_is_nothing_to_join(processes):
    with pytest.raises(ConfigurationError, match="a result of one case at least"):
        parts.run_parts(["llama-1b"], ["decode"], lambda report: None)


def test_a_suite_without_cases_of_its_own_refuses_to_be_cut(capsys):
    assert main(["launch", "--driver", "emulated", "--only", "n=1"]) == 2
    assert "--only: suite launch is measured as a whole" in capsys.readouterr().err


def test_one_case_runs_in_this_process(monkeypatch):
    seen = {}

    def run(suite, driver, **options):
        seen.update(options, suite=suite)
        return part("smollm2")

    monkeypatch.setattr(command, "run", run)
    assert main(["decode", "--driver", "emulated", "--only", "smollm2"]) == 0
    assert (seen["suite"], seen["only"]) == ("decode", ["smollm2"])
