"""Subjects: what ``graphcore inspect`` is pointed at, a file or a Python name, as something to see.

A file is a snapshot or a plan as JSON. A name is ``module:function`` (or an object): what the
function returns, where that is a graph, snapshot, plan or comparison; else what it launches,
captured after a warm-up.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

from graphcore.cli.pages import is_folder, is_there
from graphcore.drawing import Drawing, Section
from graphcore.driver import Driver, open_driver
from graphcore.errors import ConfigurationError, GraphcoreError
from graphcore.executable import Graph, capture_function
from graphcore.executable.graph_page import graph_drawing, graph_page, snapshot_sections
from graphcore.graph import GraphDiff, GraphSnapshot
from graphcore.graph.serial import FORMAT as SNAPSHOT
from graphcore.plan.plan import GraphPlan
from graphcore.plan.serial import FORMAT as PLAN
from graphcore.resources.fingerprint import fingerprint

NO_PROBLEM = "nothing keeps it from being built"
_EXPECTED = "a Graph, GraphSnapshot, GraphPlan or GraphDiff"


@dataclass(frozen=True)
class Subject:
    """Something to see: ``value`` under the name it was asked for by."""

    name: str
    value: Graph | GraphSnapshot | GraphPlan | GraphDiff

    def drawing(self) -> Drawing:
        """Its picture, in neutral form."""
        if isinstance(self.value, Graph):
            return graph_drawing(self.value, None)
        return self.value.drawing()

    def page(self, full: bool) -> str:
        """Its page: facts, picture, tables."""
        if isinstance(self.value, Graph):
            return graph_page(self.value, self.name, None, full)
        sections: list[Section] = []
        if isinstance(self.value, GraphSnapshot):
            sections = snapshot_sections(self.value, fingerprint(self.value))
        elif isinstance(self.value, GraphPlan):
            sections = [
                ("Plan", plan_facts(self.value)),
                ("Validation", "\n".join(self.problems()) or NO_PROBLEM),
            ]
        return self.drawing().to_html_page(self.name, sections, full=full)

    def problems(self) -> list[str]:
        """What keeps the plan from being built; ConfigurationError for what is no plan."""
        if isinstance(self.value, GraphPlan):
            return list(map(str, self.value.validate()))
        raise ConfigurationError(
            f"{self.name}: expected a plan to check, got {_described(self.value)}"
        )

    def snapshot(self) -> GraphSnapshot:
        """Itself as a snapshot; ConfigurationError for what is none."""
        if isinstance(self.value, Graph):
            return self.value.snapshot()
        if isinstance(self.value, GraphSnapshot):
            return self.value
        raise ConfigurationError(
            f"{self.name}: expected a graph or snapshot to compare, got {type(self.value).__name__}"
        )


def plan_facts(plan: GraphPlan) -> dict[str, str]:
    """What a plan is made of, by name."""
    facts = {"name": plan.name or "(none)", "nodes": str(len(plan.nodes))}
    for buffer in plan.buffers.values():
        shape = "x".join(map(str, buffer.shape)) or "scalar"
        facts[buffer.name] = f"{buffer.dtype} {shape}, {buffer.nbytes} bytes, {buffer.origin}"
    return facts


def load(text: str, *, driver: str | None, warmup: int) -> Subject:
    """The subject that ``text`` names.

    Args:
        text: A path, or ``module:function``.
        driver: Where work is captured: "cuda", "emulated", or None for what there is.
        warmup: Runs before the capture.

    Raises:
        GraphcoreError: It cannot be read, imported, called, captured or understood; one line.
    """
    path = Path(text)
    module, colon, name = text.partition(":")
    if is_folder(path):
        raise ConfigurationError(f"{text}: expected a file or module:function, got a folder")
    if is_there(path) or not colon or os.sep in text or not module or not name:
        return Subject(path.name, _read(path))
    return Subject(text, _named(text, module, name, driver, warmup))


def _read(path: Path) -> GraphSnapshot | GraphPlan:
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors write a mark in front
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        if "\0" in str(path):
            said = "no file has a null character in its name"
        raise ConfigurationError(f"{path}: expected a readable JSON file: {said}") from error
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: expected JSON: {error}") from error
    found = data.get("format") if isinstance(data, dict) else None
    if not isinstance(found, str) or found not in _READERS:
        known = " or ".join(map(repr, _READERS))
        raise ConfigurationError(f"{path}: expected JSON with format {known}, got {found!r}")
    try:
        return _READERS[found](text)
    except GraphcoreError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _named(text: str, module: str, name: str, driver: str | None, warmup: int) -> Any:
    value = _imported(text, module, name)
    if isinstance(value, _SEEN) or (callable(value) and not isinstance(value, type)):
        return value if isinstance(value, _SEEN) else _called(text, value, driver, warmup)
    raise ConfigurationError(
        f"{text}: expected {_EXPECTED}, or a function, got {_described(value)}"
    )


def _imported(text: str, module: str, name: str) -> Any:
    # as ``python -m`` does: modules beside the caller count
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        home = import_module(module)
        return reduce(getattr, name.split("."), home)
    except AttributeError as error:
        raise ConfigurationError(f"{text}: {error}") from error
    except BaseException as error:  # whatever a module's own code raises
        raise ConfigurationError(f"{text}: importing {module} raised {_one_line(error)}") from error


def _called(text: str, function: Callable[[], Any], driver: str | None, warmup: int) -> Any:
    _refuse_arguments(text, function)
    chosen = open_driver(driver)
    first = _run(text, function)
    if isinstance(first, _SEEN):
        return first
    return _captured(text, function, chosen, warmup)


def _run(text: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except GraphcoreError:
        raise
    except BaseException as error:  # whatever the user's function raises
        raise ConfigurationError(f"{text}: raised {_one_line(error)}") from error


def _captured(text: str, function: Callable[[], Any], driver: Driver, warmup: int) -> Graph:
    try:
        graph = capture_function(function, warmup=warmup, driver=driver)
    except GraphcoreError:
        raise
    except BaseException as error:  # as above
        raise ConfigurationError(f"{text}: its capture raised {_one_line(error)}") from error
    if not driver.nodes(graph.handle):
        raise ConfigurationError(
            f"{text}: expected {_EXPECTED} back, or work launched on the current stream; it "
            f"returned {_described(graph.outputs)} and launched nothing"
        )
    return graph


def _refuse_arguments(text: str, function: Callable[..., Any]) -> None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have none to look at
        return
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise ConfigurationError(
            f"{text}: expected a function without arguments, got one that needs {', '.join(needed)}"
        )


def _described(value: object) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _one_line(error: BaseException) -> str:
    """What a user's code raised, in one line; Ctrl-C is nobody's error."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    try:
        lines = str(error).splitlines()
    except Exception:  # a text of its own that fails too
        lines = []
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


_SEEN = (Graph, GraphSnapshot, GraphPlan, GraphDiff)
_READERS: dict[str, Callable[[str], GraphSnapshot | GraphPlan]] = {
    SNAPSHOT: GraphSnapshot.from_json,
    PLAN: GraphPlan.from_json,
}
