"""Numbers that a forward makes into tensors: filled in a capture, not copied there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.count_operations import CountOperations
from helpers.decode_models import device_of, eager_tokens, make_model, make_prompt
from torch.overrides import TorchFunctionMode
from transformers import Gemma3nForCausalLM

import graphcore
from graphcore.decode import CUDAGraphAR, captured_step
from graphcore.decode.number_tensors import NumbersFilled, numbers_filled
from graphcore.driver import Driver, open_driver
from graphcore.errors import CaptureError

elsewhere = torch.tensor(2.0)
Make = Callable[[str], torch.Tensor]


class Calls(TorchFunctionMode):
    """What reaches torch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.from_host: list[Any] = []
        """Numbers made on another device, and host tensors moved there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        made = func(*args, **(kwargs or {}))
        is_moved = func is torch.Tensor.to and not args[0].is_meta
        if (func is torch.tensor or is_moved) and made.is_meta:
            self.from_host.append(func)
        return made


def written(device: str) -> torch.Tensor:
    number = torch.tensor(0.5)
    number.add_(elsewhere)
    return number.to(device)


NUMBERS: dict[str, Make] = {
    "made there": lambda device: torch.tensor(0.1, device=device),
    "made there in another dtype": lambda d: torch.tensor(3, dtype=torch.bfloat16, device=d),
    "an int": lambda device: torch.tensor(7, device=torch.device(device)),
    "a bool": lambda device: torch.tensor(data=True, device=device),
    "moved": lambda device: torch.tensor(1e-5).to(device),
    "moved by keyword, into another dtype": lambda device: torch.tensor(0.1).to(
        device=device, dtype=torch.float64
    ),
    "moved with a dtype": lambda device: torch.tensor(0.1).to(device, torch.float16, True),
    "moved to where another is": lambda d: torch.tensor(4).to(torch.ones((), device=d)),
}
OTHERS: dict[str, Make] = {
    "written since it was made": written,
    "from elsewhere": elsewhere.to,
    "several numbers": lambda device: torch.tensor([1.0, 2.0]).to(device),
}


@pytest.mark.parametrize("how", NUMBERS)
def test_a_number_is_filled_in_where_it_is_wanted_with_its_dtype(how: str) -> None:
    make = NUMBERS[how]
    plain = make("meta")
    with Calls() as calls, NumbersFilled(), CountOperations() as operations:
        made = make("meta")
    assert (made.shape, made.dtype, made.device) == (plain.shape, plain.dtype, plain.device)
    assert torch.full in calls.seen
    assert "full.default" in operations.names
    assert not [name for name in operations.names if "copy" in name]


@pytest.mark.parametrize("how", OTHERS)
def test_what_may_be_another_at_the_next_replay_is_copied_as_ever(how: str) -> None:
    with Calls() as calls, NumbersFilled(), CountOperations() as operations:
        OTHERS[how]("meta")
    assert torch.full not in calls.seen
    assert "_to_copy.default" in operations.names


def test_on_the_host_numbers_are_made_as_ever() -> None:
    with Calls() as calls, NumbersFilled():
        assert torch.tensor(0.5).to(torch.float64).item() == 0.5
        assert torch.tensor(0.5, device="cpu").to("cpu").item() == 0.5
    assert torch.full not in calls.seen


def compiled(model: Any) -> Any:
    model.model.layers[0].compile()
    return model


@pytest.mark.parametrize(
    ("model", "filled"),
    [
        pytest.param(lambda: make_model("gemma3n"), True, id="makes them"),
        pytest.param(lambda: make_model("llama"), False, id="makes none"),
        pytest.param(lambda: make_model("gemma3"), False, id="makes them once, for its buffers"),
        pytest.param(lambda: compiled(make_model("gemma3n")), False, id="compiled in part"),
        pytest.param(lambda: written, False, id="a function"),
    ],
)
def test_only_forwards_that_make_numbers_into_tensors_are_looked_into(
    model: Callable[[], Any], filled: bool
) -> None:
    assert isinstance(numbers_filled(model()), NumbersFilled if filled else nullcontext)


def sparse_gemma3n(device: str) -> Any:
    """Makes numbers into tensors in every step, in all versions of transformers."""
    torch.manual_seed(1234)
    config = make_model("gemma3n").config
    config.activation_sparsity_pattern = [0.5, 0.0] * 3
    return Gemma3nForCausalLM(config).to(device).eval()


def from_host(model: Any, mode: Any) -> int:
    """Copies from the host, of one forward on the meta device, that a capture would refuse."""
    tokens = make_prompt(3).to("meta")
    mask = torch.zeros(1, 1, 3, 3, device="meta")
    masks = {"sliding_attention": mask, "full_attention": mask}
    with torch.no_grad(), Calls() as calls, mode:
        model.model(
            tokens,
            attention_mask=masks,
            position_ids=torch.arange(3, device="meta")[None],
            use_cache=False,
        )
    return len(calls.from_host)


def test_a_gemma3n_copies_no_number_from_the_host_where_they_are_filled() -> None:
    model = sparse_gemma3n("meta")
    assert from_host(model, nullcontext()) >= 3  # one for each sparse layer
    assert from_host(model, numbers_filled(model)) == 0


class Numbers(torch.nn.Module):
    """A forward over numbers that it makes into tensors."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        shift = torch.tensor(0.25, device=values.device)
        shift.mul_(2)  # of a tensor that stays as it is, each replay would find another
        return values * torch.tensor(3.0).to(values.device) + shift


def test_each_replay_fills_the_numbers_in_anew(graphcore_driver: Driver) -> None:
    model = Numbers()
    values = torch.arange(4.0, device=device_of(graphcore_driver))
    out = torch.full_like(values, torch.nan)
    capturing = graphcore.capture(driver=graphcore_driver)
    with capturing, numbers_filled(model) as filling:
        out.copy_(model(values))
    assert isinstance(filling, NumbersFilled)
    with capturing.graph.instantiate() as executable:
        for factor in (1, 10):
            values.copy_(torch.arange(4.0, device=values.device) * factor)
            out.fill_(torch.nan)
            executable.launch()
            graphcore_driver.synchronize()
            assert out.tolist() == [each * factor * 3 + 0.5 for each in range(4)]


@pytest.mark.gpu
def test_a_captured_gemma3n_with_sparse_layers_decodes_what_transformers_decodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = open_driver("cuda")
    model = sparse_gemma3n(device_of(driver))
    prompt = make_prompt(5, device=device_of(driver))
    with CUDAGraphAR(model, max_seq_len=40, driver=driver) as runner:
        assert torch.equal(runner.generate(prompt, 20, ()), eager_tokens(model, prompt, 20))
        assert runner.execution == "graph"
    monkeypatch.setattr(captured_step, "numbers_filled", lambda model: nullcontext())
    with (
        CUDAGraphAR(model, max_seq_len=40, driver=driver) as runner,
        pytest.raises(CaptureError, match="host tensors that are copied must be pinned"),
    ):
        runner.generate(prompt, 20, ())
