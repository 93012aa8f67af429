"""The CUDA driver of graphcore, on ``cuda.bindings``: the only package that imports it.

Importing it raises :class:`graphcore.errors.DriverUnavailable` where ``cuda.bindings`` is missing
or too old; nothing is initialised before :class:`CudaDriver` is made.
"""

from graphcore.driver.cuda.driver import CudaDriver

__all__ = ["CudaDriver"]
