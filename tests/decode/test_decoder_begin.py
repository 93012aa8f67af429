"""Decoder prompts of unequal length in one batch: every row decodes what it decodes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.decode_models import device_of
from helpers.encoder_decoder_models import (
    START,
    VOCABULARY,
    eager_ids,
    encoder_inputs,
    make_encoder_decoder,
)

from graphcore.decode import CUDAGraphAR, Sampling, generate
from graphcore.decode.decoder_begin import begin_ids
from graphcore.driver import Driver
from graphcore.errors import ConfigurationError

NEW = 10
LENGTHS = (2, 6, 4)
PAD = VOCABULARY + 3  # no id of the vocabulary: what a pad holds does not matter


def make_runner(driver: Driver, family: str = "t5", **options: Any) -> CUDAGraphAR:
    model = make_encoder_decoder(family, device=device_of(driver))
    given = {"max_seq_len": 40, "encoder_len": 12, "batch_size": len(LENGTHS)} | options
    return CUDAGraphAR(model, driver=driver, **given)


def encoder_side(model: Any, family: str, seed: int = 0) -> dict[str, torch.Tensor]:
    return encoder_inputs(family, 7, batch=3, padded=2, seed=seed, device=str(model.device))


def rows_of(device: str, seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, VOCABULARY, (1, length), generator=generator) for length in lengths]
    for row in rows:
        row[:, 0] = START
    return [row.to(device) for row in rows]


def padded(rows: list[torch.Tensor], side: str = "left") -> torch.Tensor:
    """One batch of ``rows``; on the side "between" the pads follow each row's first token."""
    longest = max(row.shape[1] for row in rows)
    batch = []
    for row in rows:
        fill = torch.full((1, longest - row.shape[1]), PAD, device=row.device)
        at = {"left": 0, "between": 1, "right": row.shape[1]}[side]
        batch.append(torch.cat([row[:, :at], fill, row[:, at:]], dim=1))
    return torch.cat(batch)


def alone(model: Any, inputs: dict[str, Any], rows: list[torch.Tensor]) -> torch.Tensor:
    """New ids ``[batch, new]`` of each row decoded alone by transformers."""
    new = []
    for index, row in enumerate(rows):
        mine = {name: value[index : index + 1] for name, value in inputs.items()}
        ids = eager_ids(model, mine, NEW, decoder_input_ids=row)
        new.append(ids[:, row.shape[1] :])
    return torch.cat(new)


@pytest.mark.parametrize(
    ("family", "exact", "attention"),
    [
        ("t5", False, "sdpa"),
        ("t5", True, "eager"),
        ("narrow-cross", False, "eager"),
        ("whisper", True, "sdpa"),
    ],
)
def test_rows_of_unequal_length_decode_what_each_decodes_alone_through_a_second_graph(
    graphcore_driver: Driver, family: str, exact: bool, attention: str
) -> None:
    with make_runner(graphcore_driver, family, exact_encoder=exact) as runner:
        model = runner.model
        model.set_attn_implementation(attention)
        inputs = {"input_ids": None} | encoder_side(model, family)
        mine = {name: value for name, value in inputs.items() if value is not None}
        rows = rows_of(str(model.device))
        begin = padded(rows)
        mask = (begin != PAD).long()
        plain = rows_of(str(model.device), seed=1, lengths=(3, 3, 3))
        unpadded = runner.generate(max_new_tokens=NEW, decoder_input_ids=torch.cat(plain), **inputs)
        assert torch.equal(unpadded[:, 3:], alone(model, mine, plain))
        for seed in (0, 2):  # the second one through the same graph
            rows = rows_of(str(model.device), seed=seed)
            begin = padded(rows)
            ids = runner.generate(
                max_new_tokens=NEW,
                decoder_input_ids=begin,
                decoder_attention_mask=mask,
                **inputs,
            )
            assert torch.equal(ids[:, :6], begin)
            assert torch.equal(ids[:, 6:], alone(model, mine, rows))
            assert runner.captures == 2
        assert runner.cache.seen_tokens == int(runner.position) == 6 + NEW
        # the control: taken for tokens, the pads of shorter rows would be seen
        legal = begin.where(begin != PAD, 3)
        seen = runner.generate(max_new_tokens=NEW, decoder_input_ids=legal, **inputs)
        assert not torch.equal(seen[:, 6:], ids[:, 6:])


