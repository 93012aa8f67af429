"""The documents keep what they promise: code runs, links lead somewhere, tests exist."""

import ast
import re

import pytest
from helpers import documents
from helpers.documents import DOCUMENTS
from helpers.repository import ROOT

from graphcore import errors
from graphcore.bench import tables
from graphcore.driver import codes
from graphcore.testing import run_isolated

RUN = "python run"
WITH_CODE = [
    name for name in DOCUMENTS if any(b.info == RUN for b in documents.blocks(documents.read(name)))
]
FILE_NAME = re.compile(r"`((?:graphcore|graphcore_kernels|kernels|tests|docs|examples)/[\w./-]+)`")


def run_code_of(document):
    script = "names = {}\n" + "\n".join(
        f"exec(compile({documents.numbered(block)!r}, {document!r}, 'exec'), names)"
        for block in documents.blocks(documents.read(document))
        if block.info == RUN
    )
    done = run_isolated(script, timeout=240)
    assert done.survived, done.stderr


@pytest.mark.parametrize("document", WITH_CODE)
def test_the_code_of_a_document_runs_in_order_on_the_emulated_driver(document, monkeypatch):
    monkeypatch.setenv("GRAPHCORE_DRIVER", "emulated")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run_code_of(document)


@pytest.mark.gpu
@pytest.mark.parametrize("document", WITH_CODE)
def test_the_code_of_a_document_runs_in_order_on_a_device(document, monkeypatch):
    monkeypatch.setenv("GRAPHCORE_DRIVER", "cuda")
    run_code_of(document)


def test_the_readme_and_the_pages_with_examples_are_among_those_that_run():
    pages = {
        "README.md",
        "docs/decode.md",
        "docs/graphs.md",
        "docs/interop.md",
        "docs/moe.md",
        "docs/plans.md",
    }
    assert pages <= set(WITH_CODE)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_that_is_only_shown_is_python(document):
    for block in documents.blocks(documents.read(document)):
        if block.info.startswith("python"):
            ast.parse(block.text, filename=document)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files_and_headings_that_exist(document):
    for link in documents.links(documents.read(document)):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.exists(), f"{document}: {link}"
        if anchor:
            assert anchor in documents.anchors(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_file_that_a_document_names_exists(document):
    named = FILE_NAME.findall(documents.read(document))
    assert [name for name in named if not (ROOT / name).exists()] == []


ALL_NAMED = sorted(set().union(*(documents.named_tests(documents.read(d)) for d in DOCUMENTS)))


@pytest.mark.parametrize("named", ALL_NAMED)
def test_a_test_that_a_document_names_exists(named):
    path, _, name = named.partition("::")
    source = (ROOT / path).read_text(encoding="utf-8")
    if name:
        functions = [node.name for node in ast.parse(source).body if hasattr(node, "name")]
        assert name in functions


PAGES_OF_TESTS = ["docs/features.md", "docs/public-bugs.md"]


@pytest.mark.parametrize("page", PAGES_OF_TESTS)
def test_the_page_names_a_test_in_every_row(page):
    text = documents.read(page)
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    heads = [line for line in rows if line.rstrip(" |").endswith("tests")]
    assert len(rows) > 40
    assert [row for row in rows if row not in heads and not documents.named_tests(row)] == []


@pytest.mark.parametrize("page", PAGES_OF_TESTS)
def test_the_page_marks_the_tests_that_only_a_device_runs(page):
    text = documents.read(page)
    marked = set(re.findall(r"`(tests/[\w/.]+\.py::\w+)` \*device\*", text))
    named = {name for name in documents.named_tests(text) if "::" in name}
    assert marked == {name for name in named if documents.is_for_a_device(name)}


def test_the_page_of_errors_draws_the_tree_that_the_code_draws():
    trees = [block.text for block in documents.blocks(documents.read("docs/errors.md"))]
    drawn = "\n".join(line.removeprefix("    ") for line in errors.__doc__.splitlines())
    assert any(tree.strip() in drawn for tree in trees if tree.startswith("GraphcoreError"))
    assert all(name in trees[0] for name in errors.__all__)


@pytest.mark.parametrize("code", sorted(codes.CAPTURE_CODES))
def test_the_page_of_errors_has_every_capture_error_with_meaning_and_remedy(code):
    error = codes.cuda_error(code, "")
    (row,) = [
        line.split(" | ")
        for line in documents.read("docs/errors.md").splitlines()
        if line.startswith("| ") and f"| `{code}` |" in line
    ]
    number, _, meaning, cause, remedy = (cell.strip("| ") for cell in row)
    assert (number, meaning, remedy) == (str(error.number), error.description, error.hint)
    assert cause


@pytest.mark.parametrize(
    ("page", "options"), [("README.md", ["--rows-only"]), ("docs/benchmarks.md", [])]
)
def test_the_figures_of_a_page_are_those_of_the_result_files(page, options):
    results = str(ROOT / "benchmarks/results")
    assert tables.main([str(ROOT / page), results, "--check", *options]) == 0


def test_the_readme_stands_on_one_picture_that_exists():
    pictures = [link for link in documents.links(documents.read("README.md")) if "images/" in link]
    assert pictures == ["docs/images/captured-graph.svg"]
