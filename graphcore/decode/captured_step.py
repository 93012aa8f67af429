"""Capturing a decode step: warm-up that leaves no trace, capture, an executable that is launched.

The warm-up runs on the capture stream (a library's first call inside a capture invalidates it) at a
real slot of the cache, so that slot and everything else a step writes is saved before and put back
after. Nothing a replay depends on is made inside the capture except temporaries, whose memory the
graph owns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from graphcore.decode import decoder_stack
from graphcore.decode.capture_lane import CaptureLane
from graphcore.decode.compiled_step import Compile, CompiledStep
from graphcore.decode.model_settings import ModelSettings
from graphcore.decode.number_tensors import numbers_filled
from graphcore.decode.one_launch import OneLaunch
from graphcore.decode.step import DecodeStep
from graphcore.executable import Capture, Graph, GraphExec
from graphcore.executable.rebinding import RebindOutcome
from graphcore.interop.torch import annotate_modules

_warmup_steps = 2


class CapturedStep:
    """Graph and executable of one decode step, and its loop once that was asked for; owns them.

    Args:
        graph: Of the step.
        executable: Made from it.
        model: That was captured.
        before: Its settings right before the forwards of warm-up and capture.

    Attributes:
        settings: Those of the model that the graph has baked in.
    """

    def __init__(
        self, graph: Graph, executable: GraphExec, model: Any, before: ModelSettings
    ) -> None:
        self.graph = graph
        self.executable = executable
        self.settings = ModelSettings(model)
        # a counter, or the newest hidden states: not what the graph was made from
        self.settings.leave_out(before.changes(self.settings))
        # the graph keeps them: an id stands for one tensor
        self._weights = {name: id(weight) for name, weight in _weights_of(model).items()}
        self._loop: OneLaunch | None = None

    @property
    def executables(self) -> tuple[GraphExec, ...]:
        """What writes the step's outputs: its own executable, and that of its loop."""
        loop = self._loop
        return (self.executable,) if loop is None else (self.executable, loop.executable)

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The step's graph, and that of its loop, which works in the same pool."""
        return (self.graph,) if self._loop is None else (self.graph, self._loop.graph)

    def in_one_launch(self, step: DecodeStep) -> OneLaunch:
        """The loop that decodes a generation in one launch; made the first time.

        Args:
            step: What was captured.

        Raises:
            PlanError, CudaError: As :class:`OneLaunch`.
        """
        if self._loop is None:
            capacity = step.forward.cache.max_seq_len
            self._loop = OneLaunch(
                self.graph, step.token, step.finished, capacity, self.graph.driver
            )
        return self._loop

    def mark_stale(self, how: str, name: str) -> None:
        """A captured buffer was replaced: every launch raises StaleGraphError, naming it."""
        self.executable.mark_stale(how, name)
        if self._loop is not None:
            self._loop.mark_stale(how, name)

    def what_changed(
        self, model: Any, named: Iterable[tuple[str, torch.Tensor]], settings: ModelSettings
    ) -> str | None:
        """The first thing the step would use now that is not what the graph uses; None: nothing.

        Args:
            model: Whose weights and buffers count.
            named: Name and tensor of every static buffer.
            settings: Of the model, now.
        """
        moved = self.executable.check()
        if moved:
            return str(moved[0])
        known = {id(owner.object) for owner in self.executable.owners}
        for name, tensor in named:
            if id(tensor) not in known:
                return f"{name}: another tensor"
        weights, places = _weights_of(model), set(self._weights.values())
        for name, weight in weights.items():
            is_elsewhere = id(weight) in places and id(weight) != self._weights.get(name)
            if id(weight) not in known or is_elsewhere:
                return f"model.{name}: another tensor"
        # what was taken out changes the step too: an adapter, a bias
        gone = next((f"model.{name}: gone" for name in self._weights if name not in weights), None)
        return gone or self.settings.first_change(settings)

    def rebind(self, buffers: Mapping[str, torch.Tensor]) -> RebindOutcome:
        """Makes the step work on other ``buffers``, by the names that were given at capture.

        Waits for the launches before, so that the old buffers are free at once.

        Raises:
            GraphcoreError: The graph cannot be rebound; it is as before, or only fit to be closed.
        """
        self._drop_loop()  # its copy of the step has the old buffers; the next one is made anew
        fence = self.executable.fence()
        if fence is not None:
            fence.wait()
        outcome = self.executable.rebind(buffers, allow_unused=True)
        # the graph of before keeps the old buffers
        before, self.graph = self.graph, self.executable.graph
        if before is not self.graph:
            before.close()
        return outcome

    def close(self) -> None:
        """Gives all back."""
        self._drop_loop()
        self.executable.close()
        self.graph.close()

    def _drop_loop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()


