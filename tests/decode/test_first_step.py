"""A captured first step of an encoder-decoder: it writes the cross K/V, later steps read them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.decode_models import device_of, make_model
from helpers.encoder_decoder_models import (
    LAYERS,
    START,
    eager_ids,
    encoder_inputs,
    make_encoder_decoder,
)
from helpers.interrupts import press_at

from graphcore import Graph
from graphcore.decode import CUDAGraphAR, EncoderDecoderKVCache
from graphcore.decode.first_step import FirstStep
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import ConfigurationError

NEW = 12
ENCODER = 12
FAMILIES = ("t5", "bart", "whisper")
PROMPTS = ((7, 2, 1), (ENCODER, 0, 2), (3, 1, 3))
"""(encoder tokens, pads in the last row, seed)."""


def make_runner(driver: Driver, family: str = "t5", **options: Any) -> CUDAGraphAR:
    model = make_encoder_decoder(family, device=device_of(driver))
    given = {"max_seq_len": 32, "encoder_len": ENCODER, "batch_size": 2} | options
    return CUDAGraphAR(model, driver=driver, **({"capture_first_step": True} | given))


def inputs_for(runner: CUDAGraphAR, family: str, prompt: tuple[int, int, int]) -> dict[str, Any]:
    tokens, padded, seed = prompt
    device = str(runner.cache.device)
    made = encoder_inputs(family, tokens, batch=2, padded=padded, seed=seed, device=device)
    return {"input_ids": None} | made


def first_graphs(runner: CUDAGraphAR) -> list[Graph]:
    first = runner._first
    assert isinstance(first, FirstStep)
    return [step.graph for step in first._variants]


def cross_writes(graph: Graph, runner: CUDAGraphAR) -> list[str]:
    """Operations of ``graph`` that write to a cross buffer, by what the recorder calls them."""
    found = []
    for each in graph.attributions(runner.cache.encoder_half.named_tensors()):
        # aten's operators that write what they are called on end in "_"
        in_place = each.node.name.split(".")[0].endswith("_") and each.operand == "arg 0"
        if each.place.source == "name" and (in_place or each.operand in ("dst", "address")):
            found.append(f"{each.node.name}: {each.place}")
    return found


@pytest.mark.parametrize("exact", [False, True], ids=["padded", "exact"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_captured_first_step_gives_the_tokens_of_an_eager_one(
    graphcore_driver: Driver, family: str, exact: bool
) -> None:
    decoded: dict[bool, list[torch.Tensor]] = {}
    for captured in (True, False):
        with make_runner(
            graphcore_driver, family, exact_encoder=exact, capture_first_step=captured
        ) as runner:
            decoded[captured] = []
            for prompt in (*PROMPTS, PROMPTS[0]):
                inputs = inputs_for(runner, family, prompt)
                ids = runner.generate(max_new_tokens=NEW, **inputs)
                assert torch.equal(ids, eager_ids(runner.model, inputs, NEW))
                decoded[captured].append(ids)
                assert runner.cache.seen_tokens == int(runner.position) == 1 + NEW
                length = runner.cache.encoder_half.position
                assert runner.cache.encoder_tokens == int(length) > 0
            steps = 1 if not exact or family == "whisper" else len(PROMPTS)
            assert runner.captures == (2 if captured else 1) * steps
    assert all(map(torch.equal, decoded[True], decoded[False]))
    assert not torch.equal(decoded[True][0], decoded[True][1])


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_first_graph_projects_and_writes_cross_keys_and_values(
    graphcore_driver: Driver, family: str
) -> None:
    with make_runner(graphcore_driver, family) as runner:
        inputs = inputs_for(runner, family, PROMPTS[0])
        runner.capture(**inputs)
        (first,) = first_graphs(runner)
        steady = runner.graph
        assert steady is not None

        def projections(graph: Graph) -> set[str]:
            labels = {node.label for node in graph.snapshot().nodes}
            cross = {each for each in labels if "EncDec" in each or "encoder_attn" in each}
            return {each for each in cross if each.endswith(("/k", "/v", "/k_proj", "/v_proj"))}

        assert len(projections(first)) == 2 * LAYERS
        assert projections(steady) == set()
        named = runner.cache.encoder_half.named_tensors()
        buffers = {name for name in named if name != "cross length"}
        for graph in (first, steady):
            met = {name for each in graph.attributions(named) for name, _ in each.place.matches}
            assert buffers <= met, "both read them"
        if graphcore_driver.is_emulated:  # a device's kernels do not say what they write
            assert len(cross_writes(first, runner)) >= 2 * LAYERS
            assert cross_writes(steady, runner) == []
        # what the steps leave alone, bit for bit, the first one writes anew
        held = {name: tensor.clone() for name, tensor in named.items()}
        for _ in range(3):
            runner.replay()
        assert all(torch.equal(held[name], tensor) for name, tensor in named.items())
        for name in buffers:
            named[name].fill_(float("nan"))
        runner.capture(**inputs)
        assert all(torch.equal(held[name], tensor) for name, tensor in named.items())
        assert runner.captures == 2


def test_the_flag_is_in_the_key_of_both_graphs(graphcore_driver: Driver) -> None:
    with make_runner(graphcore_driver) as runner:
        runner.capture(**inputs_for(runner, "t5", PROMPTS[0]))
        first = runner._first
        assert first is not None
        (key,) = first._variants._steps
        assert key == ("first step", ("cross K/V", "not written"), ("encoder", "padded"))
        assert runner._step.key == (("cross K/V", "written"), ("encoder", "padded"))


def test_another_encoder_prompt_gives_other_cross_keys_through_the_same_graph(
    graphcore_driver: Driver,
) -> None:
    """The control: a first step that was frozen would give the first prompt's tokens."""
    with make_runner(graphcore_driver) as runner:
        runner.capture(**inputs_for(runner, "t5", PROMPTS[0]))
        held = runner.cache.encoder_half.layers[0].keys.clone()
        runner.logits.fill_(float("nan"))
        runner.capture(**inputs_for(runner, "t5", PROMPTS[1]))
        assert runner.captures == 2
        assert bool(runner.logits.isfinite().all())
        now = runner.cache.encoder_half.layers[0].keys
        assert held.shape != now.shape or not torch.equal(held, now)


