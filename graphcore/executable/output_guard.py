"""OutputGuard: an output of a graph, and which run it is of.

Outputs of a graph are static: every run writes them again, so that a tensor read after the next run
holds that run's values, and nothing says so. A guard does. It sees the runs of every executable of
the same graph, of graphs in which it was embedded, of other graphs whose guarded outputs share
memory, and of those whose temporaries may, in a memory pool that captures share; a launch through a
bare driver handle it does not see.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from graphcore.advice import advises, instead
from graphcore.driver import Driver, active
from graphcore.driver.records import CaptureState, StreamHandle
from graphcore.errors import (
    CacheTypeError,
    ConfigurationError,
    LifecycleError,
    OverwrittenOutputError,
)
from graphcore.executable.fence import Fence, is_alive
from graphcore.executable.graph_exec import GraphExec, forget_bindings
from graphcore.executable.legacy_work import refuse_legacy_work
from graphcore.executable.runs import Runs, now
from graphcore.interop import current_stream
from graphcore.interop.torch import MemoryPool
from graphcore.resources.copying import copy_of
from graphcore.resources.spans import extent
from graphcore.resources.tensors import describe, is_tensor
from graphcore.resources.written import memory_around

if TYPE_CHECKING:
    from graphcore.resources.lifetime import OwnerSet

# the guards there are, so that two graphs that write one tensor learn of each other
_guards: weakref.WeakSet[OutputGuard] = weakref.WeakSet()


@advises
class OutputGuard:
    """A handle to an output of the newest run of an executable.

    Of an executable that has not run yet, to the output of its first run. Not locked.

    Args:
        exec_: The executable.
        tensor: What it writes: a tensor of any library, or a list, tuple or mapping of them.
        name: What errors call it.
        written_indirectly: The graph writes it through addresses that lie in memory (a table of
            pointers), which no node shows: what its nodes refer to is not looked at.

    Raises:
        CacheTypeError: ``exec_`` is no executable, or ``tensor`` no tensor.
        ConfigurationError: The tensor is of another driver or device, or there is none; or no node
            of the graph writes it: copies, fills and kernels with a signature say what they write,
            other kernels must at least refer to its memory.
        LifecycleError: The executable is closed.
    """

    def __init__(
        self,
        exec_: GraphExec,
        tensor: Any,
        name: str = "output",
        *,
        written_indirectly: bool = False,
    ) -> None:
        if not isinstance(exec_, GraphExec):
            raise CacheTypeError(
                f"exec_: expected a GraphExec, got {type(exec_).__name__}"
                f"{instead(exec_, 'executable')}"
            )
        runs = exec_.runs
        self.name = name
        parts = list(_parts(tensor, name))
        self._extents = [_checked_extent(exec_.driver, part, where) for where, part in parts]
        if not self._extents:
            raise ConfigurationError(f"{name}: expected at least one tensor, got {tensor!r}")
        if not written_indirectly:
            for where, part in parts:
                _check_written(exec_, part, where)
        self._driver = exec_.driver
        self._exec = weakref.ref(exec_)
        self._tensor = tensor
        # the memory pool of the capture among them: outputs lie in it
        self._owners: OwnerSet = exec_.owners
        self._runs = runs
        self._others: set[Runs] = set()
        runs.start_counting()
        self._run = runs.count if runs.has_run else 1
        self._stamp = runs.stamp or now()
        self._meet_others()
        self._meet_pool()
        forget_bindings(exec_.driver)  # bound launches do not count yet

    @property
    def run(self) -> int:
        """Which run this is the output of, counted since the graph's first guard: 0 was before."""
        return self._run

    @property
    def is_overwritten(self) -> bool:
        """Whether a later run has written the output again."""
        return self._writer() is not None

    def get(self) -> Any:
        """The tensor itself, for use before the next run.

        What is made of it without a copy (a view, a ``.to()`` that changes nothing) is the same
        memory: guard it too, or use :meth:`clone`.

        Raises:
            OverwrittenOutputError: A later run has overwritten it.
            LifecycleError: The run has not happened yet.
        """
        self._refuse("get")
        return self._tensor

    def clone(self) -> Any:
        """A copy that later runs leave alone, ordered behind this run and before the next.

        Runs on the current stream, which is made to wait for the run, and lets the run's stream
        wait for the copy; the host waits for nothing.

        Raises:
            OverwrittenOutputError: A later run has overwritten it.
            LifecycleError: The run has not happened yet.
            CaptureError: The current stream is the legacy one, where work would break a capture of
                another thread.
        """
        self._refuse("clone")
        refuse_legacy_work(self._driver, current_stream(self._driver), "clone")
        with _between_runs(self._driver, self._runs):
            stream = current_stream(self._driver)
            return _map(self._tensor, lambda part: copy_of(part, self._driver, stream))

    def overlaps(self, tensor: Any) -> bool:
        """Whether ``tensor`` lies in the guarded memory, or part of it does."""
        theirs = [_checked_extent(self._driver, tensor, "tensor")]
        return _overlap(self._extents, theirs)

    def watch(self, runs: Runs) -> None:
        """Counts ``runs`` too, of something that writes the same memory."""
        self._others.add(runs)

    def latest(self) -> OutputGuard:
        """A handle to the same output of the newest run.

        Raises:
            LifecycleError: The executable is closed.
        """
        executable = self._exec()
        if executable is None:
            raise LifecycleError("latest: expected an open executable, got one that is gone")
        # it was written by the graph of then, and may be again: graphs that take turns
        return OutputGuard(executable, self._tensor, self.name, written_indirectly=True)

    @property
    def _which(self) -> str:
        return f"run {self._run}" if self._run else "the run before the first guard"

    # ---- inside --------------------------------------------------------------------------------

    def _refuse(self, what: str) -> None:
        writer = self._writer()
        if writer is not None:
            raise OverwrittenOutputError(
                f"{what}: {self.name}: expected the output of {self._which}, got memory that "
                f"{writer} has overwritten; clone() the output before the next run, or copy it "
                "out into a tensor of your own"
            )
        if self._runs.count < self._run:
            raise LifecycleError(
                f"{what}: {self.name}: expected the output of {self._which}, got an executable "
                "that has not run yet; launch it first"
            )

    def _writer(self) -> str | None:
        """Who has written the output since its run, in words; None where nobody has."""
        runs = self._runs
        if runs.count > self._run:
            return f"run {runs.count}"
        if runs.count < self._run:
            return None
        written = runs.stamp if runs.count else self._stamp
        is_written = any(other.stamp > max(written, self._stamp) for other in self._others)
        return "a run of another graph that writes the same memory" if is_written else None

    def _meet_others(self) -> None:
        for other in list(_guards):
            if other._runs is not self._runs and _overlap(self._extents, other._extents):
                self._others.add(other._runs)
                other._others.add(self._runs)
        _guards.add(self)

    def _meet_pool(self) -> None:
        """Counts the runs of graphs that may write the output because they share its pool."""
        for pool in (owner.object for owner in self._owners):
            if not (isinstance(pool, MemoryPool) and _overlap(self._extents, pool.segments())):
                continue
            for earlier in pool.captured_before(self._runs):
                earlier.start_counting()
                self._others.add(earlier)
                # what ran before it was counted is not known: the output counts as current
                self._stamp = max(self._stamp, earlier.stamp)

    def __repr__(self) -> str:
        state = "overwritten" if self.is_overwritten else "current"
        if self._runs.count < self._run:
            state = "not written yet"
        return f"<OutputGuard {self.name} of {self._which}: {state}>"