def capture_step(
    step: DecodeStep, lane: CaptureLane, *, compile_how: Compile = False
) -> CapturedStep:
    """Warms up and captures one step of ``step`` at the cache's position.

    Cache, mirror and the step's tensors are afterwards as they were, also when this raises. A
    compiled step is compiled by the warm-up; its nodes belong to no module.

    Raises:
        CaptureError: The step does something a capture does not allow; names the Python line. Or it
            cannot be compiled.
    """
    model, cache = step.forward.model, step.forward.cache
    held, reached = cache.seen_tokens, cache._state.reached
    at = min(held, cache.max_seq_len - 1)  # a full cache has no free slot to warm up in
    slot = cache.saved_slot(at)
    saved, settings = step.saved(), ModelSettings(model)
    capturing = lane.capture()
    compiled = None if compile_how is False else CompiledStep(step, compile_how)

    def warm_up() -> None:
        cache.seek(at)
        (compiled or step).run()

    try:
        with torch.no_grad():
            capturing.warm_up(warm_up, _warmup_steps)
            with capturing:
                _keep(capturing, step)
                if compiled is None:
                    with named_modules(capturing, model), numbers_filled(model):
                        step.run(capturing.annotate)
                else:  # hooks that name modules would make torch compile anew
                    capturing.keep(compiled.code, "compiled code")
                    with capturing.annotate("compiled step"):
                        compiled.run()
    finally:  # the warm-up was waited for
        step.restore(saved)
        cache.restore_slot(at, slot)
        cache.seek(held)
        cache._state.reached = reached
    executable = capturing.graph.instantiate(guard="owners")
    return CapturedStep(capturing.graph, executable, model, settings)


def _weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Weights and buffers by name; none of a function: what it works on is compared otherwise."""
    if not isinstance(model, torch.nn.Module):
        return {}
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _keep(capturing: Capture, step: DecodeStep) -> None:
    """Lets the graph keep what it reads and writes, under the names reports use."""
    for name, tensor in step.named_tensors().items():
        capturing.keep(tensor, name)
    capturing.keep(step.forward.model, "model")


@contextmanager
def named_modules(capturing: Capture, model: Any) -> Iterator[None]:
    """Names nodes "layer 3/self_attn/q_proj" in the layers, "lm_head" and so on around them."""
    if not isinstance(model, torch.nn.Module):
        yield
        return
    layers = decoder_stack.decoder_layers(model)
    with ExitStack() as hooks:
        for index, layer in enumerate(layers):
            _name(capturing, f"layer {index}", layer, hooks)
            hooks.enter_context(annotate_modules(capturing, layer))
        inside = {id(part) for layer in layers for part in layer.modules()}
        around = [
            name
            for name, part in model.named_modules()
            if id(part) not in inside and not list(part.children())
        ]
        hooks.enter_context(annotate_modules(capturing, model, around))
        yield


def _name(capturing: Capture, label: str, module: Any, hooks: ExitStack) -> None:
    block: list[AbstractContextManager[None]] = []

    def begin(*_: Any) -> None:
        block.append(capturing.annotate(label))
        block[-1].__enter__()

    def end(*_: Any) -> None:
        if block:
            block.pop().__exit__(None, None, None)

    hooks.callback(module.register_forward_pre_hook(begin, prepend=True).remove)
    # always_call: a forward that raises must close its block too
    hooks.callback(module.register_forward_hook(end, always_call=True).remove)
