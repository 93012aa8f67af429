"""An emulated driver whose device is late: copies and graphs wait until somebody waits for them.

What the host changes too early is then seen by work that was put on a stream before; a device shows
such a mistake now and then only. How far the device has come is drawn at random at each question.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.emulated.graph import Payload
from graphcore.driver.records import (
    EventHandle,
    ExecHandle,
    GraphHandle,
    MemcpyParams,
    RawUpdate,
    StreamHandle,
)


class LateDriver(EmulatedDriver):
    """Args as of EmulatedDriver, and:

    draw: How far the device comes at a question.
    """

    def __init__(self, *, draw: random.Random, **more: Any) -> None:
        super().__init__(**more)
        self._draw = draw
        self._late: deque[Callable[[], object]] = deque()
        self._done = 0
        self._behind: dict[int, int] = {}

    @property
    def late(self) -> int:
        """Pieces of work that wait."""
        return len(self._late)

    def catch_up(self, count: int | None = None) -> None:
        """The device does ``count`` pieces of work; None: all."""
        for _ in range(len(self._late) if count is None else count):
            work = self._late.popleft()
            self._done += 1
            work()

    # ---- work ----------------------------------------------------------------------------------

    def _do(self, stream: StreamHandle, payload: Payload, run: Callable[[], None]) -> None:
        def begin() -> None:
            if isinstance(payload.params, MemcpyParams):
                self._late.append(run)
            else:  # torch's own work, which runs at once, may follow a kernel
                self.catch_up()
                run()

        super()._do(stream, payload, begin)

    def launch_graph(self, executable: ExecHandle, stream: StreamHandle) -> None:
        if self._stream(stream).capture is not None:
            super().launch_graph(executable, stream)
        else:
            found = self._executable(executable)
            self._late.append(lambda: self._machine.runner.launch(found))

    def record_event(
        self, event: EventHandle, stream: StreamHandle, *, external: bool = False
    ) -> None:
        super().record_event(event, stream, external=external)
        self._behind[event] = self._done + len(self._late)

    # ---- looking and waiting -------------------------------------------------------------------

    def _has_reached(self, event: EventHandle) -> bool:
        return self._done >= self._behind.get(event, 0)

    def query_event(self, event: EventHandle) -> bool:
        super().query_event(event)
        self.catch_up(self._draw.randint(0, len(self._late)))
        return self._has_reached(event)

    def synchronize_event(self, event: EventHandle) -> None:
        super().synchronize_event(event)
        while not self._has_reached(event):
            self.catch_up(1)

    def query_stream(self, stream: StreamHandle) -> bool:
        return super().query_stream(stream) and not self._late

    def wait_event(
        self, stream: StreamHandle, event: EventHandle, *, external: bool = False
    ) -> None:
        # what follows may be torch's own work, which runs at once
        if self._stream(stream).capture is None:
            self.catch_up()
        super().wait_event(stream, event, external=external)

    def synchronize_stream(self, stream: StreamHandle) -> None:
        super().synchronize_stream(stream)
        self.catch_up()

    def synchronize(self) -> None:
        super().synchronize()
        self.catch_up()

    def read(self, address: int, size: int) -> bytes:
        self.catch_up()
        return super().read(address, size)

    def write(self, address: int, data: bytes) -> None:
        self.catch_up()
        super().write(address, data)

    # ---- what must not change under work that waits --------------------------------------------

    def update_exec(self, executable: ExecHandle, graph: GraphHandle) -> RawUpdate:
        self.catch_up()
        return super().update_exec(executable, graph)

    def destroy_exec(self, executable: ExecHandle) -> None:
        self.catch_up()
        super().destroy_exec(executable)

    def free(self, address: int) -> None:
        self.catch_up()
        super().free(address)

    def free_pinned(self, address: int) -> None:
        self.catch_up()
        super().free_pinned(address)
