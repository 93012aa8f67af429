"""Other libraries: their current streams, memory pools and graphs, and which driver is meant.

Nothing here imports torch, CuPy or cuda.core unless the caller has, or the call is about them.
"""

from graphcore.driver.kept import default_driver
from graphcore.interop.drivers import choose_driver
from graphcore.interop.streams import current_stream, current_stream_holder, use_stream

__all__ = [
    "choose_driver",
    "current_stream",
    "current_stream_holder",
    "default_driver",
    "use_stream",
]
