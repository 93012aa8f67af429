"""Markdown as the tests see it: code blocks, links, headings."""

import ast
import re
from dataclasses import dataclass

from helpers.repository import ROOT

DOCUMENTS = tuple(
    str(path.relative_to(ROOT))
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "kernels/README.md"])
)

_FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_TEST_NAME = re.compile(r"`(tests/[\w/.]+\.py(?:::\w+)?)`")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: what stands behind the fence, its text, and its first line's number."""

    info: str
    text: str
    line: int


def read(document):
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(text):
    """Every fenced block of ``text``."""
    return [
        Block(found[1].strip(), found[2], text[: found.start(2)].count("\n") + 1)
        for found in _FENCE.finditer(text)
    ]


def prose(text):
    """``text`` without its fenced blocks."""
    return _FENCE.sub("", text)


def links(text):
    """Targets of the links and images of ``text``, in order."""
    return _LINK.findall(prose(text))


def anchors(text):
    """The anchors of the headings, as a hosting site makes them."""
    headings = _HEADING.findall(prose(text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def numbered(block):
    """The block's code on the lines where the document has it, so that errors name them."""
    return "\n" * (block.line - 1) + block.text


def named_tests(text):
    """The tests that ``text`` names, as ``tests/x.py`` or ``tests/x.py::test_y``."""
    return set(_TEST_NAME.findall(text))


def is_for_a_device(named):
    """Whether the test ``tests/x.py::test_y`` runs on a device only, by its marks or its file's."""
    path, _, name = named.partition("::")
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    marks, spellings = [], {"pytest.mark.gpu"}
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            marks.append(ast.unparse(node.value))
        elif isinstance(node, ast.Assign) and ast.unparse(node.value) in spellings:
            spellings.add(ast.unparse(node.targets[0]))  # gpu = pytest.mark.gpu
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            marks += map(ast.unparse, node.decorator_list)
    return not spellings.isdisjoint(marks)
