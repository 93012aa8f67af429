"""The work of suite launch: a chain of n one-element kernels, captured once and checked.

Every launch adds n to one float, so that an arm that launches something else is found out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from graphcore.driver import Driver, Pointer, Stream, kernel
from graphcore.driver.records import LaunchConfig, StreamHandle
from graphcore.errors import GraphcoreError
from graphcore.executable import capture
from graphcore.resources.buffer import Buffer

_ONE_THREAD = LaunchConfig((1, 1, 1), (1, 1, 1))


def _add_one(config: LaunchConfig, x: Pointer) -> None:
    x.array(1)[0] += 1


ADD_ONE = kernel(
    "graphcore_bench_add_one",
    "f32* x",
    'extern "C" __global__ void graphcore_bench_add_one(float* x) { x[0] += 1.0f; }',
    _add_one,
)


def _add_one_slowly(config: LaunchConfig, x: Pointer, nanoseconds: int) -> None:
    x.array(1)[0] += 1


ADD_ONE_SLOWLY = kernel(
    "graphcore_bench_add_one_slowly",
    "f32* x, u64 nanoseconds",
    """extern "C" __global__ void graphcore_bench_add_one_slowly(
        float* x, unsigned long long nanoseconds) {
        unsigned long long start, now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
        do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        while (now - start < nanoseconds);
        x[0] += 1.0f;
    }""",
    _add_one_slowly,
)


class Chain:
    """``length`` kernels in a row, as a graph of ours; the same launches for other captures.

    Each takes at least ``nanoseconds`` on a device; none waits where that is 0.
    """

    def __init__(
        self, driver: Driver, stream: Stream, length: int, *, nanoseconds: int = 0
    ) -> None:
        self.driver = driver
        self.stream = stream
        self.length = length
        self._buffer = Buffer.allocate((1,), "float32", driver=driver)
        self._nanoseconds = nanoseconds
        kernel = ADD_ONE_SLOWLY if nanoseconds else ADD_ONE
        self._function = driver.function(kernel)
        self._arguments = kernel.pack(*self.arguments())
        self.launch_on(stream.handle)  # loads the module before the capture
        stream.synchronize()
        with capture(stream, driver=driver, expect=length) as capturing:
            self.launch_on(stream.handle)
            capturing.keep(self._buffer, "x")
        self.graph = capturing.graph

    def launch_on(self, stream: StreamHandle) -> None:
        """Launches the chain's kernels one by one, into whatever ``stream`` captures."""
        for _ in range(self.length):
            self.driver.launch(self._function, _ONE_THREAD, self._arguments, stream)

    @property
    def buffer(self) -> Buffer:
        """The one float that the chain counts in."""
        return self._buffer

    def arguments(self) -> tuple[int, ...]:
        """What each kernel is launched with."""
        address = self._buffer.address
        return (address, self._nanoseconds) if self._nanoseconds else (address,)

    def clear(self) -> None:
        """Waits for the device and sets the sum to 0."""
        self.driver.synchronize()
        self.driver.write(self._buffer.address, bytes(4))

    def sum(self) -> float:
        """What the launches since :meth:`clear` have added."""
        (found,) = struct.unpack("f", self.driver.read(self._buffer.address, 4))
        return float(found)

    def check(self, name: str, launch: Callable[[], object]) -> None:
        """Launches once and looks at the sum.

        Raises:
            GraphcoreError: The arm ``name`` did not run the chain exactly once.
        """
        self.clear()
        launch()
        found = self.sum()
        if found != self.length:
            raise GraphcoreError(
                f"bench: arm {name}: expected one launch to add {self.length}, got {found}"
            )
