"""A model whose routers guess for later layers decodes the same, and copies experts ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.moe_models import EXPERTS, TOP_K, VOCABULARY, device_of, make_moe

import graphcore
from graphcore.decode import CUDAGraphAR
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import CapacityError, CaptureError, ConfigurationError, CudaError
from graphcore.moe import Kind, RouterPrefetch, accelerate
from graphcore.testing import inject

CASES = {
    "mixtral": ("mixtral", True),
    "qwen3-moe": ("qwen3-moe", True),
    "qwen3-moe, eager": ("qwen3-moe", False),
    "dots1": ("dots1", True),
}
SLOTS = EXPERTS // 2


def make_prompt(device: str, batch: int = 1) -> Any:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCABULARY, (batch, 5), generator=draw).to(device)


def decoded(model: Any, driver: Driver, *, capture: bool, batch: int = 1) -> torch.Tensor:
    """Logits of ten steps."""
    options = {"max_seq_len": 24, "driver": driver, "batch_size": batch, "capture": capture}
    with CUDAGraphAR(model, **options) as runner:
        runner.capture(make_prompt(device_of(driver), batch))
        logits = []
        for _ in range(10):
            runner.replay()
            logits.append(runner.logits.clone())
    return torch.stack(logits)


@pytest.mark.parametrize(("family", "capture"), CASES.values(), ids=CASES)
def test_logits_are_bit_for_bit_those_without_guesses(graphcore_driver, family, capture):
    model = make_moe(family, device=device_of(graphcore_driver))
    with accelerate(model, SLOTS, driver=graphcore_driver) as handle:
        own = decoded(model, graphcore_driver, capture=capture)
        plain = handle.totals()
        with RouterPrefetch(handle, rows=1) as prefetch:
            found = decoded(model, graphcore_driver, capture=capture)
            ahead = prefetch.totals()
        assert torch.equal(found, own)
        assert handle.faults() == {}
        last = list(handle.layers)[-1]
        assert ahead[last].guesses >= 10
        assert ahead[last].refused == 0
        assert ahead[last].nbytes == ahead[last].copied * handle.pool[last].expert_nbytes > 0
        steps = handle.totals()[last].steps - plain[last].steps
        # prompts have no guesses: they do not go through the slots
        assert ahead[last].guesses == steps
        assert torch.equal(decoded(model, graphcore_driver, capture=capture), own)


def test_every_order_that_a_captured_step_allows_gives_the_same_logits():
    driver = EmulatedDriver(order="adversarial")
    model = make_moe()
    with accelerate(model, SLOTS, driver=driver) as handle:
        own = decoded(model, driver, capture=True)
        with RouterPrefetch(handle, rows=1):
            for _ in range(3):
                assert torch.equal(decoded(model, driver, capture=True), own)


def test_several_layers_ahead_and_several_rows(graphcore_driver):
    model = make_moe("qwen3-moe", device=device_of(graphcore_driver))
    with accelerate(model, EXPERTS - 1, driver=graphcore_driver) as handle:
        own = decoded(model, graphcore_driver, capture=True, batch=3)
        with RouterPrefetch(handle, rows=3, ahead=2, choices=1) as prefetch:
            assert torch.equal(decoded(model, graphcore_driver, capture=True, batch=3), own)
            (totals,) = prefetch.totals().values()
            assert totals.routes == 3 * totals.guesses > 0


def test_good_guesses_make_hits_of_misses():
    """A router that guesses from the very rows that it is then given names every expert."""
    driver = EmulatedDriver()
    model = make_moe("qwen3-moe")
    with accelerate(model, 2 * TOP_K, driver=driver) as handle, RouterPrefetch(handle, rows=1):
        first, second = (model.get_submodule(name.rpartition(".")[0]) for name in handle.layers)
        for seed in range(8):
            rows = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                first(rows)
                second(rows)
        last = handle.totals()[list(handle.layers)[1]]
        assert (last.steps, last.misses) == (8, 0)
        assert handle.totals()[next(iter(handle.layers))].misses > 0


def test_a_forward_that_ends_early_is_made_good_by_the_next(graphcore_driver):
    model = make_moe("qwen3-moe", device=device_of(graphcore_driver))
    with accelerate(model, SLOTS, driver=graphcore_driver) as handle:
        own = decoded(model, graphcore_driver, capture=False)
        with RouterPrefetch(handle, rows=1):
            first = model.get_submodule(next(iter(handle.layers)).rpartition(".")[0])
            rows = torch.randn(1, 1, 64).to(device_of(graphcore_driver))
            with torch.no_grad():
                first(rows)  # and nothing behind it
            assert torch.equal(decoded(model, graphcore_driver, capture=False), own)


def test_a_pool_that_has_grown_is_followed_outside_of_captures(graphcore_driver):
    model = make_moe("qwen3-moe", device=device_of(graphcore_driver))
    with accelerate(model, SLOTS, driver=graphcore_driver) as handle:
        own = decoded(model, graphcore_driver, capture=True)
        with RouterPrefetch(handle, rows=1) as prefetch:
            handle.pool.grow(SLOTS + 2)
            assert torch.equal(decoded(model, graphcore_driver, capture=False), own)
            assert torch.equal(decoded(model, graphcore_driver, capture=True), own)
            (totals,) = prefetch.totals().values()
            assert totals.guesses >= 20


def test_a_step_captured_before_a_grown_pool_was_followed_has_no_guesses(caplog):
    driver = EmulatedDriver()
    with accelerate(make_moe(), SLOTS, driver=driver) as handle, RouterPrefetch(handle, rows=1):
        handle.pool.grow(SLOTS + 1)
        name = next(iter(handle.layers))
        block = handle.model.get_submodule(name.rpartition(".")[0])
        row = torch.randn(1, 1, 64)
        with (
            caplog.at_level("INFO", "graphcore"),
            graphcore.capture(driver=driver) as captured,
            torch.no_grad(),
        ):
            block(row)
        captured.graph.close()
    assert "a step is captured without guesses, since the pool has grown" in caplog.text


def test_steps_of_a_graph_reuse_have_guesses_in_their_graphs():
    driver = EmulatedDriver(order="adversarial")
    with (
        accelerate(make_moe(), SLOTS, driver=driver) as handle,
        RouterPrefetch(handle, rows=1) as prefetch,
        handle.reuse() as reuse,
    ):
        x = torch.zeros(1, 1, 64)
        out = torch.zeros_like(x)

        def layers() -> torch.Tensor:
            with torch.no_grad():
                found: torch.Tensor = handle.model.model(
                    inputs_embeds=x, use_cache=False
                ).last_hidden_state
                return found

        step = handle.step("layers", lambda: out.copy_(layers()), tensors={"x": x, "out": out},
                           rows=1)  # fmt: skip
        kinds = []
        for seed in range(12):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
            out.fill_(float("nan"))
            kinds.append(reuse.run(step).kind)
            driver.synchronize()
            assert torch.equal(out, layers()), seed
        assert kinds == [Kind.DIRECT, Kind.CAPTURE, *[Kind.REPLAY] * 10]
        (totals,) = prefetch.totals().values()
        assert totals.guesses == 24


def test_a_model_may_be_restored_before_its_prefetch_is_closed(graphcore_driver):
    model = make_moe("qwen3-moe", device=device_of(graphcore_driver))
    own = decoded(model, graphcore_driver, capture=False)
    with accelerate(model, SLOTS, driver=graphcore_driver) as handle:
        prefetch = RouterPrefetch(handle, rows=1)
        decoded(model, graphcore_driver, capture=False)
    prefetch.close()
    prefetch.close()
    assert torch.equal(decoded(model, graphcore_driver, capture=False), own)


@pytest.mark.parametrize("after", range(12))
def test_after_a_refused_launch_the_logits_are_right(after):
    driver = EmulatedDriver()
    model = make_moe("qwen3-moe")
    with accelerate(model, SLOTS, driver=driver) as handle, torch.no_grad():
        token = torch.tensor([[5]])
        own = model(token).logits
        with RouterPrefetch(handle, rows=1):
            with inject(driver, "launch", after=after) as fault:
                try:
                    model(token)
                except CudaError:
                    assert fault.fired
            assert torch.equal(model(token).logits, own)
        assert torch.equal(model(token).logits, own)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"rows": 0}, ConfigurationError, "rows: expected at least 1, got 0"),
        ({"rows": 1, "ahead": True}, ConfigurationError, "ahead: expected at least 1, got True"),
        ({"rows": 1, "choices": "2"}, ConfigurationError, "choices: expected at least 1"),
        ({"rows": 9}, CapacityError, "expected at most"),
    ],
    ids=["no rows", "a bool", "text", "more than slots"],
)
def test_numbers_that_cannot_be_are_refused(options, error, says):
    model, driver = make_moe(), EmulatedDriver()
    with (
        accelerate(model, SLOTS, driver=driver) as handle,
        pytest.raises(error, match=says),
    ):
        RouterPrefetch(handle, **options)


def test_it_is_made_outside_of_captures(graphcore_driver):
    model = make_moe(device=device_of(graphcore_driver))
    with accelerate(model, SLOTS, driver=graphcore_driver) as handle:
        captured = graphcore.capture(driver=graphcore_driver)
        with pytest.raises(CaptureError, match="RouterPrefetch"), captured:
            RouterPrefetch(handle, rows=1)


def test_a_layer_without_a_router_is_refused():
    model, driver = make_moe(), EmulatedDriver()
    with accelerate(model, SLOTS, driver=driver) as handle:
        block = model.get_submodule(list(handle.layers)[1].rpartition(".")[0])
        gate = block.gate
        del block.gate
        with pytest.raises(ConfigurationError, match="expected a router beside it"):
            RouterPrefetch(handle, rows=1)
        block.gate = gate
