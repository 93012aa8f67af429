"""A capture under autocast: the graph casts the weights itself, and leaves no cast behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.interrupts import press_at
from helpers.tensors import device_of, replay

import graphcore
from graphcore import Graph
from graphcore.driver import Driver
from graphcore.executable import capture_place
from graphcore.interop.torch import without_cached_casts

_FILES = ("interop/torch.py",)


class Product:
    """``out = x @ weight`` under autocast, which casts the weight once for its block."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.device = device_of(driver)
        self.layer = torch.nn.Linear(8, 8, bias=False, device=self.device)
        self.x = torch.ones(4, 8, device=self.device)
        self.out = torch.zeros(4, 8, dtype=torch.bfloat16, device=self.device)
        self.set(1.0)

    def set(self, value: float) -> None:
        """Changes the weight in place."""
        with torch.no_grad():
            self.layer.weight.fill_(value)

    def step(self) -> None:
        with torch.no_grad():
            self.out.copy_(self.layer(self.x))

    def autocast(self) -> torch.autocast:
        kind = torch.device(self.device).type
        return torch.autocast(kind, torch.bfloat16)

    def captured(self) -> Graph:
        capturing = graphcore.capture(driver=self.driver)
        capturing.warm_up(self.step, 1)
        with capturing:
            capturing.keep([self.x, self.out, self.layer])
            self.step()
        return capturing.graph

    def replayed(self, graph: Graph) -> float:
        self.driver.synchronize()
        self.out.fill_(float("nan"))
        with graph.instantiate() as executable:
            replay(executable)
        assert len(self.out.unique()) == 1
        return float(self.out[0, 0])


@pytest.fixture
def product(graphcore_driver: Driver) -> Product:
    return Product(graphcore_driver)


def test_a_cast_that_the_block_keeps_from_before_is_not_in_the_graph(product: Product) -> None:
    with product.autocast():
        product.step()  # the block keeps a cast of the weight
        graph = product.captured()
    # the kept cast is freed here, and would not know of this either
    product.set(2.0)
    filler = [torch.full((8, 8), -7.0, dtype=torch.bfloat16, device=product.device)] * 4
    assert product.replayed(graph) == 16.0
    assert len(filler) == 4


def test_a_cast_that_was_made_in_the_capture_is_not_used_outside_of_it(product: Product) -> None:
    with product.autocast():
        graph = product.captured()
        product.out.fill_(float("nan"))
        product.step()  # the memory of a captured cast holds nothing before a launch
        product.driver.synchronize()
        assert product.out.unique().tolist() == [8.0]
        assert torch.is_autocast_cache_enabled()
        product.set(3.0)
        assert product.replayed(graph) == 24.0


def test_a_block_inside_the_capture_leaves_nothing_behind_either(product: Product) -> None:
    inner = product.autocast()  # made here, it would keep casts in there
    with product.autocast():
        product.step()
        with graphcore.capture(driver=product.driver) as capture:
            capture.keep([product.x, product.out, product.layer])
            with inner:
                product.step()
        product.set(2.0)
        product.step()
        product.driver.synchronize()
        assert product.out.unique().tolist() == [16.0]
    product.set(4.0)
    assert product.replayed(capture.graph) == 32.0


def test_the_function_and_its_warm_up_are_captured_so_too(product: Product) -> None:
    seen: list[bool] = []

    def step() -> None:
        seen.append(torch.is_autocast_cache_enabled())
        product.step()

    with product.autocast():
        product.step()
        graph = graphcore.capture_function(step, driver=product.driver, warmup=2)
    assert seen == [False] * 3
    product.set(2.0)
    assert product.replayed(graph) == 16.0


def test_with_casts_that_are_kept_the_graph_would_not_follow_its_weights(
    graphcore_driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: this is what a capture would do that lets autocast keep its casts."""
    if not graphcore_driver.is_emulated:
        pytest.skip("the graph would read memory that is freed")
    without: Callable[[], Any] = nullcontext
    monkeypatch.setattr(capture_place, "without_cached_casts", without)
    product = Product(graphcore_driver)
    with product.autocast():
        product.step()
        graph = product.captured()
    product.set(2.0)
    assert product.replayed(graph) == 8.0, "of the weight that was"


def test_a_capture_that_fails_gives_the_casts_back(product: Product) -> None:
    with product.autocast():
        with pytest.raises(ZeroDivisionError), graphcore.capture(driver=product.driver):
            raise ZeroDivisionError
        assert torch.is_autocast_cache_enabled()
        with torch.autocast(torch.device(product.device).type, torch.bfloat16, cache_enabled=False):
            product.captured()
            assert not torch.is_autocast_cache_enabled()


def test_ctrl_c_at_any_line_leaves_the_casts_of_autocast_switched_on_and_none_of_a_capture() -> (
    None
):
    def step() -> None:
        with without_cached_casts(), torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
            pass

    places, _ = press_at(0, step, _FILES)
    for number in range(1, places + 1):
        _, where = press_at(number, step, _FILES)
        assert torch.is_autocast_cache_enabled(), where
    assert places > 8
