"""Families nobody uses daily: each decodes what transformers itself does, or is refused by name.

A model whose forward does not heed the masks that it is given would decode wrong tokens without a
word. Those that are known are refused at construction; one that leaves out the cache's last layer
is found by its first prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from helpers.decode_models import VOCABULARY, eager_tokens, make_prompt
from transformers import GenerationMixin

from graphcore.decode import CUDAGraphAR, decoder_stack
from graphcore.driver import open_driver
from graphcore.errors import CaptureError, ConfigurationError

NEW = 14
CAPACITY = 40
WINDOW = 8

_named: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_grouped: dict[str, Any] = {**_named, "num_key_value_heads": 2, "pad_token_id": None}
_sliding: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
_experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}


def build(family: str, /, head: str = "ForCausalLM", **fields: Any) -> Any:
    """A random model; weights wide enough that it does not repeat one token."""
    torch.manual_seed(1234)
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"this transformers has no {family}")
    config = getattr(transformers, f"{family}Config")(**fields)
    name = f"{family.removesuffix('Text')}{head}"
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "bias" in name:
                parameter.normal_(std=0.2)
    if getattr(config.get_text_config(), "_experts_implementation", None) == "grouped_mm":
        model.set_experts_implementation("batched_mm")
    model.generation_config.eos_token_id = None
    return model


def _gpt_neo(kinds: list[str]) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 64, "num_layers": 2, "num_heads": 4}
    ids = {"vocab_size": VOCABULARY, "eos_token_id": None, "max_position_embeddings": 64}
    return build(
        "GPTNeo", window_size=WINDOW, attention_types=[[kinds, 2 // len(kinds)]], **sizes, **ids
    )


def _falcon(**fields: Any) -> Any:
    return build("Falcon", **_named, **fields)


def _gemma3_with_images() -> Any:
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    text = {**_grouped, **_sliding, "head_dim": 16, "query_pre_attn_scalar": 16}
    model = build(
        "Gemma3", "ForConditionalGeneration", text_config=text, vision_config=vision,
        mm_tokens_per_image=4, image_token_index=90,
    )  # fmt: skip
    model.generation_config.pad_token_id = 0
    return model


equal: dict[str, Callable[[], Any]] = {
    "cohere2": lambda: build("Cohere2", **_grouped, **_sliding),
    "olmo3": lambda: build("Olmo3", **_grouped, **_sliding),
    "starcoder2": lambda: build("Starcoder2", **_grouped, sliding_window=WINDOW),
    "gpt-oss": lambda: build("GptOss", **_grouped, **_sliding, **_experts, head_dim=16),
    "gpt-neox": lambda: build("GPTNeoX", **_named, rotary_pct=0.5),
    "opt": lambda: build("OPT", **_named, ffn_dim=96, word_embed_proj_dim=64),
    "gpt-neo, global": lambda: _gpt_neo(["global"]),
    # one projection for Q, K and V: the heads that are kept are not in the configuration
    "falcon, one K/V head": lambda: _falcon(multi_query=True),
    "falcon, all heads": lambda: _falcon(multi_query=False),
    "falcon, new": lambda: _falcon(new_decoder_architecture=True, num_kv_heads=2),
    "gpt-bigcode": lambda: build(
        "GPTBigCode", n_layer=2, n_embd=64, n_head=4, vocab_size=VOCABULARY, n_positions=64,
        eos_token_id=None,
    ),
    # of two stacks of layers the text's decides
    "gemma3 with images": _gemma3_with_images,
}  # fmt: skip


@pytest.mark.parametrize("family", equal)
def test_one_graph_decodes_the_tokens_of_transformers_below_and_past_the_window(
    family: str,
) -> None:
    model = equal[family]()
    driver = open_driver("emulated")
    with CUDAGraphAR(model, max_seq_len=CAPACITY, batch_size=2, driver=driver) as runner:
        for tokens in (5, 13):
            prompt = make_prompt(tokens, batch=2)
            expected = eager_tokens(model, prompt, NEW)
            runner.cache.reset()
            assert torch.equal(runner.generate(prompt, NEW), expected)
        assert runner.execution == "graph"


_latent: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
}
_bart: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
}  # fmt: skip

refused: dict[str, tuple[str, Callable[[], Any]]] = {
    "gpt-neo, local": (
        "layer 1: .* got 'local': its own mask counts from the end of the buffer",
        lambda: _gpt_neo(["global", "local"]),
    ),
    "falcon, alibi": ("alibi: expected positions", lambda: _falcon(alibi=True)),
    "bloom": (
        "expected a forward that takes a cache and position_ids, got BloomForCausalLM",
        lambda: build("Bloom", vocab_size=VOCABULARY, hidden_size=64, n_layer=1, n_head=4),
    ),
    "deepseek": (
        "multi-head latent attention .kv_lora_rank 16",
        lambda: build(
            "DeepseekV3", **_grouped, **_latent, v_head_dim=16, n_routed_experts=4, n_group=1,
            topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1,
        ),
    ),
    "lfm2": (
        "layer 0: .* got 'conv'",
        lambda: build("Lfm2", **_grouped, layer_types=["conv", "full_attention"]),
    ),
    "a prompt that sees itself whole": (
        "use_bidirectional_attention: expected tokens that see only those before them",
        lambda: build("Gemma3Text", **_grouped, head_dim=16, use_bidirectional_attention=True),
    ),
    "a window that only the configuration knows": (
        "MoshiForCausalLM, whose configuration names a window of 8 tokens .* max_seq_len=8 or less",
        lambda: build(
            "Moshi", **_grouped, ffn_dim=96, sliding_window=WINDOW, num_codebooks=2,
        ),
    ),
    "layers in loops": (
        "n_recurrent_loops: expected layers that a step runs once, got 2",
        lambda: build("Dory", **_grouped | {"num_hidden_layers": 4}),
    ),
    "fsmt": (
        "attn_implementation: .* got FSMTForConditionalGeneration, whose attention is its own",
        lambda: build(
            "FSMT", "ForConditionalGeneration", **_bart, langs=["en", "de"],
            src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY,
        ),
    ),
    "led": (
        "LEDForConditionalGeneration, whose decoder drops it",
        lambda: build(
            "LED", "ForConditionalGeneration", **_bart, vocab_size=VOCABULARY,
            attention_window=[8], max_encoder_position_embeddings=64,
        ),
    ),
    "nllb-moe": (
        "layers.0.ffn takes the mask for one of padding",
        lambda: build(
            "NllbMoe", "ForConditionalGeneration", **_bart, vocab_size=VOCABULARY, num_experts=4,
            decoder_sparse_step=1, encoder_sparse_step=1,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", refused)
def test_a_family_that_no_mask_of_slots_serves_is_refused_at_construction(family: str) -> None:
    message, make = refused[family]
    model = make()
    with pytest.raises(ConfigurationError, match=message):
        CUDAGraphAR(model, max_seq_len=CAPACITY, driver=open_driver("emulated"))


def test_decoders_of_berts_kin_see_what_came_before_or_are_refused() -> None:
    """Transformers 5.17 let a prompt of MegatronBert see itself as a whole; 5.24 does not."""
    model = build("MegatronBert", **_named, is_decoder=True)
    prompt = make_prompt(5)
    options: dict[str, Any] = {"max_seq_len": CAPACITY, "driver": open_driver("emulated")}
    if decoder_stack.masks_causally(model):
        expected = eager_tokens(model, prompt, NEW)
        with CUDAGraphAR(model, **options) as runner:
            assert torch.equal(runner.generate(prompt, NEW), expected)
    else:
        with pytest.raises(ConfigurationError, match="whose forward lets a prompt see itself"):
            CUDAGraphAR(model, **options)


def test_a_window_that_only_the_configuration_knows_may_be_as_long_as_the_cache() -> None:
    model = refused["a window that only the configuration knows"][1]()
    prompt = make_prompt(3)
    with CUDAGraphAR(model, max_seq_len=WINDOW, driver=open_driver("emulated")) as runner:
        assert torch.equal(runner.generate(prompt, 5), eager_tokens(model, prompt, 5))


def test_a_model_that_does_not_write_the_last_layer_is_found_by_its_prompt() -> None:
    """Mllama's layers that look at an image are left out without one: nothing would advance."""
    model = build("MllamaText", **_grouped, cross_attention_layers=[1])
    with CUDAGraphAR(model, max_seq_len=CAPACITY, driver=open_driver("emulated")) as runner:
        with pytest.raises(ConfigurationError, match="its 5 tokens, it moved by 0: Mllama"):
            runner.capture(make_prompt(5))
        assert runner.cache.seen_tokens == 0
        assert runner.captures == 0


