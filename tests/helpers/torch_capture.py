"""Captures of torch work on the emulated driver, for the tests of the torch recorder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import CaptureState, KernelParams


class TorchCapture:
    """One capture of torch work: its graph, an executable of it, and what the block returned."""

    def __init__(self, driver: EmulatedDriver, graph: int, result: Any) -> None:
        self.driver = driver
        self.graph = graph
        self.result = result
        self.executable = driver.instantiate(graph)
        self.stream = driver.create_stream(blocking=False)

    @property
    def params(self) -> list[KernelParams]:
        return [self.driver.node_params(node) for node in self.driver.nodes(self.graph)]

    @property
    def names(self) -> list[str]:
        """``mm.default add.Tensor`` ...: the aten names of the nodes, in order."""
        infos = [self.driver.function_info(each.function) for each in self.params]
        return [info.name.removeprefix("aten::") for info in infos]

    def replay(self) -> Any:
        self.driver.launch_graph(self.executable, self.stream)
        return self.result


@contextmanager
def recording(driver: EmulatedDriver, box: dict[str, Any]) -> Iterator[int]:
    """Captures the block into ``box["graph"]``; ends the capture also where the block raised."""
    stream = driver.create_stream(blocking=False)
    driver.begin_capture(stream, "thread_local")
    try:
        with driver.recording(stream):
            yield stream
    except BaseException:
        if driver.capture_status(stream).state is CaptureState.ACTIVE:
            driver.end_capture(stream)
        else:
            box["invalidated"] = True
        raise
    box["graph"] = driver.end_capture(stream)


def capture(driver: EmulatedDriver, function: Callable[[], Any]) -> TorchCapture:
    """Captures ``function()``."""
    box: dict[str, Any] = {}
    with recording(driver, box):
        result = function()
    return TorchCapture(driver, box["graph"], result)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [found for each in value for found in tensors_in(each)]
    return []


def bits(tensor: torch.Tensor) -> bytes:
    """The value of every element, exactly: NaN equals NaN, 0.0 differs from -0.0."""
    flat = tensor.detach().resolve_conj().clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(flat.view(torch.uint8).tolist())


def memory_of(value: Any) -> list[bytes]:
    """Every byte of the storages behind ``value``: what a capture must not change."""
    found = []
    for tensor in tensors_in(value):
        storage = tensor.untyped_storage()
        raw = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
        found.append(bytes(raw.tolist()))
    return found


def fresh(value: Any) -> Any:
    """A deep copy with storages of its own, sharing and strides kept."""
    return copy.deepcopy(value)


def assert_replay_equals_eager(
    driver: EmulatedDriver,
    function: Callable[..., Any],
    arguments: Any,
    refill: Callable[[Any], None],
) -> TorchCapture:
    """Captures ``function(*arguments)``, refills the arguments, replays: eager's bits, all of them.

    Checks also that the capture changed no byte of the arguments, that nothing was computed before
    the replay, and, as a control, that the old inputs give something else.
    """
    before = memory_of(arguments)
    taken = capture(driver, lambda: function(*arguments))
    assert memory_of(arguments) == before, "the capture changed memory"
    old = function(*fresh(arguments))
    refill(arguments)
    copied = fresh(arguments)
    expected = function(*copied)
    replayed = taken.replay()
    pairs = list(zip(tensors_in(replayed), tensors_in(expected), strict=True))
    assert pairs, "nothing to compare"
    for got, want in pairs:
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert got.stride() == want.stride() or got.numel() < 2 or 1 in got.shape
        assert bits(got) == bits(want)
    for got, want in zip(tensors_in(arguments), tensors_in(copied), strict=True):
        assert bits(got) == bits(want), "an argument is not what eager leaves"
    olds = [bits(each) for each in tensors_in(old)]
    assert olds != [bits(want) for _, want in pairs], "the control: old inputs give the same"
    return taken