def test_transformers_own_generate_gives_the_same_ids(graphcore_driver: Driver) -> None:
    with make_runner(graphcore_driver) as runner:
        inputs = encoder_side(runner.model, "t5")
        begin = padded(rows_of(str(runner.cache.device)))
        legal = begin.where(begin != PAD, 0)
        options = {"decoder_input_ids": legal, "decoder_attention_mask": (begin != PAD).long()}
        expected = eager_ids(runner.model, inputs, NEW, **options)
        assert torch.equal(runner.generate(max_new_tokens=NEW, **inputs, **options), expected)


@pytest.mark.parametrize("side", ["right", "between"])
def test_padding_may_stand_anywhere(graphcore_driver: Driver, side: str) -> None:
    with make_runner(graphcore_driver) as runner:
        inputs = encoder_side(runner.model, "t5")
        rows = rows_of(str(runner.cache.device))
        begin = padded(rows, side)
        ids = runner.generate(
            max_new_tokens=NEW,
            decoder_input_ids=begin,
            decoder_attention_mask=begin != PAD,
            **inputs,
        )
        assert torch.equal(ids[:, :6], begin)
        assert torch.equal(ids[:, 6:], alone(runner.model, inputs, rows))


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk_size": 2, "capture_prefill": True},
        {"capture_first_step": True},
        {"sampling": Sampling(temperature=0.7)},
        {"capture": False},
    ],
    ids=["captured chunks", "captured first step", "sampling", "eager"],
)
def test_however_they_are_decoded_the_ids_are_the_same(
    graphcore_driver: Driver, options: dict[str, Any]
) -> None:
    with make_runner(graphcore_driver, **options) as runner:
        inputs = encoder_side(runner.model, "t5")
        begin = padded(rows_of(str(runner.cache.device)))
        given = {"decoder_input_ids": begin, "decoder_attention_mask": begin != PAD, **inputs}
        if "sampling" in options:
            with make_runner(graphcore_driver, capture=False, **options) as eager:
                expected = eager.generate(max_new_tokens=NEW, seed=4, **given)
        else:
            rows = rows_of(str(runner.cache.device))
            new = alone(runner.model, inputs, rows)
            expected = torch.cat([begin, new], dim=1)
        for _ in range(2):
            assert torch.equal(runner.generate(max_new_tokens=NEW, seed=4, **given), expected)
        launched = runner.generate_in_one_launch(max_new_tokens=NEW, seed=4, **given)
        assert torch.equal(launched, expected)
        streamed = torch.stack(list(runner.stream(max_new_tokens=NEW, seed=4, **given)), dim=1)
        assert torch.equal(streamed, expected[:, 6:].cpu())


def test_decoder_tokens_of_unequal_length_continue_behind_what_is_held(
    graphcore_driver: Driver,
) -> None:
    with make_runner(graphcore_driver, "whisper") as runner:
        inputs = encoder_side(runner.model, "whisper")
        device = str(runner.cache.device)
        first, more = rows_of(device), rows_of(device, 5, (3, 1, 2))
        begin, behind = padded(first), padded(more)
        runner.capture(decoder_input_ids=begin, decoder_attention_mask=begin != PAD, **inputs)
        ids = runner.generate(
            None,
            NEW,
            keep_cache=True,
            decoder_input_ids=behind,
            decoder_attention_mask=behind != PAD,
        )
        whole = [torch.cat(pair, dim=1) for pair in zip(first, more, strict=True)]
        assert torch.equal(ids[:, 3:], alone(runner.model, inputs, whole))
        # the control: pads that counted would move the rows apart
        assert runner._step.key[-1] == "ragged"
        # emptied, the cache forgets its pads: a plain prompt uses the plain graph
        runner.capture(**inputs)
        assert "ragged" not in runner._step.key


