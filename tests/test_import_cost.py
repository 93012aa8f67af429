"""`import graphcore` is cheap and loads no library of arrays, models or devices."""

import json
import os
import statistics
import subprocess
import sys
import time

import pytest

HEAVY = ("numpy", "torch", "cupy", "cuda", "transformers")
LIMIT_SECONDS = 0.060
ROUNDS = 9


# children must not pay for a measurement of coverage
ENVIRONMENT = {name: value for name, value in os.environ.items() if "COVERAGE" not in name}


def run(script):
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120, env=ENVIRONMENT
    ).stdout


def loaded_by(statement):
    script = f"{statement}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    return {name.partition(".")[0] for name in json.loads(run(script))}


@pytest.mark.parametrize(
    "statement",
    [
        "import graphcore",
        "import graphcore.errors",
        "import graphcore.decode",
        "import graphcore.moe",
        "import graphcore_kernels",
        "import graphcore.cli",
        "import graphcore; graphcore.capture, graphcore.Graph, graphcore.diff, graphcore.Buffer",
    ],
)
def test_importing_loads_no_library_of_arrays_models_or_devices(statement):
    assert loaded_by(statement).isdisjoint(HEAVY)


def test_a_library_that_is_loaded_would_be_seen():
    assert {"numpy", "graphcore"} <= loaded_by("import graphcore, numpy")


def test_importing_costs_at_most_60_ms_over_the_bare_interpreter():
    run("import graphcore")  # compiled files are written once
    extra = []
    for _ in range(ROUNDS):
        bare, ours = seconds("pass"), seconds("import graphcore")
        extra.append(ours - bare)
    assert statistics.median(extra) <= LIMIT_SECONDS


def seconds(script):
    start = time.perf_counter()
    run(script)
    return time.perf_counter() - start
