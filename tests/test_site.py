"""The site of documents: its pages, questions with tests, codes with remedies, docstrings' code."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import documents
from helpers.repository import ROOT, tracked_files

from graphcore.driver import codes
from graphcore.testing import run_isolated

FAQ = documents.read("docs/faq.md")
QUESTIONS = re.findall(r"^## (.+)$", FAQ, re.MULTILINE)
CODES = documents.read("docs/codes.md")
# what graphcore says of a code; any other has CUDA's own sentence
KNOWN = [name for name in codes.code_names() if codes.cuda_error(name, "").description]


def answer(question: str) -> str:
    return FAQ.partition(f"## {question}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_answer_is_given_and_names_tests_that_prove_it(question: str) -> None:
    text = answer(question)
    assert question.endswith("?")
    assert len(text.split("*")[0].split()) >= 8
    assert documents.named_tests(text)


def test_the_page_of_codes_has_each_with_meaning_and_remedy() -> None:
    rows = [line.strip("| ").split(" | ") for line in CODES.splitlines() if "`CUDA_ERROR" in line]
    rows = [row for row in rows if len(row) == 4]
    found = {row[1].strip("`"): row for row in rows}
    assert len(rows) == len(found) >= 29
    for name, (number, _, meaning, remedy) in found.items():
        error = codes.cuda_error(name, "")
        assert (number, meaning) == (str(error.number), error.description)
        assert len(remedy.split()) >= 2
    assert set(codes.CAPTURE_CODES) <= found.keys()


def test_every_page_of_the_documents_is_in_the_sites_contents() -> None:
    contents = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert {page for page in pages if page not in contents} == set()


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs: make docs")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "api/index.html").read_text(encoding="utf-8")
    assert all(name in reference for name in ("GraphPlan", "CUDAGraphAR", "GraphReuse"))
    assert ":meth:" not in reference
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert (tmp_path / "notebooks" / path.stem / "index.html").exists()


# ---- code in docstrings ---------------------------------------------------------------------

# where an example stands -> what there is before it
EXAMPLES = {
    "graphcore/executable/capture_session.py:fork": """
import graphcore

capture = graphcore.capture(driver=graphcore.open_driver("emulated"))
capture.__enter__()
""",
}


def docstring_code() -> dict[str, str]:
    """Place -> the block behind ``::`` in a docstring of the library, but for the drawn tree."""
    found = {}
    for path in tracked_files():
        name = path.relative_to(ROOT).as_posix()
        if path.suffix != ".py" or not name.startswith(("graphcore/", "kernels/")):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                assert ">>>" not in text, name
                for block in re.findall(r"::\n\n((?: {4}.*(?:\n|$)|\n)+)", text):
                    if "+--" not in block:
                        found[f"{name}:{getattr(node, 'name', '')}"] = textwrap.dedent(block)
    return found


def test_code_in_docstrings_runs() -> None:
    found = docstring_code()
    assert found.keys() == EXAMPLES.keys()
    for place, code in found.items():
        done = run_isolated(EXAMPLES[place] + code)
        assert done.survived, (place, done.stderr)
