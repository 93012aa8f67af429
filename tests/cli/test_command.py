"""The command's arguments, exit statuses and refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import graphcore
from graphcore.cli import command, main
from graphcore.errors import DriverUnavailable
from graphcore.testing.plugin import why_no_gpu


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: command"),
        (["demo", "--max-new-tokens", "0"], "expected a positive whole number, got '0'"),
        (["demo", "--max-new-tokens", "many"], "expected a positive whole number, got 'many'"),
        (["demo", "--driver", "metal"], "invalid choice: 'metal'"),
        (["demo", "--dtype", "int4"], "invalid choice: 'int4'"),
    ],
    ids=["nothing", "no tokens", "words", "driver", "dtype"],
)
def test_arguments_that_cannot_work_end_in_two(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == graphcore.__version__


@pytest.mark.skipif(why_no_gpu() is None, reason="needs a machine without a CUDA device")
def test_cuda_without_a_device_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--driver", "cuda"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("graphcore demo: driver 'cuda': ")
    assert "\n" not in said


@pytest.mark.skipif(why_no_gpu() is None, reason="needs a machine without a CUDA device")
def test_debug_shows_the_traceback() -> None:
    with pytest.raises(DriverUnavailable):
        main(["demo", "--driver", "cuda", "--debug"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "expected a readable GGUF file, got"),
        (b"PK\x03\x04 a zip file", "which begins with b'PK\\x03\\x04'"),
        (b"", "which begins with b''"),
        (b"GGUF and nothing else", "expected a GGUF file that transformers can read"),
    ],
    ids=["missing", "another format", "empty", "cut short"],
)
def test_a_model_that_cannot_be_read_is_named(
    tmp_path: Path, content: bytes | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    assert main(["demo", "--driver", "emulated", "--model", str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert str(path) in error


def test_ctrl_c_ends_in_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_run", interrupted)
    assert main(["doctor"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["missing/page.html", "."], ids=["no folder", "a folder"])
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_loaded(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    assert main(["demo", "--driver", "emulated", "--html", str(path)]) == 2
    said = capsys.readouterr().err
    assert said == f"graphcore demo: --html: expected a file in a writable folder, got {path}\n"


def test_bench_gets_its_own_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    said = capsys.readouterr().out
    assert "launch" in said
    assert "Measures graphcore against floors and peers." in said
    assert main(["bench", "no-such-suite"]) == 2


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "graphcore", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == graphcore.__version__
