"""CUDAGraphAR: captured decoding equals eager decoding, and one graph serves every prompt."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers.decode_models import (
    ARCHITECTURES,
    VOCABULARY,
    device_of,
    eager_tokens,
    make_model,
    make_prompt,
)

from graphcore.decode import CUDAGraphAR, StaticKVCache
from graphcore.decode.cache_layer import StaticLayer
from graphcore.driver import Driver, open_driver
from graphcore.driver.records import NodeKind
from graphcore.errors import CapacityError, LifecycleError


def make_runner(driver: Driver, architecture: str = "llama", **options: Any) -> CUDAGraphAR:
    model = make_model(architecture, device=device_of(driver))
    return CUDAGraphAR(model, driver=driver, **({"max_seq_len": 32} | options))


def replayed(runner: CUDAGraphAR, count: int) -> torch.Tensor:
    """Copies of ``count`` replays, ``[batch, count]``."""
    return torch.stack([runner.replay().clone() for _ in range(count)], dim=1)


def prompt_for(runner: CUDAGraphAR, tokens: int, seed: int = 0) -> torch.Tensor:
    return make_prompt(
        tokens, batch=runner.cache.batch_size, device=str(runner.cache.device), seed=seed
    )


def assert_mirror_is_position(runner: CUDAGraphAR, expected: int) -> None:
    assert runner.cache.seen_tokens == expected
    assert int(runner.position) == expected


@pytest.fixture
def runner(graphcore_driver: Driver) -> Any:
    with make_runner(graphcore_driver) as made:
        yield made


# ---- equal to eager -----------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kth_replay_returns_the_kth_token_of_transformers_greedy_generate(
    graphcore_driver: Driver, architecture: str, attention: str
) -> None:
    device = device_of(graphcore_driver)
    model = make_model(architecture, device=device)
    model.set_attn_implementation(attention)
    prompt = make_prompt(6, batch=2, device=device)
    expected = eager_tokens(model, prompt, 12)
    with CUDAGraphAR(model, max_seq_len=32, batch_size=2, driver=graphcore_driver) as runner:
        runner.capture(prompt)
        assert_mirror_is_position(runner, 6)
        assert torch.equal(replayed(runner, 12), expected[:, 6:])
        assert_mirror_is_position(runner, 18)
        assert runner.execution == "graph"
        assert runner.captures == 1
        assert len(expected[0].unique()) > 4  # a run of one token would prove little


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_of_a_forced_run_are_those_of_one_eager_forward(
    graphcore_driver: Driver, architecture: str
) -> None:
    device = device_of(graphcore_driver)
    with make_runner(graphcore_driver, architecture) as runner:
        ids = make_prompt(12, device=device)
        # on a device attention with and without a mask are two kernels
        close = {"atol": 1e-5 if graphcore_driver.is_emulated else 1e-4, "rtol": 1e-5}
        with torch.no_grad():
            expected = runner.model(ids).logits
        runner.capture(ids[:, :4])
        torch.testing.assert_close(runner.logits, expected[:, 3], **close)
        for index in range(4, 12):
            token = int(ids[0, index]) if index % 2 else ids[:, index]
            assert torch.equal(runner.replay(token), ids[:, index])
            torch.testing.assert_close(runner.logits, expected[:, index], **close)


def test_a_replay_whose_position_is_frozen_gives_other_tokens(runner: CUDAGraphAR) -> None:
    """The control of the tests above: they would notice a graph that rewrites one slot."""
    prompt = prompt_for(runner, 6)
    expected = eager_tokens(runner.model, prompt, 12)[:, 6:]
    runner.capture(prompt)
    frozen = []
    for _ in range(12):
        frozen.append(runner.replay().clone())
        runner.position.fill_(6)
    assert not torch.equal(torch.stack(frozen, dim=1), expected)


def test_a_replay_with_a_wrong_token_gives_other_tokens(runner: CUDAGraphAR) -> None:
    prompt = prompt_for(runner, 6)
    expected = eager_tokens(runner.model, prompt, 12)[:, 6:]
    runner.capture(prompt)
    runner.replay((int(expected[0, 0]) + 1) % VOCABULARY)
    assert not torch.equal(replayed(runner, 11), expected[:, 1:])


def test_replay_really_runs_the_graph(runner: CUDAGraphAR) -> None:
    prompt = prompt_for(runner, 6)
    runner.capture(prompt)
    runner.logits.fill_(float("nan"))
    runner.token.fill_(-7)
    runner.replay(5)
    assert int(runner.token[0]) == 5
    assert not runner.logits.isnan().any()


def test_the_returned_token_and_the_logits_are_static_buffers(runner: CUDAGraphAR) -> None:
    runner.capture(prompt_for(runner, 4))
    logits = runner.logits
    first = runner.replay()
    assert (first.dtype, first.shape) == (torch.int64, (1,))
    assert runner.replay() is first is runner.token
    assert runner.logits is logits


def test_bfloat16_models_decode_the_eager_tokens(graphcore_driver: Driver) -> None:
    device = device_of(graphcore_driver)
    model = make_model(device=device, dtype=torch.bfloat16)
    prompt = make_prompt(6, device=device)
    with CUDAGraphAR(model, max_seq_len=32, driver=graphcore_driver, capture=False) as eager:
        expected = eager.generate(prompt, 8)
    with CUDAGraphAR(model, max_seq_len=32, driver=graphcore_driver) as runner:
        assert runner.cache.dtype == torch.bfloat16
        assert torch.equal(runner.generate(prompt, 8), expected)
        with torch.no_grad():  # against transformers' own attention: to bfloat16's precision
            logits = model(expected).logits[:, -1]
        torch.testing.assert_close(runner.logits, logits, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_a_narrow_cache_gives_the_tokens_of_eager_decoding_with_the_same_cache(
    graphcore_driver: Driver, dtype: torch.dtype
) -> None:
    device = device_of(graphcore_driver)
    model = make_model(device=device)
    prompt = make_prompt(6, device=device)
    cache = StaticKVCache.for_model(model, 32, dtype=dtype)
    with CUDAGraphAR(model, cache, driver=graphcore_driver, capture=False) as eager:
        expected = eager.generate(prompt, 12)
    with CUDAGraphAR(model, cache, driver=graphcore_driver) as runner:
        assert torch.equal(runner.generate(prompt, 12), expected)
        assert runner.execution == "graph"
    assert {"scratch keys float32", "scratch values float32"} <= set(cache.named_tensors())


# ---- one graph ----------------------------------------------------------------------------------


def test_prompts_of_any_length_reuse_one_graph_at_the_same_addresses(
    runner: CUDAGraphAR,
) -> None:
    before: dict[str, int] = {}
    for seed, tokens in enumerate((5, 1, 11, 3)):
        prompt = prompt_for(runner, tokens, seed)
        ids = runner.generate(prompt, 9)
        assert torch.equal(ids, eager_tokens(runner.model, prompt, 9))
        assert_mirror_is_position(runner, tokens + 9)
        addresses = {name: held.data_ptr() for name, held in runner.named_tensors().items()}
        addresses["fingerprint"] = runner.graph.fingerprint().digest
        before = before or addresses
        assert addresses == before
    assert runner.captures == 1


def test_a_capture_behind_held_tokens_continues_from_their_position(runner: CUDAGraphAR) -> None:
    prompt = prompt_for(runner, 9)
    runner.capture(prompt[:, :4])
    assert_mirror_is_position(runner, 4)
    runner.capture(prompt[:, 4:])
    assert_mirror_is_position(runner, 9)
    assert runner.captures == 1
    assert torch.equal(replayed(runner, 8), eager_tokens(runner.model, prompt, 8)[:, 9:])


def test_a_first_capture_on_a_cache_that_somebody_filled_continues_from_there(
    graphcore_driver: Driver,
) -> None:
    device = device_of(graphcore_driver)
    model = make_model(device=device)
    prompt = make_prompt(9, device=device)
    cache = StaticKVCache.for_model(model, 32)
    with CUDAGraphAR(model, cache, driver=graphcore_driver, capture=False) as eager:
        eager.capture(prompt[:, :4])
    with CUDAGraphAR(model, cache, driver=graphcore_driver) as runner:
        runner.capture(prompt[:, 4:])
        assert torch.equal(replayed(runner, 8), eager_tokens(model, prompt, 8)[:, 9:])


def test_a_generation_may_go_on_behind_the_last_one(runner: CUDAGraphAR) -> None:
    prompt = prompt_for(runner, 5)
    first = runner.generate(prompt, 4)
    more = prompt_for(runner, 3, seed=1)
    second = runner.generate(more, 6, keep_cache=True)
    whole = torch.cat([first, more], dim=1)
    assert torch.equal(second, eager_tokens(runner.model, whole, 6)[:, 9:])
    assert_mirror_is_position(runner, 18)


def test_two_runners_taken_in_turns_do_not_interfere(graphcore_driver: Driver) -> None:
    with (
        make_runner(graphcore_driver) as one,
        make_runner(graphcore_driver, "gpt2") as other,
    ):
        prompts = prompt_for(one, 5), prompt_for(other, 7, seed=1)
        expected = [
            eager_tokens(runner.model, prompt, 8)[:, prompt.shape[1] :]
            for runner, prompt in zip((one, other), prompts, strict=True)
        ]
        one.capture(prompts[0])
        other.capture(prompts[1])
        steps = [(one.replay().clone(), other.replay().clone()) for _ in range(8)]
        for index in range(2):
            tokens = torch.stack([step[index] for step in steps], dim=1)
            assert torch.equal(tokens, expected[index])


def test_nodes_carry_the_names_of_the_layers_they_come_from(runner: CUDAGraphAR) -> None:
    runner.capture(prompt_for(runner, 4))
    labels = {node.label or "" for node in runner.graph.snapshot().nodes}
    for layer in range(3):
        assert any(f"layer {layer}" in label for label in labels)


def test_the_fingerprint_counts_static_tensors_by_name(graphcore_driver: Driver) -> None:
    with make_runner(graphcore_driver) as one, make_runner(graphcore_driver) as other:
        with pytest.raises(LifecycleError, match="fingerprint: expected a captured step"):
            one.fingerprint()
        one.capture(prompt_for(one, 4))
        other.capture(prompt_for(other, 4))
        words, others = (str(each.fingerprint().fields) for each in (one, other))
        for name in ("layer 2 keys", "layer 0 values", "cache position", "logits", "token"):
            assert name in words
        # other addresses, the same names at the same places
        assert one.cache.position.data_ptr() != other.cache.position.data_ptr()
        named = re.compile(r"layer \d (?:keys|values)', \d+")
        assert named.findall(words) == named.findall(others) != []


def test_a_graph_of_the_step_allocates_no_k_or_v_storage(graphcore_driver: Driver) -> None:
    runner = make_runner(graphcore_driver)
    again = CUDAGraphAR(runner.model, runner.cache, driver=graphcore_driver)
    before = {name: held.data_ptr() for name, held in runner.cache.named_tensors().items()}
    for each in (runner, again):
        each.capture(prompt_for(runner, 4))
        kinds = {node.kind for node in each.graph.snapshot().nodes}
        assert not kinds & {NodeKind.ALLOC, NodeKind.FREE}
    assert before == {name: held.data_ptr() for name, held in runner.cache.named_tensors().items()}
    runner.close()
    again.close()


def test_a_runner_made_in_inference_mode_works_outside_of_it(graphcore_driver: Driver) -> None:
    with torch.inference_mode():
        runner = make_runner(graphcore_driver)
        prompt = prompt_for(runner, 5)
        inside = runner.generate(prompt, 6).tolist()
    assert runner.generate(prompt.clone(), 6).tolist() == inside
    runner.close()


def test_the_step_orders_its_work_by_dependencies_not_by_luck() -> None:
    """The adversarial driver runs what is not ordered in random orders."""
    driver = open_driver("emulated", order="adversarial", seed=3)
    with make_runner(driver) as runner:
        prompt = prompt_for(runner, 5)
        assert torch.equal(runner.generate(prompt, 8), eager_tokens(runner.model, prompt, 8))


# ---- no trace -----------------------------------------------------------------------------------


def test_warm_up_and_capture_leave_no_trace_in_cache_or_logits(
    graphcore_driver: Driver,
) -> None:
    eager = make_runner(graphcore_driver, capture=False)
    captured = make_runner(graphcore_driver)
    prompt = prompt_for(eager, 6)
    eager.capture(prompt)
    captured.capture(prompt)
    for name, held in captured.named_tensors().items():
        assert torch.equal(held, eager.named_tensors()[name]), name
    assert not captured.cache.layers[0].keys[:, :, 6:].any()
    assert_mirror_is_position(captured, 6)
    assert (eager.execution, eager.reason) == ("eager", "capture=False")
    eager.close()
    captured.close()


def test_a_prompt_that_fills_the_cache_is_captured_without_touching_a_slot(
    graphcore_driver: Driver,
) -> None:
    runner = make_runner(graphcore_driver, max_seq_len=8)
    prompt = prompt_for(runner, 8)
    eager = make_runner(graphcore_driver, max_seq_len=8, capture=False)
    eager.capture(prompt)
    runner.capture(prompt)
    for mine, theirs in zip(runner.cache.layers, eager.cache.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)
    with pytest.raises(CapacityError, match="max_seq_len is 8 tokens and 8 are held"):
        runner.replay()
    assert_mirror_is_position(runner, 8)
    short = prompt_for(runner, 3)
    assert torch.equal(runner.generate(short, 5), eager_tokens(runner.model, short, 5))
    assert runner.captures == 1
    runner.close()


@pytest.mark.parametrize("poison", [1000.0, -1000.0])
def test_poison_in_slots_that_are_not_filled_leaves_every_bit_of_the_output(
    graphcore_driver: Driver, poison: float
) -> None:
    clean, poisoned = make_runner(graphcore_driver), make_runner(graphcore_driver)
    prompt = prompt_for(clean, 6)
    clean.capture(prompt)
    poisoned.capture(prompt)
    for layer in poisoned.cache.layers:
        assert isinstance(layer, StaticLayer)
        layer.keys[:, :, 6:].fill_(poison)
        layer.values[:, :, 6:].fill_(poison)
    for _ in range(10):
        assert torch.equal(clean.replay(), poisoned.replay())
        assert torch.equal(clean.logits, poisoned.logits)
    clean.close()
    poisoned.close()


def test_after_a_nan_fill_and_a_reset_generation_equals_a_fresh_run(runner: CUDAGraphAR) -> None:
    prompt = prompt_for(runner, 6)
    expected = runner.generate(prompt, 8)
    for layer in runner.cache.layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    runner.cache.reset()
    assert torch.equal(runner.generate(prompt, 8), expected)


# ---- cost ---------------------------------------------------------------------------------------


def test_a_replay_costs_the_host_little_beyond_the_launch(graphcore_driver: Driver) -> None:
    """One comparison, one call, one addition: far below 5 us even on a slow, shared core."""
    from time import perf_counter

    with make_runner(graphcore_driver) as runner:
        runner.capture(prompt_for(runner, 1))
        runner._launch = lambda: None
        best = float("inf")
        for _ in range(200):
            runner._state.seen = 1
            begin = perf_counter()
            for _ in range(20):
                runner.replay()
            best = min(best, (perf_counter() - begin) / 20)
    assert best < 5e-6


@pytest.mark.exclusive
@pytest.mark.gpu
def test_a_thousand_replays_change_neither_memory_nor_fingerprint_nor_addresses() -> None:
    from graphcore.errors import DriverUnavailable

    try:
        driver = open_driver("cuda")
    except DriverUnavailable as error:
        pytest.skip(str(error))
    model = make_model(device="cuda:0")
    model.config.max_position_embeddings = 1024
    prompt = make_prompt(8, device="cuda:0")
    with CUDAGraphAR(model, max_seq_len=1016, driver=driver) as runner:
        with CUDAGraphAR(model, max_seq_len=1016, driver=driver, capture=False) as eager:
            expected = eager.generate(prompt, 1000, eos_token_id=())
        assert torch.equal(expected[:, :40], eager_tokens(model, prompt, 32))
        for _ in range(2):  # everything is allocated then, in the order of a run without a capture
            runner.generate(prompt, 1000, eos_token_id=())
        before = facts_of(runner)
        ids = runner.generate(prompt, 1000, eos_token_id=())
        assert torch.equal(ids, expected)
        del ids  # memory it held is free again
        assert facts_of(runner) == before
        assert runner.captures == 1
        assert_mirror_is_position(runner, 1008)


def facts_of(runner: CUDAGraphAR) -> dict[str, Any]:
    """What must not change: free and allocated memory, the graph's fingerprint, all addresses."""
    runner.driver.synchronize()
    return {
        "free": runner.driver.memory_info()[0],
        "allocated": torch.cuda.memory_allocated(),
        "fingerprint": runner.graph.fingerprint().digest,
        **{name: held.data_ptr() for name, held in runner.named_tensors().items()},
    }


def test_without_sizes_a_runner_has_room_for_all_positions_of_its_model(
    graphcore_driver: Driver,
) -> None:
    model = make_model(device=device_of(graphcore_driver))
    prompt = make_prompt(5, device=str(model.device))
    with CUDAGraphAR(model) as runner:
        assert runner.cache.max_seq_len == model.config.max_position_embeddings
        assert (runner.cache.batch_size, runner.driver.name) == (1, graphcore_driver.name)
        ids = runner.generate(prompt, 4)  # and needs no no_grad of the caller's
        assert torch.equal(ids, eager_tokens(model, prompt, 4))
        assert not runner.logits.requires_grad
