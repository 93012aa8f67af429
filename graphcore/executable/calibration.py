"""What one node of an executable takes of device memory: measured once per driver.

100 executables of a chain of small kernels are made, and the free memory of the device is read
between them. The figure is the median slope over many pairs of readings, which another user of the
device, or the steps in which the driver takes memory, do not move as they would a difference. What
the driver kept of executables that were destroyed is used up first: while any of it is, some
readings do not fall, and another hundred executables are made.
"""

from __future__ import annotations

import itertools
import logging
import os
import statistics
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from graphcore.driver import Driver, active, kernel
from graphcore.driver.records import GraphHandle, KernelParams, LaunchConfig, NodeHandle
from graphcore.errors import CudaError, LifecycleError

_log = logging.getLogger("graphcore")

INSTANTIATIONS = 100
# a device takes memory in steps of MiBs: enough nodes that a reading sees more than the steps
_NODES_ON_A_DEVICE, _NODES_EMULATED = 256, 4
_BETWEEN_READINGS = 10  # executables, which take more than any step that was seen (6 MiB)
_ROUNDS = 6
# where none gave a figure: in all 2.4 GB of an H200, whose driver kept 0.7 GB of 2000 executables
# of 256 nodes, 1000 at a time
_MOST_ROUNDS = 32
_FALLING = 0.9  # of the readings, where nothing kept is used and others use the device too
# no driver is known to take less or more; such a figure is somebody else's memory. (Beside other
# processes that gave memory back, 91 bytes were read on a device that takes some 2500.)
_PLAUSIBLE_ON_A_DEVICE, _PLAUSIBLE_EMULATED = (1024.0, 16384.0), (64.0, 65536.0)
_MEASURED_BEFORE = 2560.0  # on an H200, driver 580
_ONE_THREAD = LaunchConfig((1, 1, 1), (1, 1, 1))

_nothing = kernel(
    "graphcore_nothing",
    "u64 word",
    'extern "C" __global__ void graphcore_nothing(unsigned long long word) { }',
    lambda _config, _word: None,
)


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Device memory of an executable's node.

    Args:
        bytes_per_node: Of a kernel node.
        is_measured: False where the device's other users, or a lack of memory, made measuring
            impossible, and a figure measured elsewhere stands in.
    """

    bytes_per_node: float
    is_measured: bool = True

    def of(self, nodes: int) -> int:
        """Bytes of an executable of ``nodes`` nodes."""
        return round(self.bytes_per_node * nodes)


_known: weakref.WeakKeyDictionary[Driver, NodeMemory] = weakref.WeakKeyDictionary()
# two threads that measure at once would each read what the other takes
_measuring = threading.RLock()


def _new_lock() -> None:
    """After a fork: another thread may have held the lock, and that thread is not here."""
    global _measuring
    _measuring = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


def node_memory(driver: Driver) -> NodeMemory:
    """The figure of ``driver``, measured at the first call.

    That takes about 0.1 s on a device, and up to 5 s where its driver keeps much memory of
    executables that were destroyed.

    Raises:
        LifecycleError: Not measured yet, and a capture is under way on this thread.
        CudaError: The executables could not be made; nothing of them is left.
    """
    known = _known.get(driver)
    if known is None:
        capture = active.current()
        if capture is not None:
            raise LifecycleError(
                f"memory per node: {capture.name} is under way on this thread, which measuring "
                "would break; ask once before it"
            )
        with _measuring:
            known = _known.get(driver)
            if known is not None:  # another thread was first
                return known
            with _beside_captures(driver):
                known = _known[driver] = _measure(driver)
        _log.info(
            "device memory per node of an executable on %s:%d: %.0f bytes (%s)",
            driver.name,
            driver.device,
            known.bytes_per_node,
            "measured" if known.is_measured else "not measurable just now: assumed",
        )
    return known


def expected_bytes(driver: Driver, nodes: int) -> int:
    """What an executable of ``nodes`` nodes takes, by what is known by now: nothing is measured."""
    return _known.get(driver, NodeMemory(_MEASURED_BEFORE)).of(nodes)


def slope(readings: Sequence[int], least_distance: int = 1) -> float:
    """The median of what is taken per step, over all pairs of ``readings`` of free bytes."""
    pairs = itertools.combinations(range(len(readings)), 2)
    return statistics.median(
        (readings[start] - readings[stop]) / (stop - start)
        for start, stop in pairs
        if stop - start >= least_distance
    )


def all_fall(readings: Sequence[int]) -> bool:
    """Whether ``readings`` of free bytes fall from each to the next, but for a few."""
    falls = [after < before for before, after in itertools.pairwise(readings)]
    return sum(falls) >= _FALLING * len(falls)


@contextmanager
def _beside_captures(driver: Driver) -> Iterator[None]:
    """Inside, what measuring makes and destroys breaks no capture of another thread."""
    before = driver.exchange_capture_mode("relaxed")
    try:
        yield
    finally:
        try:
            driver.exchange_capture_mode(before)
        finally:  # where Ctrl-C came into the first
            driver.exchange_capture_mode(before)


def _measure(driver: Driver) -> NodeMemory:
    nodes = _NODES_EMULATED if driver.is_emulated else _NODES_ON_A_DEVICE
    least, most = _PLAUSIBLE_EMULATED if driver.is_emulated else _PLAUSIBLE_ON_A_DEVICE
    graph = driver.create_graph()
    found: list[float] = []
    with ExitStack() as made:  # goes on where Ctrl-C comes into one of a hundred destroys
        made.callback(driver.destroy_graph, graph)
        try:
            _fill(driver, graph, nodes)
            for number in range(_MOST_ROUNDS):
                if found and number >= _ROUNDS:
                    break
                # what an earlier round took stays: memory that the driver kept is used up
                readings = _readings(driver, graph, made)
                taken = slope(readings, len(readings) // 2) / (_BETWEEN_READINGS * nodes)
                if least <= taken <= most:
                    found.append(taken)
                    if all_fall(readings):
                        return NodeMemory(taken)
        except CudaError as error:
            if error.code != "CUDA_ERROR_OUT_OF_MEMORY":
                raise  # where memory is short already, the figure is not worth a failure
    if found:
        return NodeMemory(max(found))  # what was kept makes nodes look cheap, never dear
    return NodeMemory(_MEASURED_BEFORE, is_measured=False)


def _fill(driver: Driver, graph: GraphHandle, nodes: int) -> None:
    params = KernelParams(driver.function(_nothing), _ONE_THREAD, _nothing.pack(0))
    last: list[NodeHandle] = []
    for _ in range(nodes):
        last = [driver.add_node(graph, last, params)]


def _readings(driver: Driver, graph: GraphHandle, made: ExitStack) -> list[int]:
    """Free bytes before, and after every few executables, uploaded as a launch would have them."""
    readings = [driver.memory_info()[0]]
    with driver.stream() as stream:
        for number in range(1, INSTANTIATIONS + 1):
            executable = driver.instantiate(graph)
            made.callback(driver.destroy_exec, executable)
            driver.upload(executable, stream.handle)
            if number % _BETWEEN_READINGS == 0:
                stream.synchronize()
                readings.append(driver.memory_info()[0])
    return readings
