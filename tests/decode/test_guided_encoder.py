"""Guidance with encoder-decoders: two encoder prompts, one decoder token, one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.decode_models import device_of
from helpers.encoder_decoder_models import (
    FAMILIES,
    START,
    VOCABULARY,
    eager_ids,
    eager_logits,
    encoder_inputs,
    make_encoder_decoder,
)

from graphcore.decode import CUDAGraphAR, EncoderDecoderKVCache, Guidance, generate
from graphcore.decode.guidance import Guide
from graphcore.driver import Driver
from graphcore.errors import ConfigurationError, LifecycleError

NEW = 12
ENCODER = 12
SCALE = 3.0


def make_runner(driver: Driver, family: str = "t5", **options: Any) -> CUDAGraphAR:
    model = make_encoder_decoder(family, device=device_of(driver))
    given = {"max_seq_len": 32, "encoder_len": ENCODER, "batch_size": 2} | options
    return CUDAGraphAR(model, driver=driver, **({"guidance": Guidance(SCALE)} | given))


def branches(family: str, device: str, batch: int = 2) -> list[dict[str, torch.Tensor]]:
    """What the encoder takes in either branch; the two differ in length."""
    return [
        encoder_inputs(family, tokens, batch=batch, padded=padded, seed=seed, device=device)
        for tokens, padded, seed in ((7, 2, 1), (4, 1, 9))
    ]


def given(mine: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Both branches as a runner takes them."""
    return {"input_ids": None, **mine, **{f"negative_{name}": v for name, v in other.items()}}


def by_hand(
    model: Any,
    pair: list[dict[str, Any]],
    new: int = NEW,
    scale: float = SCALE,
    begin: torch.Tensor | None = None,
) -> torch.Tensor:
    """Greedy ids of two whole forwards, without a cache, before each token."""
    guide = Guide(Guidance(scale), model.device)
    rows = next(iter(pair[0].values())).shape[0]
    ids = torch.full((rows, 1), START, device=model.device) if begin is None else begin
    for _ in range(new):
        wanted, other = (eager_logits(model, inputs, ids)[:, -1] for inputs in pair)
        ids = torch.cat([ids, guide.combine(wanted, other).argmax(-1, keepdim=True)], dim=1)
    return ids


@pytest.mark.parametrize("exact", [False, True], ids=["padded", "exact"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_guided_generation_is_that_of_two_forwards_of_each_branch(
    graphcore_driver: Driver, family: str, exact: bool
) -> None:
    with make_runner(graphcore_driver, family, exact_encoder=exact) as runner:
        model = runner.model
        pair = branches(family, str(model.device))
        expected = by_hand(model, pair)
        ids = runner.generate(max_new_tokens=NEW, **given(*pair))
        assert torch.equal(ids, expected)
        assert (runner.execution, runner.captures) == ("graph", 1)
        assert runner.cache.batch_size == 4
        assert runner.cache.seen_tokens == int(runner.position) == 1 + NEW
        # the controls: neither branch alone, and not the other way round
        for alone in pair:
            assert not torch.equal(ids, eager_ids(model, alone, NEW))
        turned = runner.generate(max_new_tokens=NEW, **given(*reversed(pair)))
        assert torch.equal(turned, by_hand(model, list(reversed(pair))))
        assert not torch.equal(turned, ids)
        assert runner.captures == 1
        # another scale needs no other graph
        assert runner.guidance is not None
        runner.guidance.scale = 1.0
        ids = runner.generate(max_new_tokens=NEW, **given(*pair))
        assert torch.equal(ids, eager_ids(model, pair[0], NEW))
        assert runner.captures == 1


@pytest.mark.parametrize(
    "options",
    [
        {"capture_first_step": True},
        {"prefill_chunk_size": 2},
        {"capture": False},
    ],
    ids=["captured first step", "in chunks", "eager"],
)
def test_however_they_are_decoded_the_ids_are_the_same(
    graphcore_driver: Driver, options: dict[str, Any]
) -> None:
    with make_runner(graphcore_driver, "bart", **options) as runner:
        pair = branches("bart", str(runner.cache.device))
        begin = torch.tensor([[START, 11, 12], [START, 21, 22]], device=runner.cache.device)
        expected = by_hand(runner.model, pair, begin=begin)
        prompt = given(*pair) | {"decoder_input_ids": begin}
        for _ in range(2):
            assert torch.equal(runner.generate(max_new_tokens=NEW, **prompt), expected)
        assert torch.equal(runner.generate_in_one_launch(max_new_tokens=NEW, **prompt), expected)


def test_decoder_prompts_of_unequal_length_are_guided_each_as_alone(
    graphcore_driver: Driver,
) -> None:
    with make_runner(graphcore_driver) as runner:
        pair = branches("t5", str(runner.cache.device))
        rows = [[START, 11, 12, 13], [START, 21]]
        begin = torch.tensor([rows[0], [0, 0, *rows[1]]], device=runner.cache.device)
        mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]], device=runner.cache.device)
        ids = runner.generate(
            max_new_tokens=NEW,
            decoder_input_ids=begin,
            decoder_attention_mask=mask,
            **given(*pair),
        )
        for index, row in enumerate(rows):
            mine = [{name: v[index : index + 1] for name, v in each.items()} for each in pair]
            alone = by_hand(runner.model, mine, begin=torch.tensor([row]).to(begin))
            assert torch.equal(ids[index, 4:], alone[0, len(row) :])


