"""Classifier-free guidance: two branches and one token in one graph, as YuE and transformers do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.decode_models import device_of, eager_tokens, make_model, make_prompt

import graphcore
from graphcore.decode import CUDAGraphAR, Guidance, Sampling, StaticKVCache, generate
from graphcore.decode.guidance import Guide
from graphcore.driver import Driver
from graphcore.errors import CapacityError, CaptureError, ConfigurationError

NEW = 10
SCALE = 1.75


def make_runner(driver: Driver, architecture: str = "llama", **options: Any) -> CUDAGraphAR:
    model = make_model(architecture, device=device_of(driver))
    given = {"max_seq_len": 32, "guidance": Guidance(SCALE), "driver": driver} | options
    return CUDAGraphAR(model, **given)


def theirs(model: Any, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
    """transformers' own guided generation, which runs the two branches one after the other."""
    given = {"guidance_scale": SCALE, "max_new_tokens": NEW, "do_sample": False} | options
    ids: torch.Tensor = model.generate(prompt, attention_mask=torch.ones_like(prompt), **given)
    return ids


def by_hand(
    runner: CUDAGraphAR, prompts: tuple[torch.Tensor, torch.Tensor], new: int
) -> list[torch.Tensor]:
    """float64 combinations of two whole forwards of each branch, before each new token."""
    branches = list(prompts)
    combined = []
    for _ in range(new):
        with torch.no_grad():
            wanted, other = (
                runner.model(ids).logits[:, -1].double().log_softmax(-1) for ids in branches
            )
        combined.append(other + SCALE * (wanted - other))
        token = combined[-1].argmax(-1, keepdim=True)
        branches = [torch.cat([ids, token], dim=1) for ids in branches]
    return combined


# ---- equal to two branches ----------------------------------------------------------------------


@pytest.mark.parametrize("negative", [5, 3, 8, None], ids=str)
def test_a_guided_generation_is_that_of_transformers(
    graphcore_driver: Driver, negative: int | None
) -> None:
    """Negative prompts as long as the prompt, shorter, longer, and none: then its last token."""
    device = device_of(graphcore_driver)
    prompt = make_prompt(5, device=device)
    given: dict[str, Any] = {}
    if negative is not None:
        given["negative_input_ids"] = make_prompt(negative, device=device, seed=4)
    with make_runner(graphcore_driver) as runner:
        ids = runner.generate(prompt, NEW, **given)
        expected = theirs(runner.model, prompt, negative_prompt_ids=given.get("negative_input_ids"))
        assert torch.equal(ids, expected)
        assert runner.execution == "graph"
        assert runner.captures == 1
        assert runner.cache.batch_size == 2
        assert runner.cache.seen_tokens == int(runner.position) == max(5, negative or 1) + NEW
        # the control: guidance changes what is decoded
        assert not torch.equal(ids, eager_tokens(runner.model, prompt, NEW))


def test_guided_logits_are_two_forwards_combined_by_hand(graphcore_driver: Driver) -> None:
    device = device_of(graphcore_driver)
    prompts = make_prompt(4, device=device), make_prompt(6, device=device, seed=3)
    with make_runner(graphcore_driver, "gpt2") as runner:
        runner.capture(prompts[0], negative_input_ids=prompts[1])
        assert (runner.logits.shape, runner.logits.dtype) == ((1, 97), torch.float32)
        for expected in by_hand(runner, prompts, 6):
            torch.testing.assert_close(runner.logits.double(), expected, atol=1e-4, rtol=1e-4)
            assert torch.equal(runner.replay(), expected.argmax(-1))