@pytest.mark.parametrize("chunk", [None, 2], ids=["in one piece", "in chunks"])
def test_further_tokens_of_a_decoder_prompt_follow_the_first(
    graphcore_driver: Driver, chunk: int | None
) -> None:
    chunks = {"prefill_chunk_size": chunk, "capture_prefill": chunk is not None}
    with make_runner(graphcore_driver, "bart", **chunks) as runner:
        device = runner.cache.device
        for seed in (1, 2):
            inputs = inputs_for(runner, "bart", (7, 1, seed))
            begin = torch.tensor([[START, 11, 12, 13 + seed], [START, 21, 22, 23]]).to(device)
            ids = runner.generate(max_new_tokens=NEW, decoder_input_ids=begin, **inputs)
            expected = eager_ids(runner.model, inputs, NEW, decoder_input_ids=begin)
            assert torch.equal(ids, expected)
        assert runner.captures == (2 if chunk is None else 3)


def test_fresh_caches_are_taken_over_with_both_graphs(graphcore_driver: Driver) -> None:
    with make_runner(graphcore_driver) as runner:
        inputs = inputs_for(runner, "t5", PROMPTS[0])
        expected = runner.generate(max_new_tokens=NEW, **inputs)
        old = runner.cache
        fresh = EncoderDecoderKVCache.for_model(runner.model, 32, ENCODER, batch_size=2)
        for tensor in old.encoder_half.named_tensors().values():
            tensor.fill_(1)
        ids = runner.generate(max_new_tokens=NEW, cache=fresh, **inputs)
        assert torch.equal(ids, expected)
        assert runner.captures == 2
        assert bool((old.encoder_half.layers[0]._keys == 1).all())
        smaller = EncoderDecoderKVCache.for_model(runner.model, 32, 8, batch_size=2)
        assert torch.equal(runner.generate(max_new_tokens=NEW, cache=smaller, **inputs), expected)
        assert runner.captures == 4


