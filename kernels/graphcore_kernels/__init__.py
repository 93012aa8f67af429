"""The kernels of graphcore: source, launcher and reference side by side.

Importing this loads no NumPy, torch, CuPy or CUDA library; kernels are compiled when first used.
"""

# bound here and now: a module of the package has the kernel's name, and whoever imported that
# module first would otherwise get the module in place of the kernel
from graphcore_kernels.copy_plan import CopyClass as CopyClass
from graphcore_kernels.strided_copy import CopyPlan as CopyPlan
from graphcore_kernels.strided_copy import strided_copy as strided_copy

__all__ = ["CopyClass", "CopyPlan", "strided_copy"]
