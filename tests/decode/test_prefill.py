"""Prompts in chunks, eager or replayed: the same tokens, less memory, nothing new next time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from helpers.decode_models import device_of, eager_tokens, make_model, make_prompt
from helpers.encoder_decoder_models import FAMILIES, START, encoder_inputs, make_encoder_decoder
from torch.utils._python_dispatch import TorchDispatchMode

from graphcore.decode import CUDAGraphAR, Guidance, StaticKVCache
from graphcore.decode.transformers_compat import cache_keyword
from graphcore.driver import Driver
from graphcore.errors import ConfigurationError

NEW = 6
SIZE = 4


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that was made in other memory than that of ``held``."""

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.elements = 0
        self._held = {tensor.untyped_storage().data_ptr() for tensor in held}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (tuple, list)) else (result,)
        sizes = [
            tensor.numel()
            for tensor in made
            if isinstance(tensor, torch.Tensor)
            and tensor.untyped_storage().data_ptr() not in self._held
        ]
        self.elements = max(self.elements, *sizes, 0)
        return result


def make_runner(driver: Driver, architecture: str = "llama", **options: Any) -> CUDAGraphAR:
    model = make_model(architecture, device=device_of(driver))
    given = {"max_seq_len": 32, "driver": driver, "prefill_chunk_size": SIZE} | options
    return CUDAGraphAR(model, **given)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_prompts_in_chunks_give_the_tokens_of_prompts_in_one_piece(
    graphcore_driver: Driver, architecture: str, captured: bool
) -> None:
    with make_runner(graphcore_driver, architecture, capture_prefill=captured) as runner:
        for tokens in (13, 8, 3, 4, 16, 1):
            prompt = make_prompt(tokens, device=device_of(graphcore_driver), seed=tokens)
            ids = runner.generate(prompt, NEW)
            assert torch.equal(ids, eager_tokens(runner.model, prompt, NEW))
            assert runner.cache.seen_tokens == int(runner.position) == tokens + NEW
        assert runner.captures == 1 + captured


def test_the_logits_behind_chunks_are_those_of_one_eager_forward(graphcore_driver: Driver) -> None:
    with make_runner(graphcore_driver, capture_prefill=True) as runner:
        prompt = make_prompt(11, device=device_of(graphcore_driver))
        with torch.no_grad():
            expected = runner.model(prompt).logits
        for tokens in (11, 8, 11):  # the rest is eager, a replayed chunk is last, and once more
            runner.cache.reset()
            runner.capture(prompt[:, :tokens])
            torch.testing.assert_close(runner.logits, expected[:, tokens - 1], atol=1e-4, rtol=1e-4)


def test_a_second_prompt_adds_no_capture_and_really_replays_the_chunk(
    graphcore_driver: Driver,
) -> None:
    with make_runner(graphcore_driver, capture_prefill=True) as runner:
        device = device_of(graphcore_driver)
        forwards: list[int] = []
        runner.model.register_forward_pre_hook(
            lambda _, args, given: forwards.append(given["input_ids"].shape[1]), with_kwargs=True
        )
        runner.capture(make_prompt(10, device=device))
        assert runner.captures == 2
        forwards.clear()
        runner.cache.reset()
        runner.capture(make_prompt(15, device=device, seed=1))
        assert forwards == [3]  # three chunks were replayed, the rest is eager
        assert runner.captures == 2


def test_chunks_continue_behind_what_the_cache_holds(graphcore_driver: Driver) -> None:
    with make_runner(graphcore_driver, capture_prefill=True) as runner:
        prompt = make_prompt(19, device=device_of(graphcore_driver))
        runner.capture(prompt[:, :5])
        runner.capture(prompt[:, 5:])
        replays = torch.stack([runner.replay().clone() for _ in range(NEW)], dim=1)
        assert torch.equal(replays, eager_tokens(runner.model, prompt, NEW)[:, 19:])


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_padded_and_guided_prompts_go_in_chunks_too(
    graphcore_driver: Driver, captured: bool
) -> None:
    device = device_of(graphcore_driver)
    rows = [make_prompt(length, device=device, seed=length) for length in (3, 10)]
    batch = torch.cat([torch.nn.functional.pad(rows[0], (7, 0)), rows[1]])
    mask = torch.tensor([[0] * 7 + [1] * 3, [1] * 10], device=device)
    given = {"batch_size": 2, "capture_prefill": captured}
    with make_runner(graphcore_driver, **given) as runner:
        for _ in range(2):
            ids = runner.generate(batch, NEW, attention_mask=mask)
            for row, alone in zip(ids, rows, strict=True):
                expected = eager_tokens(runner.model, alone, NEW)[0, alone.shape[1] :]
                assert torch.equal(row[10:], expected)
        plain = make_prompt(9, batch=2, device=device)
        assert torch.equal(runner.generate(plain, NEW), eager_tokens(runner.model, plain, NEW))
        assert runner.captures == 2 * (1 + captured)
    with make_runner(graphcore_driver, capture_prefill=captured, guidance=Guidance(2.0)) as guided:
        for _ in range(2):
            ids = guided.generate(rows[1], NEW, negative_input_ids=rows[0])
            theirs = guided.model.generate(
                rows[1], attention_mask=torch.ones_like(rows[1]), negative_prompt_ids=rows[0],
                guidance_scale=2.0, max_new_tokens=NEW, do_sample=False,
            )  # fmt: skip
            assert torch.equal(ids, theirs)


