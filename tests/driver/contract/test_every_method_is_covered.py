"""The contract suite covers the protocol: every method of ``Driver`` is named and called."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from graphcore.driver import Driver

# not abstract, and still part of what both drivers offer
_ALSO = {"recording", "bind_exec_kernel_update", "kernel_of"}
PROTOCOL = sorted(set(Driver.__abstractmethods__) | _ALSO)


def _covered_methods(function: ast.FunctionDef) -> set[str]:
    """The methods a test's ``@covers(...)`` names."""
    names: set[str] = set()
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "covers":
            names |= {ast.literal_eval(argument) for argument in decorator.args}
    return names


def _tests() -> list[ast.FunctionDef]:
    return [
        node
        for path in sorted(Path(__file__).parent.glob("test_*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and _covered_methods(node)
    ]


@pytest.mark.parametrize("method", PROTOCOL)
def test_a_contract_test_covers(method: str) -> None:
    assert any(method in _covered_methods(test) for test in _tests())


def test_contract_tests_name_only_methods_of_the_protocol() -> None:
    named = set().union(*map(_covered_methods, _tests()))
    assert named <= set(PROTOCOL)


def test_every_test_of_the_suite_says_what_it_covers() -> None:
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if path.name == Path(__file__).name:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert _covered_methods(node), f"{path.name}: {node.name} has no @covers"
