"""``graphcore moe``: the tokens are those without graphs, and what was done is told and written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from graphcore.cli import main
from graphcore.cli import moe as command
from graphcore.cli.moe import MODELS, MoEOptions, Run, moe, parse_slots
from graphcore.cli.moe_model import DecoderShape, RandomDecoder
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import CapacityError, ConfigurationError
from graphcore.moe import Row

SMALL: dict[str, Any] = {"layers": 1, "hidden": 32, "heads": 2, "experts": 6, "expert_width": 16}


def run(driver: Driver, **more: Any) -> int:
    return moe(MoEOptions(driver=driver.name, tokens=20, **(SMALL | more)))


def test_tokens_are_compared_and_the_report_printed(
    capsys: pytest.CaptureFixture[str], graphcore_driver: Driver
) -> None:
    assert run(graphcore_driver, requests=3) == 0
    said = capsys.readouterr()
    assert "equal: all 60 tokens are those of the same steps without graphs" in said.err
    assert ("no GPU is used" in said.err) is graphcore_driver.is_emulated
    assert said.out.startswith("Reuse of graphs with experts in slots")
    for heading in ("Outcomes", "Time of a call", "Variants", "Experts by group"):
        assert heading in said.out
    assert "replay" in said.out


@pytest.mark.parametrize(
    ("boundary", "overlap"), [(None, None), ("0", "1"), ("1", "0"), ("1", "1")], ids=str
)
def test_the_switches_do_what_they_say(
    boundary: str | None,
    overlap: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    graphcore_driver: Driver,
) -> None:
    for name in ("BOUNDARY_OVERLAP", "OVERLAP"):
        monkeypatch.delenv(f"GRAPHCORE_DECODE_{name}", raising=False)
    switches = {"decode_boundary_overlap": boundary, "decode_overlap": overlap}
    assert run(graphcore_driver, bucket=8, **switches) == 0
    said = capsys.readouterr().out
    for name, value in switches.items():
        source = "default" if value is None else "command line"
        assert f"{name} {'on' if value == '1' else 'off'} ({source})" in said
    # an update, which a device may refuse
    changed = ("changed outside the experts' resources", "the driver refuses the update")
    assert any(each in said for each in changed) is (boundary == "1")
    assert ("and no update is allowed" in said) is (boundary != "1")
    assert f"{19 if overlap == '1' else 0} of 20" in said
    assert ("the option decode_overlap is on" in said) is (overlap != "1")


def test_the_environment_switches_too_and_the_command_line_beats_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHCORE_DECODE_OVERLAP", "1")
    monkeypatch.setenv("GRAPHCORE_DECODE_BOUNDARY_OVERLAP", "1")
    assert run(EmulatedDriver(), decode_boundary_overlap="0") == 0
    said = capsys.readouterr().out
    assert "decode_boundary_overlap off (command line)" in said
    assert "decode_overlap on (environment)" in said


def test_report_and_trace_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], graphcore_driver: Driver
) -> None:
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    assert run(graphcore_driver, report=page, trace=trace, decode_overlap="1") == 0
    markup = page.read_text(encoding="utf-8")
    assert markup.startswith("<!doctype html>")
    assert "Why steps were not queued ahead" not in markup  # each one was
    assert "of it while the step before ran" in markup
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    runs = [event for event in events if event.get("cat") == "device"]
    assert len(runs) == 20  # the comparison is not in it
    said = capsys.readouterr()
    assert "device" in said.out.split("Time of a call")[1].splitlines()[1]
    assert str(page) in said.err
    assert str(trace) in said.err


@pytest.mark.parametrize("slots", ["1", "50%", "100%"])
def test_any_number_of_slots_gives_the_same_tokens(
    slots: str, capsys: pytest.CaptureFixture[str], graphcore_driver: Driver
) -> None:
    assert run(graphcore_driver, slots=slots) == 0
    count = {"1": 1, "50%": 3, "100%": 6}[slots]
    said = capsys.readouterr()
    assert f"{count} slots a layer" in said.err
    # two rows of two experts: fewer than four slots do not serve every step
    for words in ("the plan is not grouped", "Experts through scratch memory"):
        assert (words in said.out) is (count < 4)


def test_different_tokens_are_told_by_the_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(*_: object) -> Run:
        return Run({1: [1] * 20, 2: [1] * 20}, 1.0)

    monkeypatch.setattr(command, "_without_graphs", other)
    assert run(EmulatedDriver()) == 1
    assert "DIFFERENT: the tokens of requests [1, 2]" in capsys.readouterr().err


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_sizes_that_fit_and_can_be_made_smaller(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = DecoderShape(**MODELS[name])
    assert shape.hidden % shape.heads == 0
    smaller = {"layers": 1, "hidden": 32, "heads": 2, "expert_width": 16, "dtype": "float32"}
    options = MoEOptions(model=name, driver="emulated", tokens=4, rows=1, **smaller)
    assert moe(options) == 0
    assert f"{shape.experts} experts of width 16, {shape.top_k} a token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--slots", "0"], "--slots: expected 1 to 16, or a share such as 25%, got '0'"),
        (["--slots", "17"], "--slots: expected 1 to 16"),
        (["--slots", "many"], "got 'many'"),
        (["--slots", "1%"], "got '1%'"),
        (["--slots", "nan%"], "got 'nan%'"),
        (["--decode-overlap", "2"], "--decode-overlap: expected 0 or 1, got '2'"),
        (["--decode-boundary-overlap", "on"], "--decode-boundary-overlap: expected 0 or 1"),
        (["--top-k", "17"], "top_k: expected at most 16, got 17"),
        (["--hidden", "30"], "hidden: expected a multiple of 4 heads, got 30"),
        (["--report", "none/there/x.html"], "--report: expected a file in a writable folder"),
        (["--trace", "none/there/x.json"], "--trace: expected a file in a writable folder"),
        (["--tokens", "0"], "expected a positive whole number"),
        (["--model", "huge"], "invalid choice: 'huge'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["moe", "--driver", "emulated", *arguments]) == 2
    found = capsys.readouterr()
    assert said in found.err
    assert "Traceback" not in found.err
    assert found.out == ""


@pytest.mark.parametrize(
    ("text", "experts", "routes", "slots"),
    [(None, 128, 8, 64), (None, 16, 12, 12), (None, 8, 40, 8), ("25%", 128, 8, 32), ("3", 8, 4, 3)],
)
def test_slots_are_a_number_a_share_or_what_a_step_needs(
    text: str | None, experts: int, routes: int, slots: int
) -> None:
    assert parse_slots(text, experts, routes) == slots


def test_without_torch_the_missing_package_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "graphcore.cli.moe_model")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["moe", "--driver", "emulated"]) == 2
    assert "graphcore moe: the model needs torch: pip install" in capsys.readouterr().err


def test_the_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["moe", "--help"]) == 0
    said = capsys.readouterr().out
    for name in ("slots", "tokens", "decode-boundary-overlap", "decode-overlap", "report", "trace"):
        assert f"--{name}" in said


def test_the_command_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "graphcore", "moe", "--driver", "emulated", "--tokens", "3",
         "--layers", "1", "--report", str(tmp_path / "page.html")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Outcomes" in done.stdout
    assert (tmp_path / "page.html").exists()


def test_a_position_beyond_the_cache_is_refused() -> None:
    model = RandomDecoder(DecoderShape(**SMALL, positions=8, bucket=4), 4, EmulatedDriver())
    model.prepare([Row(1, 0, 7)])
    with pytest.raises(CapacityError, match="position: expected at most 7, got 8"):
        model.prepare([Row(1, 0, 8)])


@pytest.mark.parametrize("values", [{"top_k": 7}, {"hidden": 33}], ids=str)
def test_sizes_that_do_not_fit_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError):
        DecoderShape(**(SMALL | values))
