"""Notebooks without Jupyter: their cells, and what a run on the emulated driver puts out.

``python tests/helpers/notebooks.py NAME.ipynb ...`` writes the outputs of a run into notebooks.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
_ADDRESS = re.compile(r"0x[0-9a-f]+")

# runs cells as a notebook does: what is printed, and the value of an expression at the end
_RUN = """
import ast, contextlib, io, json, sys

names, given = {"__name__": "__main__"}, []
for number, source in enumerate(json.load(sys.stdin), start=1):
    printed, value = io.StringIO(), None
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    html = getattr(value, "_repr_html_", None)
    given.append([printed.getvalue(), html() if html else None,
                  None if value is None else repr(value)])
json.dump(given, sys.stdout)
"""


def read(name):
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def sources(notebook):
    return ["".join(cell["source"]) for cell in code_cells(notebook)]


def run(name):
    """The outputs of each code cell, as a notebook keeps them; AssertionError where one fails.

    What draws itself is kept as its picture only.
    """
    from graphcore.testing import run_isolated

    script = f"import io, sys\nsys.stdin = io.StringIO({json.dumps(sources(read(name)))!r})\n{_RUN}"
    done = run_isolated(script, timeout=240)
    assert done.survived, done.stderr
    return [_outputs(*given) for given in json.loads(done.stdout)]


def _outputs(printed, html, text):
    found = []
    if printed:
        found.append(
            {"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)}
        )
    if text is not None:
        data = {"text/html": [html]} if html else {"text/plain": text.splitlines(keepends=True)}
        found.append(
            {"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"}
        )
    return found


def without_addresses(outputs):
    """``outputs`` as text in which every address is the same."""
    return _ADDRESS.sub("0x", json.dumps(outputs, sort_keys=True))


def write_outputs(name):
    notebook = read(name)
    for cell, outputs in zip(code_cells(notebook), run(name), strict=True):
        cell["outputs"] = outputs
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for each in sys.argv[1:]:
        write_outputs(each)
