"""Every family of decoder-only models: one captured graph decodes what transformers itself decodes.

Families with a window are decoded past it: a prompt within the window that outgrows it during the
replays, and a prompt that is longer than the window.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.count_operations import CountOperations
from helpers.decode_models import (
    FAMILIES,
    WINDOW,
    device_of,
    eager_tokens,
    make_model,
    make_prompt,
)
from torch._dynamo.testing import CompileCounter

from graphcore.decode import CUDAGraphAR, StaticKVCache
from graphcore.decode.cache_layer import BorrowingLayer
from graphcore.decode.sliding_layer import SlidingLayer
from graphcore.driver import Driver, open_driver
from graphcore.errors import CaptureError, ConfigurationError

NEW = 22
CAPACITY = 40
PROMPTS = (5, 13)  # below and past the window of 8

# their own attention is written for eager attention alone
_eager_only = ("gemma2", "mimo")
CASES = [
    (family, attention)
    for family in FAMILIES
    for attention in ("sdpa", "eager")
    if attention == "eager" or family not in _eager_only
]


def theirs(model: Any, prompt: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Ids, and the logits each new token was chosen from, of transformers' own ``generate``."""
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return made.sequences, list(made.logits)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    largest = float(expected.double().abs().max())
    return float((found.double() - expected.double()).abs().max()) / largest


@pytest.mark.parametrize(("family", "attention"), CASES, ids=lambda part: part)
def test_one_graph_decodes_the_tokens_and_logits_of_transformers_own_generate(
    graphcore_driver: Driver, family: str, attention: str
) -> None:
    """Two prompts of unequal length, two rows each, every step compared."""
    device = device_of(graphcore_driver)
    model = make_model(family, device=device)
    model.set_attn_implementation(attention)
    with CUDAGraphAR(model, max_seq_len=CAPACITY, batch_size=2, driver=graphcore_driver) as runner:
        for tokens in PROMPTS:
            prompt = make_prompt(tokens, batch=2, device=device)
            ids, logits = theirs(model, prompt)
            assert len(set(ids[:, tokens:].flatten().tolist())) > 4
            runner.cache.reset()
            runner.capture(prompt)
            for step in range(NEW):
                assert difference(runner.logits, logits[step]) < 1e-5
                token = runner.token.fill_(-1)  # what is compared is what the replay wrote
                runner.replay()
                assert torch.equal(token, ids[:, tokens + step])
        assert runner.captures == 1
        assert runner.execution == "graph"


def test_the_families_have_the_windows_that_these_tests_are_about() -> None:
    rings = {
        family: StaticKVCache.for_model(make_model(family), CAPACITY).windows for family in FAMILIES
    }
    assert {family for family, windows in rings.items() if any(windows)} == {
        "mistral-window", "phi3-window", "qwen3-window", "gemma2", "gemma3", "gemma3n", "afmoe",
        "mixtral", "mimo",
    }  # fmt: skip
    assert {family for family, windows in rings.items() if all(windows)} == {
        "mistral-window", "phi3-window", "mixtral",
    }  # fmt: skip


def test_without_its_window_a_model_decodes_other_tokens() -> None:
    """The control: the window decides."""
    model, whole = make_model("mistral-window"), make_model("mistral")
    whole.load_state_dict(model.state_dict())
    prompt = make_prompt(5)
    assert not torch.equal(eager_tokens(model, prompt, NEW), eager_tokens(whole, prompt, NEW))


@pytest.mark.parametrize("family", ["mistral-window", "gemma3", "afmoe"])
def test_in_bfloat16_the_tokens_are_those_of_transformers_to_its_precision(
    graphcore_driver: Driver, family: str
) -> None:
    """Logits within 2 percent of the largest; so tokens are equal where the choice is clear."""
    device = device_of(graphcore_driver)
    model = make_model(family, device=device, dtype=torch.bfloat16)
    prompt = make_prompt(5, device=device)
    ids, logits = theirs(model, prompt)
    clear = 0
    with CUDAGraphAR(model, max_seq_len=CAPACITY, driver=graphcore_driver) as runner:
        runner.capture(prompt)
        for step, expected in enumerate(logits):
            assert difference(runner.logits, expected) < 0.02
            first, second = expected.float().topk(2).values[0].tolist()
            if first - second > 0.04 * float(expected.float().abs().max()):
                clear += 1
                assert int(runner.logits.argmax()) == int(ids[0, 5 + step])
            runner.replay(ids[:, 5 + step])
    assert clear > NEW // 3


