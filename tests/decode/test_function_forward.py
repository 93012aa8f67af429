"""Step functions and modules without transformers' interface, decoded through one graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.decode_functions import (
    LAYERS,
    VOCABULARY,
    TinyModel,
    as_function,
    make_tiny_cache,
    make_tiny_model,
    whole_tokens,
)
from helpers.decode_models import device_of, make_model

from graphcore.decode import CUDAGraphAR, Guidance
from graphcore.decode.function_forward import module_of
from graphcore.driver import Driver
from graphcore.errors import CacheTypeError, CaptureError, ConfigurationError, LifecycleError

NEW = 12


class Speaking(torch.nn.Module):
    """A module of another library: transformers' keywords, a tuple or an object as the result."""

    def __init__(self, model: TinyModel, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner = model
        self.wrap = wrap

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> Any:
        assert use_cache
        return self.wrap(self.inner(input_ids, position_ids, attention_mask, past_key_values))


forms: dict[str, Callable[[TinyModel], Any]] = {
    "function": as_function,
    "module": lambda model: model,
    "bound method": lambda model: model.forward,
    "partial": lambda model: functools.partial(as_function(model)),
    "any keywords": lambda model: lambda ids, **parts: model(tokens=ids, **parts),
    "last token": lambda model: lambda tokens, **parts: model(tokens, **parts)[:, -1:],
    "rows": lambda model: lambda tokens, **parts: model(tokens, **parts)[:, -1],
    "tuple": lambda model: Speaking(model, lambda logits: (logits, None)),
    "logits attribute": lambda model: Speaking(model, lambda out: SimpleNamespace(logits=out)),
}


def make_runner(driver: Driver, form: str = "function", **options: Any) -> CUDAGraphAR:
    device = device_of(driver)
    function = forms[form](make_tiny_model(device))
    cache = make_tiny_cache(device, rows=options.pop("rows", 1))
    return CUDAGraphAR(function, cache, vocabulary=VOCABULARY, driver=driver, **options)


def prompt_for(driver: Driver, tokens: int, rows: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(0, VOCABULARY, (rows, tokens), generator=generator).to(device_of(driver))


@pytest.mark.parametrize("form", forms)
def test_every_form_of_a_step_function_decodes_what_whole_forwards_give(
    graphcore_driver: Driver, form: str
) -> None:
    prompt = prompt_for(graphcore_driver, 5, rows=2)
    expected = whole_tokens(make_tiny_model(device_of(graphcore_driver)), prompt, NEW)
    assert len(expected[0].unique()) > 4  # a run of one token would prove little
    with make_runner(graphcore_driver, form, rows=2) as runner:
        assert torch.equal(runner.generate(prompt, NEW), expected)
        assert runner.execution == "graph"
        assert torch.equal(runner.generate(prompt[:, :2], NEW)[:, :2], prompt[:, :2])
        assert runner.captures == 1
        assert runner.cache.seen_tokens == int(runner.position) == 2 + NEW


def test_a_step_function_decodes_eagerly_the_same_tokens(graphcore_driver: Driver) -> None:
    prompt = prompt_for(graphcore_driver, 5)
    with make_runner(graphcore_driver, capture=False) as eager:
        assert torch.equal(
            eager.generate(prompt, NEW),
            whole_tokens(make_tiny_model(device_of(graphcore_driver)), prompt, NEW),
        )
        assert eager.execution == "eager"


def test_a_function_without_position_ids_is_not_given_any(graphcore_driver: Driver) -> None:
    model = make_tiny_model(device_of(graphcore_driver))
    torch.nn.init.zeros_(model.positions.weight)

    def step(tokens: torch.Tensor, attention_mask: torch.Tensor, cache: Any) -> torch.Tensor:
        return model(tokens, torch.zeros_like(tokens), attention_mask, cache)

    prompt = prompt_for(graphcore_driver, 4)
    cache = make_tiny_cache(device_of(graphcore_driver))
    with CUDAGraphAR(step, cache, vocabulary=VOCABULARY, driver=graphcore_driver) as runner:
        assert torch.equal(runner.generate(prompt, NEW), whole_tokens(model, prompt, NEW))


def test_padding_and_guidance_work_around_a_step_function(graphcore_driver: Driver) -> None:
    model = make_tiny_model(device_of(graphcore_driver))
    rows = [prompt_for(graphcore_driver, 3), prompt_for(graphcore_driver, 6)]
    padded = torch.cat([torch.nn.functional.pad(rows[0], (3, 0), value=-1), rows[1]])
    with make_runner(graphcore_driver, rows=2) as runner:
        ids = runner.generate(padded, NEW, attention_mask=padded >= 0)
        for row, alone in zip(ids, rows, strict=True):
            assert torch.equal(row[6:], whole_tokens(model, alone, NEW)[0, alone.shape[1] :])
    guided = make_runner(graphcore_driver, rows=2, guidance=Guidance(1.0))
    with guided:
        decoded = guided.generate(rows[1], NEW, negative_input_ids=rows[0])
        assert torch.equal(decoded, whole_tokens(model, rows[1], NEW))


engine = SimpleNamespace(model=None)


def through_an_argument(tokens: torch.Tensor, engine: Any, **parts: Any) -> torch.Tensor:
    return engine.model(tokens, **parts)


def through_an_object(tokens: torch.Tensor, **parts: Any) -> torch.Tensor:
    return engine.model(tokens, **parts)


@pytest.mark.parametrize("form", ["module", "bound method", "function", "bound object"])
def test_exchanged_weights_are_seen_where_the_function_shows_them(
    graphcore_driver: Driver, form: str
) -> None:
    model = make_tiny_model(device_of(graphcore_driver))
    holder = SimpleNamespace(model=model)
    function = (
        functools.partial(through_an_argument, engine=holder)
        if form == "bound object"
        else forms[form](model)
    )
    prompt = prompt_for(graphcore_driver, 4)
    cache = make_tiny_cache(device_of(graphcore_driver))
    with CUDAGraphAR(function, cache, vocabulary=VOCABULARY, driver=graphcore_driver) as runner:
        runner.generate(prompt, 4)
        kept = model.head.bias  # freed memory would be seen anyway
        model.head.bias = torch.nn.Parameter(torch.randn_like(kept))
        assert torch.equal(runner.generate(prompt, 4), whole_tokens(model, prompt, 4))
        assert runner.captures == 2


def test_weights_behind_an_object_in_a_global_are_not_compared(
    graphcore_driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(device_of(graphcore_driver))
    monkeypatch.setattr(engine, "model", model)
    prompt = prompt_for(graphcore_driver, 4)
    cache = make_tiny_cache(device_of(graphcore_driver))
    with CUDAGraphAR(
        through_an_object, cache, vocabulary=VOCABULARY, driver=graphcore_driver
    ) as runner:
        before = runner.generate(prompt, 4)
        kept = model.head.bias
        model.head.bias = torch.nn.Parameter(torch.randn_like(kept))
        runner.generate(prompt, 4)
        assert runner.captures == 1
        assert torch.equal(before[:, :4], prompt)


def test_nodes_of_a_module_carry_the_names_of_its_parts(graphcore_driver: Driver) -> None:
    with make_runner(graphcore_driver, "module") as runner:
        runner.capture(prompt_for(graphcore_driver, 4))
        labels = {node.label or "" for node in runner.graph.snapshot().nodes}
        assert any("head" in label for label in labels)
        assert any("inputs.1" in label for label in labels)


# ---- refused ------------------------------------------------------------------------------------


def wrong(result: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    step = as_function(make_tiny_model())
    return lambda tokens, **parts: result(step(tokens, **parts))


results: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "nothing": (lambda _: None, r"\[1, 3, 61\] or \[1, 1, 61\] or \[1, 61\] .*got NoneType"),
    "another vocabulary": (lambda out: out[..., :60], r"expected logits .*got \[1, 3, 60\]"),
    "two tokens of three": (lambda out: out[:, :2], r"expected logits .*got \[1, 2, 61\]"),
    "one dimension": (lambda out: out[0, 0], r"expected logits .*got \[61\]"),
    "ids": (lambda out: out.argmax(-1), r"expected logits .*got \[1, 3\]"),
    "integers": (lambda out: out.long(), "floating dtype, got torch.int64"),
    "another device": (lambda out: out.to("meta"), "logits on cpu, got meta"),
}


@pytest.mark.parametrize("case", results)
def test_a_result_that_is_no_logits_is_refused_and_the_cache_is_as_before(case: str) -> None:
    result, message = results[case]
    cache = make_tiny_cache()
    runner = CUDAGraphAR(wrong(result), cache, vocabulary=VOCABULARY)
    with pytest.raises(ConfigurationError, match=f"function: expected .*{message}|{message}"):
        runner.capture(torch.tensor([[1, 2, 3]]))
    assert (cache.seen_tokens, int(cache.position), runner.captures) == (0, 0, 0)
    assert not cache.layers[0].keys.any()
    with pytest.raises(LifecycleError, match="the last prompt failed"):
        runner.replay()


@pytest.mark.parametrize(
    ("updated", "moved"), [((), 0), ((0,), 0), ((0, 1, 1), 6)], ids=["none", "first", "twice"]
)
def test_a_function_that_does_not_move_the_position_by_its_tokens_is_refused_before_the_capture(
    updated: tuple[int, ...], moved: int
) -> None:
    cache = make_tiny_cache()

    def step(tokens: torch.Tensor, mask: Any, cache: Any) -> torch.Tensor:
        states = torch.ones(1, 2, tokens.shape[1], 8)
        for layer in updated:
            cache.update(states, states, layer)
        return torch.zeros(*tokens.shape, VOCABULARY)

    runner = CUDAGraphAR(step, cache, vocabulary=VOCABULARY)
    with pytest.raises(
        ConfigurationError,
        match=rf"by the 3 tokens .*moved by {moved}: .*the last \({LAYERS - 1}\)",
    ):
        runner.capture(torch.tensor([[1, 2, 3]]))
    assert (cache.seen_tokens, int(cache.position), runner.captures) == (0, 0, 0)


def test_a_function_that_stops_moving_the_position_for_single_tokens_is_refused_too(
    graphcore_driver: Driver,
) -> None:
    model = make_tiny_model(device_of(graphcore_driver))
    cache = make_tiny_cache(device_of(graphcore_driver))

    def step(tokens: torch.Tensor, position_ids: Any, mask: Any, cache: Any) -> torch.Tensor:
        if tokens.shape[1] > 1:
            return model(tokens, position_ids, mask, cache)
        return model.head(model.embedding(tokens))

    with CUDAGraphAR(step, cache, vocabulary=VOCABULARY, driver=graphcore_driver) as runner:
        with pytest.raises(ConfigurationError, match=r"by the 1 tokens it was given, .*moved by 0"):
            runner.capture(prompt_for(graphcore_driver, 3))
        assert (cache.seen_tokens, int(cache.position), runner.captures) == (0, 0, 0)


def test_what_a_step_function_needs_is_named() -> None:
    step, cache = as_function(make_tiny_model()), make_tiny_cache()
    with pytest.raises(ConfigurationError, match=r"or a step function with cache= and vocabulary="):
        CUDAGraphAR(step)
    with pytest.raises(
        ConfigurationError, match="cache: expected a StaticKVCache for the step fun"
    ):
        CUDAGraphAR(step, vocabulary=VOCABULARY)
    with pytest.raises(CacheTypeError, match="got dict, whose buffers are not static"):
        CUDAGraphAR(step, {}, vocabulary=VOCABULARY)
    for size in (None, 0, True, 2.5):
        with pytest.raises(ConfigurationError, match="vocabulary: expected how many ids the step"):
            CUDAGraphAR(step, cache, vocabulary=size)
    with pytest.raises(ConfigurationError, match="batch_size: expected 1"):
        CUDAGraphAR(step, cache, vocabulary=VOCABULARY, batch_size=2)
    with pytest.raises(ConfigurationError, match="max_seq_len: expected 32"):
        CUDAGraphAR(step, cache, vocabulary=VOCABULARY, max_seq_len=16)
    with pytest.raises(ConfigurationError, match=r"takes cache= or past_key_values=, got .*mask"):
        CUDAGraphAR(lambda tokens, mask: tokens, cache, vocabulary=VOCABULARY)
    with pytest.raises(ConfigurationError, match="takes mask= or attention_mask="):
        CUDAGraphAR(lambda tokens, cache: tokens, cache, vocabulary=VOCABULARY)


def test_a_transformers_model_is_no_step_function() -> None:
    with pytest.raises(ConfigurationError, match="vocabulary: expected None for a transformers"):
        CUDAGraphAR(make_model(), max_seq_len=16, vocabulary=97)


def test_training_mode_with_dropout_is_refused_for_modules_too() -> None:
    model = make_tiny_model()
    model.drop = torch.nn.Dropout(0.5)
    model.train()
    with pytest.raises(ConfigurationError, match=r"active dropout: p=0\.5 of drop"):
        CUDAGraphAR(model, make_tiny_cache(), vocabulary=VOCABULARY)


def test_a_function_that_reads_the_position_on_the_host_cannot_be_captured(
    graphcore_driver: Driver,
) -> None:
    model = make_tiny_model(device_of(graphcore_driver))

    def step(tokens: torch.Tensor, position_ids: Any, mask: Any, cache: Any) -> torch.Tensor:
        assert int(position_ids[0, 0].item()) >= 0
        return model(tokens, position_ids, mask, cache)

    cache = make_tiny_cache(device_of(graphcore_driver))
    with CUDAGraphAR(step, cache, vocabulary=VOCABULARY, driver=graphcore_driver) as runner:
        with pytest.raises(CaptureError):
            runner.capture(prompt_for(graphcore_driver, 4))
        assert cache.seen_tokens == int(cache.position) == 0


def test_the_module_of_a_function_is_found_where_it_shows() -> None:
    model = make_tiny_model()
    assert module_of(model) is module_of(model.forward) is model
    assert module_of(functools.partial(model.forward, cache=None)) is model
    assert module_of(as_function(model)) is None
