"""Prompts of different length in one batch: every row decodes what it decodes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.decode_models import (
    ARCHITECTURES,
    VOCABULARY,
    device_of,
    eager_tokens,
    make_model,
    make_prompt,
)

from graphcore.decode import (
    CUDAGraphAR,
    DecodeBuckets,
    Guidance,
    Sampling,
    StaticKVCache,
    compiled_step,
    generate,
)
from graphcore.decode.compiled_step import CompiledStep
from graphcore.decode.padding import Padding, checked_mask, left_padded, of_length
from graphcore.driver import Driver, open_driver
from graphcore.errors import CapacityError, ConfigurationError

NEW = 10
LENGTHS = (2, 7, 5)
PAD = VOCABULARY + 3  # no id of the vocabulary: what a pad holds does not matter


def rows_of(lengths: tuple[int, ...], device: str, seed: int = 0) -> list[torch.Tensor]:
    return [
        make_prompt(length, device=device, seed=seed + index)
        for index, length in enumerate(lengths)
    ]


def padded(rows: list[torch.Tensor], side: str = "left") -> torch.Tensor:
    """One batch of ``rows``; on the side "between" the pads follow each row's first token."""
    longest = max(row.shape[1] for row in rows)
    batch = []
    for row in rows:
        fill = torch.full((1, longest - row.shape[1]), PAD, device=row.device)
        at = {"left": 0, "between": 1, "right": row.shape[1]}[side]
        batch.append(torch.cat([row[:, :at], fill, row[:, at:]], dim=1))
    return torch.cat(batch)


def alone(model: Any, rows: list[torch.Tensor], new: int = NEW) -> torch.Tensor:
    """New ids ``[batch, new]`` of each row decoded alone by transformers."""
    return torch.cat([eager_tokens(model, row, new)[:, row.shape[1] :] for row in rows])


def make_runner(driver: Driver, architecture: str = "llama", **options: Any) -> CUDAGraphAR:
    model = make_model(architecture, device=device_of(driver))
    given = {"max_seq_len": 40, "batch_size": len(LENGTHS)} | options
    return CUDAGraphAR(model, driver=driver, **given)


