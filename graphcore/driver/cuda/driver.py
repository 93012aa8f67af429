"""The CUDA driver as one object: a device's primary context and the calls of all parts.

It works beside torch, CuPy and cuda.core, because it uses the primary context they use, never
resets a device and leaves another current context as it found it.
"""

from __future__ import annotations

from typing import ClassVar

from graphcore.driver.cuda.callbacks import host_callbacks
from graphcore.driver.cuda.capture import CaptureCalls
from graphcore.driver.cuda.check import ask
from graphcore.driver.cuda.context import PrimaryContext, in_context
from graphcore.driver.cuda.executables import ExecutableCalls
from graphcore.driver.cuda.memory import MemoryCalls
from graphcore.driver.cuda.streams import StreamCalls
from graphcore.driver.cuda.tensor_maps import TensorMapCalls
from graphcore.driver.cuda.versions import EntryPoints, cuda
from graphcore.driver.records import DeviceInfo

_attribute = cuda.CUdevice_attribute
_MAJOR = _attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
_MINOR = _attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
_MULTIPROCESSORS = _attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_SHARED_BYTES = _attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_NAME_BYTES = 256


class CudaDriver(StreamCalls, MemoryCalls, CaptureCalls, ExecutableCalls, TensorMapCalls):
    """A CUDA device through its driver API.

    Args:
        device: Ordinal of the device, as CUDA counts.

    Raises:
        DriverUnavailable: No driver library, a driver for a CUDA older than 13, or no such device.
    """

    name: ClassVar[str] = "cuda"
    is_emulated: ClassVar[bool] = False

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self._context = PrimaryContext(device)
        self._entry_points = EntryPoints(self._context.driver_version)
        self._callbacks = host_callbacks()
        self._functions = {}
        self._loaded = set()
        self._known_parameters = {}
        self._conditionals = {}
        self._gone = set()
        self._own_streams = {}
        self._captures = {}
        # a thread without a context gets this one now, so that a first launch finds it
        previous = self._context.enter()
        if previous is not None:
            cuda.cuCtxSetCurrent(previous)

    @in_context
    def device_info(self) -> DeviceInfo:
        device = self._context.device
        name = ask(cuda.cuDeviceGetName, _NAME_BYTES, device)
        version = self._context.driver_version
        return DeviceInfo(
            index=self.device,
            name=name.split(b"\0", 1)[0].decode(errors="replace"),
            capability=(
                int(ask(cuda.cuDeviceGetAttribute, _MAJOR, device)),
                int(ask(cuda.cuDeviceGetAttribute, _MINOR, device)),
            ),
            total_memory=int(ask(cuda.cuDeviceTotalMem, device)),
            multiprocessors=int(ask(cuda.cuDeviceGetAttribute, _MULTIPROCESSORS, device)),
            driver_version=(version // 1000, version % 1000 // 10),
            shared_bytes=int(ask(cuda.cuDeviceGetAttribute, _SHARED_BYTES, device)),
        )

    def context_id(self) -> int:
        return self._context.id

    @in_context
    def synchronize(self) -> None:
        ask(cuda.cuCtxSynchronize)

    def close(self) -> None:
        """Forgets what was loaded. The context and the modules stay: graphs may hold them."""
        self._destroy_capture_streams()
        self._functions.clear()
        self._loaded.clear()
        self._known_parameters.clear()
        self._conditionals.clear()
        self._gone.clear()