def test_guided_rows_of_one_batch_decode_what_each_decodes_alone(graphcore_driver: Driver) -> None:
    device = device_of(graphcore_driver)
    prompts = [make_prompt(length, device=device, seed=length) for length in (3, 6)]
    others = [make_prompt(length, device=device, seed=9 + length) for length in (7, 2)]
    batch = torch.cat([torch.nn.functional.pad(prompts[0], (3, 0)), prompts[1]])
    negatives = torch.cat([others[0], torch.nn.functional.pad(others[1], (5, 0))])
    masks = {
        "attention_mask": torch.tensor([[0] * 3 + [1] * 3, [1] * 6], device=device),
        "negative_attention_mask": torch.tensor([[1] * 7, [0] * 5 + [1] * 2], device=device),
    }
    with make_runner(graphcore_driver, batch_size=2) as runner:
        ids = runner.generate(batch, NEW, negative_input_ids=negatives, **masks)
        streamed = list(runner.stream(batch, NEW, negative_input_ids=negatives, **masks))
        assert torch.equal(torch.stack(streamed, dim=1), ids[:, 6:].cpu())
    assert torch.equal(ids[:, :6], batch)
    with make_runner(graphcore_driver) as single:
        for row, prompt, negative in zip(ids, prompts, others, strict=True):
            alone = single.generate(prompt, NEW, negative_input_ids=negative)
            assert torch.equal(row[6:], alone[0, prompt.shape[1] :])


def test_one_negative_prompt_serves_all_rows(graphcore_driver: Driver) -> None:
    device = device_of(graphcore_driver)
    prompt, negative = make_prompt(4, batch=2, device=device), make_prompt(3, device=device, seed=5)
    with make_runner(graphcore_driver, batch_size=2) as runner:
        wide = torch.nn.functional.pad(negative, (2, 0))
        for given in (
            {"negative_input_ids": negative.expand(2, -1)},
            {"negative_input_ids": negative},
            {"negative_input_ids": wide, "negative_attention_mask": wide != 0},
        ):
            ids = runner.generate(prompt, NEW, **given)
            expected = theirs(runner.model, prompt, negative_prompt_ids=negative.expand(2, -1))
            assert torch.equal(ids, expected)


def test_combined_logits_differ_from_combined_log_probabilities_by_a_constant_of_the_row(
    graphcore_driver: Driver,
) -> None:
    prompt = make_prompt(5, batch=2, device=device_of(graphcore_driver))
    logits = []
    for log_softmax in (True, False):
        guidance = Guidance(SCALE, log_softmax=log_softmax)
        with make_runner(graphcore_driver, batch_size=2, guidance=guidance) as runner:
            ids = runner.generate(prompt, NEW)
            assert torch.equal(ids, theirs(runner.model, prompt))
            logits.append(runner.logits.clone())
            nodes = len(runner.graph.snapshot().nodes)
    difference = logits[0] - logits[1]
    assert float(difference.std(dim=1).max()) < 1e-4
    assert float(difference.abs().max()) > 0.1
    assert nodes > 0


def test_what_the_conditional_branch_rules_out_stays_ruled_out() -> None:
    guide = Guide(Guidance(2.0, log_softmax=False), torch.device("cpu"))
    wanted = torch.tensor([[1.0, -math.inf, 2.0]])
    other = torch.tensor([[0.0, -math.inf, 1.0]])
    assert guide.combine(wanted, other).tolist() == [[2.0, -math.inf, 3.0]]


def test_generate_takes_guidance_and_makes_room_for_the_longer_prompt(
    graphcore_driver: Driver,
) -> None:
    model = make_model(device=device_of(graphcore_driver))
    prompt = make_prompt(4, device=str(model.device))
    negative = make_prompt(9, device=str(model.device), seed=2)
    given = {"guidance": Guidance(SCALE), "negative_input_ids": negative, "prefill_chunk_size": 4}
    result = generate(model, prompt, NEW, driver=graphcore_driver, **given)
    assert torch.equal(result.ids, theirs(model, prompt, negative_prompt_ids=negative))
    assert (result.execution, result.captures) == ("graph", 1)


