"""`graphcore bench`: on the emulated driver it runs through, and says that it means nothing."""

import json

import pytest

from graphcore.bench import command, main
from graphcore.bench.harness import python_arm
from graphcore.bench.suites import SUITES, Request, launch, load_suite
from graphcore.driver import open_driver
from graphcore.errors import ConfigurationError, GraphcoreError


@pytest.fixture
def written(tmp_path, capsys):
    path = tmp_path / "results" / "launch.json"
    assert main(["launch", "--driver", "emulated", "--out", str(path)]) == 0
    return json.loads(path.read_text()), capsys.readouterr().out


def test_suite_launch_gives_plain_and_guarded_rows_of_stable_names(written):
    report, _ = written
    assert [row["case"] for row in report["rows"]] == [
        "n=1",
        "n=1 guarded",
        "n=16",
        "n=16 guarded",
    ]
    for row in report["rows"]:
        assert row["unit"] == "us"
        assert row["ours"] > 0
        assert row["floor"] > 0
        assert row["peers"]
        assert row["spread"]["of_floor"][0] <= row["of_floor"] <= row["spread"]["of_floor"][1]


def test_costs_paid_once_are_notes_not_rows(written):
    report, _ = written
    cases = {note.get("case") for note in report["notes"]}
    assert {"instantiate n=16", "upload n=16", "first launch n=16"} <= cases


def test_an_emulated_result_is_marked_in_the_file_and_in_the_table(written):
    report, printed = written
    assert "say nothing" in report["meaningless"]
    assert printed.rstrip().endswith("say nothing about CUDA")
    assert (report["driver"], report["suite"]) == ("emulated", "launch")


def test_nothing_is_written_without_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "--driver", "emulated"]) == 0
    assert list(tmp_path.iterdir()) == []
    assert "n=16 guarded" in capsys.readouterr().out


def test_an_unusable_driver_is_said_and_gives_status_two(monkeypatch, capsys):
    monkeypatch.setattr(command, "open_driver", _no_driver)
    assert main(["launch"]) == 2
    assert "graphcore bench: no device" in capsys.readouterr().err


def _no_driver(name, device):
    raise GraphcoreError("no device")


def test_too_few_rounds_are_refused_on_a_device():
    class Device:
        is_emulated = False

    with pytest.raises(ConfigurationError, match="rounds: expected at least 7, got 3"):
        command.run("launch", Device(), rounds=3)


def test_an_unknown_suite_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        main(["nothing"])
    assert "launch" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(SUITES))
def test_every_suite_in_the_registry_can_be_loaded(name):
    assert callable(load_suite(name))


def test_peers_that_are_left_out_or_broken_are_listed_by_name(monkeypatch):
    def broken(chain):
        raise RuntimeError("not compiled for this device")

    good = launch.EMULATED_PEERS["driver call"]
    peers = {"fine": good, "broken": broken, "unwanted": broken}
    monkeypatch.setattr(launch, "EMULATED_PEERS", peers)
    measured = launch.run(open_driver("emulated"), Request(7, frozenset({"unwanted"})))
    left_out = [note for note in measured.notes if "left out" in note]
    assert left_out == [
        {"left out": "broken", "reason": "RuntimeError: not compiled for this device"},
        {"left out": "unwanted", "reason": "asked for"},
    ]
    assert set(measured.rows[0].peers) == {"fine"}


def test_a_peer_to_leave_out_that_is_none_is_refused_by_name(capsys):
    assert main(["launch", "--driver", "emulated", "--without", "tensorflow"]) == 2
    said = capsys.readouterr().err
    assert "--without: expected peers of the suite" in said
    assert "got ['tensorflow']" in said


def test_without_any_peer_there_is_no_row_to_make():
    with pytest.raises(ConfigurationError, match="peers: expected at least one"):
        launch.run(open_driver("emulated"), Request(7, frozenset({"driver call"})))


def test_an_arm_that_does_not_run_the_chain_is_found_out(monkeypatch):
    monkeypatch.setattr(launch, "_floor_arm", _lazy_floor)
    with pytest.raises(GraphcoreError, match="arm lazy: expected one launch to add 1, got 0"):
        launch.run(open_driver("emulated"), Request(7))


def _lazy_floor(chain):
    chain.check("lazy", lambda: None)
    return python_arm("lazy", lambda: None)
