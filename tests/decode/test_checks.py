"""Every configuration a runner cannot work with is refused with its own message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.decode_models import POSITIONS, VOCABULARY, device_of, make_model, make_prompt

from graphcore.decode import CUDAGraphAR, Sampling, StaticKVCache, generate
from graphcore.decode import transformers_compat as compat
from graphcore.driver import Driver, open_driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import CacheTypeError, CapacityError, ConfigurationError


@pytest.fixture
def model() -> Any:
    return make_model()


@pytest.fixture
def runner(model: Any) -> Any:
    with CUDAGraphAR(model, max_seq_len=16, batch_size=2, capture=False) as made:
        made.capture(make_prompt(3, batch=2))
        yield made


# ---- models -------------------------------------------------------------------------------------


def test_use_cache_false_is_refused(model: Any) -> None:
    model.config.use_cache = False
    with pytest.raises(ConfigurationError, match="use_cache: expected True, got False"):
        CUDAGraphAR(model, max_seq_len=16)


def test_training_mode_with_active_dropout_is_refused_by_module() -> None:
    gpt2 = make_model("gpt2").train()
    with pytest.raises(
        ConfigurationError, match=r"active dropout: p=0.1 of transformer\.drop;.*eval"
    ):
        CUDAGraphAR(gpt2, max_seq_len=16)


def test_training_mode_with_active_attention_dropout_is_refused(model: Any) -> None:
    model.train()
    model.model.layers[1].self_attn.attention_dropout = 0.25
    with pytest.raises(ConfigurationError, match=r"attention_dropout=0.25 of model\.layers\.1"):
        CUDAGraphAR(model, max_seq_len=16)


def test_training_mode_that_changes_nothing_needs_no_eval_call(model: Any) -> None:
    prompt = make_prompt(4)
    expected = CUDAGraphAR(model, max_seq_len=16, capture=False).generate(prompt, 6)
    model.train()
    assert torch.equal(
        CUDAGraphAR(model, max_seq_len=16, capture=False).generate(prompt, 6), expected
    )


def test_gradient_checkpointing_in_training_mode_is_refused(model: Any) -> None:
    model.train()
    model.model.gradient_checkpointing = True
    with pytest.raises(ConfigurationError, match="gradient checkpointing"):
        CUDAGraphAR(model, max_seq_len=16)
    model.eval()
    assert CUDAGraphAR(model, max_seq_len=16).cache.max_seq_len == 16


def test_beam_search_of_the_generation_config_is_refused_naming_greedy_and_sampling(
    model: Any,
) -> None:
    model.generation_config.num_beams = 4
    with pytest.raises(
        ConfigurationError, match=r"generation_config.num_beams.*reorders"
    ) as caught:
        CUDAGraphAR(model, max_seq_len=16)
    assert "greedy" in str(caught.value)
    assert "sampling" in str(caught.value)


def test_beam_search_asked_for_in_the_call_is_refused(runner: CUDAGraphAR) -> None:
    with pytest.raises(ConfigurationError, match="num_beams: expected 1, got 2"):
        runner.generate(make_prompt(3, batch=2), 4, num_beams=2)


@pytest.mark.parametrize("thing", [object(), torch.nn.Linear(2, 2)], ids=["object", "linear"])
def test_what_is_no_transformers_model_is_refused(thing: object) -> None:
    with pytest.raises(ConfigurationError, match="model: expected a transformers causal"):
        CUDAGraphAR(thing, max_seq_len=16)


def test_a_forward_without_cache_or_positions_is_refused(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "forward", lambda input_ids: None)
    with pytest.raises(ConfigurationError, match="takes a cache and position_ids"):
        CUDAGraphAR(model, max_seq_len=16)


def test_an_attention_that_takes_no_mask_is_refused_with_the_remedy(model: Any) -> None:
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ConfigurationError, match=r"'flash_attention_2'; call.*set_attn_impl"):
        CUDAGraphAR(model, max_seq_len=16)


def test_a_model_on_two_devices_or_without_weights_is_refused(model: Any) -> None:
    model.lm_head.to("meta")
    with pytest.raises(ConfigurationError, match=r"one device for all weights.*cpu.*meta"):
        CUDAGraphAR(model, max_seq_len=16)
    with pytest.raises(ConfigurationError, match=r"one device for all weights, got .'meta'"):
        CUDAGraphAR(make_model().to("meta"), max_seq_len=16)


def test_layers_that_are_not_attention_over_k_and_v_are_refused_with_layer_and_kind(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, why in (
        ("chunked_attention", "their own chunk"),
        ("linear_attention", "recurrent state instead"),
        ("hybrid", "recurrent state beside"),
        ("indexed_attention", "an index beside"),
        ("of_tomorrow", "no cache is known"),
    ):
        kinds = [("full_attention", None), (kind, None), ("full_attention", None)]
        monkeypatch.setattr(compat, "layer_kinds", lambda config, kinds=kinds: kinds)
        for cache in (None, StaticKVCache(3, 1, 2, 16, 16, torch.float32, "cpu")):
            with pytest.raises(ConfigurationError, match=rf"layer 1: .* got '{kind}': .*{why}"):
                CUDAGraphAR(model, cache, max_seq_len=16)


def test_multi_head_latent_attention_is_refused(model: Any) -> None:
    model.config.kv_lora_rank = 16
    with pytest.raises(ConfigurationError, match=r"latent attention \(kv_lora_rank 16\)"):
        CUDAGraphAR(model, max_seq_len=16)


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ([8, None, 4], r"windows of layer 2: expected 8, or None, .* got 4"),
        (8, r"windows of layer 1: expected None \(the model's layer sees every token\).* got 8"),
    ],
    ids=["another", "where the layer sees all"],
)
def test_a_cache_with_other_windows_than_the_models_is_refused(windows: Any, message: str) -> None:
    model = make_model("qwen3-window")
    cache = StaticKVCache(3, 1, 2, 16, 24, torch.float32, "cpu", windows=windows)
    with pytest.raises(ConfigurationError, match=message):
        CUDAGraphAR(model, cache)


def test_layers_of_one_type_with_different_windows_are_refused(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [("sliding_attention", window) for window in (8, 8, 4)]
    monkeypatch.setattr(compat, "layer_kinds", lambda config: kinds)
    with pytest.raises(ConfigurationError, match=r"layer 2: .*window=8.* got .*window=4"):
        CUDAGraphAR(model, max_seq_len=16)


def test_layers_of_two_types_are_refused_where_the_forward_takes_one_mask(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [("sliding_attention", 8), ("full_attention", None), ("sliding_attention", 8)]
    monkeypatch.setattr(compat, "layer_kinds", lambda config: kinds)
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM takes no mask for each type"):
        CUDAGraphAR(model, max_seq_len=16)


# ---- caches -------------------------------------------------------------------------------------


def test_a_dynamic_cache_is_refused(model: Any) -> None:
    with pytest.raises(CacheTypeError, match="DynamicCache: it allocates") as caught:
        CUDAGraphAR(model, compat.DynamicCache())
    assert isinstance(caught.value, TypeError)
    call = str(caught.value).rsplit("static one: ", 1)[1].replace("...", "16")
    made = eval(call, {"StaticKVCache": StaticKVCache, "model": model})
    assert CUDAGraphAR(model, made).cache.max_seq_len == 16


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"temperature": 0.7}, r"given to the runner: sampling=Sampling\(temperature="),
        ({"top_p": 0.9}, r"given to the runner: sampling=Sampling\(top_p="),
        ({"do_sample": True}, r"given to the runner: sampling=Sampling\(temperature="),
        ({"one_launch": True}, "call generate_in_one_launch"),
        ({"colour": 1}, "colour: this runner takes no such input$"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_setting_of_generate_elsewhere_is_refused_with_its_place_here(
    model: Any, given: Any, where: str
) -> None:
    runner = CUDAGraphAR(model, max_seq_len=16)
    with pytest.raises(ConfigurationError, match=where):
        runner.generate(torch.tensor([[1, 2]]), 2, **given)
    assert runner.captures == 0


def test_a_transformers_static_cache_is_refused_with_the_call_that_converts_it(
    model: Any,
) -> None:
    cache = compat.StaticCache(config=model.config, max_cache_len=16)
    with pytest.raises(CacheTypeError, match="StaticCache") as caught:
        CUDAGraphAR(model, cache)
    call = str(caught.value).rsplit("convert it: ", 1)[1]
    converted = eval(call, {"StaticKVCache": StaticKVCache, "cache": cache, "model": model})
    assert CUDAGraphAR(model, converted).cache.max_seq_len == 16


@pytest.mark.parametrize("thing", [{}, torch.zeros(2), "static"], ids=["dict", "tensor", "str"])
def test_anything_else_as_a_cache_is_refused(model: Any, thing: object) -> None:
    with pytest.raises(CacheTypeError, match="whose buffers are not static"):
        CUDAGraphAR(model, thing)


def _sized(model: Any, **changes: Any) -> StaticKVCache:
    sizes: dict[str, Any] = {
        "num_layers": 3,
        "batch_size": 1,
        "num_kv_heads": 2,
        "max_seq_len": 16,
        "head_dim": 16,
        "dtype": torch.float32,
        "device": "cpu",
    }
    return StaticKVCache(**(sizes | changes))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_layers": 2}, r"num_layers: expected 3 \(the model's\), got 2"),
        ({"num_kv_heads": 4}, r"num_kv_heads of layer 0: expected 2 \(the model's\), got 4"),
        ({"num_kv_heads": [2, 1, 2]}, r"num_kv_heads of layer 1: expected 2 .*got 1"),
        ({"head_dim": [16, 16, 8]}, r"head_dim of layer 2: expected 16 .*got 8"),
        ({"v_head_dim": 8}, r"v_head_dim of layer 0: expected 16 .*got 8"),
        ({"owning_layers": [0, 2]}, r"owning_layers: expected layer 1 among them"),
        ({"device": "meta"}, r"cache device: expected cpu \(the model's\), got meta"),
        ({"max_seq_len": POSITIONS + 1}, rf"max_seq_len: expected at most {POSITIONS}"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_cache_that_does_not_fit_the_model_is_refused_by_layer(
    model: Any, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigurationError, match=match):
        CUDAGraphAR(model, _sized(model, **changes))


def test_one_head_count_for_a_model_whose_layers_differ_is_refused_by_layer(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.k_proj = torch.nn.Linear(64, 16, bias=False)
    attention.v_proj = torch.nn.Linear(64, 16, bias=False)
    attention.num_key_value_groups = 4
    with pytest.raises(ConfigurationError, match=r"num_kv_heads of layer 1: expected 1 .*got 2"):
        CUDAGraphAR(model, _sized(model))
    prompt = make_prompt(4)
    runner = CUDAGraphAR(model, _sized(model, num_kv_heads=[2, 1, 2]), capture=False)
    expected = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False
    )
    assert torch.equal(runner.generate(prompt, 6), expected)


def test_a_cache_and_sizes_that_contradict_it_are_refused(model: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"max_seq_len: expected 16 \(the cache's\)"):
        CUDAGraphAR(model, _sized(model), max_seq_len=32)
    with pytest.raises(ConfigurationError, match="batch_size: expected 1"):
        CUDAGraphAR(model, _sized(model), batch_size=2)


@pytest.mark.parametrize("size", [0, -1, 2.5], ids=str)
def test_a_number_of_rows_that_cannot_work_is_refused(model: Any, size: Any) -> None:
    with pytest.raises(ConfigurationError, match="batch_size: expected a positive int"):
        CUDAGraphAR(model, max_seq_len=16, batch_size=size)


@pytest.mark.parametrize("size", [0, -1, 2.5, POSITIONS + 1], ids=str)
def test_a_capacity_that_cannot_work_is_refused(model: Any, size: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_seq_len"):
        CUDAGraphAR(model, max_seq_len=size)


def test_without_a_size_the_cache_holds_what_the_model_has_positions_for(model: Any) -> None:
    assert CUDAGraphAR(model).cache.max_seq_len == POSITIONS


# ---- driver and sampling ------------------------------------------------------------------------


def test_a_driver_of_another_kind_or_device_is_refused(model: Any) -> None:
    class Elsewhere(EmulatedDriver):
        name, is_emulated = "cuda", False

    with pytest.raises(ConfigurationError, match=r"driver: expected the emulated driver.*cuda:0"):
        CUDAGraphAR(model, max_seq_len=16, driver=Elsewhere())
    driver = open_driver("emulated")
    assert CUDAGraphAR(model, max_seq_len=16, driver=driver).driver is driver


def test_a_runner_is_greedy_unless_given_a_sampling(model: Any) -> None:
    assert Sampling() == Sampling.greedy()
    prompt = make_prompt(4)
    runner = CUDAGraphAR(model, max_seq_len=16, sampling=Sampling.greedy(), capture=False)
    plain = CUDAGraphAR(model, max_seq_len=16, capture=False)
    assert torch.equal(runner.generate(prompt, 4), plain.generate(prompt, 4))
    with pytest.raises(ConfigurationError, match="sampling: expected Sampling or None"):
        CUDAGraphAR(model, max_seq_len=16, sampling="greedy")  # type: ignore[arg-type]


# ---- prompts, budgets, tokens -------------------------------------------------------------------

prompts = [
    (torch.zeros(2, 0, dtype=torch.int64), "empty prompt"),
    (torch.zeros(3, dtype=torch.int64), r"two dimensions \[batch, tokens\], got shape \[3\]"),
    (torch.zeros(2, 3), "expected a torch.int64 tensor, got torch.float32"),
    ([[1, 2]], "expected a torch.int64 tensor, got list"),
    (torch.zeros(1, 3, dtype=torch.int64), "expected batch 2 .*got 1"),
    (torch.full((2, 3), VOCABULARY), f"ids from 0 to {VOCABULARY - 1}, got {VOCABULARY}"),
    (torch.full((2, 3), -1), "got -1 to -1"),
    (torch.zeros(2, 3, dtype=torch.int64, device="meta"), "expected device cpu .*got meta"),
]


@pytest.mark.parametrize(
    ("ids", "match"),
    prompts,
    ids=["empty", "rank", "dtype", "list", "batch", "too large", "negative", "device"],
)
def test_a_prompt_that_cannot_work_is_refused_and_nothing_moves(
    runner: CUDAGraphAR, ids: Any, match: str
) -> None:
    expected = runner.logits.clone()
    for call in (runner.capture, lambda given: runner.generate(given, 2)):
        with pytest.raises(ConfigurationError, match=f"input_ids: .*{match}"):
            call(ids)
    with pytest.raises(ConfigurationError, match=match):
        runner.stream(ids, 2)
    assert runner.cache.seen_tokens == int(runner.position) == 3
    assert torch.equal(runner.logits, expected)
    runner.replay()


def test_a_mask_of_ones_changes_nothing_and_one_of_another_shape_is_refused(
    runner: CUDAGraphAR,
) -> None:
    prompt = make_prompt(3, batch=2)
    ones = torch.ones_like(prompt)
    expected = runner.generate(prompt, 2)
    assert torch.equal(runner.generate(prompt, 2, attention_mask=ones), expected)
    assert torch.equal(generate(runner.model, prompt, 2, attention_mask=ones).ids, expected)
    with pytest.raises(ConfigurationError, match=r"the shape of input_ids \[2, 3\], got \[2, 2\]"):
        runner.capture(prompt, attention_mask=ones[:, :2])


def test_int32_prompts_are_taken(runner: CUDAGraphAR) -> None:
    prompt = make_prompt(3, batch=2)
    assert torch.equal(runner.generate(prompt.int(), 2), runner.generate(prompt, 2))


def test_a_prompt_longer_than_the_cache_is_refused_with_capacity_and_need(
    runner: CUDAGraphAR,
) -> None:
    with pytest.raises(CapacityError, match="17 tokens needs 17; max_seq_len is 16"):
        runner.generate(make_prompt(17, batch=2), 1)
    with pytest.raises(CapacityError, match="14 tokens behind 3 held needs 17; max_seq_len is 16"):
        runner.capture(make_prompt(14, batch=2))


def test_more_new_tokens_than_fit_are_refused_with_capacity_and_need(
    runner: CUDAGraphAR,
) -> None:
    with pytest.raises(CapacityError, match="10 tokens and 7 new ones need 17; max_seq_len is 16"):
        runner.generate(make_prompt(10, batch=2), 7)
    with pytest.raises(CapacityError, match="behind 3 held need 17"):
        runner.generate(make_prompt(10, batch=2), 4, keep_cache=True)
    assert runner.generate(make_prompt(10, batch=2), 6).shape == (2, 16)


@pytest.mark.parametrize("count", [0, -1, 2.0, True, None], ids=str)
def test_a_number_of_new_tokens_that_is_no_positive_int_is_refused(
    runner: CUDAGraphAR, count: Any
) -> None:
    with pytest.raises(ConfigurationError, match="max_new_tokens: expected a positive int"):
        runner.generate(make_prompt(3, batch=2), count)


def test_a_polling_interval_that_is_no_positive_int_is_refused(runner: CUDAGraphAR) -> None:
    with pytest.raises(ConfigurationError, match="poll_every"):
        runner.generate(make_prompt(3, batch=2), 2, poll_every=0)


@pytest.mark.parametrize(
    ("token", "match"),
    [
        (VOCABULARY, f"token: expected 0 to {VOCABULARY - 1}, got {VOCABULARY}"),
        (-1, "token: expected 0 to"),
        (torch.tensor([3, -2]), "token: expected 0 to .*got -2"),
        (torch.tensor([3, VOCABULARY]), f"got {VOCABULARY}"),
        (True, "token: expected an int or an int64 tensor, got True"),
        (2.0, "got 2.0"),
        (torch.tensor([1.0, 2.0]), "got torch.float32"),
        (torch.tensor([1, 2, 3]), r"expected 1 or 2 ids \(the batch\)"),
        (torch.tensor([1], device="meta"), "token: expected device cpu or the host, got meta"),
    ],
    ids=[
        "large",
        "negative",
        "ids negative",
        "ids large",
        "bool",
        "float",
        "dtype",
        "count",
        "dev",
    ],
)
def test_a_token_that_cannot_be_forced_is_refused_and_the_next_replay_is_right(
    runner: CUDAGraphAR, token: Any, match: str
) -> None:
    expected = runner.logits.argmax(dim=-1)
    with pytest.raises(ConfigurationError, match=match):
        runner.replay(token)
    assert runner.cache.seen_tokens == int(runner.position) == 3
    assert torch.equal(runner.replay(), expected)


def test_tokens_are_forced_for_every_row_or_one_for_all(runner: CUDAGraphAR) -> None:
    assert runner.replay(torch.tensor([5, 7])).tolist() == [5, 7]
    assert runner.replay(torch.tensor(9, dtype=torch.int32)).tolist() == [9, 9]
    assert runner.replay(4).tolist() == [4, 4]
    assert runner.replay().tolist() == runner.token.tolist()


@pytest.mark.parametrize("field", ["eos_token_id", "pad_token_id"])
def test_an_end_or_pad_id_outside_the_vocabulary_is_refused(
    runner: CUDAGraphAR, field: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"{field}: expected ids from 0 to"):
        runner.generate(make_prompt(3, batch=2), 2, **{field: VOCABULARY})


@pytest.mark.parametrize("field", ["eos_token_id", "pad_token_id"])
@pytest.mark.parametrize("ids", ["a", 1.5, [1.5], [None], True], ids=str)
def test_what_is_no_id_ends_and_pads_nothing(runner: CUDAGraphAR, field: str, ids: Any) -> None:
    before = runner.cache.seen_tokens
    with pytest.raises(ConfigurationError, match=f"{field}: expected an int id or a list"):
        runner.generate(make_prompt(3, batch=2), 2, **{field: ids})
    assert runner.cache.seen_tokens == before


def test_end_ids_may_be_a_tensor(runner: CUDAGraphAR) -> None:
    prompt = make_prompt(3, batch=2)
    expected = runner.generate(prompt, 4, eos_token_id=[5, 7])
    assert torch.equal(runner.generate(prompt, 4, eos_token_id=torch.tensor([5, 7])), expected)
    assert runner.generate(prompt, 4, eos_token_id=torch.tensor(5)).shape[0] == 2


def test_a_sparse_prompt_is_refused(runner: CUDAGraphAR) -> None:
    with pytest.raises(ConfigurationError, match="input_ids: expected a dense tensor"):
        runner.generate(make_prompt(3, batch=2).to_sparse(), 2)


def test_a_name_in_place_of_a_driver_is_refused_with_what_opens_it(model: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"pass graphcore\.open_driver\('emulated'\)"):
        CUDAGraphAR(model, max_seq_len=16, driver="emulated")  # type: ignore[arg-type]


def test_more_end_ids_than_the_step_has_room_for_are_refused(runner: CUDAGraphAR) -> None:
    with pytest.raises(ConfigurationError, match="at most 16 ids, got 17"):
        runner.generate(make_prompt(3, batch=2), 2, eos_token_id=range(17))


def test_a_model_without_a_language_head_is_refused_by_name(graphcore_driver: Driver) -> None:
    model = make_model(device=device_of(graphcore_driver))
    with CUDAGraphAR(model.model, max_seq_len=16, driver=graphcore_driver) as runner:
        with pytest.raises(ConfigurationError, match=r"a \.\.\.ForCausalLM.*, got LlamaModel"):
            runner.capture(make_prompt(3, device=device_of(graphcore_driver)))
        assert runner.cache.seen_tokens == 0