def test_one_negative_row_serves_all_and_states_stand_in_for_inputs(
    graphcore_driver: Driver,
) -> None:
    with make_runner(graphcore_driver) as runner:
        model = runner.model
        mine, _ = branches("t5", str(model.device))
        one = encoder_inputs("t5", 4, seed=9, device=str(model.device))
        other = {name: value.expand(2, -1) for name, value in one.items()}
        expected = by_hand(model, [mine, other])
        assert torch.equal(runner.generate(max_new_tokens=NEW, **given(mine, one)), expected)
        with torch.no_grad():
            states = [model.get_encoder()(**each) for each in (mine, other)]
        made = [
            {"encoder_outputs": each, "attention_mask": inputs["attention_mask"]}
            for each, inputs in zip(states, (mine, other), strict=True)
        ]
        assert torch.equal(runner.generate(max_new_tokens=NEW, **given(*made)), expected)
        # as MusicGen has it: the other branch hears nothing
        silence = {"encoder_outputs": torch.zeros_like(states[0][0])}
        silent = runner.generate(max_new_tokens=NEW, **given(made[0], silence))
        assert not torch.equal(silent, expected)
        guide = Guide(Guidance(SCALE), model.device)
        ids = silent[:, :-1]
        with torch.no_grad():
            wanted = eager_logits(model, mine, ids)[:, -1]
            unheard = model(
                encoder_outputs=(silence["encoder_outputs"],),
                decoder_input_ids=ids,
                use_cache=False,
            ).logits[:, -1]
        assert torch.equal(silent[:, -1], guide.combine(wanted, unheard).argmax(-1))


def test_further_decoder_tokens_follow_in_both_branches(graphcore_driver: Driver) -> None:
    with make_runner(graphcore_driver) as runner:
        pair = branches("t5", str(runner.cache.device))
        runner.capture(**given(*pair))
        more = torch.tensor([[11, 12], [21, 22]], device=runner.cache.device)
        ids = runner.generate(None, NEW, keep_cache=True, decoder_input_ids=more)
        begin = torch.cat([torch.full_like(more[:, :1], START), more], dim=1)
        assert torch.equal(ids, by_hand(runner.model, pair, begin=begin)[:, 1:])
        runner.cache.forget_encoder()
        with pytest.raises(LifecycleError):
            runner.replay(5)


def test_the_one_call_makes_a_cache_for_both_branches(graphcore_driver: Driver) -> None:
    model = make_encoder_decoder(device=device_of(graphcore_driver))
    pair = branches("t5", str(model.device))
    result = generate(
        model,
        max_new_tokens=NEW,
        guidance=Guidance(SCALE),
        driver=graphcore_driver,
        **given(pair[1], pair[0]),
    )
    assert torch.equal(result.ids, by_hand(model, pair[::-1]))
    assert result.execution == "graph"


_ids = torch.full((2, 4), 5)
_refused: dict[str, tuple[dict[str, Any], str]] = {
    "no negative input": (
        {"input_ids": _ids},
        "negative_input_ids: expected the encoder's input of the unconditional branches, got none",
    ),
    "a negative input alone": (
        {"decoder_input_ids": _ids, "negative_input_ids": _ids},
        "negative_input_ids: expected none of the unconditional branches, got some",
    ),
    "inputs of two kinds": (
        {"input_ids": _ids, "negative_encoder_outputs": torch.zeros(2, 4, 32)},
        "expected inputs of one kind in both branches",
    ),
    "another batch": (
        {"input_ids": _ids, "negative_input_ids": torch.full((3, 4), 5)},
        "input_ids: expected batch 2",
    ),
    "an id": (
        {"input_ids": _ids, "negative_input_ids": _ids * VOCABULARY},
        "expected ids from 0 to",
    ),
}


@pytest.mark.parametrize("case", _refused)
def test_prompts_that_are_no_pair_are_refused(case: str) -> None:
    inputs, message = _refused[case]
    with CUDAGraphAR(
        make_encoder_decoder(),
        max_seq_len=32,
        encoder_len=ENCODER,
        batch_size=2,
        guidance=Guidance(SCALE),
    ) as runner:
        with pytest.raises(ConfigurationError, match=message):
            runner.capture(**inputs)
        assert (runner.captures, runner.cache.seen_tokens) == (0, 0)


def test_what_has_no_two_branches_is_refused() -> None:
    model = make_encoder_decoder()
    odd = EncoderDecoderKVCache.for_model(model, 32, ENCODER, batch_size=3)
    with pytest.raises(ConfigurationError, match=r"cache batch_size: expected 2 x batch rows"):
        CUDAGraphAR(model, odd, guidance=Guidance(SCALE))
    with CUDAGraphAR(model, max_seq_len=32, encoder_len=ENCODER) as plain:
        ids = _ids[:1]
        with pytest.raises(ConfigurationError, match="no such input without guidance"):
            plain.capture(ids, negative_input_ids=ids)