def test_an_exchanged_weight_is_captured_again(graphcore_driver: Driver) -> None:
    with make_runner(graphcore_driver) as runner:
        inputs = inputs_for(runner, "t5", PROMPTS[0])
        before = runner.generate(max_new_tokens=NEW, **inputs)
        cross = runner.model.decoder.block[0].layer[1].EncDecAttention.k
        cross.weight = torch.nn.Parameter(-2 * cross.weight.detach())
        ids = runner.generate(max_new_tokens=NEW, **inputs)
        assert torch.equal(ids, eager_ids(runner.model, inputs, NEW))
        assert not torch.equal(ids, before)
        assert runner.captures == 4
        assert torch.equal(runner.generate(max_new_tokens=NEW, **inputs), ids)
        assert runner.captures == 4, "nothing is captured a third time"


def test_a_first_step_that_fails_leaves_a_runner_that_works(
    graphcore_driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_runner(graphcore_driver) as runner:
        inputs = inputs_for(runner, "t5", PROMPTS[0])
        expected = eager_ids(runner.model, inputs, NEW)
        with monkeypatch.context() as patch:
            patch.setattr(FirstStep, "_captured", _failing)
            with pytest.raises(RuntimeError, match="no capture today"):
                runner.capture(**inputs)
        assert runner.cache.encoder_tokens == 0
        assert torch.equal(runner.generate(max_new_tokens=NEW, **inputs), expected)


_FILES = tuple(
    f"decode/{name}.py"
    for name in (
        "cross_cache", "encoder_decoder_cache", "encoder_decoder_forward", "first_step", "padding",
        "prompt_graphs", "prompting",
    )
)  # fmt: skip


# in a finalizer nothing can be raised: Python prints it and goes on
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("again", [False, True], ids=["replayed", "captured again"])
def test_ctrl_c_at_any_line_of_a_first_step_leaves_a_runner_that_works(again: bool) -> None:
    driver = EmulatedDriver()
    with make_runner(driver) as runner:
        inputs = inputs_for(runner, "t5", PROMPTS[0])
        begin = torch.tensor([[START, 11, 12], [0, START, 21]])
        ragged = {"decoder_input_ids": begin, "decoder_attention_mask": begin != 0}
        expected = eager_ids(runner.model, inputs, 4)
        runner.capture(**inputs)
        runner.capture(**ragged, **inputs)

        def act() -> None:
            if again:
                cross = runner.cache.encoder_half.layers[1]
                cross.keys = cross._keys.clone()
            runner.capture(**ragged, **inputs)

        places, _ = press_at(0, act, _FILES)
        assert places > 60
        stopped = set()
        for number in range(1, places, places // (8 if again else 30) + 1):
            _, where = press_at(number, act, _FILES)
            stopped.add(where)
            assert torch.equal(runner.generate(max_new_tokens=4, **inputs), expected)
            assert runner.cache.seen_tokens == int(runner.position) == 5
        assert len(stopped - {None}) > (3 if again else 10)


def test_without_graphs_the_first_step_is_eager(
    graphcore_driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_runner(graphcore_driver, capture=False) as runner:
        assert runner._first is None
    monkeypatch.setenv("GRAPHCORE_DISABLE", "1")
    with make_runner(graphcore_driver) as runner:
        for prompt in PROMPTS:
            inputs = inputs_for(runner, "t5", prompt)
            ids = runner.generate(max_new_tokens=NEW, **inputs)
            assert torch.equal(ids, eager_ids(runner.model, inputs, NEW))
            assert runner.cache.encoder_tokens == prompt[0]
        assert runner.captures == 0


def test_a_decoder_has_no_first_step_of_its_own(graphcore_driver: Driver) -> None:
    model = make_model(device=device_of(graphcore_driver))
    with pytest.raises(ConfigurationError, match="capture_first_step: expected False"):
        CUDAGraphAR(model, max_seq_len=16, driver=graphcore_driver, capture_first_step=True)


def _failing(*_: Any) -> Any:
    raise RuntimeError("no capture today")
