"""generate() and streams: how a generation ends, and how it says what it did."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from helpers.decode_models import VOCABULARY, device_of, eager_tokens, make_model, make_prompt

from graphcore.decode import CUDAGraphAR, Generation, StaticKVCache, generate
from graphcore.decode.ending import cut_after_end, end_ids
from graphcore.decode.forward import DecoderForward
from graphcore.driver import Driver
from graphcore.errors import CapacityError, ConfigurationError

NEW = 20


@pytest.fixture
def model(graphcore_driver: Driver) -> Any:
    return make_model(device=device_of(graphcore_driver))


@pytest.fixture
def prompt(model: Any) -> torch.Tensor:
    return make_prompt(5, batch=3, device=str(model.device))


def ends_of(model: Any, prompt: torch.Tensor) -> list[int]:
    """Two ids that end the rows of an unended generation at different steps."""
    new = eager_tokens(model, prompt, NEW)[:, prompt.shape[1] :]
    return [int(new[0, 3]), int(new[1, 6]), int(new[2, 9])]


# ---- how it ends --------------------------------------------------------------------------------


@pytest.mark.parametrize(("poll_every", "pad"), [(1, None), (4, 0), (16, 2), (100, None)], ids=str)
def test_rows_end_and_are_padded_as_in_transformers(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor, poll_every: int, pad: int | None
) -> None:
    eos = ends_of(model, prompt)
    options: dict[str, Any] = {"eos_token_id": eos}
    expected = eager_tokens(
        model, prompt, NEW, pad_token_id=eos[0] if pad is None else pad, **options
    )
    assert expected.shape[1] < 5 + NEW
    with CUDAGraphAR(model, max_seq_len=32, batch_size=3, driver=graphcore_driver) as runner:
        ids = runner.generate(prompt, NEW, pad_token_id=pad, poll_every=poll_every, **options)
        assert torch.equal(ids, expected)
        assert runner.cache.seen_tokens == int(runner.position) <= 5 + NEW
        streamed = torch.stack(list(runner.stream(prompt, NEW, pad_token_id=pad, **options)), 1)
        assert torch.equal(streamed, expected[:, 5:].cpu())
        assert runner.cache.seen_tokens == int(runner.position) == expected.shape[1]


def test_end_ids_come_from_the_generation_config_unless_given(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor
) -> None:
    one = prompt[:1]
    whole = eager_tokens(model, one, NEW)
    model.generation_config.eos_token_id = int(whole[0, 8])
    short = eager_tokens(model, one, NEW)
    assert short.shape[1] < whole.shape[1]
    with CUDAGraphAR(model, max_seq_len=32, driver=graphcore_driver) as runner:
        assert torch.equal(runner.generate(one, NEW), short)
        assert torch.equal(runner.generate(one, NEW, eos_token_id=()), whole)
        runner.cache.reset()
        runner.capture(one)
        replays = torch.stack([runner.replay().clone() for _ in range(NEW)], 1)
        assert torch.equal(replays, whole[:, 5:])


def test_ids_that_the_model_cannot_choose_end_nothing() -> None:
    model = make_model()
    forward = DecoderForward(model, StaticKVCache.for_model(model, 8))
    model.generation_config.eos_token_id = [VOCABULARY, 5]
    model.generation_config.pad_token_id = -1
    assert end_ids(forward, None, None) == ((5,), 5)
    assert end_ids(forward, (), None) == ((), 0)
    assert end_ids(forward, 7, 3) == ((7,), 3)
    model.generation_config.eos_token_id = None
    assert end_ids(forward, None, None) == ((), 0)


def test_ids_are_cut_where_the_last_row_ends() -> None:
    ids = torch.tensor([[1, 9, 0, 0, 0], [1, 2, 3, 9, 0]])
    assert cut_after_end(ids, 1, (9,)).tolist() == ids[:, :4].tolist()
    assert cut_after_end(ids, 1, (8,)) is ids
    assert cut_after_end(ids[:, :3], 1, (9,)).shape == (2, 3)


def test_replays_after_a_generation_with_end_ids_are_not_held_back_by_them(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor
) -> None:
    one = prompt[:1]
    whole = eager_tokens(model, one, NEW)
    with CUDAGraphAR(model, max_seq_len=32, driver=graphcore_driver) as runner:
        short = runner.generate(one, NEW, eos_token_id=int(whole[0, 8]), poll_every=1)
        following = [int(runner.replay()) for _ in range(3)]
        assert following == whole[0, short.shape[1] : short.shape[1] + 3].tolist()


def test_a_stream_gives_copies_and_checks_everything_in_the_call(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor
) -> None:
    with CUDAGraphAR(model, max_seq_len=16, batch_size=3, driver=graphcore_driver) as runner:
        with pytest.raises(CapacityError):
            runner.stream(prompt, 12)
        tokens = list(runner.stream(prompt, 11))
        assert len(tokens) == 11
        assert torch.equal(torch.stack(tokens, 1), eager_tokens(model, prompt, 11)[:, 5:].cpu())
        assert all(ids.device.type == "cpu" for ids in tokens)


def test_generated_ids_are_a_tensor_of_their_own(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor
) -> None:
    with CUDAGraphAR(model, max_seq_len=32, batch_size=3, driver=graphcore_driver) as runner:
        ids = runner.generate(prompt, 6)
        kept = ids.clone()
        runner.generate(prompt.flip(1), 6)
        assert torch.equal(ids, kept)


# ---- generate() ---------------------------------------------------------------------------------


def test_generate_replays_a_graph_and_says_so(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor
) -> None:
    result = generate(model, prompt, NEW, driver=graphcore_driver)
    assert isinstance(result, Generation)
    assert torch.equal(result.ids, eager_tokens(model, prompt, NEW))
    assert torch.equal(result.new_ids, result.ids[:, 5:])
    assert (result.execution, result.captures) == ("graph", 1)
    assert f"captured on the {graphcore_driver.name} driver" in result.reason


def test_generate_without_a_driver_uses_the_one_of_the_models_device() -> None:
    model, prompt = make_model(), make_prompt(4)
    result = generate(model, prompt, 6)
    assert torch.equal(result.ids, eager_tokens(model, prompt, 6))
    assert "emulated driver" in result.reason


@pytest.mark.parametrize("how", ["asked", "disabled"])
def test_generate_decodes_eagerly_where_told_and_says_why(
    graphcore_driver: Driver,
    model: Any,
    prompt: torch.Tensor,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if how == "disabled":
        monkeypatch.setenv("GRAPHCORE_DISABLE", "1")
    with caplog.at_level(logging.INFO, logger="graphcore"):
        result = generate(model, prompt, 8, driver=graphcore_driver, capture=how == "disabled")
    assert torch.equal(result.ids, eager_tokens(model, prompt, 8))
    reason = {"asked": "capture=False", "disabled": "GRAPHCORE_DISABLE=1"}[how]
    assert (result.execution, result.reason, result.captures) == ("eager", reason, 0)
    assert f"decoding eagerly: {reason}" in caplog.text


def test_generate_decodes_eagerly_where_the_step_cannot_be_captured_and_says_why(
    graphcore_driver: Driver,
    model: Any,
    prompt: torch.Tensor,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = eager_tokens(model, prompt, 8)
    model.model.layers[0].register_forward_hook(lambda *_: torch.ones(1).sum().item() and None)
    hooked = model.model.norm.register_forward_hook(lambda _, __, out: out.sum().item() and None)
    with caplog.at_level(logging.INFO, logger="graphcore"):
        result = generate(model, prompt, 8, driver=graphcore_driver)
    hooked.remove()
    assert torch.equal(result.ids, expected)
    assert result.execution == "eager"
    assert "could not be captured" in result.reason
    assert "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" in result.reason
    assert "decoding eagerly: the step could not be captured" in caplog.text


def test_generate_takes_a_cache_and_empties_it_first(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor
) -> None:
    cache = StaticKVCache.for_model(model, 32, batch_size=3)
    for _ in range(2):
        result = generate(model, prompt, 8, cache=cache, driver=graphcore_driver)
        assert torch.equal(result.ids, eager_tokens(model, prompt, 8))
        assert cache.seen_tokens == int(cache.position) == 13
    assert not cache.is_captured


def test_generate_refuses_what_cannot_work(model: Any, prompt: torch.Tensor) -> None:
    with pytest.raises(ConfigurationError, match="num_beams"):
        generate(model, prompt, 4, num_beams=3)
    with pytest.raises(ConfigurationError, match="max_new_tokens"):
        generate(model, prompt, 0)
    with pytest.raises(ConfigurationError, match="input_ids"):
        generate(model, prompt[0], 4)
    with pytest.raises(CapacityError, match="need 65; max_seq_len is 64"):
        generate(model, prompt, 60)
    with pytest.raises(CapacityError, match="need 9; max_seq_len is 8"):
        generate(model, prompt, 4, max_seq_len=8)
