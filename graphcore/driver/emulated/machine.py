"""An emulated machine: what the drivers of all its devices share."""

from __future__ import annotations

import itertools

from graphcore.driver.emulated.capture import Captures
from graphcore.driver.emulated.execution import ORDERS, Executable, Order, Runner
from graphcore.driver.emulated.faults import Faults
from graphcore.driver.emulated.functions import Functions
from graphcore.driver.emulated.graph import Graphs
from graphcore.driver.emulated.handles import Table
from graphcore.driver.emulated.memory import Memory
from graphcore.driver.emulated.streams import Streams
from graphcore.errors import ConfigurationError

_contexts = itertools.count(1)


class Machine:
    """Devices and everything made on them."""

    def __init__(self, devices: int, order: Order, seed: int, total_memory: int) -> None:
        if devices < 1:
            raise ConfigurationError(f"devices: expected at least 1, got {devices}")
        if order not in ORDERS:
            raise ConfigurationError(f"order: expected one of {ORDERS}, got {order!r}")
        if total_memory < 1:
            raise ConfigurationError(f"total_memory: expected at least 1 byte, got {total_memory}")
        self.devices = devices
        self.contexts = [next(_contexts) for _ in range(devices)]
        self.memory = Memory(devices, total_memory)
        self.streams = Streams(devices)
        self.functions = Functions()
        self.graphs = Graphs()
        self.captures = Captures(self.graphs)
        self.executables: Table[Executable] = Table("executable", "CUDA_ERROR_INVALID_VALUE")
        self.runner = Runner(self.memory, order, seed)
        self.faults = Faults()