def test_a_model_that_leaves_out_a_layer_before_the_last_decodes_equal_tokens() -> None:
    model = build("MllamaText", **_grouped, cross_attention_layers=[0])
    prompt = make_prompt(5)
    # not captured: transformers 5.17 reads on the host whether the layer was written
    with CUDAGraphAR(model, max_seq_len=CAPACITY, capture=False) as runner:
        assert torch.equal(runner.generate(prompt, NEW), eager_tokens(model, prompt, NEW))


# ---- encoder-decoders ---------------------------------------------------------------------------


def _t5gemma() -> Any:
    side = {**_grouped, **_sliding, "head_dim": 16, "pad_token_id": 0, "dropout_rate": 0.0}
    model = build("T5Gemma", "ForConditionalGeneration", encoder=side, decoder=dict(side))
    model.generation_config.decoder_start_token_id = 2
    return model


def _theirs(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    ids: torch.Tensor = GenerationMixin.generate(
        model, **inputs, max_new_tokens=NEW, do_sample=False
    )
    return ids


@pytest.mark.parametrize("options", [{}, {"exact_encoder": True}, {"prefill_chunk_size": 2}])
def test_a_decoder_with_a_window_hides_what_left_it(options: dict[str, Any]) -> None:
    """T5Gemma: a mask for each type of layer; the decoder goes past its window in replays."""
    model = _t5gemma()
    ids = make_prompt(11, batch=2)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    begin = torch.tensor([[2, 7, 11, 5, 9], [2, 9, 4, 8, 3]])
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": begin}
    expected = _theirs(model, inputs)
    with CUDAGraphAR(
        model, max_seq_len=CAPACITY, encoder_len=16, batch_size=2, **options,
        driver=open_driver("emulated"),
    ) as runner:  # fmt: skip
        found = runner.generate(ids, NEW, attention_mask=mask, decoder_input_ids=begin)
        assert torch.equal(found, expected)
        assert runner.execution == "graph"


def test_a_model_that_passes_on_what_its_encoder_routed_needs_none_of_it() -> None:
    """Switch Transformers; its experts are chosen on the host, so no graph is possible."""
    sizes: dict[str, Any] = {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_decoder_layers": 2,
    }
    model = build(
        "SwitchTransformers", "ForConditionalGeneration", **sizes, num_heads=4, num_experts=4,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, vocab_size=VOCABULARY,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model.generation_config.decoder_start_token_id = 0
    ids = make_prompt(7)
    expected = _theirs(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    options: dict[str, Any] = {"max_seq_len": CAPACITY, "encoder_len": 8}
    runner = CUDAGraphAR(model, **options, driver=open_driver("emulated"))
    with runner, pytest.raises(CaptureError):
        runner.generate(ids, NEW)
    with CUDAGraphAR(model, **options, capture=False) as eager:
        assert torch.equal(eager.generate(ids, NEW), expected)
