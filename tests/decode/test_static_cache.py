"""StaticKVCache: fixed addresses, device position, capacity, refusals, conversions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.decode_models import ARCHITECTURES, device_of, eager_tokens, make_model, make_prompt

from graphcore.decode import StaticKVCache
from graphcore.decode import transformers_compat as compat
from graphcore.driver import Driver
from graphcore.errors import (
    CacheTypeError,
    CapacityError,
    CaptureError,
    ConfigurationError,
)


@pytest.fixture
def device(graphcore_driver: Driver) -> str:
    return device_of(graphcore_driver)


def make_cache(device: str = "cpu", **changes: Any) -> StaticKVCache:
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "batch_size": 2,
        "num_kv_heads": 3,
        "max_seq_len": 4,
        "head_dim": 8,
        "dtype": torch.float32,
        "device": device,
    }
    return StaticKVCache(**(sizes | changes))


def states(
    cache: StaticKVCache, tokens: int = 1, layer: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    held = cache.layers[layer]
    shape = (held.batch_size, held.num_heads, tokens)
    keys = torch.randn(*shape, held.k_head_dim, device=cache.device, dtype=dtype)
    return keys, torch.randn(*shape, held.v_head_dim, device=cache.device, dtype=dtype)


def write_step(cache: StaticKVCache, tokens: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    written = [states(cache, tokens, layer) for layer in range(cache.num_layers)]
    for layer, (keys, values) in enumerate(written):
        cache.update(keys, values, layer)
    return written


def addresses(cache: StaticKVCache) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in cache.named_tensors().items()}


def assert_keys(cache: StaticKVCache, expected: list[torch.Tensor]) -> None:
    for layer, kept in zip(cache.layers, expected, strict=True):
        assert torch.equal(layer.keys, kept)


# ---- storage ------------------------------------------------------------------------------------


def test_every_layer_has_zeroed_buffers_of_the_published_shape(device: str) -> None:
    cache = make_cache(device)
    assert len(cache) == len(cache.layers) == 2
    for layer in cache.layers:
        for buffer in (layer.keys, layer.values):
            assert buffer.shape == (2, 3, 4, 8)
            assert not buffer.any()
    assert cache.kv_bytes == 2 * 2 * (2 * 3 * 4 * 8) * 4


def test_sizes_may_differ_by_layer_and_between_k_and_v(device: str) -> None:
    cache = make_cache(device, num_kv_heads=[1, 3], head_dim=[8, 4], v_head_dim=[2, 6])
    assert cache.layers[0].keys.shape == (2, 1, 4, 8)
    assert cache.layers[1].keys.shape == (2, 3, 4, 4)
    assert cache.layers[1].values.shape == (2, 3, 4, 6)
    keys, values = cache.update(*states(cache, layer=0), 0)
    assert keys.shape == (2, 1, 4, 8)
    assert values.shape == (2, 1, 4, 2)


def test_addresses_never_change_over_steps_resets_and_rewinds(device: str) -> None:
    cache = make_cache(device, dtype=torch.float16, compute_dtype=torch.float32)
    before = addresses(cache)
    for _ in range(3):
        write_step(cache, tokens=2)
        cache.rewind(1)
        write_step(cache)
        cache.reset()
    assert addresses(cache) == before
    assert set(before) >= {"layer 0 keys", "layer 1 values", "cache position"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("batch_size", -1),
        ("num_kv_heads", 0),
        ("max_seq_len", 0),
        ("head_dim", -8),
        ("v_head_dim", 0),
        ("num_layers", True),
        ("max_seq_len", 4.0),
        ("num_kv_heads", [3, 0]),
        ("num_kv_heads", [3]),
        ("head_dim", [8, 8, 8]),
        ("dtype", torch.int8),
        ("dtype", "float16"),
        ("compute_dtype", torch.int64),
        ("owning_layers", []),
        ("owning_layers", [0, 2]),
        ("owning_layers", [0, 0]),
        ("owning_layers", [-1, 0]),
        ("owning_layers", [0.5]),
        ("owning_layers", 1),
        ("head_dim", 2.5),
        ("num_kv_heads", None),
        ("device", "nowhere"),
    ],
    ids=str,
)
def test_a_size_that_cannot_work_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=field):
        make_cache(**{field: value})


# ---- writing ------------------------------------------------------------------------------------


def test_update_writes_at_the_device_position_and_returns_the_full_buffers(device: str) -> None:
    cache = make_cache(device)
    first = write_step(cache, tokens=2)
    second = write_step(cache)
    for layer in range(2):
        keys, values = cache.layers[layer].keys, cache.layers[layer].values
        assert torch.equal(keys[:, :, :2], first[layer][0])
        assert torch.equal(values[:, :, 2:3], second[layer][1])
        assert not keys[:, :, 3:].any()
    keys, values = cache.update(*states(cache), 0)
    assert keys is cache.layers[0].keys
    assert values is cache.layers[0].values


def test_the_position_that_counts_is_the_one_on_the_device(device: str) -> None:
    cache = make_cache(device)
    cache.position.fill_(2)  # the mirror still says 0
    keys, _ = written = states(cache)
    cache.update(*written, 0)
    assert torch.equal(cache.layers[0].keys[:, :, 2:3], keys)
    assert not cache.layers[0].keys[:, :, :2].any()


def test_the_position_advances_once_per_step_at_the_last_owning_layer(device: str) -> None:
    cache = make_cache(device, num_layers=3, owning_layers=[0, 1])
    cache.update(*states(cache, 2), 0)
    assert (cache.seen_tokens, int(cache.position)) == (0, 0)
    cache.update(*states(cache, 2), 1)
    assert (cache.seen_tokens, int(cache.position)) == (2, 2)
    assert cache.get_seq_length() == cache.get_seq_length(2) == 2
    assert cache.get_max_length(2) == 4
    assert cache.get_mask_sizes(1, 2) == (4, 0)
    with pytest.raises(ConfigurationError, match=r"layer 2.*owns no K/V"):
        cache.layers[2].update(*states(cache))
    cache.reset()
    cache.layers[2].reset()
    assert cache.layers[2].keys is None


def test_capacity_three_holds_three_and_refuses_the_fourth_unchanged(device: str) -> None:
    torch.manual_seed(0)
    cache = make_cache(device, max_seq_len=3)
    for _ in range(3):
        write_step(cache)
    before = [layer.keys.clone() for layer in cache.layers]
    for layer in range(2):
        with pytest.raises(CapacityError, match=r"capacity is 3.*need 4") as caught:
            cache.update(*states(cache), layer)
        assert isinstance(caught.value, ValueError)
    assert (cache.seen_tokens, int(cache.position)) == (3, 3)
    assert all(
        torch.equal(layer.keys, kept) for layer, kept in zip(cache.layers, before, strict=True)
    )
    cache.reset()
    torch.manual_seed(0)
    for _ in range(3):
        write_step(cache)
    assert all(
        torch.equal(layer.keys, kept) for layer, kept in zip(cache.layers, before, strict=True)
    )


def test_a_chunk_that_does_not_fit_writes_nothing_of_itself(device: str) -> None:
    cache = make_cache(device)
    write_step(cache, tokens=2)
    before = cache.layers[0].keys.clone()
    with pytest.raises(CapacityError, match="3 more need 5"):
        cache.update(*states(cache, tokens=3), 0)
    assert torch.equal(cache.layers[0].keys, before)


@pytest.mark.parametrize(
    ("keys", "values", "match"),
    [
        ((1, 3, 1, 8), (2, 3, 1, 8), r"layer 0 keys.*batch 2"),
        ((2, 1, 1, 8), (2, 3, 1, 8), r"layer 0 keys.*heads 3"),
        ((2, 3, 1, 1), (2, 3, 1, 8), r"layer 0 keys.*head_dim 8"),
        ((2, 3, 1, 8), (2, 3, 1, 4), r"layer 0 values.*head_dim 8"),
        ((2, 3, 8), (2, 3, 1, 8), r"layer 0 keys"),
        ((2, 3, 2, 8), (2, 3, 1, 8), "same length"),
        ((2, 3, 0, 8), (2, 3, 0, 8), "at least 1"),
    ],
    ids=["batch", "heads", "head_dim", "v_head_dim", "rank", "lengths differ", "no token"],
)
def test_k_and_v_of_another_shape_are_refused_instead_of_broadcast(
    keys: tuple[int, ...], values: tuple[int, ...], match: str
) -> None:
    cache = make_cache()
    with pytest.raises(ConfigurationError, match=match):
        cache.update(torch.ones(keys), torch.ones(values), 0)
    assert not cache.layers[0].keys.any()


def test_k_and_v_that_are_no_floats_or_of_two_dtypes_are_refused() -> None:
    cache = make_cache()
    keys, values = states(cache)
    with pytest.raises(ConfigurationError, match="floating"):
        cache.update(keys.to(torch.int32), values.to(torch.int32), 0)
    with pytest.raises(ConfigurationError, match=r"one floating dtype.*float16"):
        cache.update(keys, values.half(), 0)


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_that_does_not_exist_is_refused(layer: int) -> None:
    cache = make_cache()
    with pytest.raises(ConfigurationError, match=r"layer_idx: expected 0 to 1"):
        cache.update(*states(cache), layer)


def test_gradients_do_not_leak_into_the_buffers() -> None:
    cache = make_cache()
    keys, values = states(cache)
    cache.update(keys.requires_grad_(), values, 0)
    assert not cache.layers[0].keys.requires_grad


# ---- narrower than the model --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_narrow_cache_casts_on_write_and_reads_back_through_one_pair(
    device: str, dtype: torch.dtype
) -> None:
    cache = make_cache(device, dtype=dtype)
    (keys, values), (later_keys, _) = states(cache), states(cache)
    read_keys, read_values = cache.update(keys, values, 0)
    assert read_keys.dtype == torch.float32
    assert torch.equal(read_keys[:, :, :1], keys.to(dtype).float())
    assert torch.equal(read_values[:, :, :1], values.to(dtype).float())
    assert not read_keys[:, :, 1:].any()
    again, _ = cache.update(later_keys, values, 1)
    assert again.data_ptr() == read_keys.data_ptr()
    names = [name for name in cache.named_tensors() if "scratch" in name]
    assert names == ["scratch keys float32", "scratch values float32"]
    cache.reset()
    assert not cache.layers[0].keys.view(torch.uint8).any()


def test_the_scratch_pair_fits_the_largest_layer() -> None:
    cache = make_cache(
        num_kv_heads=[1, 3], head_dim=[8, 4], dtype=torch.float16, compute_dtype=torch.float32
    )
    for layer in range(2):
        keys, values = states(cache, layer=layer)
        read, _ = cache.update(keys, values, layer)
        assert read.shape == cache.layers[layer].keys.shape
        assert torch.equal(read[:, :, :1], keys.half().float())


# ---- views, reset, rewind -----------------------------------------------------------------------


def test_prefix_views_share_address_and_strides_at_every_length(device: str) -> None:
    cache = make_cache(device)
    seen = set()
    for length in (1, 2, 3):
        keys, values = states(cache)
        first, _ = cache.update(keys, values, 0, prefix=True)
        cache.update(keys, values, 1)
        assert first.shape[2] == length
        held, _ = cache.prefix(0)
        assert torch.equal(held, first)
        seen.add((first.data_ptr(), first.stride(), held.data_ptr(), held.stride()))
    assert len(seen) == 1


def test_reset_removes_a_nan_from_every_slot_in_place(device: str) -> None:
    cache = make_cache(device)
    before = addresses(cache)
    for layer in cache.layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    cache.reset()
    assert addresses(cache) == before
    for layer in cache.layers:
        assert not layer.keys.any()
        assert not layer.values.any()


def test_rewind_and_crop_drop_the_last_tokens_and_keep_the_others(device: str) -> None:
    cache = make_cache(device)
    written = write_step(cache, tokens=4)
    cache.crop(-1)
    assert (cache.seen_tokens, int(cache.position)) == (3, 3)
    assert torch.equal(cache.layers[1].keys[:, :, :3], written[1][0][:, :, :3])
    assert not cache.layers[1].keys[:, :, 3:].any()
    cache.rewind(1)
    assert cache.seen_tokens == 1
    assert cache.is_croppable
    for wrong in (1, -2):
        with pytest.raises(ConfigurationError, match="tokens_to_remove"):
            cache.crop(wrong)
    with pytest.raises(ConfigurationError, match="position: expected 0 to 4"):
        cache.rewind(5)


def test_reorder_works_in_place_while_no_graph_depends_on_the_cache(device: str) -> None:
    cache = make_cache(device)
    written = write_step(cache, tokens=2)
    before = addresses(cache)
    cache.reorder_cache(torch.tensor([1, 0], device=device))
    assert addresses(cache) == before
    assert torch.equal(cache.layers[0].keys[:, :, :2], written[0][0].flip(0))


# ---- changes after construction -----------------------------------------------------------------


@pytest.mark.parametrize("field", ["keys", "values"])
@pytest.mark.parametrize(
    "other",
    [torch.zeros(2, 1, 4, 8), torch.zeros(2, 3, 4, 8, dtype=torch.int8)],
    ids=["heads", "dtype"],
)
def test_another_shape_or_dtype_is_refused_by_layer_and_field(
    field: str, other: torch.Tensor
) -> None:
    cache = make_cache()
    with pytest.raises(ConfigurationError, match=f"layer 1 {field}: expected torch.float32"):
        setattr(cache.layers[1], field, other)
    setattr(cache.layers[1], field, getattr(cache.layers[1], field))  # itself is no change


def test_a_fitting_tensor_may_be_bound_while_no_graph_depends_on_the_cache() -> None:
    cache = make_cache()
    mine = torch.ones_like(cache.layers[0].values)
    cache.layers[0].values = mine
    assert cache.layers[0].values is mine
    position = torch.tensor(2)
    cache.position = position
    cache.position = position
    assert cache.seen_tokens == 2


def test_a_position_that_is_no_int64_scalar_is_refused() -> None:
    cache = make_cache()
    with pytest.raises(ConfigurationError, match=r"position: expected a 0-d torch\.int64"):
        cache.position = torch.zeros(2, dtype=torch.int64)


def test_early_initialization_repeats_the_construction_or_is_refused(device: str) -> None:
    cache = make_cache(device)
    before = addresses(cache)
    cache.early_initialization(2, 3, 8, torch.float32, device)
    cache.early_initialization(2, [3, 3], [8, 8], torch.float32, device)
    assert addresses(cache) == before
    for wrong in ((3, 3, 8), (2, 1, 8), (2, 3, 4)):
        with pytest.raises(ConfigurationError, match="layer 0: initialised with"):
            cache.early_initialization(*wrong, torch.float32, device)
    with pytest.raises(ConfigurationError, match="float16"):
        cache.early_initialization(2, 3, 8, torch.float16, device)


def test_the_number_of_rows_is_fixed() -> None:
    cache = make_cache()
    with pytest.raises(ConfigurationError, match="batch_size is fixed at 2"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(ConfigurationError, match="batch_size is fixed at 2"):
        cache.batch_select_indices(torch.tensor([0]))


# ---- compiled regions ---------------------------------------------------------------------------


def test_inside_a_compiled_region_lengths_come_from_the_device() -> None:
    cache = make_cache()

    def step(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        length = cache.get_seq_length()
        for layer in range(2):
            read, _ = cache.update(keys, values, layer)
        return read.sum() * 0 + length

    compiled = torch.compile(step, backend="eager")
    for expected in range(3):
        assert int(compiled(*states(cache))) == expected
        assert cache.seen_tokens == int(cache.position) == expected + 1


def test_a_cache_is_not_made_or_reset_inside_a_compiled_region(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = make_cache()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(CaptureError, match="compiled region"):
        make_cache()
    with pytest.raises(CaptureError, match="compiled region"):
        cache.early_initialization(2, 3, 8, torch.float32, "cpu")
    with pytest.raises(CaptureError, match="compiled region"):
        cache.reset()


# ---- transformers -------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers_own_generate_gives_the_same_tokens_with_this_cache(
    device: str, architecture: str, attention: str
) -> None:
    model = make_model(architecture, device=device)
    model.set_attn_implementation(attention)
    prompt = make_prompt(5, batch=2, device=device)
    expected = eager_tokens(model, prompt, 12)
    cache = StaticKVCache.for_model(model, 20, batch_size=2)
    options = {str(compat.cache_keyword(model)): cache, "disable_compile": True}
    assert torch.equal(eager_tokens(model, prompt, 12, **options), expected)
    assert cache.seen_tokens == int(cache.position) == 16  # the last token is not forwarded
    assert cache.is_compileable
    assert cache.is_initialized
    assert cache.batch_size == 2
    assert cache.is_sliding == [False] * 3


def test_a_nan_in_a_masked_slot_would_spoil_the_logits_which_is_why_reset_zeroes() -> None:
    model = make_model()
    prompt = make_prompt(5)
    expected = eager_tokens(model, prompt, 6)
    cache = StaticKVCache.for_model(model, 20)
    options = {str(compat.cache_keyword(model)): cache, "disable_compile": True}
    for layer in cache.layers:
        layer.values.fill_(float("nan"))
    spoiled = eager_tokens(model, prompt, 6, **options)
    assert not torch.equal(spoiled, expected)
    cache.reset()
    assert torch.equal(eager_tokens(model, prompt, 6, **options), expected)


def test_a_transformers_static_cache_is_converted_with_its_contents() -> None:
    model = make_model()
    theirs = compat.StaticCache(config=model.config, max_cache_len=24)
    empty = StaticKVCache.from_transformers(theirs, model)
    assert (empty.max_seq_len, empty.seen_tokens) == (24, 0)
    with torch.no_grad():
        model(make_prompt(5, batch=2), **{str(compat.cache_keyword(model)): theirs})
    cache = StaticKVCache.from_transformers(theirs, model)
    assert (cache.max_seq_len, cache.batch_size, cache.seen_tokens) == (24, 2, 5)
    assert torch.equal(cache.layers[2].values, theirs.layers[2].values)
    with pytest.raises(CacheTypeError, match="DynamicCache"):
        StaticKVCache.from_transformers(compat.DynamicCache(), model)


def test_the_repr_says_what_is_held() -> None:
    cache = make_cache()
    assert "2 layers, batch 2, max_seq_len 4" in repr(cache)
    assert "StaticLayer(1" in repr(cache.layers)