@pytest.mark.parametrize("family", ["gemma3", "mistral-window"])
def test_poison_in_slots_that_hold_no_token_leaves_every_bit_of_the_output(
    graphcore_driver: Driver, family: str
) -> None:
    """In rings and in full buffers; the ring's slots fill up while it is decoded."""
    device = device_of(graphcore_driver)
    model = make_model(family, device=device)
    prompt = make_prompt(3, device=device)
    options: dict[str, Any] = {"max_seq_len": CAPACITY, "driver": graphcore_driver}
    with CUDAGraphAR(model, **options) as clean, CUDAGraphAR(model, **options) as poisoned:
        clean.capture(prompt)
        poisoned.capture(prompt)
        for poison, part in ((1000.0, "keys"), (-1000.0, "values")):
            for layer in poisoned.cache.layers:
                getattr(layer, part)[:, :, 3:].fill_(poison)
        for _ in range(WINDOW + 4):
            assert torch.equal(clean.replay(), poisoned.replay())
            assert torch.equal(clean.logits, poisoned.logits)


def test_a_full_ring_hides_nothing_and_forgets_what_left_the_window(
    graphcore_driver: Driver,
) -> None:
    """Tokens that left the window do not matter: another beginning, equal logits behind it."""
    device = device_of(graphcore_driver)
    model = make_model("mistral-window", device=device)
    # information passes on through the layers: 3 windows back nothing is left of a token
    tail = make_prompt(3 * WINDOW, device=device, seed=5)
    heads = [make_prompt(4, device=device, seed=seed) for seed in (1, 2)]
    with CUDAGraphAR(model, max_seq_len=CAPACITY, driver=graphcore_driver) as runner:
        logits = []
        for head in heads:
            runner.cache.reset()
            runner.capture(head)
            for token in tail[0]:
                runner.replay(token.view(1))
            logits.append(runner.logits.clone())
    assert difference(logits[0], logits[1]) < 1e-5


def test_the_step_of_a_model_with_rings_is_ordered_by_dependencies_not_by_luck() -> None:
    driver = open_driver("emulated", order="adversarial", seed=3)
    model = make_model("gemma3")
    prompt = make_prompt(5)
    with CUDAGraphAR(model, max_seq_len=CAPACITY, driver=driver) as runner:
        assert torch.equal(runner.generate(prompt, 10), eager_tokens(model, prompt, 10))


def test_a_step_finds_its_slot_once_for_all_layers_of_a_window() -> None:
    model = make_model("mistral-window")
    with CUDAGraphAR(model, max_seq_len=CAPACITY, capture=False) as runner:
        runner.capture(make_prompt(5))
        with CountOperations() as counted:
            runner.replay()
    assert sum(isinstance(layer, SlidingLayer) for layer in runner.cache.layers) == 3
    assert counted.names.count("remainder.Scalar") == 1


# ---- layers that differ -------------------------------------------------------------------------


def test_layers_that_attend_to_anothers_k_and_v_have_none_and_are_served_from_its_ring() -> None:
    model = make_model("gemma3n")
    cache = StaticKVCache.for_model(model, CAPACITY)
    assert cache.owning_layers == (0, 1, 2, 3)
    assert [isinstance(layer, BorrowingLayer) for layer in cache.layers] == [False] * 4 + [True] * 2
    assert cache.windows[:4] == (WINDOW, None) * 2


@pytest.mark.parametrize("family", ["gemma3n", "gemma3"])
def test_a_narrow_cache_decodes_to_its_precision_also_where_k_and_v_are_shared(
    graphcore_driver: Driver, family: str
) -> None:
    """One converted pair for all would be overwritten before the layers that share it read it."""
    device = device_of(graphcore_driver)
    model = make_model(family, device=device)
    prompt = make_prompt(5, device=device)
    ids, logits = theirs(model, prompt)
    cache = StaticKVCache.for_model(model, CAPACITY, dtype=torch.bfloat16)
    with CUDAGraphAR(model, cache, driver=graphcore_driver) as runner:
        runner.capture(prompt)
        for step in range(12):
            assert difference(runner.logits, logits[step]) < 0.05
            runner.replay(ids[:, 5 + step])


