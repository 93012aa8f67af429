"""A layer with a window: a ring of slots that holds, gives and refuses the right tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.decode_models import device_of, eager_tokens, make_model, make_prompt
from transformers import StaticCache

import graphcore
from graphcore.decode import CUDAGraphAR, StaticKVCache
from graphcore.decode.access import Form
from graphcore.decode.sliding_layer import SlidingLayer
from graphcore.driver import Driver, open_driver
from graphcore.errors import (
    CaptureError,
    ConfigurationError,
    LifecycleError,
)

WINDOW = 4
CAPACITY = 16


@pytest.fixture
def device(graphcore_driver: Driver) -> str:
    return device_of(graphcore_driver)


def make_cache(device: str = "cpu", **options: Any) -> StaticKVCache:
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "batch_size": 1,
        "num_kv_heads": 1,
        "max_seq_len": CAPACITY,
        "head_dim": 2,
        "dtype": torch.float32,
        "device": device,
        "windows": [WINDOW, None],
    }
    return StaticKVCache(**sizes | options)


def states(first: int, count: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the tokens from ``first`` on: K holds the token's number, V its negative."""
    keys = torch.arange(first, first + count, device=device, dtype=torch.float32)
    keys = keys[None, None, :, None].expand(1, 1, count, 2).contiguous()
    return keys, -keys


def append(cache: StaticKVCache, count: int) -> list[float]:
    """Appends the next ``count`` tokens to both layers; the tokens that the first one gives."""
    first = cache.seen_tokens
    given = [part.clone() for part in cache.update(*states(first, count, str(cache.device)), 0)]
    cache.update(*states(first, count, str(cache.device)), 1)
    assert torch.equal(given[0], -given[1])
    return [float(token) for token in given[0][0, 0, :, 0]]


def ring(cache: StaticKVCache) -> list[float]:
    return [float(token) for token in cache.layers[0].keys[0, 0, :, 0]]


# ---- sizes --------------------------------------------------------------------------------------


def test_a_window_is_all_that_its_layer_keeps() -> None:
    cache = make_cache()
    assert cache.layers[0].keys.shape == (1, 1, WINDOW, 2)
    assert cache.layers[1].keys.shape == (1, 1, CAPACITY, 2)
    assert cache.kv_bytes == 2 * 4 * 2 * (WINDOW + CAPACITY)
    assert cache.is_sliding == [True, False]
    assert cache.windows == (WINDOW, None)
    assert cache.get_max_length() == CAPACITY
    whole = make_cache(windows=None)
    assert whole.kv_bytes == 2 * 4 * 2 * 2 * CAPACITY


