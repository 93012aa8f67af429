"""Views of a static cache: their size is their own, storage and position are the whole cache's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.decode_models import device_of, eager_tokens, make_model, make_prompt

import graphcore
from graphcore.decode import CUDAGraphAR, StaticKVCache
from graphcore.driver import Driver
from graphcore.errors import CapacityError, CaptureError, ConfigurationError, StaleGraphError

NEW = 6


def whole_cache(dtype: torch.dtype = torch.float32, device: str = "cpu") -> StaticKVCache:
    return StaticKVCache(2, 4, 2, 12, 8, dtype, device, compute_dtype=torch.float32)


def states(rows: int, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn((2, rows, 2, tokens, 8), generator=generator)
    return made[0], made[1]


def write(cache: StaticKVCache, tokens: int, seed: int = 0) -> None:
    for layer in range(cache.num_layers):
        cache.update(*states(cache.batch_size, tokens, seed + layer), layer)


def test_a_view_is_the_first_rows_and_slots_of_the_same_storage() -> None:
    cache = whole_cache()
    view = cache.view(batch_size=3, max_seq_len=5)
    assert (view.batch_size, view.max_seq_len, view.num_layers) == (3, 5, 2)
    assert (cache.batch_size, cache.max_seq_len) == (4, 12)
    for mine, whole in zip(view.layers, cache.layers, strict=True):
        assert mine.keys.shape == mine.values.shape == (3, 2, 5, 8)
        assert mine.keys.data_ptr() == whole.keys.data_ptr()
        assert mine.values.stride() == whole.values.stride()
        assert mine.get_mask_sizes(1) == (5, 0)
    assert view.position is cache.position
    assert view.kv_bytes == cache.kv_bytes * 3 * 5 // (4 * 12)
    assert list(view.named_tensors()) == list(cache.named_tensors())


def test_what_a_view_writes_the_whole_cache_and_other_views_hold() -> None:
    cache = whole_cache()
    short, long = cache.view(max_seq_len=4), cache.view(max_seq_len=9)
    write(short, 4)
    assert short.seen_tokens == long.seen_tokens == cache.seen_tokens == 4
    assert torch.equal(long.prefix(0)[0], short.layers[0].keys)
    with pytest.raises(CapacityError, match="capacity is 4 tokens and 4 are held"):
        write(short, 1)
    write(long, 2, seed=5)
    assert int(cache.position) == short.seen_tokens == 6
    with pytest.raises(CapacityError, match="capacity is 4 tokens and 6 are held"):
        write(short, 1)
    assert torch.equal(cache.layers[1].keys[:, :, 4:6], states(4, 2, 6)[0])
    assert not cache.layers[1].keys[:, :, 6:].any()


def test_reset_and_rewind_of_a_view_touch_its_own_part_alone() -> None:
    cache = whole_cache()
    for layer in cache.layers:
        layer.keys.fill_(3.0)
    view = cache.view(batch_size=2, max_seq_len=5)
    view.reset()
    keys = cache.layers[0].keys
    assert not keys[:2, :, :5].any()
    assert bool((keys[2:] == 3).all())
    assert bool((keys[:2, :, 5:] == 3).all())
    cache.layers[1].keys.fill_(2.0)
    view.rewind(2)
    assert bool((cache.layers[1].keys[:2, :, :2] == 2).all())
    assert not cache.layers[1].keys[:2, :, 2:5].any()
    assert cache.seen_tokens == 2


def test_a_view_of_a_narrower_cache_reads_through_the_one_scratch_pair() -> None:
    cache = whole_cache(torch.float16)
    view = cache.view(batch_size=2, max_seq_len=5)
    keys, values = states(2, 3)
    read = view.update(keys, values, 0)
    assert read[0].dtype == torch.float32
    assert torch.equal(read[0][:, :, :3], keys.half().float())
    scratch = [name for name in view.named_tensors() if name.startswith("scratch")]
    assert len(scratch) == 2
    for name in scratch:
        assert view.named_tensors()[name] is cache.named_tensors()[name]


wrong_sizes: dict[str, tuple[dict[str, Any], str]] = {
    "more rows": ({"batch_size": 5}, r"batch_size: expected 1 to 4 \(the cache's\), got 5"),
    "no rows": ({"batch_size": 0}, "batch_size: expected 1 to 4"),
    "more slots": ({"max_seq_len": 13}, "max_seq_len: expected 1 to 12"),
    "half a slot": ({"max_seq_len": 2.5}, r"max_seq_len: expected 1 to 12 .* got 2.5"),
    "a flag": ({"batch_size": True}, "batch_size: expected 1 to 4"),
}


@pytest.mark.parametrize("case", wrong_sizes)
def test_a_view_larger_than_the_cache_is_refused(case: str) -> None:
    sizes, message = wrong_sizes[case]
    with pytest.raises(ConfigurationError, match=message):
        whole_cache().view(**sizes)


def test_a_copied_view_is_a_cache_of_its_own() -> None:
    cache = whole_cache()
    view = cache.view(batch_size=2, max_seq_len=5)
    write(view, 3)
    twin = copy.deepcopy(view)
    write(view, 1, seed=7)
    assert (twin.seen_tokens, int(twin.position), twin.max_seq_len) == (3, 3, 5)
    assert twin.layers[0].keys.data_ptr() != view.layers[0].keys.data_ptr()
    assert not twin.layers[0].keys[:, :, 3].any()


def test_runners_over_views_decode_as_eager_and_know_of_each_other(
    graphcore_driver: Driver,
) -> None:
    model = make_model(device=device_of(graphcore_driver))
    cache = StaticKVCache.for_model(model, 24, batch_size=2)
    prompt = make_prompt(5, batch=2, device=device_of(graphcore_driver))
    expected = eager_tokens(model, prompt, NEW)
    views = [cache.view(max_seq_len=12), cache.view(max_seq_len=16), cache]
    runners = [CUDAGraphAR(model, view, driver=graphcore_driver) for view in views]
    for runner in (*runners, *runners):
        assert torch.equal(runner.generate(prompt, NEW), expected)
        assert cache.is_captured
        for other in runners:
            assert other.cache.seen_tokens == int(cache.position) == 5 + NEW
    with graphcore.capture(driver=graphcore_driver), pytest.raises(CaptureError, match="view"):
        cache.view(max_seq_len=3)
    runners[0].generate(prompt, NEW)
    runners[0].cache.layers[1].keys = runners[0].cache.layers[1].keys.clone()
    for runner in runners:
        assert runner.executable is not None
        with pytest.raises(StaleGraphError, match="layer 1 keys"):
            runner.executable.launch()
    for runner in runners:
        runner.close()
