"""The user's line: the innermost frame that is theirs, and a deeper one of a model's code."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest

from graphcore.executable import location

SITE = sysconfig.get_paths()["purelib"]
STDLIB = sysconfig.get_paths()["stdlib"]
SCRIPTS = sysconfig.get_paths()["scripts"]


def _frame(path: str, inner: Callable[[], object]) -> Callable[[], object]:
    """A function in the file ``path`` that calls ``inner`` on its second line."""
    names: dict[str, Any] = {"inner": inner}
    exec(compile("def outer():\n    return inner()", path, "exec"), names)
    outer: Callable[[], object] = names["outer"]
    return outer


def _stack(*paths: str, inner: Callable[[], object]) -> Callable[[], object]:
    """Frames in files, the outermost first."""
    for path in reversed(paths):
        inner = _frame(path, inner)
    return inner


def _trace(*paths: str) -> TracebackType:
    """A traceback through frames of these files only."""

    def fail() -> object:
        raise ValueError

    with pytest.raises(ValueError) as caught:  # noqa: PT011 -- ours, thrown above
        _stack(*paths, inner=fail)()
    trace = caught.value.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != paths[0]:
        trace = trace.tb_next
    assert trace is not None
    last = trace
    for _ in paths[1:]:
        assert last.tb_next is not None
        last = last.tb_next
    last.tb_next = None
    return trace


USER = "/home/someone/decode.py"
NOTEBOOK = "/tmp/ipykernel_7/1234.py"
MODEL = f"{SITE}/transformers/models/llama/modeling_llama.py"
TORCH = f"{SITE}/torch/nn/modules/module.py"
DISTRIBUTION = "/usr/lib/python3/dist-packages/numpy/core.py"
OURS = location.__file__
KERNELS = "/anywhere/graphcore_kernels/strided_copy.py"

CASES: dict[str, tuple[tuple[str, ...], str | None, str | None]] = {
    "only_the_user": ((USER,), USER, USER),
    "torch_below": ((USER, TORCH), USER, USER),
    "a_model_below": ((USER, TORCH, MODEL, TORCH), USER, MODEL),
    "a_callback_of_the_user": ((USER, MODEL, USER), USER, USER),
    "ours_below": ((NOTEBOOK, OURS, KERNELS), NOTEBOOK, NOTEBOOK),
    "the_standard_library": ((USER, f"{STDLIB}/contextlib.py", "<frozen runpy>"), USER, USER),
    "installed_code_only": ((MODEL, TORCH), MODEL, MODEL),
    "an_installed_command": ((f"{SCRIPTS}/serve", MODEL, TORCH), MODEL, MODEL),
    "torch_only": ((TORCH,), None, None),
    "of_the_distribution": ((DISTRIBUTION,), DISTRIBUTION, DISTRIBUTION),
}


@pytest.mark.parametrize("case", CASES)
def test_the_right_line_of_a_traceback_is_named(case: str) -> None:
    paths, user, inner = CASES[case]
    expected = tuple(None if path is None else f"{path}:2" for path in (user, inner))
    assert location.locate(_trace(*paths)) == expected


def test_without_a_traceback_there_is_no_line() -> None:
    assert location.locate(None) == (None, None)


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ((USER, OURS), USER),
        ((USER, MODEL, OURS), USER),
        ((USER, f"{STDLIB}/contextlib.py"), USER),
        (("<stdin>", OURS), "<stdin>"),
    ],
    ids=["from_us", "through_a_model", "through_contextlib", "at_the_prompt"],
)
def test_the_caller_is_the_users_innermost_line(paths: tuple[str, ...], expected: str) -> None:
    assert _stack(*paths, inner=location.caller)() == f"{expected}:2"


def test_a_caller_that_is_installed_code_only_is_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # everything around the two counts as Python's own, or there would always be a user
    known = location._library
    monkeypatch.setattr(
        location, "_library", lambda path: known(path) if path in (MODEL, OURS) else ""
    )
    assert _stack(MODEL, OURS, inner=location.caller)() == f"{MODEL}:2"
    monkeypatch.setattr(location, "_library", lambda path: "")
    assert location.caller() == "a line of graphcore's own"
