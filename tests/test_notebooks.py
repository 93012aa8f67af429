"""Notebooks run from top to bottom, use public names, and keep what a run gives, or nothing."""

import ast
import importlib
import json

import pytest
from helpers import notebooks
from helpers.repository import ROOT

NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
PUBLIC = {"graphcore", "graphcore.decode", "graphcore.testing", "graphcore_kernels"}
OTHERS = {"cupy", "numpy", "torch", "transformers"}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_on_the_emulated_driver_and_keeps_what_that_gives(name, monkeypatch):
    monkeypatch.setenv("GRAPHCORE_DRIVER", "emulated")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    given = notebooks.run(name)
    kept = [cell["outputs"] for cell in notebooks.code_cells(notebooks.read(name))]
    if any(kept):
        assert notebooks.without_addresses(kept) == notebooks.without_addresses(given)


def test_the_notebooks_about_plans_and_changes_keep_their_outputs():
    for name in ("02_plan_and_race.ipynb", "03_update_diff_rebind.ipynb"):
        outputs = [cell["outputs"] for cell in notebooks.code_cells(notebooks.read(name))]
        assert sum(map(bool, outputs)) >= 5
        assert any("text/html" in each.get("data", {}) for cell in outputs for each in cell)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_begins_with_its_idea_and_shows_nothing_of_a_machine(name):
    cells = notebooks.read(name)["cells"]
    assert all(cell.get("execution_count") is None for cell in cells)
    kept = json.dumps([cell.get("outputs", []) for cell in cells])
    assert str(ROOT) not in kept
    first = cells[0]
    assert first["cell_type"] == "markdown"
    assert first["source"][0].startswith("# ")
    assert "".join(first["source"]).count("The idea:") == 1


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_uses_public_names_only(name):
    for source in notebooks.sources(notebooks.read(name)):
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
