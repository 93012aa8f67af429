"""Random operations on graphs, caches and experts of one driver, each checked, with faults between.

``python tests/helpers/soak.py [STEPS] [SEED] [--out FILE]`` soaks the driver that is here and tells
how memory went.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers.decode_models import device_of, eager_tokens, make_model, make_prompt
from helpers.every_fault import handles
from helpers.exhaustion import let_go_of_what_is_kept
from helpers.fault_codes import codes_of
from helpers.kernels import ONE_BLOCK, add_one, axpy
from helpers.moe_steps import Scene

import graphcore
from graphcore import CapacityError, CaptureError, GraphCache, GraphcoreError, GraphPlan
from graphcore.bench import provenance
from graphcore.decode import CUDAGraphAR
from graphcore.driver import Driver, active
from graphcore.driver.emulated import EmulatedDriver

COUNT, ALIVE, NEW = 8, 5, 3
MOST_ENTRIES = 4
ONCE = 2_000  # blocks of Python's that what is met for the first time keeps
FAULT_EVERY = 25
# what takes long is done less often
HEAVY = {"capture", "generate", "fill_the_cache", "step", "step_elsewhere"}
# what nearly every operation asks of the driver
ASKED = (
    "alloc", "allocation_of", "add_node", "begin_capture", "create_graph", "create_stream", "edges",
    "end_capture", "fill", "function", "instantiate", "launch", "launch_graph", "node_params",
    "nodes", "read", "update_exec", "write",
)  # fmt: skip


class Soak:
    """Everything that is used, and the operations; a seed makes the same run again."""

    def __init__(self, driver: Driver, seed: int = 0) -> None:
        self.driver, self.random = driver, random.Random(seed)
        self.device = device_of(driver)
        self.inputs = [torch.zeros(COUNT, device=self.device) for _ in range(3)]
        self.out = torch.zeros(COUNT, device=self.device)
        self.model = make_model(device=self.device)
        self.prompts = [make_prompt(count, device=self.device) for count in (1, 2, 3, 5)]
        self.expected = [eager_tokens(self.model, prompt, NEW) for prompt in self.prompts]
        self.lane = Scene(driver, decode_boundary_overlap=1).lane()
        self.runner = CUDAGraphAR(self.model, max_seq_len=16, driver=driver)
        self.cache = GraphCache(max_entries=MOST_ENTRIES, driver=driver)
        self.alive: list[tuple[Any, Callable[[], torch.Tensor]]] = []
        self.done: Counter[str] = Counter()
        self.failed = 0
        self.operations = {
            name.removeprefix("do_"): getattr(self, name)
            for name in sorted(dir(self))
            if name.startswith("do_")
        }

    # ---- a step ---------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        """That many operations; AssertionError where one gives a wrong result."""
        names = [*self.operations]
        weights = [1 if name in HEAVY else 4 for name in names]
        for name in self.random.choices(names, weights, k=steps):
            if self.driver.is_emulated and self.random.randrange(FAULT_EVERY) == 0:
                self.with_a_fault(name)
            else:
                self.operations[name]()
                self.done[name] += 1
            assert active.current() is None
            assert gc.isenabled()

    def with_a_fault(self, name: str) -> None:
        """The operation while some call of it may fail; what it changed is given up."""
        assert isinstance(self.driver, EmulatedDriver)
        call = self.random.choice(ASKED)
        code = self.random.choice(codes_of(call))
        self.driver.faults.inject(call, code=code, after=self.random.randrange(3))
        try:
            self.operations[name]()
        except GraphcoreError:
            self.failed += 1
        finally:
            self.driver.faults.clear()
        self.drop_all()

    # ---- graphs ---------------------------------------------------------------------------------

    def do_capture(self) -> None:
        x, factor = self.random.choice(self.inputs), self.random.randrange(2, 9)
        graph = graphcore.capture_function(
            lambda: self.out.copy_(x * factor), driver=self.driver, warmup=self.random.randrange(2)
        )
        self.keep(graph.instantiate(guard=self.random.choice([None, "owners", "full"])),
                  lambda: x * factor)  # fmt: skip

    def do_build(self) -> None:
        x, factor = self.random.choice(self.inputs), self.random.randrange(2, 9)
        longer = self.random.random() < 0.5
        executable = self.plan(factor, longer).build(self.buffers(x), driver=self.driver)
        self.keep(executable.instantiate(), lambda: x * factor + longer)

    def do_launch(self) -> None:
        for executable, expected in self.alive:
            for value, tensor in enumerate(self.inputs, start=self.random.randrange(5)):
                tensor.fill_(value)
            self.out.fill_(float("nan"))
            executable.launch()
            self.driver.synchronize()
            assert torch.equal(self.out, expected())

    def do_update(self) -> None:
        if self.alive:
            executable, _ = self.alive.pop(self.random.randrange(len(self.alive)))
            x, factor = self.random.choice(self.inputs), self.random.randrange(2, 9)
            longer = self.random.random() < 0.5
            graph = self.plan(factor, longer).build(self.buffers(x), driver=self.driver)
            executable.update(graph)
            self.keep(executable, lambda: x * factor + longer)

    def do_rebind(self) -> None:
        x, y = self.random.sample(self.inputs, 2)
        graph = self.plan(3, longer=False).build(self.buffers(x), driver=self.driver)
        executable = graph.instantiate()
        executable.rebind([(x, y)])
        self.keep(executable, lambda: y * 3)

    def do_look(self) -> None:
        names = {f"x{number}": tensor for number, tensor in enumerate(self.inputs)}
        for executable, _ in self.alive:
            assert executable.check() == []
            assert executable.fingerprint(names) == executable.fingerprint(names)
            assert graphcore.diff(executable.snapshot(), executable.snapshot()).is_empty

    def do_break_a_capture(self) -> None:
        try:
            with graphcore.capture(driver=self.driver):
                self.out.add_(1)
                self.out.sum().item()
        except CaptureError:
            return
        raise AssertionError("a host read was captured")

    def do_cache(self) -> None:
        self.add_to_the_cache(self.random.randrange(2, 11))

    def add_to_the_cache(self, factor: int) -> None:
        x = self.inputs[0]
        executable = self.cache.get_or_capture(factor, lambda: x * factor, warmup=0)
        x.fill_(self.random.randrange(9))
        executable.launch()
        self.driver.synchronize()
        assert torch.equal(executable.outputs, x * factor)

    # ---- caches ---------------------------------------------------------------------------------

    def do_generate(self) -> None:
        at = self.random.randrange(len(self.prompts))
        call = self.random.choice([self.runner.generate, self.runner.generate_in_one_launch])
        assert torch.equal(call(self.prompts[at], NEW), self.expected[at])

    def do_fill_the_cache(self) -> None:
        self.runner.generate(self.prompts[0], NEW)
        try:
            while True:
                self.runner.replay()
        except CapacityError:
            assert self.runner.cache.seen_tokens == 16

    # ---- experts --------------------------------------------------------------------------------

    def do_step(self) -> None:
        self.lane.run()

    def do_step_elsewhere(self) -> None:
        self.lane.move_output()
        self.lane.run()

    # ---- parts ----------------------------------------------------------------------------------

    def keep(self, executable: Any, expected: Callable[[], torch.Tensor]) -> None:
        self.alive.append((executable, expected))
        if len(self.alive) > ALIVE:
            self.alive.pop(0)[0].close()

    def buffers(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": x, "y": self.out}

    def plan(self, factor: float, longer: bool) -> GraphPlan:
        plan = GraphPlan("soak")
        x, y = plan.buffer("x", (COUNT,)), plan.buffer("y", (COUNT,))
        plan.memset(y, 0.0)
        plan.launch(axpy, ONE_BLOCK, float(factor), x, y, COUNT)
        if longer:
            plan.launch(add_one, ONE_BLOCK, y, COUNT)
        return plan

    def drop_all(self) -> None:
        """Gives up whatever may go: what is left is the same whenever it is asked for."""
        for executable, _ in self.alive:
            executable.close()
        self.alive.clear()
        self.cache.close()
        self.cache = GraphCache(max_entries=MOST_ENTRIES, driver=self.driver)
        self.runner.close()
        self.runner = CUDAGraphAR(self.model, max_seq_len=16, driver=self.driver)

    def live_most(self) -> None:
        """Has as many graphs live at once as ever do: each has a stream, which libraries keep."""
        gc.collect()
        self.do_generate()
        for _ in range(ALIVE):
            self.do_capture()
        for factor in range(2, 2 + MOST_ENTRIES):
            self.add_to_the_cache(factor)
        self.lane.run()
        # and one more of each kind, which takes its stream before another one gives its own back
        self.do_step_elsewhere()
        self.do_capture()
        self.add_to_the_cache(2 + MOST_ENTRIES)
        self.do_break_a_capture()

    def held(self) -> dict[str, int]:
        """What is held with everything dropped that may go, and every kind of step done once."""
        self.live_most()
        self.drop_all()
        self.do_generate()
        for number in range(6):
            if number == 4:  # an executable that was updated keeps the graph it was made from
                self.lane.move_output()
            self.lane.run()
        self.drop_all()
        self.lane.scene.seen.clear()  # an observer of the tests, not of the library
        gc.collect()
        self.driver.synchronize()
        counted = {"python blocks": sys.getallocatedblocks()}
        if not self.driver.is_emulated:
            let_go_of_what_is_kept(self.driver)
            counted["torch's bytes"] = torch.cuda.memory_reserved(self.driver.device)
        free, total = self.driver.memory_info()
        counted["device bytes"] = total - free
        if isinstance(self.driver, EmulatedDriver):
            names = ("graphs", "nodes", "executables", "streams", "events")
            counted |= dict(zip(names, handles(self.driver), strict=False))
        return counted


def is_flat(held: list[dict[str, int]], steps: int) -> bool:
    """Whether nothing grew after the second tenth of ``steps``; Python's own memory by little.

    The newest 256 records of steps with experts fill up meanwhile, about 30 blocks each.
    """
    settled, last = held[2:3] or held[:1], held[-1]
    blocks = last["python blocks"] - settled[0]["python blocks"]
    without = [dict(each, **{"python blocks": 0}) for each in held[2:]]
    return all(each == without[0] for each in without) and blocks < ONCE + steps


def main(steps: int, seed: int, out: Path | None = None) -> int:
    """A soak in ten parts, with what is held after each; 1 where that grew after the second.

    Args:
        steps: How many operations.
        seed: Of their order.
        out: Where what was seen is written after every part, as JSON; None: nowhere.
    """
    driver = graphcore.open_driver()
    soak, held = Soak(driver, seed), list[dict[str, int]]()
    for part in range(11):
        if part:
            soak.run(steps // 10)
        held.append(soak.held())
        print(f"{part * (steps // 10)} steps:", held[-1], flush=True)
        if out is not None:
            found = {
                "what": "soak", "device": driver.device_info().name, "driver": driver.name,
                "versions": provenance.versions(driver), "commit": provenance.commit(),
                "date": provenance.today(), "steps": part * (steps // 10), "seed": seed,
                "faults": soak.failed, "done": dict(sorted(soak.done.items())), "held": held,
            }  # fmt: skip
            out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{soak.failed} faults raised, done: {dict(soak.done)}")
    return 0 if is_flat(held, steps) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", type=int, nargs="?", default=10_000)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--out", type=Path, help="a file for what was seen (JSON)")
    sys.exit(main(**vars(parser.parse_args())))
