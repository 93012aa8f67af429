"""Operations on graphs and caches of executables for which the device has not memory enough."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from helpers.caching import Steps, add_up, check
from helpers.exhaustion import MIB, Case
from helpers.kernels import ONE_BLOCK, add_one, axpy
from helpers.tensors import filled, poisoned, replay

import graphcore
from graphcore import CaptureError, GraphCache, GraphPlan
from graphcore.driver import Driver
from graphcore.errors import CudaError
from graphcore.executable import UpdateStatus

COUNT = 4
NO_GRAPH = "here is no graph; the stream is usable"


class Stood(Case):
    """``out = factor * x + 1``, captured before: run again on poisoned memory and other inputs."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.x, self.out = filled(driver, 2.0), poisoned(driver)
        self.executable = graphcore.capture_function(
            lambda: self.out.copy_(self.x * 3 + 1), driver=driver, warmup=1
        ).instantiate()
        replay(self.executable)

    def still_right(self) -> None:
        for value in (5.0, -0.5):
            self.x.fill_(value)
            self.out.fill_(float("nan"))
            replay(self.executable)
            assert self.out.tolist() == [3 * value + 1] * COUNT
        assert self.executable.check() == []


# ---- captures -----------------------------------------------------------------------------------


class TorchInACapture(Stood):
    """A step whose temporary finds no room in the capture's pool."""

    # a device may refuse what torch does to find memory, before torch says that there is none
    errors = (torch.OutOfMemoryError, CaptureError)
    says = (NO_GRAPH,)
    warmup = 0

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.y = poisoned(driver)
        self.step()  # loads the kernels

    def step(self) -> torch.Tensor:
        large = self.x.repeat(self.unit // COUNT).view(-1, COUNT)
        self.y.copy_(large.amax(0) * 7)
        return large

    def operate(self) -> Any:
        graph = graphcore.capture_function(self.step, driver=self.driver, warmup=self.warmup)
        return graph, graph.instantiate()

    def check(self, made: Any) -> None:
        for value in (4.0, -3.0):
            self.x.fill_(value)
            self.y.fill_(float("nan"))
            replay(made[1])
            assert self.y.tolist() == [7 * value] * COUNT


class TorchInAWarmUp(TorchInACapture):
    errors = (torch.OutOfMemoryError,)
    says = ("Tried to allocate",)
    warmup = 1


class MemoryOfTheGraph(Stood):
    """A graph that allocates: memory is asked for when it is launched, and free behind it."""

    device_slack = None  # CUDA keeps it for the next launch
    holds_memory = False

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        count, y = self.unit, filled(driver, 0.0, COUNT)
        plan = GraphPlan("allocates")
        x, out = plan.buffer("x", (COUNT,)), plan.buffer("out", (COUNT,))
        large = plan.allocate("large", (count,))
        plan.memcpy(large[-COUNT:], x)
        plan.memset(out, 1.0)
        plan.launch(axpy, ONE_BLOCK, 2.0, large[-COUNT:], out, COUNT)
        plan.deallocate(large)
        self.y = y
        self.graph = plan.build({"x": self.x, "out": y}, driver=driver)
        self.allocating = self.graph.instantiate()

    def lefts(self, took: int) -> list[int]:
        return [2 * self.unit]

    def operate(self) -> Any:
        replay(self.allocating)
        return None

    def check(self, made: Any) -> None:
        for value in (4.0, -3.0):
            self.x.fill_(value)
            self.y.fill_(float("nan"))
            replay(self.allocating)
            assert self.y.tolist() == [2 * value + 1] * COUNT


# ---- executables --------------------------------------------------------------------------------


class ManyNodes(Stood):
    """A graph of so many nodes that its executable needs more than is free."""

    says = (*Case.says, "an executable of its ")
    device_slack = None  # CUDA keeps what executables took, for the next ones

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.nodes = 400 if driver.is_emulated else 20_000
        self.y = filled(driver, 0.0)
        function, arguments = driver.function(add_one), add_one.pack(self.y.data_ptr(), COUNT)
        with graphcore.capture(driver=driver) as capture:
            for _ in range(self.nodes):
                driver.launch(function, ONE_BLOCK, arguments, capture.stream.handle)
        self.long = capture.graph

    def lefts(self, took: int) -> list[int]:
        return [self.nodes * 2560 // 2] if self.driver.is_emulated else [16 * MIB]

    def operate(self) -> Any:
        made = self.long.instantiate()
        made.upload()
        return made

    def check(self, made: Any) -> None:
        self.counts(made)

    def counts(self, executable: graphcore.GraphExec) -> None:
        self.y.fill_(0.5)
        replay(executable)
        assert self.y.tolist() == [self.nodes + 0.5] * COUNT


class Reinstantiation(ManyNodes):
    """An update that needs a new executable, which finds no memory: the old one is there."""

    def operate(self) -> Any:
        outcome = self.executable.update(self.long)
        assert outcome.status is UpdateStatus.REINSTANTIATED
        return self.executable

    def check(self, made: Any) -> None:
        self.counts(made)
        # and back, for what looks at what stood before
        assert made.update(self.short).status is UpdateStatus.REINSTANTIATED

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.short = graphcore.capture_function(
            lambda: self.out.copy_(self.x * 3 + 1), driver=driver, warmup=0
        )


# ---- caches of executables ----------------------------------------------------------------------


class OneEntry(Case):
    """A cache with an entry that must stay, and a key whose graph finds no memory."""

    errors = (torch.OutOfMemoryError, CaptureError, CudaError)
    says = ()
    shares = (0.3, 0.8)
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.cache = GraphCache(driver=driver, **self.options)
        self.small, self.large = Steps(driver), Steps(driver, self.unit)
        self.large.of(1)  # loads the kernels
        self.entry = self.cache.get_or_capture("small", self.small(3), warmup=1)
        self.entries = self.more()
        self.state = self.holds()

    def more(self) -> set[str]:
        """Makes what else the cache has; the keys of all."""
        return {"small"}

    def holds(self) -> tuple[set[Any], int]:
        return set(self.cache.keys()), self.cache.bytes

    def operate(self) -> Any:
        with self.cache.pin("small"):
            before = self.cache.counters.failures
            try:
                return self.cache.get_or_capture("large", self.large(5), warmup=1)
            except BaseException:
                assert self.cache.counters.failures == before + 1
                raise

    def check(self, made: Any) -> None:
        self.large.x.fill_(2.0)
        check(made, 11.0)
        assert set(self.cache.keys()) == self.entries | {"large"}

    def still_right(self) -> None:
        if "large" not in self.cache:
            assert self.holds() == self.state
        assert self.cache.get("small") is self.entry
        for value in (2.0, -1.0):
            self.small.x.fill_(value)
            check(self.entry, 3 * value + 1)
        add_up(self.cache)


class OneEntryInASharedPool(OneEntry):
    # torch keeps what a failed capture took of a pool for the next capture into it
    device_keeps_for_life = True
    options: ClassVar[dict[str, Any]] = {"share_pool": True}

    def holds(self) -> tuple[set[Any], int]:
        # so the pool may have grown, by as much as the first failure took
        return set(self.cache.keys()), self.cache.bytes - self.cache.pool_bytes

    def more(self) -> set[str]:
        self.cache.get_or_capture("second", self.small(2), warmup=1)
        return {"small", "second"}

    def operate(self) -> Any:
        with self.cache.pin("second"):
            return super().operate()


class StrictCache(OneEntry):
    """Nothing goes for want of memory, though nothing is pinned."""

    options: ClassVar[dict[str, Any]] = {"strict": True}

    def operate(self) -> Any:
        return self.cache.get_or_capture("large", self.large(5), warmup=1)


class OverTheBudget(OneEntry):
    """The entry makes room for the new key, as the budget says; then memory runs out."""

    options: ClassVar[dict[str, Any]] = {"max_entries": 1}
    says = ("the cache had already evicted to make room: 'small'",)

    def operate(self) -> Any:
        try:
            return self.cache.get_or_capture("large", self.large(5), warmup=1)
        except BaseException:
            assert len(self.cache) == 0
            self.entry = self.cache.get_or_capture("small", self.small(3), warmup=1)
            raise

    def check(self, made: Any) -> None:
        self.large.x.fill_(2.0)
        check(made, 11.0)
        assert self.cache.keys() == ["large"]

    def still_right(self) -> None:
        if "large" not in self.cache:
            super().still_right()
