"""Buckets: the smallest captured step that fits, one storage and one pool for all of them."""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.decode_models import device_of, eager_tokens, make_model, make_prompt
from helpers.tensors import cuda_driver
from transformers import T5Config, T5ForConditionalGeneration

from graphcore.decode import Bucket, CUDAGraphAR, DecodeBuckets, Guidance, Sampling, StaticKVCache
from graphcore.driver import Driver, open_driver
from graphcore.errors import (
    CapacityError,
    CaptureError,
    ConfigurationError,
    LifecycleError,
)

NEW = 6


@pytest.fixture(scope="module")
def by_driver() -> Iterator[dict[str, DecodeBuckets]]:
    """Captured once for all tests of this file, each of which must find them usable."""
    made: dict[str, DecodeBuckets] = {}
    yield made
    for buckets in made.values():
        buckets.close()


@pytest.fixture
def made(graphcore_driver: Driver, by_driver: dict[str, DecodeBuckets]) -> DecodeBuckets:
    name = graphcore_driver.name
    if name not in by_driver:
        driver = open_driver(name)
        model = make_model(device=device_of(driver))
        by_driver[name] = DecodeBuckets(model, [12, 32], [4, 1], driver=driver, progress=False)
    return by_driver[name]


def model_of(buckets: DecodeBuckets) -> Any:
    return buckets.runner(buckets.buckets[0]).model