# ---- equal to each row alone --------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_left_padded_rows_decode_what_each_decodes_alone_and_what_transformers_does(
    graphcore_driver: Driver, architecture: str, attention: str
) -> None:
    with make_runner(graphcore_driver, architecture) as runner:
        model = runner.model
        model.set_attn_implementation(attention)
        rows = rows_of(LENGTHS, device_of(graphcore_driver))
        prompt = padded(rows)
        mask = (prompt != PAD).long()
        ids = runner.generate(prompt, NEW, attention_mask=mask)
        assert torch.equal(ids[:, :7], prompt)
        assert torch.equal(ids[:, 7:], alone(model, rows))
        legal = prompt.where(prompt != PAD, 0)
        theirs = model.generate(legal, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(ids[:, 7:], theirs[:, 7:])
        assert runner.execution == "graph"
        assert runner.cache.seen_tokens == int(runner.position) == 7 + NEW
        # the control: without the mask (and with ids that can be looked up) rows differ
        unmasked = runner.generate(legal, NEW)
        assert not torch.equal(unmasked[0, 7:], ids[0, 7:])


@pytest.mark.parametrize("side", ["right", "between"])
@pytest.mark.parametrize("capture", [True, False], ids=["graph", "eager"])
def test_padding_on_the_right_or_between_gives_what_each_row_gives_alone(
    graphcore_driver: Driver, side: str, capture: bool
) -> None:
    with make_runner(graphcore_driver, capture=capture) as runner:
        rows = rows_of(LENGTHS, device_of(graphcore_driver))
        prompt = padded(rows, side)
        ids = runner.generate(prompt, NEW, attention_mask=prompt != PAD)
        assert torch.equal(ids, torch.cat([prompt, alone(runner.model, rows)], dim=1))


def test_logits_of_a_padded_batch_are_those_of_each_rows_last_token_alone(
    graphcore_driver: Driver,
) -> None:
    with make_runner(graphcore_driver) as runner:
        rows = rows_of(LENGTHS, device_of(graphcore_driver))
        prompt = padded(rows)
        runner.capture(prompt, attention_mask=prompt != PAD)
        token = 5
        for fed in range(3):
            with torch.no_grad():
                more = torch.full((1, fed), token, device=prompt.device)
                expected = torch.cat(
                    [runner.model(torch.cat([row, more], dim=1)).logits[:, -1] for row in rows]
                )
            torch.testing.assert_close(runner.logits, expected, atol=1e-4, rtol=1e-4)
            runner.replay(token)


def test_a_stream_of_padded_prompts_gives_the_same_tokens(graphcore_driver: Driver) -> None:
    with make_runner(graphcore_driver) as runner:
        rows = rows_of(LENGTHS, device_of(graphcore_driver))
        prompt = padded(rows)
        tokens = list(runner.stream(prompt, NEW, attention_mask=prompt != PAD))
        assert torch.equal(torch.stack(tokens, dim=1), alone(runner.model, rows).cpu())


def test_padded_rows_end_where_each_ends_alone(graphcore_driver: Driver) -> None:
    with make_runner(graphcore_driver) as runner:
        rows = rows_of(LENGTHS, device_of(graphcore_driver))
        new = alone(runner.model, rows)
        eos = [int(row[index]) for row, index in zip(new, (2, 4, 6), strict=True)]
        prompt = padded(rows)
        mask = (prompt != PAD).long()
        ids = runner.generate(prompt, NEW, eos, eos[0], attention_mask=mask, poll_every=1)
        theirs = runner.model.generate(
            prompt.where(prompt != PAD, 0), attention_mask=mask, max_new_tokens=NEW,
            do_sample=False, eos_token_id=eos, pad_token_id=eos[0],
        )  # fmt: skip
        assert ids.shape[1] < 7 + NEW
        assert torch.equal(ids[:, 7:], theirs[:, 7:])


def test_generate_takes_padded_prompts(graphcore_driver: Driver) -> None:
    model = make_model(device=device_of(graphcore_driver))
    rows = rows_of(LENGTHS, device_of(graphcore_driver))
    prompt = padded(rows)
    result = generate(model, prompt, NEW, attention_mask=prompt != PAD, driver=graphcore_driver)
    assert (result.execution, result.captures) == ("graph", 1)
    assert torch.equal(result.new_ids, alone(model, rows))


def test_a_compiled_step_is_one_region_that_hides_pads_and_guides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled_step, "_fusing_inductor", lambda graph, inputs: graph.forward)
    driver = open_driver("emulated")
    rows = rows_of(LENGTHS, "cpu")
    prompt = padded(rows)
    with make_runner(driver, capture=False, guidance=Guidance(2.0)) as runner:
        expected = runner.generate(prompt, NEW, attention_mask=prompt != PAD)[:, 7:]
        runner.cache.reset()
        runner.capture(prompt, attention_mask=prompt != PAD)
        compiled = CompiledStep(runner._step)
        found = []
        for _ in range(NEW):
            with torch.no_grad(), runner._state.written_by(runner):
                compiled.run()
            found.append(runner.token.clone())
        assert torch.equal(torch.stack(found, dim=1), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("guided", [False, True], ids=["padded", "padded and guided"])
def test_a_captured_compiled_step_decodes_padded_and_guided_prompts(guided: bool) -> None:
    driver = open_driver("cuda")
    rows = rows_of(LENGTHS, device_of(driver))
    prompt = padded(rows)
    options = {"guidance": Guidance(2.0)} if guided else {}
    ids = []
    for compiled in (False, True):
        with make_runner(driver, compile=compiled, **options) as runner:
            ids.append(runner.generate(prompt, NEW, attention_mask=prompt != PAD))
            assert runner.execution == "graph"
    assert torch.equal(ids[0], ids[1])


@pytest.mark.parametrize("sampling", ["greedy", "penalty"])
def test_padded_prompts_in_one_launch_give_the_same_ids(
    graphcore_driver: Driver, sampling: str
) -> None:
    """A penalty counts the tokens of a row, not its pads."""
    chosen = Sampling(repetition_penalty=1.7) if sampling == "penalty" else None
    with make_runner(graphcore_driver, sampling=chosen) as runner:
        rows = rows_of(LENGTHS, device_of(graphcore_driver))
        prompt = padded(rows)
        penalty = {"repetition_penalty": 1.7} if chosen else {}
        expected = torch.cat(
            [eager_tokens(runner.model, row, NEW, **penalty)[:, row.shape[1] :] for row in rows]
        )
        for generate_ids in (runner.generate, runner.generate_in_one_launch):
            ids = generate_ids(prompt, NEW, attention_mask=prompt != PAD)
            assert torch.equal(ids, torch.cat([prompt, expected], dim=1))


def test_buckets_take_padded_prompts(graphcore_driver: Driver) -> None:
    model = make_model(device=device_of(graphcore_driver))
    rows = rows_of(LENGTHS, device_of(graphcore_driver))
    prompt = padded(rows)
    with DecodeBuckets(model, (20, 40), (2, 4), driver=graphcore_driver, progress=False) as buckets:
        for _ in range(2):
            result = buckets.generate(prompt, NEW, attention_mask=prompt != PAD)
            assert result.bucket.batch_size == 4
            assert torch.equal(result.new_ids, alone(model, rows))
        assert not buckets.runner(result.bucket).cache.padding.hidden[:, 20:].any()
        plain = make_prompt(5, batch=2, device=device_of(graphcore_driver))
        assert torch.equal(buckets.generate(plain, NEW).ids, eager_tokens(model, plain, NEW))


# ---- variants -----------------------------------------------------------------------------------


def test_padded_and_plain_prompts_in_turns_need_two_captures_in_all(
    graphcore_driver: Driver,
) -> None:
    with make_runner(graphcore_driver) as runner:
        device = device_of(graphcore_driver)
        plain = make_prompt(6, batch=3, device=device, seed=9)
        graphs = []
        for turn in range(2):
            assert torch.equal(runner.generate(plain, NEW), eager_tokens(runner.model, plain, NEW))
            graphs.append(runner.graph)
            rows = rows_of((3, 1, 4 + turn), device, seed=turn)
            prompt = padded(rows)
            ids = runner.generate(prompt, NEW, attention_mask=prompt != PAD)
            assert torch.equal(ids[:, prompt.shape[1] :], alone(runner.model, rows))
            graphs.append(runner.graph)
        assert runner.captures == 2
        assert graphs[0] is graphs[2] is not graphs[1] is graphs[3]


def test_plain_prompts_cost_no_node_more_than_before_a_padded_one_came(
    graphcore_driver: Driver,
) -> None:
    with make_runner(graphcore_driver) as runner:
        device = device_of(graphcore_driver)
        plain = make_prompt(4, batch=3, device=device)
        runner.capture(plain)
        before = len(runner.graph.snapshot().nodes)
        prompt = padded(rows_of(LENGTHS, device))
        runner.generate(prompt, 2, attention_mask=prompt != PAD)
        assert len(runner.graph.snapshot().nodes) > before
        runner.generate(plain, 2)
        assert len(runner.graph.snapshot().nodes) == before


def test_columns_of_padding_only_take_no_slots_and_need_no_second_graph(
    graphcore_driver: Driver,
) -> None:
    with make_runner(graphcore_driver, batch_size=2, max_seq_len=16) as runner:
        prompt = make_prompt(5, batch=2, device=device_of(graphcore_driver))
        wide = torch.nn.functional.pad(prompt, (12, 3), value=PAD)
        ids = runner.generate(wide, NEW, attention_mask=wide != PAD)
        assert torch.equal(ids[:, 20:], eager_tokens(runner.model, prompt, NEW)[:, 5:])
        assert torch.equal(ids[:, :20], wide)
        assert runner.cache.seen_tokens == 5 + NEW
        assert not runner.cache.padding
        runner.generate(prompt, NEW)
        assert runner.captures == 1


# ---- behind held tokens -------------------------------------------------------------------------


@pytest.mark.parametrize("second", ["padded", "plain"])
def test_a_generation_behind_padded_rows_sees_each_rows_own_tokens_only(
    graphcore_driver: Driver, second: str
) -> None:
    """The pads of the first prompt, and of the second, lie in the middle of the cache then."""
    with make_runner(graphcore_driver) as runner:
        device = device_of(graphcore_driver)
        rows = rows_of(LENGTHS, device)
        prompt = padded(rows)
        first = runner.generate(prompt, 4, attention_mask=prompt != PAD)
        more = rows_of((3, 1, 2) if second == "padded" else (2, 2, 2), device, seed=7)
        following = padded(more)
        ids = runner.generate(following, 6, attention_mask=following != PAD, keep_cache=True)
        whole = [
            torch.cat([row, decoded[None, 7:], turn], dim=1)
            for row, decoded, turn in zip(rows, first, more, strict=True)
        ]
        assert torch.equal(ids[:, following.shape[1] :], alone(runner.model, whole, 6))
        assert runner.captures == 1


def test_a_padded_prompt_behind_plain_rows_sees_all_of_them(graphcore_driver: Driver) -> None:
    with make_runner(graphcore_driver) as runner:
        device = device_of(graphcore_driver)
        plain = make_prompt(5, batch=3, device=device)
        first = runner.generate(plain, 3)
        more = rows_of((1, 4, 2), device, seed=5)
        following = padded(more)
        ids = runner.generate(following, 6, attention_mask=following != PAD, keep_cache=True)
        whole = [torch.cat([row[None], turn], 1) for row, turn in zip(first, more, strict=True)]
        assert torch.equal(ids[:, 4:], alone(runner.model, whole, 6))
        assert runner.captures == 2


@pytest.mark.parametrize("seed", range(3), ids=str)
def test_conversations_with_random_padding_are_those_of_each_row_alone(seed: int) -> None:
    """Three turns with holes anywhere, chunks replayed, and unordered work in random orders."""
    driver = open_driver("emulated", order="adversarial", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with make_runner(driver, prefill_chunk_size=3, capture_prefill=True) as runner:
        wholes = [torch.zeros(1, 0, dtype=torch.int64)] * 3
        for turn, tokens in enumerate((7, 4, 6)):
            ids = make_prompt(tokens, batch=3, seed=10 * seed + turn)
            mask = torch.rand(3, tokens, generator=generator) < 0.6
            mask[:, turn] = True
            new = runner.generate(ids, 3, attention_mask=mask, keep_cache=turn > 0)[:, tokens:]
            for row, (part, kept) in enumerate(zip(ids, mask, strict=True)):
                whole = torch.cat([wholes[row], part[kept][None]], dim=1)
                expected = eager_tokens(runner.model, whole, 3)
                assert torch.equal(new[row], expected[0, whole.shape[1] :])
                wholes[row] = expected


@pytest.mark.parametrize("how", ["reset", "rewind"])
def test_emptying_the_cache_forgets_the_padding(graphcore_driver: Driver, how: str) -> None:
    with make_runner(graphcore_driver) as runner:
        prompt = padded(rows_of(LENGTHS, device_of(graphcore_driver)))
        runner.capture(prompt, attention_mask=prompt != PAD)
        padding = runner.cache.padding
        assert padding
        assert padding.hidden.sum(dim=1).tolist() == padding.pads.tolist() == [5, 0, 2]
        addresses = padding.hidden.data_ptr(), padding.pads.data_ptr()
        runner.cache.reset() if how == "reset" else runner.cache.rewind(0)
        assert not padding
        assert not padding.hidden.any()
        assert not padding.pads.any()
        assert addresses == (padding.hidden.data_ptr(), padding.pads.data_ptr())
        plain = make_prompt(6, batch=3, device=device_of(graphcore_driver))
        runner.capture(plain)
        replays = torch.stack([runner.replay().clone() for _ in range(NEW)], dim=1)
        assert torch.equal(replays, eager_tokens(runner.model, plain, NEW)[:, 6:])


def test_a_rewind_into_a_padded_prompt_keeps_the_pads_before_it(graphcore_driver: Driver) -> None:
    with make_runner(graphcore_driver) as runner:
        device = device_of(graphcore_driver)
        rows = rows_of(LENGTHS, device)
        prompt = padded(rows)
        runner.generate(prompt, 4, attention_mask=prompt != PAD)
        runner.cache.rewind(6)
        assert runner.cache.padding.pads.tolist() == [5, 0, 2]
        last = prompt[:, 6:]
        runner.capture(last)
        replays = torch.stack([runner.replay().clone() for _ in range(NEW)], dim=1)
        assert torch.equal(replays, alone(runner.model, rows))
        runner.cache.rewind(3)
        assert runner.cache.padding.pads.tolist() == [3, 0, 2]


# ---- no trace, no NaN ---------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pads_make_no_nan_in_cache_or_logits(
    graphcore_driver: Driver, attention: str, dtype: torch.dtype
) -> None:
    device = device_of(graphcore_driver)
    model = make_model(device=device, dtype=dtype)
    model.set_attn_implementation(attention)
    given = {"max_seq_len": 24, "batch_size": 3, "driver": graphcore_driver}
    with CUDAGraphAR(model, **given) as runner:
        for layer in runner.cache.layers:  # what an earlier user may have left
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))
        prompt = padded(rows_of(LENGTHS, device))
        runner.generate(prompt, 4, attention_mask=prompt != PAD)
        assert not runner.logits.isnan().any()
        for layer in runner.cache.layers:
            assert not layer.keys.isnan().any()
            assert not layer.values.isnan().any()


