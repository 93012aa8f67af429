"""The gpu tests on a machine with a device, all cores at it: `make gpu` where it is installed.

Compiles the kernels first, each once, and all of them beside each other: processes of tests that
start together would each compile what they need. Then runs the tests and writes what came of them.
After a time limit every further test is skipped, so that the run ends with the counts that it has.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context

from graphcore_kernels._catalogue import CAPABILITIES, catalogue
from graphcore_kernels._module import load

from graphcore.driver import open_driver

SUMMARY = "benchmarks/results/{device}/tests.json"
MOST_PROCESSES = 15
TEST_SECONDS, SLOW_SECONDS = 150, 400
UNTIL = "GRAPHCORE_TESTS_UNTIL"
"""Names the time, as of time.time(), after which tests are skipped (tests/conftest.py)."""


def architecture_of(capability):
    """The one of the listed architectures whose kernels a device of ``capability`` takes."""
    for name, each in CAPABILITIES.items():
        if each == capability:
            return name
    raise SystemExit(f"device_run: no kernels are listed for a device of {capability}")


@cache
def modules(architecture):
    """The kernels of each source with its options: what one compilation makes, largest first."""
    found = defaultdict(list)
    for entry in catalogue(architecture):
        found[entry.kernel.source, entry.kernel.options].append(entry.kernel)
    return sorted(found.values(), key=lambda kernels: -len(kernels[0].source))


def compile_module(architecture, index):
    """Compiles one of :func:`modules` into CuPy's cache on the disk; (seconds, its first kernel).

    A process finds the kernels itself: they hold functions, which do not travel.
    """
    kernels = modules(architecture)[index]
    start = time.perf_counter()
    driver = open_driver("cuda")
    for kernel in kernels:
        load(driver, kernel)
    driver.close()
    return time.perf_counter() - start, kernels[0].name


def compile_all(architecture, processes, compile_one=compile_module):
    """Compiles every kernel, each module in one of ``processes``.

    Returns:
        (seconds, kernel) of each module, the longest first.
    """
    count = len(modules(architecture))
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return sorted(pool.map(partial(compile_one, architecture), range(count)), reverse=True)


def pytest_command(processes, summary, durations, tests, *, slow=False):
    """The run of the tests, in the order that the plugin gives a parallel run."""
    return [
        *(sys.executable, "-m", "pytest", "-q", "-rf"),
        *("-m", "gpu" if slow else "gpu and not slow"),
        *("-n", str(processes), "--dist", "load", "--maxschedchunk=1"),
        *(f"--timeout={SLOW_SECONDS if slow else TEST_SECONDS}", f"--durations={durations}"),
        f"--graphcore-summary={summary}",
        *tests,
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tests", nargs="*", default=["tests"])
    parser.add_argument("--summary", default=SUMMARY, help="the file to write ({device}: its name)")
    parser.add_argument("--processes", type=int, default=min(MOST_PROCESSES, os.cpu_count() or 1))
    parser.add_argument("--durations", type=int, default=15)
    parser.add_argument("--slow", action="store_true", help="the tests marked slow, too")
    parser.add_argument("--limit", type=float, help="seconds after which tests are skipped")
    given, more = parser.parse_known_args()
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # as many processes as cores
    if given.limit is not None:
        environment[UNTIL] = str(time.time() + given.limit)
    driver = open_driver("cuda")
    info = driver.device_info()
    driver.close()
    start = time.perf_counter()
    done = compile_all(architecture_of(info.capability), given.processes)
    seconds, (longest, name) = time.perf_counter() - start, done[0]
    print(f"{len(done)} modules compiled in {seconds:.0f} s; longest {longest:.1f} s: {name}")
    summary = given.summary.format(device=info.name.split()[-1].lower())
    command = pytest_command(
        given.processes, summary, given.durations, given.tests, slow=given.slow
    )
    return subprocess.run(command + more, check=False, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
