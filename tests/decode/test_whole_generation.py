"""One launch by generate() and by buckets: the same ids, and the result says how and why."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.decode_models import device_of, eager_tokens, make_model, make_prompt
from helpers.encoder_decoder_models import eager_ids, encoder_inputs, make_encoder_decoder

from graphcore.decode import CUDAGraphAR, DecodeBuckets, Guidance, Sampling, generate
from graphcore.decode.captured_step import CapturedStep
from graphcore.driver import Driver, active
from graphcore.errors import ConfigurationError
from graphcore.executable import GraphExec

NEW = 9


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[GraphExec]:
    """The executable of each launch that is asked to decode a whole generation."""
    made: list[GraphExec] = []
    plain = CapturedStep.in_one_launch

    def counted(self: CapturedStep, step: Any) -> Any:
        loop = plain(self, step)
        made.append(loop.executable)
        return loop

    monkeypatch.setattr(CapturedStep, "in_one_launch", counted)
    return made


@pytest.mark.parametrize(
    "sampling", [None, Sampling(temperature=0.8, top_p=0.9)], ids=["greedy", "sampling"]
)
def test_generate_decodes_in_one_launch_where_that_is_asked_for_and_says_so(
    graphcore_driver: Driver, sampling: Sampling | None, launches: list[GraphExec]
) -> None:
    model = make_model(device=device_of(graphcore_driver))
    prompt = make_prompt(5, batch=2, device=str(model.device))
    options: dict[str, Any] = {"sampling": sampling, "seed": 3, "driver": graphcore_driver}
    stepwise = generate(model, prompt, NEW, **options)
    assert (stepwise.execution, launches) == ("graph", [])
    result = generate(model, prompt, NEW, one_launch=True, **options)
    assert torch.equal(result.ids, stepwise.ids)
    assert (result.execution, result.captures, len(launches)) == ("one launch", 1, 1)
    assert result.reason == (
        f"the captured step is the body of a WHILE node on the {graphcore_driver.name} driver"
    )
    if sampling is None:
        assert torch.equal(result.ids, eager_tokens(model, prompt, NEW))


def test_generate_decodes_an_encoder_decoder_in_one_launch(graphcore_driver: Driver) -> None:
    model = make_encoder_decoder("t5", device=device_of(graphcore_driver))
    inputs = encoder_inputs("t5", batch=2, padded=2, device=str(model.device))
    ids = inputs.pop("input_ids")
    result = generate(model, ids, NEW, one_launch=True, driver=graphcore_driver, **inputs)
    assert result.execution == "one launch"
    assert torch.equal(result.ids, eager_ids(model, {"input_ids": ids, **inputs}, NEW))


@pytest.mark.parametrize("how", ["capture=False", "GRAPHCORE_DISABLE=1"])
def test_without_a_graph_there_is_no_launch_and_the_result_says_why(
    graphcore_driver: Driver, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(device=device_of(graphcore_driver))
    prompt = make_prompt(5, device=str(model.device))
    if how == "GRAPHCORE_DISABLE=1":
        monkeypatch.setenv("GRAPHCORE_DISABLE", "1")
    result = generate(
        model,
        prompt,
        NEW,
        one_launch=True,
        capture=how != "capture=False",
        driver=graphcore_driver,
    )
    assert (result.execution, result.reason) == ("eager", how)
    assert torch.equal(result.ids, eager_tokens(model, prompt, NEW))


def test_a_step_that_no_while_node_takes_is_replayed_for_each_token_with_the_reason(
    graphcore_driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(device=device_of(graphcore_driver))
    prompt = make_prompt(5, device=str(model.device))
    expected = eager_tokens(model, prompt, NEW)

    def call_host(*_: Any) -> None:
        capture = active.current()
        if capture is not None:
            graphcore_driver.launch_host(lambda: None, capture.stream)

    model.lm_head.register_forward_pre_hook(call_host)
    with caplog.at_level(logging.INFO, "graphcore"):
        result = generate(model, prompt, NEW, one_launch=True, driver=graphcore_driver)
    assert torch.equal(result.ids, expected)
    assert result.execution == "graph"
    assert result.reason.startswith("not in one launch: ")
    assert "host" in result.reason
    assert f"decoding step by step: {result.reason}" in caplog.messages


@pytest.fixture
def buckets(graphcore_driver: Driver) -> Iterator[DecodeBuckets]:
    model = make_model(device=device_of(graphcore_driver))
    with DecodeBuckets(model, [12, 32], [4], driver=graphcore_driver, progress=False) as made:
        yield made


def test_buckets_decode_in_one_launch_each_and_end_where_all_rows_have_ended(
    buckets: DecodeBuckets, launches: list[GraphExec]
) -> None:
    model = buckets.runner(buckets.buckets[0]).model
    prompt = make_prompt(5, batch=3, device=str(model.device))
    expected = eager_tokens(model, prompt, 20)
    for grow, count in ((False, 1), (True, 2)):
        launches.clear()
        result = buckets.generate(prompt, 20, grow=grow, one_launch=True)
        assert torch.equal(result.ids, expected)
        assert (result.execution, len(launches)) == ("one launch", count)
        assert "WHILE" in result.reason
        assert len(result.path) == count
        assert torch.equal(buckets.generate(prompt, 20, grow=grow).ids, expected)
    # each row ends by an id of its own: the launch that grew begins with rows that have ended
    ends = [int(expected[row, 5 + at]) for row, at in enumerate((2, 10, 12))]
    ended = eager_tokens(model, prompt, 20, eos_token_id=ends, pad_token_id=0)
    for one_launch in (True, False):
        result = buckets.generate(prompt, 20, ends, 0, grow=True, one_launch=one_launch)
        assert torch.equal(result.ids, ended)
        assert result.execution == ("one launch" if one_launch else "graph")
    assert ended.shape[1] < 25
    runner = buckets.runner(buckets.buckets[-1])
    assert runner.cache.seen_tokens == int(runner.position)


def test_buckets_say_why_they_did_not_decode_in_one_launch(graphcore_driver: Driver) -> None:
    model = make_model(device=device_of(graphcore_driver))
    prompt = make_prompt(4, device=str(model.device))
    with DecodeBuckets(
        model,
        [32],
        driver=graphcore_driver,
        capture=False,
        guidance=Guidance(scale=1.0),
        progress=False,
    ) as eager:
        result = eager.generate(prompt, NEW, one_launch=True)
    assert (result.execution, result.reason) == ("eager", "capture=False")
    assert torch.equal(result.ids, eager_tokens(model, prompt, NEW))


@pytest.mark.parametrize("option", ["keep_cache", "on_token"])
def test_what_would_differ_where_one_launch_is_impossible_is_refused_either_way(
    buckets: DecodeBuckets, option: str
) -> None:
    runner = buckets.runner(buckets.buckets[0])
    prompt = make_prompt(5, batch=4, device=str(runner.cache.device))
    given: Any = {option: True}
    for one_launch in (True, False):
        with pytest.raises(ConfigurationError, match=f"{option}: "):
            buckets.generate(prompt, NEW, one_launch=one_launch, **given)
        with pytest.raises(ConfigurationError, match=f"{option}: "):
            generate(
                runner.model, prompt, NEW, one_launch=one_launch, driver=buckets.driver, **given
            )
    assert torch.equal(buckets.generate(prompt, NEW).ids, eager_tokens(runner.model, prompt, NEW))


# ---- after every kind of generation -------------------------------------------------------------


def _stream(runner: CUDAGraphAR, prompt: torch.Tensor, **options: Any) -> int:
    return len(list(runner.stream(prompt, NEW, **options)))


def _stream_in_one_launch(runner: CUDAGraphAR, prompt: torch.Tensor, **options: Any) -> int:
    with runner.stream_in_one_launch(prompt, NEW, **options) as tokens:
        return len(list(tokens))


def _left_half_way(runner: CUDAGraphAR, prompt: torch.Tensor, **options: Any) -> int:
    stream = runner.stream(prompt, NEW, **options)
    return len([next(stream) for _ in range(3)])


def _stopped(runner: CUDAGraphAR, prompt: torch.Tensor, **options: Any) -> None:
    """How far the device was when it was stopped is not the host's to say."""
    with runner.stream_in_one_launch(prompt, NEW, **options) as tokens:
        next(tokens)