def test_what_pad_slots_hold_changes_no_logit(graphcore_driver: Driver) -> None:
    with make_runner(graphcore_driver) as runner:
        prompt = padded(rows_of(LENGTHS, device_of(graphcore_driver)))
        mask = prompt != PAD

        def logits(filled_with: float | None) -> torch.Tensor:
            runner.cache.reset()
            runner.capture(prompt, attention_mask=mask)
            if filled_with is not None:
                for layer in runner.cache.layers:
                    hidden = ~mask[:, None, :, None]
                    layer.keys[:, :, :7].masked_fill_(hidden, filled_with)
                    layer.values[:, :, :7].masked_fill_(hidden, filled_with)
            runner.replay(4)
            runner.replay(9)
            return runner.logits.clone()

        expected = logits(None)
        assert torch.equal(logits(1000.0), expected)
        assert torch.equal(logits(-1000.0), expected)


def test_a_padded_prompt_that_fails_leaves_no_padding(graphcore_driver: Driver) -> None:
    with make_runner(graphcore_driver) as runner:
        prompt = padded(rows_of(LENGTHS, device_of(graphcore_driver)))

        def fail(*_: Any) -> None:
            raise ArithmeticError("no")

        hook = runner.model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            runner.capture(prompt, attention_mask=prompt != PAD)
        hook.remove()
        assert not runner.cache.padding
        assert runner.cache.seen_tokens == 0