def test_a_replayed_chunk_uses_exchanged_weights(graphcore_driver: Driver) -> None:
    with make_runner(graphcore_driver, capture_prefill=True) as runner:
        prompt = make_prompt(9, device=device_of(graphcore_driver))
        runner.generate(prompt, NEW)
        norm = runner.model.model.norm
        norm.weight = torch.nn.Parameter(torch.linspace(-2, 2, norm.weight.numel()).to(norm.weight))
        assert torch.equal(runner.generate(prompt, NEW), eager_tokens(runner.model, prompt, NEW))
        assert runner.captures == 4


def test_a_replaced_buffer_of_the_cache_reaches_the_graph_of_the_chunk(
    graphcore_driver: Driver,
) -> None:
    with make_runner(graphcore_driver, capture_prefill=True) as runner:
        prompt = make_prompt(9, device=device_of(graphcore_driver))
        expected = runner.generate(prompt, NEW)
        layer = runner.cache.layers[1]
        layer.keys = layer.keys.clone()
        assert torch.equal(runner.generate(prompt, NEW), expected)
        assert runner.captures == 4


@pytest.mark.parametrize("capacity", [32, 24], ids=["same size", "another size"])
def test_another_cache_takes_the_graph_of_the_chunk_along_where_it_is_alike(
    graphcore_driver: Driver, capacity: int
) -> None:
    with make_runner(graphcore_driver, capture_prefill=True, guidance=Guidance(1.5)) as runner:
        prompt = make_prompt(9, device=device_of(graphcore_driver))
        expected = runner.generate(prompt, NEW)
        old = runner.cache
        other = StaticKVCache.for_model(runner.model, capacity, batch_size=2)
        runner.guidance.scale = 2.5
        runner.use(other)
        for layer in old.layers:
            layer.keys.fill_(float("nan"))
        assert not torch.equal(runner.generate(prompt, NEW), expected)
        runner.guidance.scale = 1.5
        assert torch.equal(runner.generate(prompt, NEW), expected)
        assert runner.captures == (2 if capacity == 32 else 4)


def test_a_failing_chunk_leaves_the_cache_as_before(graphcore_driver: Driver) -> None:
    with make_runner(graphcore_driver, capture_prefill=True) as runner:
        prompt = make_prompt(10, device=device_of(graphcore_driver))
        failing: list[bool] = []

        def fail(_: Any, arguments: Any) -> None:
            if failing and arguments[0].shape[1] == 2:  # the rest, behind two chunks
                raise ArithmeticError("no")

        runner.model.model.layers[0].register_forward_pre_hook(fail)
        runner.generate(prompt, 2)
        failing.append(True)
        with pytest.raises(ArithmeticError):
            runner.generate(prompt, NEW)
        failing.clear()
        assert runner.cache.seen_tokens == int(runner.position) == 0
        assert not runner.cache.layers[0].keys.any()
        assert torch.equal(runner.generate(prompt, NEW), eager_tokens(runner.model, prompt, NEW))
        assert runner.captures == 2


def test_an_eager_runner_captures_no_chunk(graphcore_driver: Driver) -> None:
    given = {"capture": False, "capture_prefill": True}
    with make_runner(graphcore_driver, **given) as runner:
        prompt = make_prompt(9, device=device_of(graphcore_driver))
        assert torch.equal(runner.generate(prompt, NEW), eager_tokens(runner.model, prompt, NEW))
        assert runner.captures == 0


