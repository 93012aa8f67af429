"""Notebooks without Jupyter: their cells, and what a run puts out.

``python tests/helpers/notebooks.py [--to FOLDER] NAME.ipynb ...`` writes the outputs of a run on
the driver that is here into notebooks, in their place or as copies in another folder.
"""

import argparse
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
VARIES = "varies"
"""The tag of cells whose outputs differ from run to run: times, or the last bits of floats."""
_ADDRESS = re.compile(r"0x[0-9a-f]+")
# how the first cell of a notebook says whose outputs it keeps
_SAID = re.compile(r"those of (?:the emulated driver|an? [\w ]+ on \d{4}-\d\d-\d\d)")

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
    done = run_isolated(script, timeout=600)
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


def compared(notebook, outputs):
    """``outputs``, one for each code cell, as text: addresses alike, cells that vary left out."""
    kept = [
        [] if VARIES in cell["metadata"].get("tags", ()) else each
        for cell, each in zip(code_cells(notebook), outputs, strict=True)
    ]
    return _ADDRESS.sub("0x", json.dumps(kept, sort_keys=True))


def driver_of(notebook):
    """The name of the driver whose outputs a notebook keeps; None: it keeps none."""
    return notebook["metadata"].get("graphcore", {}).get("driver")


def write_outputs(name, folder=FOLDER):
    """Runs a notebook and writes it with its outputs, and with whose they are."""
    from datetime import date

    from graphcore import open_driver

    notebook, driver = read(name), open_driver()
    for cell, outputs in zip(code_cells(notebook), run(name), strict=True):
        cell["outputs"] = outputs
    notebook["metadata"]["graphcore"] = {"driver": driver.name}
    said = "the emulated driver"
    if not driver.is_emulated:
        said = f"an {driver.device_info().name} on {date.today().isoformat()}"
    for cell in notebook["cells"][:1]:
        cell["source"] = [_SAID.sub(f"those of {said}", line) for line in cell["source"]]
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    (Path(folder) / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="write the outputs of a run into notebooks")
    parser.add_argument("--to", default=FOLDER, help="where copies are written")
    parser.add_argument("names", nargs="+")
    options = parser.parse_args()
    for each in options.names:
        write_outputs(each, options.to)