# ---- branches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("branch", [0, 1])
def test_altering_the_cache_of_one_branch_changes_nothing_in_the_other(
    graphcore_driver: Driver, branch: int
) -> None:
    """A scale of 1 shows the conditional branch alone, one of 0 the other."""
    prompt = make_prompt(5, device=device_of(graphcore_driver))
    with make_runner(graphcore_driver, guidance=Guidance(1.0, log_softmax=False)) as runner:

        def logits(scale: float, altered: bool) -> torch.Tensor:
            runner.guidance.scale = scale
            runner.cache.reset()
            runner.capture(prompt, negative_input_ids=prompt.flip(1))
            if altered:
                for layer in runner.cache.layers:
                    layer.keys[branch, :, :5] += 3.0
                    layer.values[branch, :, :5] += 3.0
            runner.replay(7)
            return runner.logits.clone()

        shown, hidden = (1.0, 0.0) if branch == 1 else (0.0, 1.0)
        if shown == 0.0:  # 0 * (a - b) + b is b to the bit, 1 * (a - b) + b is a but for rounding
            assert torch.equal(logits(shown, True), logits(shown, False))
        torch.testing.assert_close(logits(shown, True), logits(shown, False), atol=1e-5, rtol=0)
        assert float((logits(hidden, True) - logits(hidden, False)).abs().max()) > 0.01
        assert runner.captures == 1


def test_a_forced_token_goes_to_both_branches(graphcore_driver: Driver) -> None:
    device = device_of(graphcore_driver)
    prompts = make_prompt(4, device=device), make_prompt(4, device=device, seed=3)
    token = torch.tensor([[11]], device=device)
    with make_runner(graphcore_driver) as runner:
        runner.capture(prompts[0], negative_input_ids=prompts[1])
        assert int(runner.replay(11)) == 11
        fed = tuple(torch.cat([ids, token], dim=1) for ids in prompts)
        expected = by_hand(runner, fed, 1)[0]
        torch.testing.assert_close(runner.logits.double(), expected, atol=1e-4, rtol=1e-4)


def test_the_scale_changes_without_a_capture_and_without_another_address(
    graphcore_driver: Driver,
) -> None:
    prompt = make_prompt(5, device=device_of(graphcore_driver))
    with make_runner(graphcore_driver) as runner:
        assert runner.guidance.scale == SCALE
        for scale in (SCALE, 3.0, 0.5):
            runner.guidance.scale = scale
            ids = runner.generate(prompt, NEW)
            assert torch.equal(ids, theirs(runner.model, prompt, guidance_scale=scale))
        assert runner.captures == 1
        assert "guidance scale" in runner.named_tensors()
        before = runner.guidance.scale
        for wrong in (math.nan, math.inf, "1", True, None):
            with pytest.raises(ConfigurationError, match="guidance scale: expected a finite num"):
                runner.guidance.scale = wrong
        with (
            graphcore.capture(driver=graphcore_driver),
            pytest.raises(CaptureError, match=r"guidance\.scale: not while"),
        ):
            runner.guidance.scale = 2.0
        assert runner.guidance.scale == before == float(runner.guidance.tensor)


def test_a_guided_conversation_goes_on_behind_what_both_branches_hold(
    graphcore_driver: Driver,
) -> None:
    device = device_of(graphcore_driver)
    prompts = make_prompt(5, device=device), make_prompt(3, device=device, seed=1)
    turns = make_prompt(2, device=device, seed=2), make_prompt(4, device=device, seed=3)
    with make_runner(graphcore_driver) as runner:
        first = runner.generate(prompts[0], 3, negative_input_ids=prompts[1])[:, 5:]
        second = runner.generate(turns[0], 5, negative_input_ids=turns[1], keep_cache=True)
        whole = [torch.cat([ids, first, turn], 1) for ids, turn in zip(prompts, turns, strict=True)]
        expected = theirs(runner.model, whole[0], negative_prompt_ids=whole[1], max_new_tokens=5)
        assert torch.equal(second[:, 2:], expected[:, 10:])
        assert runner.captures == 1


def test_an_eager_runner_is_guided_too_and_an_unguided_one_has_no_guidance(
    graphcore_driver: Driver,
) -> None:
    prompt = make_prompt(5, device=device_of(graphcore_driver))
    with make_runner(graphcore_driver, capture=False) as runner:
        assert torch.equal(runner.generate(prompt, NEW), theirs(runner.model, prompt))
    with make_runner(graphcore_driver, guidance=None) as plain:
        assert plain.guidance is None
        with pytest.raises(ConfigurationError, match="negative_input_ids: this runner takes no"):
            plain.generate(prompt, NEW, negative_input_ids=prompt)