def test_a_disabled_library_captures_no_chunk(
    graphcore_driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_runner(graphcore_driver, capture_prefill=True) as runner:
        monkeypatch.setenv("GRAPHCORE_DISABLE", "1")
        prompt = make_prompt(9, device=device_of(graphcore_driver))
        assert torch.equal(runner.generate(prompt, NEW), eager_tokens(runner.model, prompt, NEW))
        assert (runner.captures, runner.execution) == (0, "eager")


def test_the_largest_tensor_of_a_prompt_in_chunks_is_that_of_a_chunk() -> None:
    elements = []
    for size in (None, 8):
        model = make_model("gpt2")  # as many K/V heads as query heads: nothing repeats K and V
        runner = CUDAGraphAR(model, max_seq_len=64, prefill_chunk_size=size, capture=False)
        held = [*model.parameters(), *runner.cache.named_tensors().values()]
        with Largest(held) as largest:
            runner.capture(make_prompt(48))
        elements.append(largest.elements)
    assert elements[0] == 6 * elements[1]


@pytest.mark.gpu
def test_the_peak_of_memory_grows_with_the_chunk_not_with_the_prompt() -> None:
    peaks = []
    for size in (None, 64):
        model = make_model("llama", device="cuda")
        model.config.max_position_embeddings = 4096
        runner = CUDAGraphAR(model, max_seq_len=4096, prefill_chunk_size=size, capture=False)
        prompt = make_prompt(4000, device="cuda")
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        runner.capture(prompt)
        peaks.append(torch.cuda.max_memory_allocated() - held)
    assert peaks[1] < peaks[0] / 10


@pytest.mark.parametrize("size", [0, -1, 2.5, True], ids=str)
def test_a_chunk_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(ConfigurationError, match="prefill_chunk_size: expected a positive int"):
        CUDAGraphAR(make_model(), max_seq_len=16, prefill_chunk_size=size)


def test_a_captured_prefill_without_a_size_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="capture_prefill: expected prefill_chunk_size"):
        CUDAGraphAR(make_model(), max_seq_len=16, capture_prefill=True)


# ---- encoder-decoders ---------------------------------------------------------------------------


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_prompts_of_an_encoder_decoder_go_in_chunks_too(
    graphcore_driver: Driver, family: str, captured: bool
) -> None:
    device = device_of(graphcore_driver)
    model = make_encoder_decoder(family, device=device)
    given = {"max_seq_len": 32, "encoder_len": 12, "batch_size": 2, "driver": graphcore_driver}
    chunked = {"prefill_chunk_size": SIZE, "capture_prefill": captured}
    generator = torch.Generator().manual_seed(5)
    begin = torch.randint(3, 40, (2, 11), generator=generator)
    begin[:, 0] = START
    with (
        CUDAGraphAR(model, **given) as whole,
        CUDAGraphAR(model, **given, **chunked) as runner,
    ):
        for tokens in (7, 7, 5):
            inputs = encoder_inputs(family, tokens, batch=2, device=device, seed=tokens)
            inputs = {"input_ids": None, "decoder_input_ids": begin.to(device), **inputs}
            expected = whole.generate(max_new_tokens=NEW, **inputs)
            assert torch.equal(runner.generate(max_new_tokens=NEW, **inputs), expected)
            assert runner.cache.seen_tokens == 11 + NEW
        assert runner.captures == whole.captures * (1 + captured)


def test_compiled_chunks_give_the_same_tokens_and_a_second_prompt_compiles_nothing() -> None:
    """Callers who compile a model's forward feed it chunks and tokens over the same cache."""
    torch._dynamo.reset()
    model = make_model()
    cache = StaticKVCache.for_model(model, 32)
    keyword = {str(cache_keyword(model)): cache}
    compiled: list[int] = []

    def count(graph: Any, inputs: Any) -> Any:
        compiled.append(len(inputs))
        return graph.forward

    forward = torch.compile(model.forward, backend=count, fullgraph=True, dynamic=False)
    for seed in range(2):
        cache.reset()
        prompt = make_prompt(8, seed=seed)
        ids, count_before = prompt, len(compiled)
        with torch.no_grad():
            for chunk in torch.split(prompt, 4, dim=1):
                logits = forward(chunk, **keyword).logits
            for _ in range(6):
                token = logits[:, -1:].argmax(-1)
                ids = torch.cat([ids, token], dim=1)
                logits = forward(token, **keyword).logits
        assert torch.equal(ids, eager_tokens(model, prompt, 6))
        assert cache.seen_tokens == int(cache.position) == 14
        # one region for chunks, one for tokens
        assert len(compiled) - count_before == (2 if seed == 0 else 0)
    torch._dynamo.reset()
