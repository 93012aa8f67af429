"""Notebooks run from top to bottom, use public names only, and are kept without outputs."""

import ast
import importlib
import json

import pytest
from helpers.repository import ROOT

from graphcore.testing import run_isolated

NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
PUBLIC = {"graphcore", "graphcore.decode", "graphcore.testing", "graphcore_kernels"}
OTHERS = {"cupy", "numpy", "torch", "transformers"}


def cells(name):
    notebook = json.loads((ROOT / "notebooks" / name).read_text(encoding="utf-8"))
    return notebook["cells"]


def code(name):
    return ["".join(cell["source"]) for cell in cells(name) if cell["cell_type"] == "code"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_on_the_emulated_driver(name, monkeypatch):
    monkeypatch.setenv("GRAPHCORE_DRIVER", "emulated")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script = "names = {}\n" + "".join(
        f"exec(compile({source!r}, {f'{name} cell {number}'!r}, 'exec'), names)\n"
        for number, source in enumerate(code(name), start=1)
    )
    done = run_isolated(script, timeout=240)
    assert done.survived, done.stderr


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_kept_without_outputs_and_begins_with_its_idea(name):
    for cell in cells(name):
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
    first = cells(name)[0]
    assert first["cell_type"] == "markdown"
    assert first["source"][0].startswith("# ")
    assert "".join(first["source"]).count("The idea:") == 1


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_uses_public_names_only(name):
    for source in code(name):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom):
                assert node.module in PUBLIC | OTHERS
                offered = getattr(importlib.import_module(node.module), "__all__", None)
                assert offered is None or {alias.name for alias in node.names} <= set(offered)
            elif isinstance(node, ast.Import):
                assert {alias.name for alias in node.names} <= PUBLIC | OTHERS
            elif isinstance(node, ast.Attribute):
                assert not node.attr.startswith("_"), node.attr
                if isinstance(node.value, ast.Name) and node.value.id == "graphcore":
                    assert node.attr in importlib.import_module("graphcore").__all__


def test_there_is_a_notebook():
    assert "01_capture_and_replay.ipynb" in NOTEBOOKS