def test_pads_between_tokens_are_refused_where_distances_are_counted_in_slots(
    graphcore_driver: Driver,
) -> None:
    with make_runner(graphcore_driver) as runner:
        inputs = encoder_side(runner.model, "t5")
        rows = rows_of(str(runner.cache.device))
        begin = padded(rows)
        given = {"decoder_input_ids": begin, "decoder_attention_mask": begin != PAD}
        expected = torch.cat([begin, alone(runner.model, inputs, rows)], dim=1)
        runner.capture(**given, **inputs)
        with pytest.raises(ConfigurationError, match="behind the 6 tokens held, got padding: T5F"):
            runner.capture(**given)
        assert runner.cache.seen_tokens == int(runner.position) == 6
        assert torch.equal(runner.generate(max_new_tokens=NEW, **given, **inputs), expected)


def test_the_one_call_takes_them(graphcore_driver: Driver) -> None:
    model = make_encoder_decoder(device=device_of(graphcore_driver))
    inputs = encoder_side(model, "t5")
    rows = rows_of(str(model.device))
    begin = padded(rows)
    result = generate(
        model,
        inputs.pop("input_ids"),
        NEW,
        driver=graphcore_driver,
        decoder_input_ids=begin,
        decoder_attention_mask=begin != PAD,
        **inputs,
    )
    inputs = encoder_side(model, "t5")
    assert torch.equal(result.new_ids, alone(model, inputs, rows))
    assert result.execution == "graph"


def test_the_start_token_is_put_before_rows_that_begin_with_another_one() -> None:
    model = make_encoder_decoder()
    cpu = torch.device("cpu")
    ids = torch.tensor([[PAD, 11], [21, 22]])
    mask = torch.tensor([[0, 1], [1, 1]])
    begun, counts = begin_ids(model, 2, cpu, ids, mask)
    assert counts is not None
    assert begun.tolist() == [[START, PAD, 11], [START, 21, 22]]
    assert counts.int().tolist() == [[1, 0, 1], [1, 1, 1]]
    ids = torch.tensor([[PAD, START], [21, 22]])
    begun, _ = begin_ids(model, 2, cpu, ids, mask)
    assert begun.tolist() == ids.tolist(), "a row begins with the first token that counts"


def test_a_model_that_counts_positions_itself_refuses_padding_with_the_reason() -> None:
    with CUDAGraphAR(
        make_encoder_decoder("bart"), max_seq_len=32, encoder_len=12, batch_size=3
    ) as runner:
        inputs = encoder_side(runner.model, "bart")
        begin = padded(rows_of("cpu"))
        with pytest.raises(
            ConfigurationError,
            match="decoder_attention_mask: expected all ones, got padding: BartForConditional"
            "Generation counts the positions",
        ):
            runner.capture(decoder_input_ids=begin, decoder_attention_mask=begin != PAD, **inputs)
        assert (runner.captures, runner.cache.seen_tokens) == (0, 0)
        legal = begin.where(begin != PAD, 3)
        ones = torch.ones_like(legal)
        runner.capture(decoder_input_ids=legal, decoder_attention_mask=ones, **inputs)
        assert runner.captures == 1


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(3, 5), r"decoder_attention_mask: expected the shape of decoder_input_ids"),
        (torch.full((3, 6), 2), "expected ones for tokens and zeros for padding"),
        (torch.tensor([[1] * 6, [0] * 6, [1] * 6]), r"none in rows \[1\]"),
    ],
    ids=["another shape", "other values", "a row of padding"],
)
def test_masks_that_are_none_are_refused(mask: torch.Tensor, message: str) -> None:
    with CUDAGraphAR(
        make_encoder_decoder(), max_seq_len=32, encoder_len=12, batch_size=3
    ) as runner:
        with pytest.raises(ConfigurationError, match=message):
            runner.capture(
                decoder_input_ids=torch.full((3, 6), START),
                decoder_attention_mask=mask,
                **encoder_side(runner.model, "t5"),
            )
        assert runner.captures == 0
