"""The doctor names what is there, what is missing, and what mends it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from graphcore.cli import doctor, main
from graphcore.cli.model import INSTALL_MODEL
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import DriverUnavailable
from graphcore.testing.plugin import why_no_gpu


def found() -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.findings()}


@pytest.mark.skipif(why_no_gpu() is None, reason="needs a machine without a CUDA device")
@pytest.mark.parametrize(("options", "status"), [([], 0), (["--driver", "cuda"], 1)], ids=str)
def test_without_a_device_the_driver_is_missing_and_the_remedy_named(
    capsys: pytest.CaptureFixture[str], options: list[str], status: int
) -> None:
    assert main(["doctor", *options]) == status
    said = capsys.readouterr().out
    assert "cuda driver" in said
    assert "install an NVIDIA driver that serves CUDA 13" in said
    assert "need attention" in said
    assert "the emulated driver works; no GPU" in said
    assert ("not usable: driver 'cuda'" in said) is bool(status)


def test_where_no_driver_works_the_doctor_ends_in_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(name: str) -> EmulatedDriver:
        raise DriverUnavailable(f"driver {name!r}: nothing here")

    monkeypatch.setattr(doctor, "open_driver", broken)
    assert doctor.doctor() == 1
    said = capsys.readouterr().out
    assert "not usable: no driver works here" in said
    assert "pip install 'numpy>=2'" in said


def test_a_device_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "open_driver", lambda name: EmulatedDriver())
    findings = found()
    assert findings["device 0"].value.startswith("emulated device, sm_")
    assert findings["cuda driver"].remedy is None


def test_a_missing_package_comes_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "cupy-cuda13x":
            raise PackageNotFoundError(name)
        return {"torch": "2.4.1+cu121"}.get(name, "99.0")

    monkeypatch.setattr(doctor, "version", version)
    findings = found()
    assert findings["cupy-cuda13x"].remedy == "pip install 'cupy-cuda13x>=14.2'"
    assert "older than the tested 2.11" in findings["torch"].value
    assert findings["torch"].remedy == "pip install 'torch>=2.11'"
    assert findings["numpy"].remedy is None


def test_a_missing_model_comes_with_its_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GRAPHCORE_SMOLLM2", str(tmp_path / "none.gguf"))
    finding = found()["demo model"]
    assert finding.remedy == INSTALL_MODEL
    assert "GRAPHCORE_SMOLLM2" in finding.value


def test_all_is_well_is_said_and_ends_in_zero(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fine = doctor.Finding("cuda driver", "CUDA 13.0", driver="cuda")
    monkeypatch.setattr(doctor, "findings", lambda: iter([fine]))
    assert doctor.doctor() == 0
    said = capsys.readouterr().out
    assert "all is well" in said
    assert "no GPU" not in said
