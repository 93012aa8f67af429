"""Operations of all three systems, each on a state of its own: what is done, and what must come.

Every site has ``operate``, in which one driver call fails, and ``again``, which does the same work
anew and gives what it came to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from graphcore_kernels import strided_copy
from helpers.decode_models import make_model, make_prompt
from helpers.kernels import ONE_BLOCK, add_one, axpy, scale
from helpers.moe_steps import Lane, Scene

import graphcore
from graphcore import Buffer, GraphCache, GraphPlan
from graphcore.decode import CUDAGraphAR, StaticKVCache
from graphcore.driver.emulated import EmulatedDriver

COUNT = 6


class Site:
    """Tensors, a captured step over them, and its executable."""

    def __init__(self, driver: EmulatedDriver) -> None:
        self.driver = driver
        self.x, self.y = torch.zeros(COUNT), torch.zeros(COUNT)
        self.other = torch.full((COUNT,), 7.0)
        self.prepare()
        self.x.fill_(2.0)
        self.y.zero_()

    def prepare(self) -> None:
        """What is there before the operation."""

    def operate(self) -> object:
        """The operation."""
        raise NotImplementedError

    def again(self) -> Any:
        """The operation once more; gives what it came to."""
        return self.operate()

    # ---- parts ----------------------------------------------------------------------------------

    def step(self, factor: float = 3.0) -> None:
        self.y.copy_(self.x * factor)

    def plan(self, factor: float, *, longer: bool = False) -> GraphPlan:
        plan = GraphPlan("step")
        x, y = plan.buffer("x", (COUNT,)), plan.buffer("y", (COUNT,))
        plan.memset(y, 0.0)
        plan.launch(axpy, ONE_BLOCK, factor, x, y, COUNT, name="add")
        if longer:
            plan.launch(add_one, ONE_BLOCK, y, COUNT)
        return plan

    def build(self, factor: float, *, longer: bool = False) -> graphcore.Graph:
        plan = self.plan(factor, longer=longer)
        return plan.build({"x": self.x, "y": self.y}, driver=self.driver)

    def launched(self, executable: Any) -> list[float]:
        self.y.fill_(-1.0)
        executable.launch()
        self.driver.synchronize()
        values: list[float] = self.y.tolist()
        return values


class Capturing(Site):
    def operate(self) -> graphcore.Graph:
        return graphcore.capture_function(self.step, driver=self.driver, warmup=1)

    def again(self) -> Any:
        return self.launched(self.operate().instantiate())


class Branching(Site):
    def operate(self) -> graphcore.Graph:
        with graphcore.capture(driver=self.driver) as capture:
            self.x.add_(1)
            with capture.fork(), capture.annotate("side"):
                self.y.copy_(self.x)
            self.y.mul_(2)
        return capture.graph

    def again(self) -> Any:
        return self.launched(self.operate().instantiate())


class Building(Site):
    def operate(self) -> graphcore.Graph:
        return self.build(2.0, longer=True)

    def again(self) -> Any:
        return self.launched(self.operate().instantiate())


class Running(Site):
    def operate(self) -> None:
        self.plan(2.0).run({"x": self.x, "y": self.y}, driver=self.driver)

    def again(self) -> Any:
        self.operate()
        return self.y.tolist()


class Made(Site):
    """A site that has a graph and its executable."""

    guard: Any = None

    def prepare(self) -> None:
        self.graph = self.build(2.0)
        self.executable = self.graph.instantiate(guard=self.guard)
        self.launched(self.executable)

    def again(self) -> Any:
        self.operate()
        return self.launched(self.executable)


class Instantiating(Made):
    def operate(self) -> object:
        return self.graph.instantiate(guard="full")

    def again(self) -> Any:
        return self.launched(self.operate())


class Cloning(Made):
    def operate(self) -> object:
        return self.graph.clone()

    def again(self) -> Any:
        return self.launched(self.graph.clone().instantiate())


class Launching(Made):
    def operate(self) -> object:
        self.executable.launch()
        return None


class Guarded(Launching):
    guard = "full"


class Uploading(Made):
    def operate(self) -> object:
        return self.executable.upload()


class Updating(Made):
    def operate(self) -> object:
        return self.executable.update(self.build(5.0))


class Rebuilding(Made):
    def operate(self) -> object:
        return self.executable.update(self.build(5.0, longer=True))


class Rebinding(Made):
    def operate(self) -> object:
        if self.executable.rebind([(self.x, self.other)]):
            self.x, self.other = self.other, self.x
        return None

    def again(self) -> Any:
        values = {float(each[0]) for each in (self.x, self.other)}
        assert values == {2.0, 7.0}
        self.executable.update(self.build(2.0))
        return self.launched(self.executable) == [2 * float(self.x[0])] * COUNT


class SettingParameters(Made):
    def operate(self) -> object:
        return self.executable.set_params(1, [4.0, self.x, self.y, COUNT])


class Enabling(Made):
    def operate(self) -> object:
        self.executable.enable(1, False)
        return None


class Looking(Made):
    def operate(self) -> object:
        names = {"x": self.x, "y": self.y}
        self.graph.watch(names)
        other = self.build(9.0)
        found = graphcore.diff(self.graph, other), self.executable.check()
        return self.graph.fingerprint(names), self.graph.attributions(names), found

    def again(self) -> Any:
        fingerprint, attributions, (diff, check) = self.operate()  # type: ignore[misc]
        return len(fingerprint.fields), list(map(str, attributions)), str(diff), check


class Memory(Site):
    def operate(self) -> object:
        with Buffer.allocate((COUNT,), "float32", driver=self.driver) as buffer:
            buffer.write([4.0] * COUNT)
            return buffer.read().tolist()


class Inputs(Site):
    def prepare(self) -> None:
        self.inputs = graphcore.StaticInputs({"x": self.x}, fill={"x": 0.0}, driver=self.driver)

    def operate(self) -> object:
        self.inputs.copy_(x=self.other[:4])
        return None

    def again(self) -> Any:
        self.operate()
        return self.x.tolist()


class Outputs(Made):
    def operate(self) -> object:
        return graphcore.OutputGuard(self.executable, self.y, "sum").clone()

    def again(self) -> Any:
        self.executable.launch()
        return self.operate().tolist()  # type: ignore[attr-defined]


class Caching(Site):
    """A cache with room for one entry, which has one."""

    def prepare(self) -> None:
        self.cache = GraphCache(max_entries=1, driver=self.driver)
        self.cache.get_or_capture("first", self.step)

    def operate(self) -> Any:
        return self.cache.get_or_capture("second", lambda: self.step(5.0), warmup=1)

    def again(self) -> Any:
        made = self.launched(self.operate())
        assert self.cache.keys() == ["second"]
        return made


class Copying(Site):
    def prepare(self) -> None:
        self.stream = self.driver.stream()

    def operate(self) -> object:
        strided_copy(self.y.view(2, 3), self.x.view(3, 2).T, stream=self.stream)
        return self.stream.synchronize()

    def again(self) -> Any:
        self.operate()
        return self.y.tolist()


class Scaling(Site):
    """A kernel by its handle, as other libraries launch."""

    def operate(self) -> object:
        stream = self.driver.stream()
        arguments = scale.pack(self.x.data_ptr(), 1.0, COUNT)
        self.driver.launch(self.driver.function(scale), ONE_BLOCK, arguments, stream.handle)
        stream.synchronize()
        return stream.close()

    def again(self) -> Any:
        self.operate()
        return self.x.tolist()


class Decoding(Site):
    """A runner that has decoded a prompt, and a cache of the same layout beside its own."""

    def prepare(self) -> None:
        self.model = make_model()
        self.prompt = make_prompt(3)
        self.runner = CUDAGraphAR(self.model, max_seq_len=12, driver=self.driver)
        self.beside = StaticKVCache.for_model(self.model, 12)

    def operate(self) -> Any:
        self.runner.cache.reset()
        self.runner.capture(self.prompt)
        return self.runner.replay()

    def again(self) -> Any:
        return self.runner.generate(self.prompt, 4).tolist()


class Replaying(Decoding):
    def prepare(self) -> None:
        super().prepare()
        self.runner.generate(self.prompt, 4)

    def operate(self) -> Any:
        return self.runner.generate(self.prompt, 4)


class InOneLaunch(Replaying):
    def operate(self) -> Any:
        return self.runner.generate_in_one_launch(self.prompt, 4)


class AnotherCache(Replaying):
    def operate(self) -> Any:
        return self.runner.generate(self.prompt, 4, cache=self.beside)


class Stepping:
    """A step of experts in slots, after ``steps`` of its kind."""

    steps = 0

    def __init__(self, driver: EmulatedDriver) -> None:
        self.driver = driver
        self.lane: Lane = Scene(driver, decode_boundary_overlap=1).lane()
        self.lane.kinds(self.steps)
        self.change()

    def change(self) -> None:
        """What is another thing for the step that comes."""

    def operate(self) -> Any:
        return self.lane.scene.reuse.run(self.lane.step, stream=self.lane.scene.stream)

    def again(self) -> Any:
        """The kind of the fourth step from here; every one is compared bit by bit."""
        return [self.lane.run() for _ in range(4)][-1].kind


class FirstStep(Stepping):
    pass


class CapturedStep(Stepping):
    steps = 1


class ReplayedStep(Stepping):
    steps = 3


class UpdatedStep(Stepping):
    steps = 3

    def change(self) -> None:
        self.lane.move_output()


# what only looks, or makes something new, leaves all that was there as it was
GRAPHS: dict[str, Callable[[EmulatedDriver], Any]] = {
    "capture a function": Capturing,
    "capture with a branch": Branching,
    "build a plan": Building,
    "run a plan": Running,
    "instantiate, guarded": Instantiating,
    "clone": Cloning,
    "launch": Launching,
    "launch, guarded": Guarded,
    "upload": Uploading,
    "update": Updating,
    "update that builds anew": Rebuilding,
    "rebind": Rebinding,
    "parameters of a node": SettingParameters,
    "a node switched off": Enabling,
    "fingerprint, compare, check": Looking,
    "memory": Memory,
    "static inputs": Inputs,
    "an output": Outputs,
    "a cache that evicts": Caching,
    "strided copy": Copying,
    "a kernel by its handle": Scaling,
}
CACHES: dict[str, Callable[[EmulatedDriver], Any]] = {
    "prompt, capture, replay": Decoding,
    "a generation": Replaying,
    "a generation in one launch": InOneLaunch,
    "a generation on another cache": AnotherCache,
}
EXPERTS: dict[str, Callable[[EmulatedDriver], Any]] = {
    "the first step": FirstStep,
    "a step that is captured": CapturedStep,
    "a step that is replayed": ReplayedStep,
    "a step that is updated": UpdatedStep,
}