# ---- refused ------------------------------------------------------------------------------------


def test_masks_that_are_none_are_refused_with_what_is_expected(graphcore_driver: Driver) -> None:
    with make_runner(graphcore_driver, max_seq_len=10) as runner:
        prompt = padded(rows_of(LENGTHS, device_of(graphcore_driver)))
        mask = (prompt != PAD).float()
        cases: dict[str, Any] = {
            r"the shape of input_ids \[3, 7\], got \[3, 6\]": mask[:, :6],
            r"the shape of input_ids \[3, 7\], got \[\]": [[1]],
            "ones for tokens and zeros for padding": mask * 2,
            "other values": torch.full_like(mask, float("nan")),
            "a dense tensor with values, got torch.sparse_coo": mask.to_sparse(),
            "a dense tensor with values, got torch.strided on meta": mask.to("meta"),
            r"a token in every row, got none in rows \[1\]": mask.index_fill(
                0, torch.tensor([1], device=mask.device), 0
            ),
        }
        for message, wrong in cases.items():
            with pytest.raises(ConfigurationError, match=f"attention_mask: expected .*{message}"):
                runner.capture(prompt, attention_mask=wrong)
        with pytest.raises(ConfigurationError, match=r"expected ids from 0 to 96, got .* to 100"):
            runner.capture(prompt, attention_mask=torch.ones_like(prompt))
        with pytest.raises(CapacityError, match="a prompt of 7 tokens and 4 new ones need 11"):
            runner.generate(prompt, 4, attention_mask=mask)
        assert runner.cache.seen_tokens == runner.captures == 0


