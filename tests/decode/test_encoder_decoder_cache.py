"""EncoderDecoderKVCache: what transformers' models and users ask of it, and what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.decode_models import make_model
from helpers.encoder_decoder_models import (
    FAMILIES,
    LAYERS,
    eager_ids,
    encoder_inputs,
    make_encoder_decoder,
)
from transformers import EncoderDecoderCache

import graphcore
from graphcore.decode import EncoderDecoderKVCache, StaticKVCache
from graphcore.decode import transformers_compat as compat
from graphcore.driver import open_driver
from graphcore.errors import (
    CacheTypeError,
    CapacityError,
    CaptureError,
    ConfigurationError,
    LifecycleError,
)


def half(capacity: int = 16, *, heads: Any = 3, head_dim: Any = 8, **options: Any) -> StaticKVCache:
    sizes = {"num_layers": 2, "batch_size": 2, "dtype": torch.float32, "device": "cpu"} | options
    return StaticKVCache(num_kv_heads=heads, max_seq_len=capacity, head_dim=head_dim, **sizes)


def make_cache() -> EncoderDecoderKVCache:
    """Halves that differ in heads, head sizes and capacity."""
    return EncoderDecoderKVCache(half(16), half(6, heads=[2, 4], head_dim=[4, 10]))


def cross_states(cache: EncoderDecoderKVCache, layer: int, tokens: int) -> tuple[Any, Any]:
    held = cache.cross_attention_cache.layers[layer]
    generator = torch.Generator().manual_seed(layer)
    shape = (2, held.num_heads, tokens, held.k_head_dim)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def fill_cross(cache: EncoderDecoderKVCache, tokens: int) -> list[tuple[Any, Any]]:
    states = [cross_states(cache, layer, tokens) for layer in range(2)]
    for layer, pair in enumerate(states):
        cache.cross_attention_cache.update(*pair, layer)
        cache.is_updated[layer] = True
    return states


def addresses(cache: EncoderDecoderKVCache) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in cache.named_tensors().items()}


# ---- transformers' models -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "made"),
    [
        *[(family, made) for family in FAMILIES for made in ("for_model", "shell")],
        ("t5", "early"),
        ("whisper", "early"),
    ],
)
def test_transformers_own_generate_gives_the_same_tokens_with_this_cache(
    family: str, made: str
) -> None:
    model = make_encoder_decoder(family)
    if made == "for_model":
        cache = EncoderDecoderKVCache.for_model(model, 32, 12, batch_size=2)
    else:
        cache = EncoderDecoderKVCache.shell(LAYERS, 32, 12)
    if made == "early":
        head_dim = 12 if family == "t5" else 8
        cache.early_initialization(2, 4, head_dim, torch.float32, "cpu")
    options = {str(compat.cache_keyword(model)): cache, "disable_compile": True}
    decoded = []
    for tokens, padded in ((9, 2), (5, 1)):
        inputs = encoder_inputs(family, tokens, batch=2, padded=padded, seed=tokens)
        expected = eager_ids(model, inputs, 20)
        decoded.append(eager_ids(model, inputs, 20, **options))
        assert torch.equal(decoded[-1], expected)
        assert cache.seen_tokens == int(cache.position) == 20
        assert cache.encoder_tokens == (12 if family == "whisper" else tokens)
        assert all(cache.is_updated.values())
        before = addresses(cache)
        cache.reset()
        assert addresses(cache) == before
    assert not torch.equal(decoded[0][:, : decoded[1].shape[1]], decoded[1])


def test_models_see_an_encoder_decoder_cache_with_two_halves_and_flags() -> None:
    own, cross = half(16), half(6)
    cache = EncoderDecoderKVCache(own, cross)
    assert isinstance(cache, EncoderDecoderCache)
    assert cache.self_attention_cache is own
    assert cache.cross_attention_cache is cross
    assert cache.is_updated == {0: False, 1: False}
    assert (cache.max_seq_len, cache.encoder_len, cache.batch_size) == (16, 6, 2)
    assert cache.get_max_length() == 16
    assert cache.is_compileable
    assert cache.is_initialized
    assert len(cache) == 2
    assert cache.kv_bytes == own.kv_bytes + cross.kv_bytes


def test_the_cross_half_shows_what_was_written_at_one_address_for_every_length() -> None:
    cache = make_cache()
    before = addresses(cache)
    for tokens in (6, 3):
        states = fill_cross(cache, tokens)
        for layer, (keys, values) in enumerate(states):
            shown = cache.cross_attention_cache.layers[layer]
            assert torch.equal(shown.keys, keys)
            assert torch.equal(shown.values, values)
            assert shown.keys.data_ptr() == before[f"layer {layer} cross keys"]
            assert not shown._keys[:, :, tokens:].any()  # of the longer prompt nothing is left
        assert cache.encoder_tokens == tokens
        assert int(cache.cross_attention_cache.position) == tokens
        assert cache.seen_tokens == 0


def test_reset_empties_both_halves_in_place_and_clears_the_flags() -> None:
    cache = make_cache()
    before = addresses(cache)
    fill_cross(cache, 4)
    keys = torch.ones(2, 3, 5, 8)
    for layer in range(2):
        cache.self_attention_cache.update(keys, keys, layer)
    cache.reset()
    assert addresses(cache) == before
    assert cache.is_updated == {0: False, 1: False}
    assert (cache.seen_tokens, cache.encoder_tokens) == (0, 0)
    assert not any(bool(tensor.any()) for tensor in cache.named_tensors().values())


def test_rewinding_the_decoder_leaves_the_encoders_keys_and_values() -> None:
    cache = make_cache()
    states = fill_cross(cache, 4)
    keys = torch.ones(2, 3, 5, 8)
    for layer in range(2):
        cache.self_attention_cache.update(keys, keys, layer)
    cache.rewind(2)
    assert (cache.seen_tokens, cache.encoder_tokens) == (2, 4)
    assert torch.equal(cache.cross_attention_cache.layers[1].keys, states[1][0])
    cache.crop(-1)
    assert cache.seen_tokens == 1


def test_rows_are_reordered_in_both_halves() -> None:
    cache = make_cache()
    states = fill_cross(cache, 4)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(cache.cross_attention_cache.layers[0].keys, states[0][0].flip(0))
    with pytest.raises(ConfigurationError, match="batch_size is fixed"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(ConfigurationError, match="batch_size is fixed"):
        cache.batch_select_indices(torch.tensor([0]))


def test_a_cross_half_that_was_filled_before_counts_as_written() -> None:
    cross = half(6)
    states = torch.ones(2, 3, 4, 8)
    for layer in range(2):
        cross.update(states, states, layer)
    cache = EncoderDecoderKVCache(half(16), cross)
    assert cache.is_updated == {0: True, 1: True}
    assert cache.encoder_tokens == 4
    assert cache.cross_attention_cache.layers[0].keys.shape == (2, 3, 4, 8)


def test_a_copy_is_a_cache_of_its_own() -> None:
    cache = make_cache()
    fill_cross(cache, 4)
    made = copy.deepcopy(cache)
    made.reset()
    assert cache.encoder_tokens == 4
    assert (made.encoder_tokens, made.is_updated[0]) == (0, False)
    assert not set(addresses(made).values()) & set(addresses(cache).values())


def test_reports_call_the_buffers_of_both_halves_by_name() -> None:
    names = set(make_cache().named_tensors())
    expected = {"layer 1 keys", "layer 1 cross keys", "layer 0 cross values", "cache position"}
    assert expected | {"cross length"} <= names


# ---- refusals -----------------------------------------------------------------------------------


_foreign: dict[str, tuple[Any, type[Exception], str]] = {
    "no cache": (lambda: (half(), None), CacheTypeError, "cross_cache: expected a graphcore Stat"),
    "dynamic": (
        lambda: (compat.DynamicCache(), half()),
        CacheTypeError,
        "self_cache: expected a graphcore StaticKVCache, got DynamicCache",
    ),
    "layers": (
        lambda: (half(), half(num_layers=3)),
        ConfigurationError,
        "cross_cache num_layers: expected 2",
    ),
    "rows": (
        lambda: (half(), half(batch_size=3)),
        ConfigurationError,
        "cross_cache batch_size: expected 2",
    ),
    "a layer without K/V": (
        lambda: (half(), half(owning_layers=[0])),
        ConfigurationError,
        "cross_cache owning_layers: expected every layer",
    ),
    "the cross half of another": (
        lambda: (make_cache().cross_attention_cache, half()),
        ConfigurationError,
        "self_cache: expected no cross half",
    ),
}


@pytest.mark.parametrize("case", _foreign)
def test_halves_that_do_not_fit_are_refused(case: str) -> None:
    halves, error, message = _foreign[case]
    with pytest.raises(error, match=message):
        EncoderDecoderKVCache(*halves())


def test_one_cache_is_not_both_halves() -> None:
    cache = half()
    with pytest.raises(ConfigurationError, match="expected a cache of its own"):
        EncoderDecoderKVCache(cache, cache)


_unwritable: dict[str, tuple[Any, type[Exception], str]] = {
    "too long": ((2, 2, 7, 4), CapacityError, "layer 0 cross: expected at most 6 encoder tokens"),
    "empty": ((2, 2, 0, 4), ConfigurationError, "layer 0 cross: expected K and V of the same le"),
    "heads": ((2, 3, 4, 4), ConfigurationError, "layer 0 cross keys: expected"),
    "batch": ((1, 2, 4, 4), ConfigurationError, "layer 0 cross keys: expected"),
}


@pytest.mark.parametrize("case", _unwritable)
def test_what_cannot_be_written_to_the_cross_half_leaves_it_as_it_was(case: str) -> None:
    shape, error, message = _unwritable[case]
    cache = make_cache()
    states = fill_cross(cache, 3)
    with pytest.raises(error, match=message):
        cache.cross_attention_cache.update(torch.ones(shape), torch.ones(shape), 0)
    assert torch.equal(cache.cross_attention_cache.layers[0].keys, states[0][0])


def test_the_cross_half_takes_no_other_dtype_since_models_read_it_without_a_cast() -> None:
    cache = make_cache()
    keys = torch.ones(2, 2, 4, 4, dtype=torch.float64)
    with pytest.raises(ConfigurationError, match=r"layer 0 cross: expected K and V of torch.float"):
        cache.cross_attention_cache.update(keys, keys, 0)


def test_a_cache_that_a_captured_graph_uses_does_not_become_a_cross_half() -> None:
    model = make_model()
    held = StaticKVCache.for_model(model, 16)
    with graphcore.decode.CUDAGraphAR(model, held) as runner:
        runner.capture(torch.tensor([[5, 6]]))
        own = StaticKVCache.for_model(model, 16)
        with pytest.raises(LifecycleError, match="expected one that no captured graph uses"):
            EncoderDecoderKVCache(own, held)


# ---- early and lazy initialisation --------------------------------------------------------------


def shell() -> EncoderDecoderKVCache:
    return EncoderDecoderKVCache.shell(2, 16, 6)


def test_early_initialisation_makes_both_halves_with_shapes_of_their_own() -> None:
    cache = shell()
    assert not cache.is_initialized
    with pytest.raises(LifecycleError, match="self_cache: expected early_initialization"):
        _ = cache.position
    shapes = {"cross_num_heads": 5, "cross_head_dim": [6, 7]}
    cache.early_initialization(2, [3, 4], 8, torch.float32, "cpu", **shapes)
    assert cache.is_initialized
    held = [tuple(layer._keys.shape) for layer in cache.self_attention_cache.layers]
    assert held == [(2, 3, 16, 8), (2, 4, 16, 8)]
    held = [tuple(layer._keys.shape) for layer in cache.cross_attention_cache.layers]
    assert held == [(2, 5, 6, 6), (2, 5, 6, 7)]
    before = addresses(cache)
    cache.early_initialization(2, [3, 4], 8, torch.float32, "cpu", **shapes)
    assert addresses(cache) == before


_conflicts: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "heads": ((2, 4, 8), {}, r"layer 0: initialised with .*3, 8.*asked for .*4, 8"),
    "head_dim of one layer": ((2, 3, [8, 9]), {}, "layer 1: initialised with"),
    "batch": ((3, 3, 8), {}, "layer 0: initialised with"),
    "cross heads": ((2, 3, 8), {"cross_num_heads": 4}, "layer 0 cross: initialised with"),
    "cross head_dim": ((2, 3, 8), {"cross_head_dim": [8, 4]}, "layer 1 cross: initialised with"),
    "a list too long": ((2, [3, 3, 3], 8), {}, "num_heads: expected one value for each of 2"),
}


@pytest.mark.parametrize("case", _conflicts)
def test_a_conflicting_second_initialisation_raises_and_changes_nothing(case: str) -> None:
    sizes, cross, message = _conflicts[case]
    cache = shell()
    cache.early_initialization(2, 3, 8, torch.float32, "cpu")
    before = addresses(cache)
    with pytest.raises(ConfigurationError, match=message):
        cache.early_initialization(*sizes, torch.float32, "cpu", **cross)
    assert addresses(cache) == before


@pytest.mark.parametrize("order", [("self", "cross"), ("cross", "self")], ids="-".join)
def test_each_half_may_be_initialised_alone_as_users_of_transformers_do(
    order: tuple[str, str],
) -> None:
    cache = shell()
    for name in order:
        made = getattr(cache, f"{name}_attention_cache")
        made.early_initialization(2, 3, 8, torch.float32, "cpu")
    fill_cross(cache, 4)
    assert cache.encoder_tokens == 4
    assert cache.cross_attention_cache.layers[1].name == "layer 1 cross"


def test_the_first_keys_and_values_initialise_a_half_outside_of_captures() -> None:
    cache = shell()
    keys, values = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 4, 5)
    cache.self_attention_cache.update(keys, values, 0)
    cache.self_attention_cache.update(keys, values, 1)
    assert cache.seen_tokens == 4
    assert cache.self_attention_cache.layers[1].v_head_dim == 5


@pytest.mark.parametrize("how", ["early", "update", "construct", "reset"])
def test_nothing_is_initialised_while_a_graph_is_captured(how: str) -> None:
    cache = shell()
    made = make_cache()
    halves = half(), half()
    keys = torch.ones(2, 3, 4, 8)
    actions = {
        "early": lambda: cache.early_initialization(2, 3, 8, torch.float32, "cpu"),
        "update": lambda: cache.self_attention_cache.update(keys, keys, 0),
        "construct": lambda: EncoderDecoderKVCache(*halves),
        "reset": made.reset,
    }
    with (
        pytest.raises(CaptureError, match="not while a graph is captured"),
        graphcore.capture(driver=open_driver("emulated")),
    ):
        actions[how]()
    assert not cache.is_initialized


def test_cross_keys_and_values_are_not_written_inside_a_capture() -> None:
    cache = make_cache()
    states = cross_states(cache, 0, 4)
    with (
        pytest.raises(CaptureError, match="would project and write them at every replay"),
        graphcore.capture(driver=open_driver("emulated")),
    ):
        cache.cross_attention_cache.update(*states, 0)
    assert cache.cross_attention_cache.layers[0].get_seq_length() == 0


# ---- compiled regions ---------------------------------------------------------------------------


def test_every_buffer_and_counter_of_both_halves_is_marked_static() -> None:
    cache = shell()
    cache.early_initialization(2, 3, 8, torch.float32, "cpu")
    for name, tensor in cache.named_tensors().items():
        assert tensor._dynamo_static_input_type in ("guarded", "unguarded"), name


def test_initialising_inside_a_compiled_region_raises() -> None:
    cache = shell()

    def step() -> torch.Tensor:
        cache.early_initialization(2, 3, 8, torch.float32, "cpu")
        return torch.zeros(1)

    with pytest.raises(Exception, match="not inside a compiled region"):
        torch.compile(step, backend="eager", fullgraph=True)()
    assert not cache.is_initialized


@pytest.mark.parametrize(("family", "backend"), [("t5", "eager"), ("whisper", "aot_eager")])
def test_a_whole_compiled_forward_decodes_equal_tokens_with_fresh_caches(
    family: str, backend: str
) -> None:
    torch._dynamo.reset()
    model = make_encoder_decoder(family)
    prompts = [encoder_inputs(family, tokens, seed=tokens) for tokens in (9, 5)]
    expected = [eager_ids(model, inputs, 4) for inputs in prompts]
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)
    for inputs, ids in zip(prompts, expected, strict=True):
        cache = EncoderDecoderKVCache.for_model(model, 16, 12)
        before = addresses(cache)
        options = {str(compat.cache_keyword(model)): cache, "disable_compile": True}
        assert torch.equal(eager_ids(model, inputs, 4, **options), ids)
        assert addresses(cache) == before
        assert cache.seen_tokens == int(cache.position) == 4
    torch._dynamo.reset()
