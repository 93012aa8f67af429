"""The emulated driver: CUDA graphs with real numbers and real refusals, without a device.

Device pointers are host addresses, so the CPU tensors of torch, NumPy and DLPack are its device
memory. Kernels run their Python references; torch's operations on CPU tensors are recorded inside
captures; graphs are built, captured, read, instantiated, launched and updated by the driver's own
rules, with its error codes. ``order="adversarial"`` runs independent nodes in random orders, and
``driver.faults`` makes chosen calls fail.

What it cannot show:

* time: every call runs at once on the host, and event times are host times;
* real concurrency: streams never overlap, and nothing is ever "not ready";
* device faults: a wrong address is not found out (freed memory of this driver is kept a while, so
  that a late read gives stale bytes), and no error is sticky;
* what torch does without dispatching an operation: the list is in ``torch_recorder``.
"""

from graphcore.driver.emulated.conditional import set_conditional
from graphcore.driver.emulated.driver import EmulatedDriver
from graphcore.driver.emulated.operation import Operation

__all__ = ["EmulatedDriver", "Operation", "set_conditional"]
