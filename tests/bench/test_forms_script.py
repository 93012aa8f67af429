"""The script that holds forms of the grouped product against each other, on the emulated driver."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from helpers.repository import ROOT

from graphcore.bench.replays import Replayed
from graphcore.bench.suites.grouped_cases import GroupedCase, Shape
from graphcore.bench.suites.grouped_floors import Floors, effort_of
from graphcore.bench.suites.grouped_operands import BOUNDS
from graphcore.bench.suites.grouped_ways import Product
from graphcore.bench.targets import Target
from graphcore.driver import open_driver
from graphcore.errors import ConfigurationError

PATH = ROOT / "benchmarks/forms.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("benchmark_forms", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measured(script, path, *arguments):
    """(exit status, what was written)."""
    status = script.main([*arguments, "--driver", "emulated", "--out", str(path)])
    return status, json.loads(path.read_text())


def test_the_script_checks_times_and_writes_every_form_of_every_case(script, tmp_path, capsys):
    asked = ["mixtral-up T=8", "qwen3-up T=5 tf32x3", "dense T=48"]
    status, report = measured(script, tmp_path / "new" / "found.json", *asked)
    assert status == 0
    assert report["suite"] == "grouped forms"
    assert "emulated" in report["meaningless"]
    assert report["rates"].keys() == {
        "streaming read", "dense product, bf16 (for bf16)", "dense product, float32 (for tf32x3)"
    }  # fmt: skip
    found = {case["case"]: case for case in report["cases"]}
    assert list(found) == asked
    printed = capsys.readouterr().out
    for name, case in found.items():
        precision = "tf32x3" if name.endswith("tf32x3") else "bf16"
        assert case["forms"].keys() == set(script.forms_by_name(precision))
        assert case["left_out"] == {}
        assert case["chosen"] in case["forms"]
        assert case["floors_us"].keys() == {"streaming read", "dense product"}
        assert case["floors_us"][case["floor"]] == max(case["floors_us"].values())
        for form, told in case["forms"].items():
            assert 0 < told["error"] < BOUNDS[precision]
            of_floor = case["floors_us"][case["floor"]] / told["us"]
            assert told["of_floor"] == pytest.approx(of_floor, rel=2e-3)
            low, high = told["spread"]["of_floor"]
            assert low - 1e-4 <= told["of_floor"] <= high + 1e-4
            assert f"  {form:<14}" in printed
    assert (found["mixtral-up T=8"]["rows"], found["dense T=48"]["experts_hit"]) == (16, 1)
    dense = found["dense T=48"]["forms"]["tile64"]
    assert dense["TFLOP/s"] == pytest.approx(2 * 48**3 / dense["us"] / 1e6, rel=2e-3)
    assert dense["TB/s"] == pytest.approx(2 * 48**2 / dense["us"] / 1e6, rel=2e-3)


def test_a_form_that_is_refused_or_wrong_is_left_out_by_name(script, tmp_path, monkeypatch, capsys):
    ours = script.ours

    def wrong(driver, stream, calls, form):
        products = ours(driver, stream, calls, form=form)
        if form != "tile64":
            return products

        def spoilt(product):
            def launch(stream):
                product(stream)
                product.out[-1] = product.out[-1].flip(0)

            return Product(launch, product.out)

        return [spoilt(product) for product in products]

    monkeypatch.setattr(script, "ours", wrong)
    asked = ("qwen3-up T=5", "--precision", "ieee", "--forms", "wide,tile64,tile128,flow")
    status, report = measured(script, tmp_path / "found.json", *asked)
    (case,) = report["cases"]
    assert status == 0
    assert case["case"] == "qwen3-up T=5 ieee"
    assert case["forms"].keys() == {"wide", "tile128"}
    assert case["left_out"].keys() == {"tile64", "flow"}
    assert "tile64: expected an error of 1e-05" in case["left_out"]["tile64"]
    assert case["left_out"]["flow"].startswith("ConfigurationError: form: expected one of")
    printed = capsys.readouterr()
    assert "  flow          left out: ConfigurationError" in printed.out
    assert "qwen3-up T=5 ieee: tile64: GraphcoreError: bench grouped" in printed.err
    # with no form that is right the case fails, and its floors are written all the same
    only = ("qwen3-up T=5", "--precision", "ieee", "--forms", "tile64")
    status, report = measured(script, tmp_path / "none.json", *only)
    assert (status, report["cases"][0]["forms"]) == (1, {})
    assert report["cases"][0]["floors_us"]["dense product"] > 0


def test_what_was_found_stays_written_when_a_later_case_ends_the_run(script, tmp_path, monkeypatch):
    of = script.Comparison.of

    def failing(self, case, names):
        if case.name == "qwen3-up T=5":
            raise ConfigurationError("the device is gone")
        return of(self, case, names)

    monkeypatch.setattr(script.Comparison, "of", failing)
    asked = ("mixtral-up T=1", "qwen3-up T=5", "--forms", "tile64")
    status, report = measured(script, tmp_path / "found.json", *asked)
    assert status == 2
    assert [case["case"] for case in report["cases"]] == ["mixtral-up T=1"]


def test_names_that_are_none_are_refused_before_anything_is_measured(script, capsys):
    assert script.main(["qwen3-up T=6", "--driver", "emulated"]) == 2
    assert "'qwen3-up T=5'" in capsys.readouterr().err
    for forms in ("tile65", "tile64,tile64"):
        with pytest.raises(SystemExit) as exited:
            script.main(["qwen3-up T=5", "--driver", "emulated", "--forms", forms])
        assert exited.value.code == 2
        assert f"got '{forms}'" in capsys.readouterr().err


def test_the_script_runs_as_its_help_says():
    paths = [str(ROOT), str(ROOT / "kernels")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(PATH), "mixtral-up T=1", "--driver", "emulated"]
    done = subprocess.run(
        [*command, "--forms", "direct"], capture_output=True, text=True, timeout=120,
        env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "mixtral-up T=1: streaming read" in done.stdout


@pytest.mark.gpu
def test_a_device_times_forms_beside_its_floors(script, tmp_path):
    path = tmp_path / "found.json"
    asked = ["qwen3-down T=1", "--forms", "direct,tile64", "--driver", "cuda", "--out", str(path)]
    assert script.main(asked) == 0
    (case,) = json.loads(path.read_text())["cases"]
    assert case["forms"].keys() == {"direct", "tile64"}
    assert case["floor"] == "streaming read"
    assert 0.1 < case["forms"]["direct"]["of_floor"] < 1.5


# ---- floors --------------------------------------------------------------------------------------


def test_each_precision_has_a_dense_product_of_its_own_that_is_made_once(monkeypatch):
    driver, told, seen = open_driver("emulated"), [], []
    multiply = torch.mm

    def noted(a, b, *, out):
        seen.append((a.dtype, torch.get_float32_matmul_precision()))
        return multiply(a, b, out=out)

    monkeypatch.setattr(torch, "mm", noted)
    before = torch.get_float32_matmul_precision()
    with driver.stream(blocking=True) as stream:
        floors = Floors(driver, stream, lambda *note: told.append(note))
        for precision in ("bf16", "ieee", "tf32x3", "tf32"):
            case = GroupedCase(Shape("it", 2, 1, 8, 16), 4, "uniform", precision, Target())
            warm = len(seen)
            floors.dense(case)
            assert seen[warm] == expected_of(precision)
            warm = len(seen)
            floors.dense(case)
            assert len(seen) == warm
    assert [what for what, _, _ in told] == [
        "streaming read", "dense product, bf16 (for bf16)", "dense product, float32 (for ieee)",
        "dense product, float32 (for tf32x3)", "dense product, float32 (for tf32)",
    ]  # fmt: skip
    assert torch.get_float32_matmul_precision() == before


def expected_of(precision):
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return dtype, "high" if precision == "tf32" else "highest"


def test_a_floor_is_the_share_of_its_own_size_that_a_case_needs(monkeypatch):
    driver, shares = open_driver("emulated"), []
    arm = Replayed.arm

    def noted(self, *, share=1.0, turns=None):
        shares.append(share)
        return arm(self, share=share, turns=turns)

    case = GroupedCase(Shape("it", 2, 1, 8, 16), 4, "uniform", "ieee", Target())
    with driver.stream(blocking=True) as stream:
        floors = Floors(driver, stream, lambda *note: None)
        floors.dense(case)
        monkeypatch.setattr(Replayed, "arm", noted)
        assert floors.dense(case).burst(1) > 0
        assert floors.read(1 << 12).burst(1) > 0
        assert effort_of(driver, 7, floors.read(1), 3).calls == 1
    assert shares == [2 * 4 * 8 * 16 / (2 * 64**3), 1 / 4, 1 / (1 << 14)]
