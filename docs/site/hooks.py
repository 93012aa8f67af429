"""Hooks of the site: pages that lie outside docs/, the notebooks, and the list of public names."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "kernels/README.md": "kernels.md",
}
PUBLIC = ["graphcore", "graphcore.decode", "graphcore.moe", "graphcore.testing"]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_ROLE = re.compile(r":(?:meth|func|class|mod|attr|data|exc):\s*<code>[.~]?")
_BOLD_HEAD = re.compile(r"^#+ ")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that no file of docs/ holds."""
    made = {page: _text(source) for source, page in OUTSIDE.items()}
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    made |= {f"notebooks/{path.stem}.md": notebook(path) for path in notebooks}
    made |= {"notebooks.md": contents(notebooks), "api.md": reference()}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Leads links to pages of the site, or, where what they name is no page, nowhere."""
    if page.file.src_uri == "api.md" or page.file.src_uri.startswith("notebooks"):
        return markdown
    outside = {to: source for source, to in OUTSIDE.items()}
    source = ROOT / outside.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return _LINK.sub(lambda found: _link(found, source.parent), markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Takes the roles of docstrings (``:meth:``) away, which stand before names in code."""
    return _ROLE.sub("<code>", html)


def _link(found: re.Match[str], folder: Path) -> str:
    mark, words, target, anchor = found[1], found[2], found[3], found[4] or ""
    if "://" in target:
        return found[0]
    path = (folder / target).resolve()
    name = path.relative_to(ROOT).as_posix()
    if name in OUTSIDE:
        name = OUTSIDE[name]
    elif name.startswith("docs/"):
        name = name.removeprefix("docs/")
    elif name == "notebooks":
        name = "notebooks.md"
    elif name.startswith("notebooks/"):
        name = f"{name.removesuffix('.ipynb')}.md"
    else:  # a file of the repository that is no page
        return words if words.startswith("`") else f"`{words}`"
    return f"{mark}[{words}]({name}{anchor})"


def _text(source: str) -> str:
    return (ROOT / source).read_text(encoding="utf-8")


# ---- notebooks ----------------------------------------------------------------------------------


def notebook(path: Path) -> str:
    """A notebook as a page: its text, its code, and the outputs it keeps."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(_cell(cell) for cell in cells) + "\n"


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    outputs = [_output(each) for each in cell["outputs"]]
    return "\n\n".join([f"```python\n{source}\n```", *outputs])


def _output(output: dict[str, Any]) -> str:
    text = "".join(output.get("text") or output["data"].get("text/plain", []))
    picture = "".join(output.get("data", {}).get("text/html", []))
    if not picture:
        return f"```text\n{text.rstrip()}\n```"
    # one line without blank ones, so that Markdown leaves it alone
    return f"<div>{' '.join(picture.split())}</div>"


def contents(paths: list[Path]) -> str:
    """The page that lists notebooks by their titles and ideas."""
    lines = ["# Notebooks", "", "One idea each; every one runs with a GPU and without.", ""]
    for path in paths:
        first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
        title = _BOLD_HEAD.sub("", first.splitlines()[0])
        idea = re.search(r"\*\*The idea: (.*?)\*\*", first, re.DOTALL)
        words = " ".join(idea[1].split()) if idea else ""
        lines.append(f"* [{title}](notebooks/{path.stem}.md): {words}")
    return "\n".join(lines) + "\n"


# ---- reference ----------------------------------------------------------------------------------


def reference() -> str:
    """The page of all public names, each from its docstring."""
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    lines = ["# Reference", "", "All public names, by module."]
    for name in PUBLIC:
        module = import_module(name)
        lines += ["", f"## `{name}`", "", (module.__doc__ or "").splitlines()[0]]
        for public in sorted(module.__all__):
            lines += ["", f"::: {_home(module, public)}"]
    return "\n".join(lines) + "\n"


def _home(module: Any, public: str) -> str:
    homes = getattr(module, "_HOMES", None) or getattr(module, "_homes", None) or {}
    return f"{homes.get(public, module.__name__)}.{public}"