def test_heads_that_differ_by_layer_and_a_narrower_v_are_stored_as_they_are() -> None:
    model = make_model("mimo")
    cache = StaticKVCache.for_model(model, CAPACITY)
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [
        (1, 4, WINDOW, 24),
        (1, 2, CAPACITY, 24),
        (1, 4, WINDOW, 24),
    ]
    assert {layer.values.shape[3] for layer in cache.layers} == {16}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_kv_heads": 2}, "num_kv_heads of layer 0: expected 4 .the model's., got 2"),
        ({"v_head_dim": None}, "v_head_dim of layer 0: expected 16 .the model's., got 24"),
    ],
    ids=["one head count for all", "V as wide as K"],
)
def test_one_size_for_layers_that_differ_is_refused_by_layer(
    sizes: dict[str, Any], message: str
) -> None:
    options = {"num_kv_heads": [4, 2, 4], "head_dim": 24, "v_head_dim": 16} | sizes
    cache = StaticKVCache(
        num_layers=3, batch_size=1, max_seq_len=16, dtype=torch.float32, device="cpu", **options
    )
    with pytest.raises(ConfigurationError, match=message):
        CUDAGraphAR(make_model("mimo"), cache)


def test_a_cache_that_keeps_every_token_decodes_a_model_with_windows_too(
    graphcore_driver: Driver,
) -> None:
    """It takes more memory, and can be rewound anywhere."""
    device = device_of(graphcore_driver)
    model = make_model("qwen3-window", device=device)
    prompt = make_prompt(11, device=device)
    cache = StaticKVCache(3, 1, 2, CAPACITY, 24, torch.float32, device)
    with CUDAGraphAR(model, cache, driver=graphcore_driver) as runner:
        expected = eager_tokens(model, prompt, 12)
        assert torch.equal(runner.generate(prompt, 12), expected)
        cache.rewind(4)
        runner.capture(prompt[:, 4:])
        assert [int(runner.replay()) for _ in range(12)] == expected[0, 11:].tolist()


# ---- experts ------------------------------------------------------------------------------------


def test_experts_by_grouped_products_are_captured_too(graphcore_driver: Driver) -> None:
    """Transformers' default; on a device its kernel is for bfloat16."""
    device = device_of(graphcore_driver)
    dtype = torch.float32 if graphcore_driver.is_emulated else torch.bfloat16
    model = make_model("qwen3-moe", device=device, dtype=dtype)
    model.set_experts_implementation("grouped_mm")
    prompt = make_prompt(5, device=device)
    with CUDAGraphAR(model, max_seq_len=CAPACITY, driver=graphcore_driver, capture=False) as eager:
        expected = eager.generate(prompt, 12)
    with CUDAGraphAR(model, max_seq_len=CAPACITY, driver=graphcore_driver) as runner:
        assert torch.equal(runner.generate(prompt, 12), expected)


def test_experts_in_a_loop_over_those_that_were_hit_are_refused_by_the_capture(
    graphcore_driver: Driver,
) -> None:
    model = make_model("qwen3-moe", device=device_of(graphcore_driver))
    model.set_experts_implementation("eager")
    prompt = make_prompt(5, device=device_of(graphcore_driver))
    with CUDAGraphAR(model, max_seq_len=CAPACITY, driver=graphcore_driver) as runner:
        with pytest.raises(CaptureError):
            runner.capture(prompt)
        assert runner.cache.seen_tokens == 0


# ---- compiled -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma3", "mistral-window"])
def test_a_step_with_rings_is_traced_as_one_region_that_serves_every_position(family: str) -> None:
    """What inductor would compile; traced once, it decodes past the window."""
    model = make_model(family)
    prompt = make_prompt(5)
    expected = eager_tokens(model, prompt, 16)[0, 5:].tolist()
    counter = CompileCounter()
    with CUDAGraphAR(model, max_seq_len=CAPACITY, capture=False) as runner:
        runner.capture(prompt)
        step = torch.compile(runner._step.run, backend=counter, fullgraph=True, dynamic=False)
        found = []
        with torch.no_grad():
            for _ in range(16):
                step()
                found.append(int(runner.token))
    assert found == expected
    assert counter.frame_count == 1