def _generated(runner: CUDAGraphAR, prompt: torch.Tensor, **options: Any) -> int:
    return runner.generate(prompt, NEW, **options).shape[1] - prompt.shape[1]


def _launched(runner: CUDAGraphAR, prompt: torch.Tensor, **options: Any) -> int:
    return runner.generate_in_one_launch(prompt, NEW, **options).shape[1] - prompt.shape[1]


def _forced(runner: CUDAGraphAR, prompt: torch.Tensor, **options: Any) -> int:
    runner.capture(prompt, **options)
    for token in (None, 5, None):
        runner.replay(token)
    return 3


_kinds: dict[str, Any] = {
    "generate": _generated,
    "one launch": _launched,
    "stream": _stream,
    "stream in one launch": _stream_in_one_launch,
    "left half way": _left_half_way,
    "stopped": _stopped,
    "forced": _forced,
}


@pytest.mark.parametrize("model_kind", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
def test_the_mirror_is_the_device_position_after_every_kind_of_generation(
    graphcore_driver: Driver, model_kind: str, capture: bool
) -> None:
    device = device_of(graphcore_driver)
    if model_kind == "decoder":
        model, begin = make_model(device=device), 5
        prompt = make_prompt(begin, batch=2, device=device)
    else:
        model, begin = make_encoder_decoder(device=device), 1
        prompt = encoder_inputs("t5", batch=2, device=device)["input_ids"]
    with CUDAGraphAR(
        model,
        max_seq_len=32,
        batch_size=2,
        driver=graphcore_driver,
        capture=capture,
        **({} if model_kind == "decoder" else {"encoder_len": 12}),
    ) as runner:
        for name, kind in _kinds.items():
            runner.cache.reset()
            count = kind(runner, prompt)
            if name in ("generate", "one launch") and model_kind != "decoder":
                count = runner.cache.seen_tokens - begin  # its prompt is not the ids' beginning
            runner.driver.synchronize()
            seen = runner.cache.seen_tokens
            assert int(runner.position) == seen == runner.cache._state.seen, name
            assert count is None or seen == begin + count, name
            assert begin < seen <= begin + NEW, name
        # by other routes: tokens dropped, another cache, one that was emptied
        runner.cache.rewind(begin)
        assert int(runner.position) == runner.cache.seen_tokens == begin
        runner.cache.reset()
        assert int(runner.position) == runner.cache.seen_tokens == 0
