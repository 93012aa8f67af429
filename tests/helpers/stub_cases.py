"""All cases of graphcore.driver.cuda on a libcuda without a device: one function a case.

Run as a script, with the stub on the library path, it prints ``{case: outcome}`` as JSON; outcomes
are "passed" or a traceback. tests/driver/test_cuda_on_a_stub.py shows each as a test.
"""

import json
import sys
import traceback
import types

from helpers import (
    stub_cases_bodies,
    stub_cases_calls,
    stub_cases_maps,
    stub_cases_nodes,
    stub_cases_runs,
)

MODULES = (stub_cases_calls, stub_cases_nodes, stub_cases_runs, stub_cases_bodies, stub_cases_maps)
CASES = {
    name: case
    for module in MODULES
    for name, case in vars(module).items()
    if isinstance(case, types.FunctionType) and case.__module__ == module.__name__
}


def main():
    sys.modules["cupy_backends"] = None  # it has the CUDA runtime in it, which wants a whole driver
    outcomes = {}
    for name, case in CASES.items():
        try:
            case()
        except BaseException:
            outcomes[name] = traceback.format_exc()
        else:
            outcomes[name] = "passed"
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    main()