def _parts(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """The tensors inside nested lists, tuples and mappings, each with its name."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _parts(part, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _parts(part, f"{where}[{index}]")
    elif is_tensor(value):
        yield where, value
    else:
        raise CacheTypeError(f"{where}: expected a tensor, got {type(value).__name__}")


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _map(part, function) for key, part in value.items()}
    if isinstance(value, tuple):
        parts = [_map(part, function) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [_map(part, function) for part in value]
    return function(value)


def _checked_extent(driver: Driver, tensor: Any, where: str) -> tuple[int, int]:
    """(address, bytes) of a tensor of ``driver``."""
    ref = describe(tensor, name=where)
    kind, device = ("cpu", 0) if driver.is_emulated else ("cuda", driver.device)
    if (ref.device_kind, ref.device) != (kind, device):
        raise ConfigurationError(
            f"{where}: expected memory of driver {driver.name}:{driver.device}, got a tensor on "
            f"{ref.device_kind}:{ref.device}"
        )
    return extent(where, ref)


def _check_written(exec_: GraphExec, tensor: Any, where: str) -> None:
    """Refuses a tensor that no node of the executable writes, as far as they say."""
    if not describe(tensor, name=where).size:
        return
    memory = memory_around(tensor, where, exec_.driver, exec_.owners)
    why = exec_.why_unwritten(memory)
    # what the capture made is the graph's own: a descriptor in a kernel may hide its address
    if why is not None and _overlap(exec_.private_memory(), memory[:1]):
        return
    if why is not None:
        raise ConfigurationError(
            f"{where}: expected a tensor that the graph writes, got {why}; where it is written "
            "through addresses that lie in memory, say written_indirectly=True"
        )


def _overlap(ours: list[tuple[int, int]], theirs: list[tuple[int, int]]) -> bool:
    return any(
        start < other + length and other < start + size
        for start, size in ours
        for other, length in theirs
    )


@contextmanager
def _between_runs(driver: Driver, runs: Runs) -> Iterator[None]:
    """Orders the block's work on the current stream behind the run, and the next run behind it."""
    current, run_stream = current_stream(driver), runs.stream
    if run_stream is None or run_stream == current or active.current() is not None:
        yield
        return
    if not is_alive(runs.holder, run_stream):
        Fence(driver, runs.holder, run_stream).wait()
        yield
        return
    if _captures(driver, run_stream):
        yield
        return
    done = driver.event()
    driver.record_event(done.handle, run_stream)
    driver.wait_event(current, done.handle)
    yield
    copied = driver.event()
    driver.record_event(copied.handle, current)
    driver.wait_event(run_stream, copied.handle)


def _captures(driver: Driver, stream: StreamHandle) -> bool:
    return driver.capture_status(stream).state is not CaptureState.NONE