# ---- the parts ----------------------------------------------------------------------------------


def test_a_cache_names_what_hides_pads_once_it_held_some_and_a_runner_always(
    graphcore_driver: Driver,
) -> None:
    device = device_of(graphcore_driver)
    names = {"hidden slots", "pads of rows"}
    rows = rows_of(LENGTHS, device)
    prompt = padded(rows)
    with make_runner(graphcore_driver) as runner:
        model, cache = runner.model, runner.cache
        runner.capture(torch.cat([row[:, :2] for row in rows]))
        assert names.isdisjoint(cache.named_tensors())
        assert names <= set(runner.named_tensors())
        runner.capture(prompt, attention_mask=prompt != PAD)
        assert names <= set(cache.named_tensors())
        said = " ".join(str(field.value) for field in runner.fingerprint().fields)
        assert all(name in said for name in names)
        cache.reset()
        assert names <= set(cache.named_tensors()), "the captured step still reads them"
        # another cache, which does not name them yet, is bound with them all the same
        other = StaticKVCache.for_model(model, 40, batch_size=len(LENGTHS))
        assert names.isdisjoint(other.named_tensors())
        captures = runner.captures
        ids = runner.generate(prompt, NEW, attention_mask=prompt != PAD, cache=other)
        assert torch.equal(ids[:, 7:], alone(model, rows))
        assert (runner.captures, runner.rebinds) == (captures, 2)