@pytest.mark.parametrize("window", [CAPACITY, CAPACITY + 1])
def test_a_window_that_nothing_leaves_is_no_ring(window: int) -> None:
    cache = make_cache(windows=window)
    assert cache.windows == (None, None)
    assert not any(isinstance(layer, SlidingLayer) for layer in cache.layers)


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        (0, "windows of layer 0: expected a positive int, got 0"),
        ([4, -1], "windows of layer 1: expected a positive int, got -1"),
        ([4, True], "windows of layer 1: expected a positive int, got True"),
        ([4], "windows: expected one value for each of 2 layers, got 1"),
        ("4", "windows: expected None, a positive int, or a list"),
    ],
    ids=["zero", "negative", "bool", "short", "text"],
)
def test_windows_that_make_no_sense_are_refused(windows: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_cache(windows=windows)


# ---- writing and giving -------------------------------------------------------------------------


def test_token_by_token_the_ring_takes_turns_at_one_address(device: str) -> None:
    cache = make_cache(device)
    addresses = {name: tensor.data_ptr() for name, tensor in cache.named_tensors().items()}
    for token in range(CAPACITY):
        given = append(cache, 1)
        expected = [0.0] * WINDOW
        for held in range(max(token - WINDOW + 1, 0), token + 1):
            expected[held % WINDOW] = float(held)
        assert given == ring(cache) == expected
    assert cache.seen_tokens == int(cache.position) == CAPACITY
    assert addresses == {name: tensor.data_ptr() for name, tensor in cache.named_tensors().items()}


@pytest.mark.parametrize("before", [0, 1, 3, 4, 5, 9])
@pytest.mark.parametrize("count", [2, 4, 6])
def test_several_tokens_come_behind_the_past_that_the_first_of_them_sees(
    device: str, before: int, count: int
) -> None:
    cache = make_cache(device)
    for _ in range(before):
        append(cache, 1)
    past = range(max(before - WINDOW + 1, 0), before)
    assert append(cache, count) == [*past, *range(before, before + count)]
    held = range(max(before + count - WINDOW, 0), before + count)
    assert sorted(ring(cache)) == sorted([*held, *[0] * (WINDOW - len(held))])
    assert all(ring(cache)[token % WINDOW] == token for token in held)


def test_in_a_form_for_graphs_several_tokens_come_behind_the_whole_ring(device: str) -> None:
    cache = make_cache(device)
    append(cache, 6)  # tokens 2 to 5 are held
    cache._state.begin_access(3, form=Form.FIXED)
    assert append(cache, 3) == [4, 5, 2, 3, 6, 7, 8]
    assert ring(cache) == [8, 5, 6, 7]


def test_a_captured_chunk_writes_and_gives_right_at_every_position(
    graphcore_driver: Driver,
) -> None:
    cache = make_cache(device_of(graphcore_driver))
    keys, values = states(0, 3, str(cache.device))
    given = torch.zeros(1, 1, WINDOW + 3, 2, device=cache.device)

    def chunk() -> None:
        cache._state.begin_access(3, form=Form.FIXED)
        given.copy_(cache.update(keys, values, 0)[0])
        cache.update(keys, values, 1)

    graph = graphcore.capture_function(chunk, driver=graphcore_driver)
    cache.reset()
    with graph.instantiate() as executable:
        for first in (0, 3, 6):
            keys.copy_(states(first, 3, str(cache.device))[0])
            values.copy_(-keys)
            before = ring(cache)
            executable.launch()
            graphcore_driver.synchronize()
            assert given[0, 0, :, 0].tolist() == [*before, first, first + 1, first + 2]
    assert ring(cache) == [8, 5, 6, 7]


def test_a_narrower_ring_gives_every_token_as_it_would_be_read_back() -> None:
    """Tokens of a prompt are rounded like those of the past, however it is cut."""
    whole = make_cache(dtype=torch.float16, compute_dtype=torch.float32)
    parts = make_cache(dtype=torch.float16, compute_dtype=torch.float32)
    keys = torch.rand(1, 1, 5, 2)
    read = whole.update(keys, keys, 0)[0]
    assert read.dtype == torch.float32
    assert torch.equal(read, keys.half().float())
    for token in range(5):
        new = keys[:, :, token : token + 1]
        part = parts.update(new, new, 0)[0].clone()
        parts.update(new, new, 1)
    assert torch.equal(part[:, :, 0], read[:, :, 4])
    assert torch.equal(part[:, :, 1:], read[:, :, 1:4])


def test_a_one_byte_ring_takes_turns_too() -> None:
    cache = make_cache(dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    assert append(cache, 6) == [0, 1, 2, 3, 4, 5]
    assert append(cache, 3) == [3, 4, 5, 6, 7, 8]
    assert append(cache, 1) == [8, 9, 6, 7]


# ---- going back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 1, 2, 3, 4])
def test_a_ring_that_never_wrapped_goes_back_anywhere(device: str, position: int) -> None:
    cache = make_cache(device)
    append(cache, 4)
    cache.rewind(position)
    assert cache.seen_tokens == int(cache.position) == position
    assert ring(cache) == [*range(position), *[0] * (WINDOW - position)]
    append(cache, 5 - position)
    assert ring(cache) == [4, 1, 2, 3]


def test_a_wrapped_ring_goes_back_by_one_token_or_to_nothing(device: str) -> None:
    cache = make_cache(device)
    append(cache, 6)
    cache.rewind(6)
    assert ring(cache) == [4, 5, 2, 3]
    cache.rewind(5)
    assert ring(cache) == [4, 0, 2, 3]  # what the token at 5 sees is there
    assert append(cache, 1) == [4, 5, 2, 3]
    cache.rewind(0)
    assert ring(cache) == [0, 0, 0, 0]
    assert not cache.layers[1].keys.any()


@pytest.mark.parametrize("go", ["rewind", "crop"])
def test_going_back_to_overwritten_tokens_is_refused_and_changes_nothing(
    device: str, go: str
) -> None:
    cache = make_cache(device)
    append(cache, 6)
    before = [tensor.clone() for tensor in cache.named_tensors().values()]
    with pytest.raises(LifecycleError, match=r"layer 0: cannot go back to 4 of 6 .*needs those"):
        cache.rewind(4) if go == "rewind" else cache.crop(-2)
    assert cache.seen_tokens == 6
    after = cache.named_tensors().values()
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_going_back_twice_by_one_token_is_going_back_by_two(device: str) -> None:
    """The token at 4 sees the one at 1, which the one at 5 has overwritten."""
    cache = make_cache(device)
    append(cache, 6)
    cache.rewind(5)
    cache.rewind(5)
    with pytest.raises(LifecycleError, match="cannot go back to 4 of 6 tokens"):
        cache.rewind(4)
    assert append(cache, 1) == [4, 5, 2, 3]
    cache.rewind(0)
    append(cache, 4)
    cache.rewind(2)  # it begins anew


def test_a_capture_does_not_forget_what_a_ring_has_overwritten() -> None:
    """Its warm-up writes a slot and puts it back; that says nothing of what was before."""
    model = make_model("mistral-window")
    with CUDAGraphAR(model, max_seq_len=20, driver=open_driver("emulated")) as runner:
        runner.generate(make_prompt(5), 6)  # 11 of a window of 8
        runner.cache.rewind(10)
        runner._variants.mark_stale("layer 0 keys", "bound to another tensor")
        with pytest.raises(LifecycleError, match="cannot go back to 9 of 11 tokens"):
            runner.cache.rewind(9)
        runner.capture(make_prompt(1))
        assert runner.captures == 2
        with pytest.raises(LifecycleError, match="cannot go back to 9 of 11 tokens"):
            runner.cache.rewind(9)
        runner.cache.rewind(10)


def test_a_forward_that_failed_half_way_is_not_gone_back_over_silently() -> None:
    """The first layer was written, the second not: the count of tokens alone says nothing."""
    cache = make_cache()
    append(cache, 4)
    cache.update(*states(4, 2), 0)
    assert cache.seen_tokens == 4
    with pytest.raises(LifecycleError, match="cannot go back to 4 of 6"):
        cache.rewind(4)
    cache.rewind(0)
    assert append(cache, 2) == [0, 1]


def test_the_slot_that_a_warm_up_overwrites_comes_back_bit_exact(device: str) -> None:
    cache = make_cache(device)
    append(cache, CAPACITY)  # full: the warm-up takes the place of a token that is still seen
    before = [tensor.clone() for tensor in cache.named_tensors().values()]
    saved = cache.saved_slot(CAPACITY - 1)
    cache.seek(CAPACITY - 1)
    cache.update(*states(900, 1, device), 0)
    cache.update(*states(900, 1, device), 1)
    assert 900 in ring(cache)
    cache.restore_slot(CAPACITY - 1, saved)
    after = cache.named_tensors().values()
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_views_of_the_first_tokens_end_where_they_are_overwritten(device: str) -> None:
    cache = make_cache(device)
    first, _ = cache.update(*states(0, 3, device), 0, prefix=True)
    cache.update(*states(0, 3, device), 1)
    assert first[0, 0, :, 0].tolist() == [0, 1, 2]
    assert first.data_ptr() == cache.layers[0].keys.data_ptr() == cache.prefix(0)[0].data_ptr()
    for refused in (
        lambda: cache.update(*states(3, 2, device), 0, prefix=True),
        lambda: (append(cache, 2), cache.prefix(0)),
    ):
        with pytest.raises(LifecycleError, match="layer 0: no view of 5 tokens: its window keeps"):
            refused()
    assert cache.prefix(1)[0].shape[2] == 5


def test_a_reset_zeroes_the_ring_nans_too(device: str) -> None:
    cache = make_cache(device)
    append(cache, 7)
    cache.layers[0].keys.fill_(float("nan"))
    cache.reset()
    assert ring(cache) == [0] * WINDOW
    assert append(cache, 1) == [0, 0, 0, 0]


# ---- with a model -------------------------------------------------------------------------------


def test_a_prompt_that_fails_over_a_wrapped_ring_leaves_an_empty_cache_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model("qwen3-window")
    prompt = make_prompt(10)
    with CUDAGraphAR(model, max_seq_len=32, capture=False) as runner:
        runner.capture(prompt)
        with monkeypatch.context() as patched:
            patched.setattr(model.model.layers[1].mlp, "forward", lambda states: 1 / 0)
            with pytest.raises(ZeroDivisionError) as raised:
                runner.capture(prompt)
        assert any("the cache was emptied: layer 0" in note for note in raised.value.__notes__)
        assert runner.cache.seen_tokens == 0
        assert torch.equal(runner.generate(prompt, 6), eager_tokens(model, prompt, 6))


@pytest.mark.parametrize("pieces", [(3, 4, 5), (7, 1, 4), (1, 11), (9, 3)], ids=str)
def test_a_prompt_in_pieces_gives_the_tokens_of_a_whole_one(
    graphcore_driver: Driver, pieces: tuple[int, ...]
) -> None:
    """Pieces begin before, at and past the window of 8."""
    model = make_model("qwen3-window", device=device_of(graphcore_driver))
    prompt = make_prompt(12, device=device_of(graphcore_driver))
    whole = eager_tokens(model, prompt, 6)
    with CUDAGraphAR(model, max_seq_len=32, driver=graphcore_driver) as runner:
        at = 0
        for piece in pieces:
            runner.capture(prompt[:, at : at + piece])
            at += piece
        tokens = [int(runner.replay()) for _ in range(6)]
        assert tokens == whole[0, 12:].tolist()
        assert runner.captures == 1


def test_transformers_own_generate_takes_a_cache_with_rings_and_padding() -> None:
    """Rows begin at different tokens, past the window: the masks transformers makes must fit."""
    model = make_model("qwen3-window")
    prompt = make_prompt(11, batch=2)
    counted = torch.ones_like(prompt)
    counted[1, :5] = 0
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "attention_mask": counted}
    theirs = model.generate(prompt, **options)
    cache = StaticKVCache.for_model(model, 32, batch_size=2)
    keyword = graphcore.decode.transformers_compat.cache_keyword(model)
    ours = model.generate(prompt, disable_compile=True, **{str(keyword): cache}, **options)
    assert torch.equal(ours, theirs)


def test_a_captured_step_under_transformers_own_masks_goes_round_the_ring(
    graphcore_driver: Driver,
) -> None:
    """Without a runner: the model makes its masks inside the graph."""
    model = make_model("qwen3-window", device=device_of(graphcore_driver))
    prompt = make_prompt(5, device=device_of(graphcore_driver))
    expected = eager_tokens(model, prompt, 16)[0, 5:].tolist()
    cache = StaticKVCache.for_model(model, 32)
    keyword = {str(graphcore.decode.transformers_compat.cache_keyword(model)): cache}
    token = torch.zeros(1, 1, dtype=torch.int64, device=cache.device)

    def step(ids: torch.Tensor = token) -> None:
        with torch.no_grad():
            token.copy_(model(ids, **keyword).logits[:, -1].argmax(-1, keepdim=True))

    graph = graphcore.capture_function(step, driver=graphcore_driver)
    cache.reset()
    step(prompt)
    found = []
    with graph.instantiate(guard="owners") as executable:
        for _ in range(16):
            found.append(int(token))
            executable.launch()
            graphcore_driver.synchronize()
    assert found == expected


def test_several_tokens_under_transformers_own_masks_are_refused_in_a_capture(
    graphcore_driver: Driver,
) -> None:
    cache = make_cache(device_of(graphcore_driver))
    assert cache.get_mask_sizes(3, 0) == (3, 0)
    capturing = graphcore.capture(driver=graphcore_driver)
    message = "layer 0: 3 tokens under masks that transformers"
    with pytest.raises(CaptureError, match=message), capturing:
        cache.get_mask_sizes(3, 0)


@pytest.mark.parametrize("tokens", [3, 8, 11])
def test_a_transformers_cache_with_windows_is_converted_token_by_token(tokens: int) -> None:
    model = make_model("qwen3-window")
    prompt = make_prompt(tokens)
    theirs = StaticCache(config=model.config, max_cache_len=32)
    keyword = str(graphcore.decode.transformers_compat.cache_keyword(model))
    with torch.no_grad():
        logits = model(prompt, **{keyword: theirs}).logits[:, -1]
    ours = StaticKVCache.from_transformers(theirs, model)
    assert ours.seen_tokens == tokens
    assert ours.windows == (8, None, 8)
    found = []
    with torch.no_grad():
        for _ in range(12):
            found.append(int(logits.argmax()))
            token = logits.argmax(-1, keepdim=True)
            logits = model(token, **{keyword: ours}).logits[:, -1]
    assert found == eager_tokens(model, prompt, 12)[0, tokens:].tolist()


def test_a_transformers_cache_of_windows_alone_does_not_know_its_capacity() -> None:
    model = make_model("mistral-window")
    theirs = StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(ConfigurationError, match=r"max_seq_len: expected a number: all layers"):
        StaticKVCache.from_transformers(theirs, model)
    assert StaticKVCache.from_transformers(theirs, model, 32).max_seq_len == 32
    keyword = str(graphcore.decode.transformers_compat.cache_keyword(model))
    with torch.no_grad():
        model(make_prompt(12), **{keyword: theirs})
    with pytest.raises(ConfigurationError, match=r"layer 0: expected the last 8 of 12 tokens"):
        StaticKVCache.from_transformers(theirs, model, 9)


def test_rows_that_begin_at_different_tokens_decode_as_each_alone_past_the_window(
    graphcore_driver: Driver,
) -> None:
    """Pads lie in the ring until they are overwritten; none is ever seen."""
    model = make_model("qwen3-window", device=device_of(graphcore_driver))
    prompt = make_prompt(11, batch=2, device=device_of(graphcore_driver))
    counted = torch.ones_like(prompt)
    counted[1, :7] = 0
    alone = [eager_tokens(model, prompt[:1], 16), eager_tokens(model, prompt[1:, 7:], 16)]
    with CUDAGraphAR(model, max_seq_len=32, batch_size=2, driver=graphcore_driver) as runner:
        ids = runner.generate(prompt, 16, attention_mask=counted)
        assert ids[0, 11:].tolist() == alone[0][0, 11:].tolist()
        assert ids[1, -16:].tolist() == alone[1][0, 4:].tolist()


@pytest.mark.parametrize("slots", [6, 8, 12])
def test_a_short_view_of_a_cache_with_rings_holds_what_the_whole_one_goes_on_with(
    graphcore_driver: Driver, slots: int
) -> None:
    """Below the window of 8 a view has no ring; its tokens lie where the ring will look."""
    model = make_model("qwen3-window", device=device_of(graphcore_driver))
    prompt = make_prompt(4, device=device_of(graphcore_driver))
    cache = StaticKVCache.for_model(model, 32)
    view = cache.view(max_seq_len=slots)
    assert view.windows == ((8, None, 8) if slots > 8 else (None,) * 3)
    expected = eager_tokens(model, prompt, 16)[0, 4:].tolist()
    with CUDAGraphAR(model, view, driver=graphcore_driver) as short:
        short.capture(prompt)
        found = [int(short.replay()) for _ in range(slots - 4)]
    with CUDAGraphAR(model, cache, driver=graphcore_driver) as whole:
        whole.capture(torch.tensor([[expected[len(found)]]], device=prompt.device))
        found += [expected[len(found)], *(int(whole.replay()) for _ in range(10))]
    assert found[: len(expected)] == expected[: len(found)]