# ---- refused ------------------------------------------------------------------------------------


def test_a_cache_without_two_rows_for_each_of_the_batch_is_refused() -> None:
    model = make_model()
    guided = {"guidance": Guidance()}
    for rows, batch_size, message in (
        (3, None, "expected 2 x batch rows, since guidance keeps .*, got 3"),
        (4, 4, r"expected 2 x batch \(4\) rows, .* got 4"),
        (1, 1, r"expected 2 x batch \(1\) rows, .* got 1"),
    ):
        cache = StaticKVCache.for_model(model, 16, batch_size=rows)
        with pytest.raises(ConfigurationError, match=f"cache batch_size: {message}"):
            CUDAGraphAR(model, cache, batch_size=batch_size, **guided)
    with pytest.raises(ConfigurationError, match="batch_size: expected a positive int, got 0"):
        CUDAGraphAR(model, max_seq_len=16, batch_size=0, **guided)
    cache = StaticKVCache.for_model(model, 16, batch_size=4)
    runner = CUDAGraphAR(model, cache, capture=False, **guided)
    with pytest.raises(ConfigurationError, match="input_ids: expected batch 2"):
        runner.generate(make_prompt(3, batch=4), 2)
    assert CUDAGraphAR(model, max_seq_len=16, batch_size=3, **guided).cache.batch_size == 6


def test_guidance_and_negative_prompts_that_cannot_work_are_refused() -> None:
    for scale in (math.nan, "2", True):
        with pytest.raises(ConfigurationError, match="guidance scale: expected a finite number"):
            Guidance(scale)  # type: ignore[arg-type]
    model, prompt = make_model(), make_prompt(3)
    with pytest.raises(ConfigurationError, match=r"guidance: expected Guidance or None, got 1\.5"):
        CUDAGraphAR(model, max_seq_len=8, guidance=1.5)  # type: ignore[arg-type]
    runner = CUDAGraphAR(model, max_seq_len=8, guidance=Guidance(), capture=False)
    cases: dict[str, dict[str, Any]] = {
        r"negative_input_ids: expected batch 1": {"negative_input_ids": make_prompt(3, batch=2)},
        r"negative_input_ids: expected ids from 0": {"negative_input_ids": prompt + 97},
        r"negative_input_ids: expected at least one": {"negative_input_ids": prompt[:, :0]},
        r"negative_attention_mask: expected the shape of negative_input_ids": {
            "negative_input_ids": prompt,
            "negative_attention_mask": torch.ones(1, 2),
        },
        r"negative_attention_mask: expected negative_input_ids": {
            "negative_attention_mask": torch.ones(1, 3)
        },
        r"positive_ids: this runner takes no such input$": {"positive_ids": prompt},
    }
    for message, given in cases.items():
        with pytest.raises(ConfigurationError, match=message):
            runner.generate(prompt, 2, **given)
    with pytest.raises(CapacityError, match="a prompt of 7 tokens and 2 new ones need 9"):
        runner.generate(prompt, 2, negative_input_ids=make_prompt(7))
    assert runner.cache.seen_tokens == 0


def test_guided_generations_with_a_penalty_and_in_one_launch_are_those_of_transformers(
    graphcore_driver: Driver,
) -> None:
    """The penalty divides or multiplies by the sign: it shows that log-probabilities are chosen."""
    device = device_of(graphcore_driver)
    prompt, negative = make_prompt(5, device=device), make_prompt(7, device=device, seed=4)
    sampling = Sampling(repetition_penalty=1.7)
    with make_runner(graphcore_driver, sampling=sampling) as runner:
        expected = theirs(
            runner.model, prompt, negative_prompt_ids=negative, repetition_penalty=1.7
        )
        assert torch.equal(runner.generate(prompt, NEW, negative_input_ids=negative), expected)
        ids = runner.generate_in_one_launch(prompt, NEW, negative_input_ids=negative)
        assert torch.equal(ids, expected)
        assert not torch.equal(expected, theirs(runner.model, prompt, negative_prompt_ids=negative))