def prompt_for(buckets: DecodeBuckets, rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return make_prompt(tokens, batch=rows, device=str(buckets.cache.device), seed=seed)


choices = [(1, 5, 6, "1 x 12"), (1, 6, 7, "1 x 32"), (2, 5, 6, "4 x 12"), (4, 9, 20, "4 x 32")]


@pytest.mark.parametrize("grow", [False, True], ids=["in one bucket", "growing"])
@pytest.mark.parametrize(
    ("rows", "tokens", "new", "bucket"), choices, ids=[case[3] for case in choices]
)
def test_the_smallest_bucket_that_fits_decodes_as_eager_and_is_named(
    made: DecodeBuckets, rows: int, tokens: int, new: int, bucket: str, grow: bool
) -> None:
    prompt = prompt_for(made, rows, tokens)
    result = made.generate(prompt, new, grow=grow)
    assert torch.equal(result.ids, eager_tokens(model_of(made), prompt, new))
    assert str(result.bucket) == bucket
    assert torch.equal(result.new_ids, result.ids[:, tokens:])
    assert result.execution == "graph"
    short = Bucket(result.bucket.batch_size, 12)
    is_longer = grow and result.bucket.max_seq_len == 32
    assert result.path == ((short, result.bucket) if is_longer else (result.bucket,))
    assert made.captures == 4


def test_growing_moves_no_keys_and_reads_nothing_of_earlier_generations(
    made: DecodeBuckets,
) -> None:
    prompt = prompt_for(made, 3, 5)
    expected = eager_tokens(model_of(made), prompt, 20)
    for layer in made.cache.layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    addresses = [layer.keys.data_ptr() for layer in made.cache.layers]
    assert torch.equal(made.generate(prompt, 20, grow=True).ids, expected)
    for bucket in made.buckets:
        assert [each.keys.data_ptr() for each in made.runner(bucket).cache.layers] == addresses


@pytest.mark.parametrize("grow", [False, True], ids=["in one bucket", "growing"])
def test_rows_end_by_themselves_and_the_result_is_cut_where_the_last_real_row_ends(
    made: DecodeBuckets, grow: bool
) -> None:
    prompt = prompt_for(made, 3, 5)
    free = eager_tokens(model_of(made), prompt, 20)
    eos = [int(free[0, 7]), int(free[1, 16]), int(free[2, 10])]
    options = {"eos_token_id": eos, "pad_token_id": 0}
    expected = eager_tokens(model_of(made), prompt, 20, **options)
    result = made.generate(prompt, 20, grow=grow, poll_every=2, **options)
    assert torch.equal(result.ids, expected)
    assert result.ids.shape[1] < 25


def test_seeded_samples_are_those_of_a_runner_of_the_batch_itself(
    graphcore_driver: Driver,
) -> None:
    model = make_model(device=device_of(graphcore_driver))
    sampling = Sampling(temperature=0.8, top_k=20, repetition_penalty=1.2)
    options = {"driver": graphcore_driver, "sampling": sampling}
    prompt = make_prompt(5, batch=3, device=device_of(graphcore_driver))
    cache = StaticKVCache.for_model(model, 24, batch_size=3)
    with CUDAGraphAR(model, cache, **options) as runner:
        expected = runner.generate(prompt, 15, seed=11)
        other = runner.generate(prompt, 15, seed=12)
    with DecodeBuckets(model, [12, 24], [4], **options, progress=False) as buckets:
        for grow in (False, True):
            result = buckets.generate(prompt, 15, grow=grow, seed=11)
            assert torch.equal(result.ids, expected)
        assert len(result.path) == 2
        assert buckets.runner(result.bucket).seed == 11
    assert not torch.equal(other, expected)


def test_a_generation_that_ends_early_never_reaches_the_larger_bucket(
    made: DecodeBuckets,
) -> None:
    prompt = prompt_for(made, 1, 5)
    free = eager_tokens(model_of(made), prompt, 20)
    result = made.generate(prompt, 20, int(free[0, 8]), grow=True)
    assert torch.equal(result.ids, free[:, :9])
    assert result.path == (Bucket(1, 12),)


@pytest.mark.parametrize("grow", [False, True], ids=["in one bucket", "growing"])
def test_prompts_of_unequal_length_decode_as_each_does_alone(
    made: DecodeBuckets, grow: bool
) -> None:
    prompt, mask = prompt_for(made, 3, 7), torch.ones((3, 7), dtype=torch.int64)
    mask[0, :3] = mask[2, :1] = 0
    result = made.generate(prompt, 20, grow=grow, attention_mask=mask.to(prompt.device))
    assert torch.equal(result.ids[:, :7], prompt)
    for row, pads in enumerate((3, 0, 1)):
        alone = eager_tokens(model_of(made), prompt[row : row + 1, pads:], 20)
        assert torch.equal(result.new_ids[row], alone[0, 7 - pads :])
    assert len(result.path) == 1 + grow
    # the next prompt has none of it
    whole = prompt_for(made, 4, 5)
    assert torch.equal(made.generate(whole, 6).ids, eager_tokens(model_of(made), whole, 6))


def test_guidance_pairs_run_in_buckets_of_both_branches(graphcore_driver: Driver) -> None:
    model = make_model(device=device_of(graphcore_driver))
    options = {"driver": graphcore_driver, "guidance": Guidance(scale=2.0)}
    prompt = make_prompt(4, batch=3, device=device_of(graphcore_driver))
    negative = make_prompt(6, batch=3, device=device_of(graphcore_driver), seed=8)
    with CUDAGraphAR(model, max_seq_len=24, batch_size=3, **options) as runner:
        expected = runner.generate(prompt, 12, negative_input_ids=negative)
        unguided = runner.generate(prompt, 12)
    with DecodeBuckets(
        model, [10, 24], [4], **options, prefill_chunk_size=3, progress=False
    ) as buckets:
        assert buckets.cache.batch_size == 8
        for grow in (False, True):
            result = buckets.generate(prompt, 12, grow=grow, negative_input_ids=negative)
            assert torch.equal(result.ids, expected)
        assert [bucket.max_seq_len for bucket in result.path] == [10, 24]
    assert not torch.equal(unguided, expected)


def test_a_stream_gives_the_real_rows_alone(made: DecodeBuckets) -> None:
    prompt = prompt_for(made, 3, 5)
    expected = eager_tokens(model_of(made), prompt, NEW)[:, 5:]
    streamed = list(made.stream(prompt, NEW))
    assert torch.equal(torch.stack(streamed, dim=1).to(expected.device), expected)
    # what padded the batch is forgotten: the runner of the bucket has all rows again
    full = prompt_for(made, 4, 5)
    runner = made.runner(Bucket(4, 12))
    assert torch.equal(runner.generate(full, NEW), eager_tokens(model_of(made), full, NEW))


def test_a_stream_ends_with_its_real_rows_whatever_pads_the_others(made: DecodeBuckets) -> None:
    prompt = prompt_for(made, 3, 5)
    chosen = eager_tokens(model_of(made), prompt, NEW)[:, 5:]
    ends = sorted({int(each) for each in chosen[:, 1]})  # every row ends at its second token
    pad = next(each for each in range(50) if each not in ends)
    streamed = list(made.stream(prompt, NEW, eos_token_id=ends, pad_token_id=pad))
    expected = made.generate(prompt, NEW, ends, pad, poll_every=1).new_ids
    assert torch.equal(torch.stack(streamed, dim=1).to(expected.device), expected)
    assert len(streamed) <= 2 < NEW


def _logits_with_row_poisoned(made: DecodeBuckets, row: int | None) -> torch.Tensor:
    """All logits of the real rows of a batch of 3 in the bucket of 4."""
    prompt = prompt_for(made, 3, 5)
    rows = []
    for _ in made.stream(prompt, NEW):
        runner = made.runner(Bucket(4, 12))
        rows.append(runner.logits[:3].clone())
        if row is not None:
            for layer in runner.cache.layers:
                layer.keys[row, :, : runner.cache.seen_tokens].fill_(1000.0)
                layer.values[row].fill_(float("nan"))
    return torch.stack(rows)


def test_real_rows_are_bit_equal_whatever_the_rows_that_pad_the_batch_hold(
    made: DecodeBuckets,
) -> None:
    clean = _logits_with_row_poisoned(made, None)
    assert torch.equal(_logits_with_row_poisoned(made, 3), clean)
    assert not torch.equal(_logits_with_row_poisoned(made, 2)[:, 2], clean[:, 2])  # the control
    model, prompt = model_of(made), prompt_for(made, 3, 5)
    cache = StaticKVCache.for_model(model, 12, batch_size=3)
    with CUDAGraphAR(model, cache, driver=made.driver) as unpadded:
        unpadded.capture(prompt)
        alone = _replayed_logits(unpadded)
    # another number of rows may take another matrix product, so equal up to rounding
    torch.testing.assert_close(clean, alone, rtol=1e-4, atol=1e-4)


def _replayed_logits(runner: CUDAGraphAR) -> torch.Tensor:
    rows = []
    for _ in range(NEW):
        runner.replay()
        rows.append(runner.logits.clone())
    return torch.stack(rows)


def test_no_fitting_bucket_is_a_capacity_error_that_names_the_largest(
    made: DecodeBuckets,
) -> None:
    made.generate(prompt_for(made, 1, 5), NEW)
    held = made.cache.layers[0].keys.clone()
    for rows, tokens, new in ((5, 5, 6), (4, 20, 13), (1, 40, 1)):
        with pytest.raises(CapacityError, match=r"the largest is 4 x 32 \(batch_size x max"):
            made.generate(prompt_for(made, rows, tokens), new, grow=True)
    assert torch.equal(made.cache.layers[0].keys, held)
    assert made.cache.seen_tokens == 5 + NEW


def test_keys_and_values_are_stored_once_and_the_report_says_so(made: DecodeBuckets) -> None:
    report = made.memory_report()
    assert report.kv_bytes == made.cache.kv_bytes
    assert [each.name for each in report.buckets] == ["1 x 12", "1 x 32", "4 x 12", "4 x 32"]
    private = sum(made.runner(bucket).cache.kv_bytes for bucket in made.buckets)
    assert report.kv_bytes < private
    logits = {made.runner(bucket).logits.data_ptr() for bucket in made.buckets}
    assert len(logits) == 1
    text = str(report)
    assert "K and V, stored once" in text
    assert "bucket 4 x 32 alone" in text
    for bucket, part in zip(made.buckets, report.buckets, strict=True):
        graph = made.runner(bucket).graph
        assert graph is not None
        assert graph.memory_report() in part.graphs
        assert part.node_bytes == sum(each.node_bytes for each in part.graphs)
    assert report.total_bytes >= report.kv_bytes + report.node_bytes


@pytest.mark.exclusive
@pytest.mark.gpu
def test_shared_pool_and_storage_take_far_less_than_private_ones() -> None:
    driver = cuda_driver()
    model = make_model(device=device_of(driver))
    sizes = {"max_seq_lens": [16, 32, 48, 64], "batch_sizes": [8, 64], "progress": False}
    taken = {}
    for share in (True, False):
        before = _allocated()
        with DecodeBuckets(model, **sizes, driver=driver, share_pool=share) as buckets:
            report = buckets.memory_report()
            assert report.is_shared is share
            taken[share] = report.pool_bytes
            kv_bytes = report.kv_bytes
            caches = sum(buckets.runner(each).cache.kv_bytes for each in buckets.buckets)
            assert caches > 2 * kv_bytes
        assert _allocated() < before + kv_bytes // 2
    assert taken[True] * 2 < taken[False]


def _allocated() -> int:
    """Bytes of tensors on the device, without the workspaces that torch keeps by stream."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


# ---- construction -------------------------------------------------------------------------------


def test_the_largest_is_captured_first_and_progress_is_told(
    graphcore_driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    order = []
    capture = CUDAGraphAR.capture

    def noted(runner: CUDAGraphAR, *args: Any, **options: Any) -> None:
        order.append((runner.cache.batch_size, runner.cache.max_seq_len))
        capture(runner, *args, **options)

    monkeypatch.setattr(CUDAGraphAR, "capture", noted)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    model = make_model(device=device_of(graphcore_driver))
    with (
        caplog.at_level(logging.INFO, logger="graphcore"),
        DecodeBuckets(model, [8, 12], [1, 2], driver=graphcore_driver) as buckets,
    ):
        assert order == [(2, 12), (2, 8), (1, 12), (1, 8)]
        assert buckets.cache.seen_tokens == 0
        assert not any(layer.keys.any() for layer in buckets.cache.layers)
    assert "capturing graphs: 4 of 4" in caplog.text


def test_eager_buckets_decode_the_same(graphcore_driver: Driver) -> None:
    model = make_model(device=device_of(graphcore_driver))
    options = {"driver": graphcore_driver, "capture": False, "progress": False}
    with DecodeBuckets(model, [8, 32], [2], **options) as buckets:
        prompt = prompt_for(buckets, 1, 5)
        result = buckets.generate(prompt, 12, grow=True)
        assert torch.equal(result.ids, eager_tokens(model, prompt, 12))
        assert (result.execution, result.reason) == ("eager", "capture=False")
        assert len(result.path) == 2
        assert buckets.captures == 0
        assert buckets.memory_report().node_bytes == 0


def test_a_bucket_that_cannot_be_captured_is_named_and_nothing_is_left(
    graphcore_driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(device=device_of(graphcore_driver))
    caches = []
    view = StaticKVCache.view

    def noted(cache: StaticKVCache, **sizes: int) -> StaticKVCache:
        caches.append(weakref.ref(cache))
        return view(cache, **sizes)

    monkeypatch.setattr(StaticKVCache, "view", noted)
    calls = 0

    def read_the_host(_module: Any, _inputs: Any, output: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 6:  # the first bucket: prompt, two warm-up steps, capture; then the second's
            output.sum().item()

    hook = model.model.layers[1].mlp.register_forward_hook(read_the_host)
    with pytest.raises(CaptureError) as caught:
        DecodeBuckets(model, [8, 12], driver=graphcore_driver, progress=False)
    hook.remove()
    assert caught.value.__notes__[-1] == "while capturing the bucket 1 x 8"
    del caught
    gc.collect()
    assert [found() for found in caches] == [None, None]


wrong: dict[str, tuple[dict[str, Any], str]] = {
    "no capacity": ({"max_seq_lens": []}, "max_seq_lens: expected a list of sizes"),
    "a number": ({"max_seq_lens": 16}, "max_seq_lens: expected a list of sizes, got 16"),
    "zero": ({"max_seq_lens": [8, 0]}, r"max_seq_lens\[1\]: expected a positive int"),
    "twice": ({"max_seq_lens": [8, 8]}, "max_seq_lens: expected sizes that differ"),
    "too long": ({"max_seq_lens": [8, 65]}, "max_seq_len: expected at most 64"),
    "a batch of half": ({"batch_sizes": [0.5]}, r"batch_sizes\[0\]: expected a positive int"),
    "no batch": ({"batch_sizes": ()}, "batch_sizes: expected a list of sizes"),
}


@pytest.mark.parametrize("case", wrong)
def test_sizes_that_cannot_be_are_refused(graphcore_driver: Driver, case: str) -> None:
    options, message = wrong[case]
    model = make_model(device=device_of(graphcore_driver))
    with pytest.raises(ConfigurationError, match=message):
        DecodeBuckets(model, **{"max_seq_lens": [8], **options}, driver=graphcore_driver)


def test_an_encoder_decoder_is_refused_in_buckets(graphcore_driver: Driver) -> None:
    config = T5Config(
        vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).eval().to(device_of(graphcore_driver))
    with pytest.raises(ConfigurationError, match="expected a decoder-only model, got T5For"):
        DecodeBuckets(model, [16], driver=graphcore_driver)


def test_what_makes_no_sense_for_buckets_is_refused(made: DecodeBuckets) -> None:
    prompt = prompt_for(made, 1, 5)
    for name in ("cache", "keep_cache"):
        for call in (made.generate, made.stream):
            with pytest.raises(ConfigurationError, match=f"{name}: expected none, the buckets"):
                call(prompt, 2, **{name: True})
    with pytest.raises(ConfigurationError, match="bucket: expected one of 1 x 12, 1 x 32"):
        made.runner(Bucket(3, 3))
    with pytest.raises(ConfigurationError, match="max_new_tokens"):
        made.generate(prompt, 0)


def test_closed_buckets_give_everything_back_and_say_so(graphcore_driver: Driver) -> None:
    model = make_model(device=device_of(graphcore_driver))
    buckets = DecodeBuckets(model, [8, 12], driver=graphcore_driver, progress=False)
    prompt = prompt_for(buckets, 1, 3)
    buckets.generate(prompt, 2)
    kept = [weakref.ref(buckets.cache), weakref.ref(buckets.cache.layers[0].keys)]
    graphcore_driver.synchronize()  # until then the last step may use the cache
    buckets.close()
    buckets.close()
    gc.collect()
    assert [found() for found in kept] == [None, None]
    for call in (
        lambda: buckets.generate(prompt, 2),
        lambda: buckets.stream(prompt, 2),
        buckets.memory_report,
        lambda: buckets.runner(Bucket(1, 8)),
    ):
        with pytest.raises(LifecycleError, match="expected open buckets, they are closed"):
            call()
