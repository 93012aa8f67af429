"""compute-sanitizer over the gpu tests of the kernels: `make sanitizer` where there is a device.

Each tool runs the tests in processes of its own, all of them beside each other, and a kernel with
one planted fault, which it must find: a tool that finds nothing there has looked at nothing. Writes
counts of tests and of errors. Exit status 1: errors, failed tests, or a planted fault not found.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from helpers.device_run import UNTIL

TESTS = "tests/kernels"
TOO_LARGE = ("real_sizes", "2_to_the_31", "random_views")
"""Parts of names of tests that move gigabytes or thousands of copies: hours under a tool."""
NOT_SEEN = {"memcheck": ("test_decode_loop",), "initcheck": ("test_decode_loop",)}
"""Tests that a tool cannot follow: memcheck takes what a kernel in a WHILE node's body reads for
memory out of bounds, although it "is inside the nearest allocation", and ends the context; under
initcheck such a kernel sometimes touches an illegal address (in one of three processes)."""
SHARDS = {"memcheck": 3, "racecheck": 10, "initcheck": 3}
SANITIZER = ("compute-sanitizer", "--report-api-errors", "no", "--target-processes")
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")

FAULTS = {
    "memcheck": "out[1 << 16] = 1;",  # beyond the memory
    "racecheck": "shared[threadIdx.x] = threadIdx.x; out[threadIdx.x] = shared[63 - threadIdx.x];",
    "initcheck": "out[threadIdx.x + 64] = out[threadIdx.x];",  # nobody has written it
}
"""Statements of a kernel of one block of 64 threads, ``int *out`` of 128 elements."""
_FAULTY = """
import cupy
cupy.cuda.set_allocator(None)  # each array is memory of its own
kernel = cupy.RawKernel(
    'extern "C" __global__ void faulty(int *out) {{ __shared__ int shared[64]; {fault} }}', "faulty"
)
kernel((1,), (64,), (cupy.empty(128, cupy.int32),), shared_mem=0)
cupy.cuda.Device().synchronize()
"""


@dataclass(frozen=True)
class Shard:
    """What one process is to run under a tool, and where it writes."""

    tool: str
    number: int
    tests: tuple[str, ...]
    folder: Path

    def command(self):
        chosen = self.folder / f"{self.tool}-{self.number}.txt"
        chosen.write_text("\n".join(self.tests) + "\n", encoding="utf-8")
        return [
            *(*SANITIZER, "application-only", "--tool", self.tool),
            *(sys.executable, "-m", "pytest", "-q", "-pgraphcore.testing.plugin"),
            *("-pno:cacheprovider", f"--graphcore-summary={self.summary}", f"@{chosen}"),
        ]

    @property
    def summary(self):
        return self.folder / f"{self.tool}-{self.number}.json"


def chosen_tests():
    """Ids of the gpu tests of the kernels that a tool can run in minutes."""
    without = " and ".join(f"not {name}" for name in TOO_LARGE)
    command = [
        *(sys.executable, "-m", "pytest", "--collect-only", "-q", "-pgraphcore.testing.plugin"),
        *("-pno:cacheprovider", "-m", "gpu and not slow", "-k", without, TESTS),
    ]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line for line in printed.splitlines() if line.startswith(TESTS)]


def errors_of(printed):
    """Errors or hazards that a tool says it found; AssertionError where it says nothing."""
    found = [int(one or other) for one, other in _SUMMARY.findall(printed)]
    assert found, f"the tool came to no end:\n{printed[-2000:]}"
    return sum(found)


def run(shard, environment):
    """(errors that the tool found, counts of the tests)."""
    log = shard.folder / f"{shard.tool}-{shard.number}.log"
    with log.open("w", encoding="utf-8") as stream:
        subprocess.run(
            shard.command(), stdout=stream, stderr=subprocess.STDOUT, check=False, env=environment
        )
    counts = json.loads(shard.summary.read_text(encoding="utf-8"))
    return errors_of(log.read_text(encoding="utf-8", errors="replace")), counts


def find_planted(tool):
    """Errors that a tool finds in a kernel with one fault."""
    script = _FAULTY.format(fault=FAULTS[tool])
    command = [*SANITIZER, "application-only", "--tool", tool, sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return errors_of(done.stdout + done.stderr)


def told(tools, planted, done):
    """What is written: of each tool the counts of its shards together."""
    result = {key: done[tools[0]][0][1][key] for key in ("commit", "date", "device")}
    result["without"] = list(TOO_LARGE)
    for tool in tools:
        counts = {
            key: sum(tests[key] for _, tests in done[tool])
            for key in ("passed", "failed", "skipped")
        }
        errors = sum(found for found, _ in done[tool])
        seen = {"errors": errors, "planted_errors_found": planted[tool]}
        result[tool] = {**seen, **counts, "without": list(NOT_SEEN.get(tool, ()))}
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--summary", type=Path, required=True, help="the file to write")
    parser.add_argument("--logs", type=Path, required=True, help="a folder for what tools print")
    parser.add_argument("--tool", action="append", choices=list(SHARDS), help="default: all")
    parser.add_argument("--limit", type=float, help="seconds after which tests are skipped")
    given = parser.parse_args()
    environment = dict(os.environ)
    if given.limit is not None:
        environment[UNTIL] = str(time.time() + given.limit)
    given.logs.mkdir(parents=True, exist_ok=True)
    tools, chosen = given.tool or list(SHARDS), chosen_tests()
    tests = {
        tool: [test for test in chosen if not any(n in test for n in NOT_SEEN.get(tool, ()))]
        for tool in tools
    }
    with ThreadPoolExecutor(sum(SHARDS.values()) + len(SHARDS)) as pool:
        planted = {tool: pool.submit(find_planted, tool) for tool in tools}
        running = {
            tool: [
                pool.submit(
                    run,
                    Shard(tool, number, tuple(tests[tool][number :: SHARDS[tool]]), given.logs),
                    environment,
                )
                for number in range(min(SHARDS[tool], len(tests[tool])))
            ]
            for tool in tools
        }
        found = {tool: future.result() for tool, future in planted.items()}
        done = {tool: [future.result() for future in futures] for tool, futures in running.items()}
    result = told(tools, found, done)
    given.summary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for tool in tools:
        print(f"{tool}: {result[tool]}")
    return int(
        any(result[tool]["errors"] or result[tool]["failed"] or not found[tool] for tool in tools)
    )


if __name__ == "__main__":
    sys.exit(main())
