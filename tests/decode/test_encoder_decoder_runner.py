"""CUDAGraphAR around encoder-decoders: equal to eager, whatever the encoder's length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.decode_models import device_of
from helpers.encoder_decoder_models import (
    FAMILIES,
    FRAMES,
    LAYERS,
    START,
    VOCABULARY,
    eager_ids,
    eager_logits,
    encoder_inputs,
    make_encoder_decoder,
)

from graphcore.decode import CUDAGraphAR, EncoderDecoderKVCache
from graphcore.driver import Driver
from graphcore.driver.records import NodeKind
from graphcore.errors import CapacityError, ConfigurationError, LifecycleError

NEW = 20
ENCODER = 12


def make_runner(driver: Driver, family: str = "t5", **options: Any) -> CUDAGraphAR:
    model = make_encoder_decoder(family, device=device_of(driver))
    sizes = {"max_seq_len": 32, "encoder_len": ENCODER, "batch_size": 2}
    return CUDAGraphAR(model, driver=driver, **(sizes | options))


def inputs_for(runner: CUDAGraphAR, family: str, tokens: int = 7, **options: Any) -> dict[str, Any]:
    rows = runner.cache.batch_size
    return encoder_inputs(family, tokens, batch=rows, device=str(runner.cache.device), **options)


def generated(runner: CUDAGraphAR, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
    ids = inputs.get("input_ids")
    others = {name: value for name, value in inputs.items() if name != "input_ids"}
    return runner.generate(ids, NEW, **others, **options)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, bound: float = 1e-5) -> None:
    """``bound`` of the largest logit: other kernels sum in another order."""
    error = float((actual.double() - expected.double()).abs().max())
    assert error <= bound * max(1.0, float(expected.abs().max()))


@pytest.fixture
def runner(graphcore_driver: Driver) -> Any:
    with make_runner(graphcore_driver) as made:
        yield made


# ---- equal to eager -----------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_unequal_length_with_padding_decode_as_transformers_does_through_one_graph(
    graphcore_driver: Driver, family: str, attention: str
) -> None:
    with make_runner(graphcore_driver, family) as runner:
        runner.model.set_attn_implementation(attention)
        addresses = {name: t.data_ptr() for name, t in runner.cache.named_tensors().items()}
        decoded = []
        for tokens, padded, seed in ((7, 2, 1), (ENCODER, 0, 2), (3, 1, 3)):
            inputs = inputs_for(runner, family, tokens, padded=padded, seed=seed)
            decoded.append(generated(runner, inputs))
            assert torch.equal(decoded[-1], eager_ids(runner.model, inputs, NEW))
            assert runner.cache.seen_tokens == int(runner.position) == 1 + NEW
        assert not torch.equal(decoded[0], decoded[1])
        assert runner.captures == 1
        assert runner.execution == "graph"
        now = {name: t.data_ptr() for name, t in runner.cache.named_tensors().items()}
        assert now == addresses


@pytest.mark.parametrize("exact", [False, True], ids=["padded", "exact"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_at_every_position_are_those_of_one_forward_without_a_cache(
    graphcore_driver: Driver, family: str, exact: bool
) -> None:
    with make_runner(graphcore_driver, family, exact_encoder=exact) as runner:
        inputs = inputs_for(runner, family, padded=2)
        generator = torch.Generator().manual_seed(5)
        ids = torch.randint(3, VOCABULARY, (2, 24), generator=generator)
        ids[:, 0] = START
        ids = ids.to(runner.cache.device)
        expected = eager_logits(runner.model, inputs, ids)
        runner.capture(**({"input_ids": None} | inputs))
        assert_close(runner.logits, expected[:, 0])
        for position in range(1, 24):
            runner.logits.fill_(float("nan"))
            runner.replay(ids[:, position])
            assert_close(runner.logits, expected[:, position])
        assert runner.captures == 1
        # each position is another question: a step that was frozen at one would fail
        assert not torch.allclose(expected[:, 5], expected[:, 20], atol=1e-2)


@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_bfloat16_logits_stay_near_those_of_one_forward_without_a_cache(
    graphcore_driver: Driver, family: str
) -> None:
    model = make_encoder_decoder(family, device=device_of(graphcore_driver), dtype=torch.bfloat16)
    inputs = encoder_inputs(family, batch=2, padded=2, device=str(model.device))
    if family == "whisper":
        inputs = {name: value.to(torch.bfloat16) for name, value in inputs.items()}
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(5))
    ids[:, 0] = START
    ids = ids.to(model.device)
    expected = eager_logits(model, inputs, ids)
    with CUDAGraphAR(
        model, max_seq_len=32, encoder_len=ENCODER, batch_size=2, driver=graphcore_driver
    ) as runner:
        assert runner.cache.dtype == runner.cache.encoder_half.dtype == torch.bfloat16
        runner.capture(**({"input_ids": None} | inputs))
        for position in range(1, 12):
            runner.replay(ids[:, position])
            assert_close(runner.logits, expected[:, position], 5e-2)


def test_an_exact_encoder_has_a_graph_for_each_length_and_uses_it_again(
    graphcore_driver: Driver,
) -> None:
    with make_runner(graphcore_driver, exact_encoder=True) as runner:
        for tokens, padded, captures in ((7, 0, 1), (5, 0, 2), (7, 0, 2), (7, 1, 3)):
            inputs = inputs_for(runner, "t5", tokens, padded=padded, seed=captures)
            assert torch.equal(generated(runner, inputs), eager_ids(runner.model, inputs, NEW))
            assert runner.captures == captures


def test_whisper_is_read_exactly_since_its_cross_attention_takes_no_mask(
    graphcore_driver: Driver,
) -> None:
    with make_runner(graphcore_driver, "whisper", encoder_len=None) as runner:
        assert runner.cache.encoder_len == FRAMES
        features = inputs_for(runner, "whisper")["input_features"]
        by_position = runner.generate(features, NEW)
        assert torch.equal(by_position, runner.generate(None, NEW, input_features=features))
        assert runner._step.key == (
            ("cross K/V", "written"),
            ("encoder", FRAMES),
            ("masked", False),
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_decoder_may_begin_with_a_longer_prompt(graphcore_driver: Driver, family: str) -> None:
    with make_runner(graphcore_driver, family) as runner:
        inputs = inputs_for(runner, family)
        begin = torch.tensor([[START, 11, 12, 13], [START, 21, 22, 23]]).to(runner.cache.device)
        decoded = generated(runner, inputs, decoder_input_ids=begin)
        expected = eager_ids(runner.model, inputs, NEW, decoder_input_ids=begin)
        assert torch.equal(decoded, expected)
        assert torch.equal(decoded[:, :4], begin)


def test_the_start_token_is_put_before_a_decoder_prompt_as_transformers_does(
    runner: CUDAGraphAR,
) -> None:
    inputs = inputs_for(runner, "t5")
    begin = torch.tensor([[11, 12], [21, 22]]).to(runner.cache.device)
    decoded = generated(runner, inputs, decoder_input_ids=begin)
    assert decoded[:, :3].tolist() == [[START, 11, 12], [START, 21, 22]]
    assert torch.equal(decoded, eager_ids(runner.model, inputs, NEW, decoder_input_ids=begin))


@pytest.mark.parametrize("form", ["states", "tuple", "output"])
def test_an_encoders_output_may_be_given_instead_of_its_input(
    runner: CUDAGraphAR, form: str
) -> None:
    inputs = inputs_for(runner, "t5", padded=2)
    with torch.no_grad():
        output = runner.model.get_encoder()(**inputs)
    given = {"states": output[0], "tuple": (output[0],), "output": output}[form]
    decoded = runner.generate(
        None, NEW, attention_mask=inputs["attention_mask"], encoder_outputs=given
    )
    assert torch.equal(decoded, eager_ids(runner.model, inputs, NEW))


def test_streamed_and_eager_decoding_and_one_launch_give_the_same_tokens(
    graphcore_driver: Driver,
) -> None:
    with make_runner(graphcore_driver, "bart") as runner:
        inputs = inputs_for(runner, "bart", padded=1)
        expected = generated(runner, inputs)
        streamed = torch.stack(list(runner.stream(max_new_tokens=NEW, **inputs)), dim=1)
        assert torch.equal(streamed, expected[:, 1:].cpu())
        launched = runner.generate_in_one_launch(max_new_tokens=NEW, **inputs)
        assert torch.equal(launched, expected)
    with make_runner(graphcore_driver, "bart", capture=False) as eager:
        assert torch.equal(generated(eager, inputs), expected)
        assert (eager.execution, eager.captures) == ("eager", 0)


def test_a_narrow_self_half_works_beside_a_cross_half_in_the_models_dtype(
    graphcore_driver: Driver,
) -> None:
    device = device_of(graphcore_driver)
    model = make_encoder_decoder(device=device)
    inputs = encoder_inputs("t5", batch=2, padded=2, device=device)
    decoded = []
    for capture in (True, False):
        cache = EncoderDecoderKVCache.for_model(
            model, 32, ENCODER, batch_size=2, dtype=torch.bfloat16
        )
        assert cache.dtype == torch.bfloat16
        assert cache.encoder_half.dtype == torch.float32
        with CUDAGraphAR(model, cache, driver=graphcore_driver, capture=capture) as runner:
            decoded.append(generated(runner, inputs))
    assert torch.equal(decoded[0], decoded[1])


@pytest.mark.parametrize("exact", [False, True], ids=["padded", "exact"])
@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_the_step_is_one_compiled_region_for_torch(family: str, exact: bool) -> None:
    torch._dynamo.reset()
    with CUDAGraphAR(
        make_encoder_decoder(family),
        max_seq_len=32,
        encoder_len=ENCODER,
        capture=False,
        exact_encoder=exact,
    ) as runner:
        inputs = {"input_ids": None} | encoder_inputs(family)
        runner.capture(**inputs)
        for token in (5, 6):
            runner.replay(token)
        expected = runner.logits.clone()
        runner.cache.rewind(1)
        step = torch.compile(runner._step.run, backend="eager", fullgraph=True)
        for token in (5, 6):
            runner._step.force(token)
            with torch.no_grad():
                step()
        assert torch.equal(runner.logits, expected)
        assert int(runner.position) == 3
    torch._dynamo.reset()


# ---- cross K/V are written once, and their flag is in the key -----------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_captured_step_projects_and_writes_no_cross_keys_or_values(
    graphcore_driver: Driver, family: str
) -> None:
    with make_runner(graphcore_driver, family) as runner:
        calls: list[str] = []
        cross = [
            (name, module)
            for name, module in runner.model.get_decoder().named_modules()
            if ("EncDec" in name or "encoder_attn" in name)
            and name.rpartition(".")[2] in ("k", "v", "k_proj", "v_proj")
        ]
        assert len(cross) == 2 * LAYERS
        for name, module in cross:
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
        runner.capture(**({"input_ids": None} | inputs_for(runner, family)))
        assert len(calls) == 2 * LAYERS  # the prompt; neither the warm-up nor the capture
        labels = [node.label or "" for node in runner.graph.snapshot().nodes]
        read = [label for label in labels if "EncDec" in label or "encoder_attn" in label]
        assert any(label.endswith(("/q", "/q_proj")) for label in read)
        assert not [label for label in read if label.endswith(("/k", "/v", "k_proj", "v_proj"))]
        before = [t.clone() for t in runner.cache.encoder_half.named_tensors().values()]
        for _ in range(3):
            runner.replay()
        after = runner.cache.encoder_half.named_tensors().values()
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_a_step_depends_on_what_the_cross_half_holds(runner: CUDAGraphAR) -> None:
    inputs = inputs_for(runner, "t5")
    runner.capture(**inputs)
    runner.replay(5)
    expected = runner.logits.clone()
    runner.capture(**inputs)
    for layer in runner.cache.encoder_half.layers:
        layer.values.mul_(2.0)
    runner.replay(5)
    assert not torch.allclose(runner.logits, expected, atol=1e-3)


def test_slots_behind_the_encoder_change_nothing(runner: CUDAGraphAR) -> None:
    inputs = inputs_for(runner, "t5", 7)
    runner.capture(**inputs)
    runner.replay(5)
    expected = runner.logits.clone()
    for filler in (1000.0, -1000.0):
        runner.capture(**inputs)
        for layer in runner.cache.encoder_half.layers:
            layer._keys[:, :, 7:].fill_(filler)
            layer._values[:, :, 7:].fill_(filler)
        runner.replay(5)
        assert torch.equal(runner.logits, expected)


def test_the_key_says_whether_the_cross_half_is_written(runner: CUDAGraphAR) -> None:
    missing = (("cross K/V", "not written"),)
    assert runner._step.key == missing
    runner.capture(**inputs_for(runner, "t5"))
    assert runner._step.key == (("cross K/V", "written"), ("encoder", "padded"))
    runner.cache.forget_encoder()
    assert runner._step.key == missing


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("how", ["reset", "forgotten", "written by another runner"])
def test_a_forced_token_does_not_go_on_without_the_encoder_it_was_for(
    graphcore_driver: Driver, how: str, capture: bool
) -> None:
    with make_runner(graphcore_driver, capture=capture) as runner:
        runner.capture(**inputs_for(runner, "t5"))
        if how == "reset":
            runner.cache.reset()
        elif how == "forgotten":
            runner.cache.forget_encoder()
        else:
            with CUDAGraphAR(
                runner.model, runner.cache, driver=graphcore_driver, capture=capture
            ) as other:
                other.capture(**inputs_for(runner, "t5", 5, seed=9))
        held = int(runner.position)
        with pytest.raises(LifecycleError, match="cross K/V: expected"):
            runner.replay(5)
        assert int(runner.position) == runner.cache.seen_tokens == held
        inputs = inputs_for(runner, "t5", 4, seed=4)
        assert torch.equal(generated(runner, inputs), eager_ids(runner.model, inputs, NEW))


def test_decoder_tokens_alone_continue_behind_what_the_cache_holds(runner: CUDAGraphAR) -> None:
    inputs = inputs_for(runner, "t5")
    runner.capture(**inputs)
    more = torch.tensor([[11, 12, 13], [21, 22, 23]]).to(runner.cache.device)
    runner.capture(decoder_input_ids=more)
    begin = torch.full_like(more[:, :1], START)
    expected = eager_logits(runner.model, inputs, torch.cat([begin, more], dim=1))[:, -1]
    assert_close(runner.logits, expected)
    assert (runner.cache.seen_tokens, runner.captures) == (4, 1)
    continued = runner.generate(None, 4, decoder_input_ids=more, keep_cache=True)
    assert continued.shape == (2, 7)
    assert runner.cache.seen_tokens == 11


def test_a_new_encoder_prompt_begins_a_generation(runner: CUDAGraphAR) -> None:
    for seed in (1, 2):
        runner.capture(**inputs_for(runner, "t5", seed=seed))
        assert runner.cache.seen_tokens == 1
    with pytest.raises(ConfigurationError, match="keep_cache: expected False with an encoder"):
        generated(runner, inputs_for(runner, "t5"), keep_cache=True)


# ---- other caches, failures ---------------------------------------------------------------------


def test_fresh_caches_between_calls_are_taken_over(runner: CUDAGraphAR) -> None:
    for seed in (1, 2):
        cache = EncoderDecoderKVCache.for_model(runner.model, 32, ENCODER, batch_size=2)
        inputs = inputs_for(runner, "t5", 4 + seed, seed=seed)
        assert torch.equal(
            generated(runner, inputs, cache=cache), eager_ids(runner.model, inputs, NEW)
        )
        assert runner.cache is cache
    runner.use(EncoderDecoderKVCache.for_model(runner.model, 32, ENCODER, batch_size=2))
    with pytest.raises(LifecycleError, match="expected a prompt"):
        runner.replay(5)


def test_a_rebound_cross_buffer_is_named(runner: CUDAGraphAR) -> None:
    runner.capture(**inputs_for(runner, "t5"))
    layer = runner.cache.cross_attention_cache.layers[1]
    layer.keys = torch.zeros_like(layer._keys)
    with pytest.raises(LifecycleError, match="layer 1 cross keys"):
        runner.replay()


def test_an_encoder_prompt_that_fails_leaves_a_runner_that_works(
    runner: CUDAGraphAR, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_for(runner, "t5")
    runner.capture(**inputs)

    def fail(*_: Any) -> None:
        raise RuntimeError("no decoder today")

    with monkeypatch.context() as patch:
        patch.setattr(runner.model.lm_head, "forward", fail)
        with pytest.raises(RuntimeError, match="no decoder today"):
            runner.capture(**inputs)
    with pytest.raises(LifecycleError, match="prompt"):
        runner.replay()
    assert torch.equal(generated(runner, inputs), eager_ids(runner.model, inputs, NEW))


def test_the_graph_keeps_both_halves_by_name_and_allocates_nothing(runner: CUDAGraphAR) -> None:
    runner.capture(**inputs_for(runner, "t5"))
    assert NodeKind.ALLOC not in {node.kind for node in runner.graph.snapshot().nodes}
    names = runner.named_tensors()
    assert {"layer 1 keys", "layer 1 cross keys", "cross length", "encoder mask"} <= set(names)
    kept = {id(owner.object) for owner in runner.executable.owners}
    assert {name for name, tensor in names.items() if id(tensor) not in kept} == set()


# ---- refusals -----------------------------------------------------------------------------------


def _ids(*shape: int) -> torch.Tensor:
    return torch.full(shape, 5)


_refused: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "nothing": ({}, ConfigurationError, "input_ids: expected the encoder's input, or decoder_"),
    "empty": ({"input_ids": _ids(2, 0)}, ConfigurationError, "at least one token"),
    "too long": ({"input_ids": _ids(2, 13)}, CapacityError, "13 tokens; encoder_len is 12"),
    "another batch": ({"input_ids": _ids(3, 4)}, ConfigurationError, "expected batch 2"),
    "an id": ({"input_ids": _ids(2, 4) * 50}, ConfigurationError, "expected ids from 0 to 96"),
    "floats": ({"input_ids": torch.ones(2, 4)}, ConfigurationError, "torch.int64 tensor"),
    "unknown": (
        {"input_ids": _ids(2, 4), "pixel_values": _ids(2, 4)},
        ConfigurationError,
        "pixel_values: expected an input of T5ForConditionalGeneration's encoder",
    ),
    "mask of another shape": (
        {"input_ids": _ids(2, 4), "attention_mask": _ids(2, 5)},
        ConfigurationError,
        r"attention_mask: expected the shape of input_ids \[2, 4\]",
    ),
    "a mask that is added": (
        {"input_ids": _ids(2, 4), "attention_mask": torch.tensor([[0.0] * 4, [0.0, 0, 0, -1e9]])},
        ConfigurationError,
        "attention_mask: expected ones for tokens and zeros for padding",
    ),
    "a row of padding": (
        {"input_ids": _ids(2, 4), "attention_mask": torch.tensor([[1] * 4, [0] * 4])},
        ConfigurationError,
        "none in row 1",
    ),
    "decoder ids of another batch": (
        {"input_ids": _ids(2, 4), "decoder_input_ids": _ids(1, 4)},
        ConfigurationError,
        "decoder_input_ids: expected batch 2",
    ),
    "a decoder prompt too long": (
        {"input_ids": _ids(2, 4), "decoder_input_ids": _ids(2, 40)},
        CapacityError,
        "max_seq_len is 32",
    ),
    "padding in the decoder": (
        {"input_ids": _ids(2, 4), "decoder_attention_mask": torch.zeros(2, 1)},
        ConfigurationError,
        "decoder_attention_mask: expected decoder_input_ids with it",
    ),
    "no states": (
        {"encoder_outputs": torch.zeros(2, 0, 32)},
        ConfigurationError,
        "encoder output: expected 2 rows of at least one token",
    ),
    "states too long": (
        {"encoder_outputs": torch.zeros(2, 13, 32)},
        CapacityError,
        "encoder output: 13 tokens; encoder_len is 12",
    ),
}


@pytest.mark.parametrize("case", _refused)
def test_what_cannot_be_decoded_is_refused(case: str) -> None:
    given, error, message = _refused[case]
    with CUDAGraphAR(make_encoder_decoder(), max_seq_len=32, encoder_len=12, batch_size=2) as made:
        with pytest.raises(error, match=message):
            made.capture(**given)
        assert made.captures == 0
        assert made.cache.seen_tokens == 0


def test_a_full_cache_is_refused_before_the_launch(runner: CUDAGraphAR) -> None:
    runner.capture(**inputs_for(runner, "t5"))
    for _ in range(31):
        runner.replay()
    with pytest.raises(CapacityError, match="max_seq_len is 32 tokens and 32 are held"):
        runner.replay()
    assert int(runner.position) == 32
