"""The package as its users import it."""

from __future__ import annotations

import graphcore_kernels
import pytest
from helpers.isolated import run_script


def test_the_public_names_are_sorted_and_there():
    assert graphcore_kernels.__all__ == sorted(graphcore_kernels.__all__)
    assert all(hasattr(graphcore_kernels, name) for name in graphcore_kernels.__all__)


def test_importing_it_loads_no_array_or_gpu_library():
    heavy = "('numpy', 'torch', 'cupy', 'cuda', 'cuda.bindings')"
    script = f"import sys, graphcore_kernels; print([m for m in {heavy} if m in sys.modules])"
    done = run_script(script)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    "first",
    [
        "import graphcore_kernels.strided_copy",
        "from graphcore_kernels.strided_copy import CopyPlan",
    ],
)
def test_the_kernel_is_callable_whoever_imported_its_module_first(first):
    done = run_script(f"{first}\nfrom graphcore_kernels import strided_copy\nprint(strided_copy)")
    assert done.stdout.strip() == "strided_copy(dst, src, stream=None)", done.stderr
