"""import graphcore: quick, and loads nothing that belongs to a GPU library."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

import graphcore

HEAVY = ("numpy", "torch", "cupy", "cuda", "transformers")


def _run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


def _loaded_after(statement: str) -> set[str]:
    script = (
        "import sys\n"
        f"{statement}\n"
        "import json; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    return set(json.loads(_run(script)))


def test_importing_loads_no_gpu_library() -> None:
    assert _loaded_after("import graphcore").isdisjoint(HEAVY)
    assert _loaded_after("import graphcore.errors").isdisjoint(HEAVY)


def test_most_public_names_load_no_gpu_library_either() -> None:
    names = ("capture", "Graph", "GraphExec", "CudaError", "Kernel", "diff", "fingerprint")
    statement = f"import graphcore; [getattr(graphcore, name) for name in {names!r}]"
    assert _loaded_after(statement).isdisjoint(HEAVY)


def test_importing_takes_at_most_60_ms_over_the_interpreter() -> None:
    script = (
        "import time; start = time.perf_counter()\n"
        "import graphcore\n"
        "print(time.perf_counter() - start)"
    )
    assert min(float(_run(script)) for _ in range(5)) <= 0.060


def test_every_public_name_is_there_sorted_and_listed() -> None:
    assert graphcore.__all__ == sorted(graphcore.__all__)
    assert set(graphcore.__all__) == set(graphcore._HOMES)
    assert set(graphcore.__all__) <= set(dir(graphcore))
    for name, home in graphcore._HOMES.items():
        assert getattr(graphcore, name) is getattr(importlib.import_module(home), name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'graphcore' has no attribute 'captures'"):
        _ = graphcore.captures  # type: ignore[attr-defined]
