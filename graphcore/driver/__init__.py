"""What graphcore asks of CUDA: the seam, its two drivers, and how one is opened."""

from graphcore.driver.api import LEGACY_STREAM, CaptureMode, Driver
from graphcore.driver.kernel import Kernel, Parameter, Pointer, kernel
from graphcore.driver.opening import open_driver
from graphcore.driver.streams import Event, Stream, as_stream, stream_handle

__all__ = [
    "LEGACY_STREAM",
    "CaptureMode",
    "Driver",
    "Event",
    "Kernel",
    "Parameter",
    "Pointer",
    "Stream",
    "as_stream",
    "kernel",
    "open_driver",
    "stream_handle",
]
