"""torch: names for nodes by module hooks, graphs to read, what is said where torch is missing."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.tensors import device_of, replay

import graphcore
from graphcore import CaptureError, ConfigurationError, DriverUnavailable
from graphcore.driver import Driver
from graphcore.interop import cuda_core, cupy
from graphcore.interop import torch as torch_interop


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.ReLU()
        self.down = torch.nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.up(x)) + 1
        return result


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * 2


def _labels(driver: Driver, model: torch.nn.Module, names: Any) -> list[str]:
    x = torch.ones(4, device=device_of(driver))
    model(x)
    with (
        graphcore.capture(driver=driver) as capture,
        torch_interop.annotate_modules(capture, model, names),
    ):
        model(x)
    return [node.label for node in capture.graph.snapshot().nodes]


def test_each_node_is_named_by_the_modules_around_it(graphcore_driver: Driver) -> None:
    assert _labels(graphcore_driver, Model(), None) == [
        "layers.0/up",
        "layers.0/down",
        "layers.0",
        "layers.1/up",
        "layers.1/down",
        "layers.1",
        "",
    ]


def test_chosen_modules_only_are_named(graphcore_driver: Driver) -> None:
    assert _labels(graphcore_driver, Model(), ["layers.1.down"]) == [
        *[""] * 4,
        "layers.1.down",
        *[""] * 2,
    ]


def test_a_name_the_module_does_not_have_is_refused() -> None:
    capture = SimpleNamespace(annotate=None)
    with (
        pytest.raises(ConfigurationError, match=r"names of submodules of Model, got \['layer.9'\]"),
        torch_interop.annotate_modules(capture, Model(), ["layers.0", "layer.9"]),
    ):
        pass


def test_hooks_are_removed_also_after_a_failure(graphcore_driver: Driver) -> None:
    class Fails(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    model = torch.nn.Sequential(torch.nn.ReLU(), Fails())
    x = torch.ones(4, device=device_of(graphcore_driver))
    capture = graphcore.capture(driver=graphcore_driver)
    with (
        pytest.raises(ZeroDivisionError),
        capture,
        torch_interop.annotate_modules(capture, model),
    ):
        model(x)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_module_that_reads_the_host_still_explains_itself(graphcore_driver: Driver) -> None:
    class Reads(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x.sum().item()

    model = torch.nn.Sequential(Reads())
    x = torch.ones(4, device=device_of(graphcore_driver))
    x.sum()
    capture = graphcore.capture(driver=graphcore_driver)
    with (
        pytest.raises(CaptureError) as caught,
        capture,
        torch_interop.annotate_modules(capture, model),
    ):
        model(x)
    assert caught.value.code == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"


def test_named_nodes_do_the_same_work(graphcore_driver: Driver) -> None:
    model = Model()
    x = torch.full((4,), 0.5, device=device_of(graphcore_driver))
    out = model(x)
    with (
        graphcore.capture(driver=graphcore_driver) as capture,
        torch_interop.annotate_modules(capture, model),
    ):
        out.copy_(model(x))
    out.fill_(float("nan"))
    x.fill_(0.25)
    with capture.graph.instantiate() as executable:
        replay(executable)
    assert torch.equal(out, model(x))


@pytest.mark.gpu
def test_memory_of_a_capture_lives_as_long_as_its_executable() -> None:
    from helpers.tensors import cuda_driver

    driver = cuda_driver()
    x = torch.ones(1 << 20, device=device_of(driver))
    y = x.clone()
    y.copy_((x + 1) * 2)
    with graphcore.capture(driver=driver) as capture:
        y.copy_((x + 1) * 2)
    executable = capture.graph.instantiate()
    assert capture.graph.private_memory()
    capture.graph.close()
    del capture
    torch.cuda.empty_cache()
    x.fill_(2.0)
    replay(executable)
    assert y[0].item() == 6.0


# ---- what is missing ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name"), [(torch_interop, "torch"), (cupy, "cupy")], ids=["torch", "cupy"]
)
def test_a_missing_library_names_the_command_that_mends_it(
    module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DriverUnavailable, match=rf"pip install 'graphcore-cuda\[{name}\]'"):
        module.require()


def test_a_library_that_is_there_is_given() -> None:
    assert torch_interop.require() is torch


def test_foreign_objects_have_no_graph_handle() -> None:
    assert cuda_core.raw_graph(object()) is None
    assert cuda_core.raw_graph(SimpleNamespace(handle=3)) is None
    assert not torch_interop.is_graph(object())