def test_rows_move_to_the_right_and_columns_without_tokens_are_left_out() -> None:
    ids = torch.tensor([[9, 1, 9, 2, 9], [9, 9, 3, 9, 9]])
    moved, mask = left_padded(ids, ids != 9)
    assert moved.tolist() == [[1, 2], [0, 3]]
    assert mask is not None
    assert mask.tolist() == [[True, True], [False, True]]
    moved, mask = left_padded(ids[:1], ids[:1] != 9)
    assert (moved.tolist(), mask) == ([[1, 2]], None)
    assert checked_mask(ids, torch.ones_like(ids)) is None
    longer, mask = of_length(torch.tensor([[4, 5]]), None, 3)
    assert mask is not None
    assert (longer.tolist(), mask.tolist()) == ([[0, 4, 5]], [[False, True, True]])
    assert of_length(longer, None, 3)[1] is None


def test_padding_knows_its_end_and_reorders() -> None:
    padding = Padding(2, 8, torch.device("cpu"))
    assert not padding
    padding.append(0, torch.tensor([[False, True], [True, True]]))
    padding.append(3, torch.tensor([[False, True], [False, True]]))
    assert padding.pads.tolist() == [2, 1]
    padding.reorder(torch.tensor([1, 0]))
    assert padding.pads.tolist() == [1, 2]
    padding.append(5, None)
    assert padding
    padding.clear_from(3)
    assert (bool(padding), padding.pads.tolist()) == (True, [0, 1])
    padding.clear_from(1)
    assert (bool(padding), padding.pads.tolist()) == (True, [0, 1])
    padding.clear_from(0)
    assert (bool(padding), padding.hidden.any().item()) == (False, False)
