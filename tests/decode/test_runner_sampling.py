"""CUDAGraphAR with sampling: one seed gives the same tokens eager, captured, streamed and again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.decode_models import VOCABULARY, device_of, eager_tokens, make_model, make_prompt
from helpers.decode_sampling import transformers_scores

from graphcore.decode import CUDAGraphAR, DecodeBuckets, Sampling, generate
from graphcore.driver import Driver, open_driver
from graphcore.errors import CaptureError, ConfigurationError

NEW = 9
ROWS = 3

samplings = {
    "temperature": Sampling(temperature=0.8),
    "top-k": Sampling(temperature=1.2, top_k=8),
    "top-p": Sampling(temperature=1.0, top_p=0.8),
    "min-p": Sampling(temperature=1.5, min_p=0.1),
    "all": Sampling(
        temperature=1.4, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.3, seed=3
    ),
}
hot = Sampling(temperature=1.5)


@pytest.fixture
def model(graphcore_driver: Driver) -> Any:
    return make_model(device=device_of(graphcore_driver))


@pytest.fixture
def prompt(model: Any) -> torch.Tensor:
    return make_prompt(5, batch=ROWS, device=str(model.device))


def runner_of(model: Any, driver: Driver, sampling: Sampling, **options: Any) -> CUDAGraphAR:
    sizes = {"max_seq_len": 48, "batch_size": ROWS}
    return CUDAGraphAR(model, driver=driver, sampling=sampling, **sizes, **options)


# ---- the same seed, the same tokens -------------------------------------------------------------


@pytest.mark.parametrize("name", samplings)
def test_one_seed_gives_the_same_tokens_eager_captured_streamed_and_again(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor, name: str
) -> None:
    sampling = samplings[name]
    with runner_of(model, graphcore_driver, sampling, capture=False) as eager:
        expected = eager.generate(prompt, NEW, seed=11)
        assert eager.execution == "eager"
    with runner_of(model, graphcore_driver, sampling) as runner:
        for _ in range(2):
            assert torch.equal(runner.generate(prompt, NEW, seed=11), expected)
        assert (runner.execution, runner.captures, runner.seed) == ("graph", 1, 11)
        streamed = torch.stack(list(runner.stream(prompt, NEW, seed=11)), dim=1)
        assert torch.equal(streamed, expected[:, 5:].cpu())
        runner.cache.reset()
        runner.capture(prompt, seed=11)
        replayed = [runner.replay().clone() for _ in range(NEW)]
        assert torch.equal(torch.stack(replayed, dim=1), expected[:, 5:])
        other = runner.generate(prompt, NEW, seed=12)
        assert not torch.equal(other, expected)
        assert not torch.equal(expected, eager_tokens(model, prompt, NEW))
        assert runner.captures == 1


def test_rows_of_one_batch_draw_independent_numbers(graphcore_driver: Driver, model: Any) -> None:
    prompt = make_prompt(5, device=str(model.device)).expand(ROWS, 5)
    with runner_of(model, graphcore_driver, hot) as runner:
        ids = runner.generate(prompt, NEW, seed=0)
    assert len({tuple(row) for row in ids.tolist()}) == ROWS


def test_a_row_draws_the_same_tokens_in_a_batch_of_any_size(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor
) -> None:
    with runner_of(model, graphcore_driver, hot) as runner:
        three = runner.generate(prompt, NEW, seed=0)
    with CUDAGraphAR(model, max_seq_len=48, sampling=hot, driver=graphcore_driver) as runner:
        assert torch.equal(runner.generate(prompt[:1], NEW, seed=0), three[:1])


def test_the_seed_of_the_sampling_holds_for_every_generation_that_has_none(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor
) -> None:
    with runner_of(model, graphcore_driver, Sampling(temperature=1.5, seed=21)) as runner:
        first = runner.generate(prompt, NEW)
        assert runner.seed == 21
        assert torch.equal(runner.generate(prompt, NEW), first)
        assert not torch.equal(runner.generate(prompt, NEW, seed=22), first)


def test_without_a_seed_torch_manual_seed_makes_generations_repeatable(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor
) -> None:
    with runner_of(model, graphcore_driver, hot) as runner:
        assert runner.seed is None
        runs = []
        for _ in range(2):
            torch.manual_seed(5)
            runs.append([runner.generate(prompt, NEW).tolist() for _ in range(2)])
        assert runs[0] == runs[1]
        assert runs[0][0] != runs[0][1]
        assert runner.generate(prompt, NEW, seed=runner.seed).tolist() == runs[1][1]


def test_generate_takes_a_seed_and_tells_the_one_it_drew(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor
) -> None:
    options: dict[str, Any] = {"sampling": hot, "driver": graphcore_driver}
    drawn = generate(model, prompt, NEW, **options)
    assert torch.equal(generate(model, prompt, NEW, seed=drawn.seed, **options).ids, drawn.ids)
    eager = generate(model, prompt, NEW, seed=drawn.seed, capture=False, **options)
    assert torch.equal(eager.ids, drawn.ids)
    assert generate(model, prompt, NEW, driver=graphcore_driver).seed is None


def test_a_wrong_seed_is_refused_before_anything_runs(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor
) -> None:
    with runner_of(model, graphcore_driver, hot) as runner:
        for call in (runner.generate, runner.stream):
            with pytest.raises(ConfigurationError, match=r"seed: expected an int .*got 1\.5"):
                call(prompt, NEW, seed=1.5)
        with pytest.raises(ConfigurationError, match="seed: expected an int"):
            runner.capture(prompt, seed=True)
        assert runner.cache.seen_tokens == 0
        assert runner.captures == 0


# ---- numbers go on, and leave no trace ----------------------------------------------------------


def test_a_generation_that_keeps_the_cache_goes_on_with_the_numbers(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor
) -> None:
    """One prompt forced in the middle: the same numbers as replays without an end between."""
    more = make_prompt(1, batch=ROWS, device=str(model.device), seed=1)
    with runner_of(model, graphcore_driver, hot) as runner:
        first = runner.generate(prompt, 6, seed=4)
        second = runner.generate(more, 6, keep_cache=True)
        assert runner.seed == 4
    with runner_of(model, graphcore_driver, hot, capture=False) as eager:
        assert torch.equal(eager.generate(prompt, 6, seed=4), first)
        state = eager.named_tensors()["random state"].clone()
        assert torch.equal(eager.generate(more, 6, keep_cache=True), second)
        eager.cache.reset()
        eager.capture(torch.cat([first, more], dim=1), seed=4)
        eager.named_tensors()["random state"].copy_(state)
        replayed = [eager.replay().clone() for _ in range(6)]
        assert torch.equal(torch.stack(replayed, dim=1), second[:, 1:])


def test_warm_up_and_capture_draw_no_number_and_mark_no_token(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor
) -> None:
    with (
        runner_of(model, graphcore_driver, samplings["all"], capture=False) as eager,
        runner_of(model, graphcore_driver, samplings["all"]) as captured,
    ):
        for runner in (eager, captured):
            runner.capture(prompt, seed=8)
        graphcore_driver.synchronize()
        for name in ("random state", "penalised tokens"):
            assert torch.equal(captured.named_tensors()[name], eager.named_tensors()[name]), name
        # captured behind held tokens: the numbers go on where they were
        assert torch.equal(captured.replay(), eager.replay())


def test_a_capture_that_fails_leaves_numbers_and_marks_as_they_were(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor
) -> None:
    with runner_of(model, graphcore_driver, samplings["all"]) as runner:
        broken = model.model.norm.register_forward_hook(
            lambda *given: given[2].sum().item() and None
        )
        names = ("random state", "penalised tokens")
        before = {
            name: held.clone()
            for name, held in runner._step.sampler.named_tensors().items()
            if name in names
        }
        with pytest.raises(CaptureError):
            runner.capture(prompt, seed=8)
        broken.remove()
        assert len(before) == 2
        for name, held in before.items():
            assert torch.equal(runner.named_tensors()[name], held), name


def test_a_forced_token_takes_a_number_too_and_is_penalised(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor
) -> None:
    runs = []
    for capture in (False, True):
        with runner_of(model, graphcore_driver, samplings["all"], capture=capture) as runner:
            runner.capture(prompt, seed=8)
            tokens = [runner.replay().clone(), runner.replay(VOCABULARY - 1).clone()]
            tokens += [runner.replay().clone() for _ in range(6)]
            marked = runner.named_tensors()["penalised tokens"]
            whole = torch.cat([prompt, torch.stack(tokens, dim=1)], dim=1)
            expected = torch.zeros_like(marked).scatter_(1, whole, True)
            assert torch.equal(marked, expected)
            runs.append(whole.tolist())
    assert runs[0] == runs[1]


def test_static_tensors_of_the_sampler_keep_their_addresses_and_are_named(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor
) -> None:
    with runner_of(model, graphcore_driver, samplings["all"]) as runner:
        runner.generate(prompt, 4)
        before = {name: held.data_ptr() for name, held in runner.named_tensors().items()}
        runner.generate(prompt, 4, seed=2)
        assert before == {name: held.data_ptr() for name, held in runner.named_tensors().items()}
        named = {"random state", "penalised tokens", "token ids", "centre of uniform numbers"}
        assert named <= set(before)
        assert "random state" in str(runner.fingerprint().fields)


# ---- equal to transformers ----------------------------------------------------------------------


@pytest.mark.parametrize("name", samplings)
def test_every_token_drawn_is_one_that_transformers_keeps(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor, name: str
) -> None:
    sampling = samplings[name]
    removed = 0
    with runner_of(model, graphcore_driver, sampling) as runner:
        ids = prompt
        runner.capture(prompt, seed=1)
        for _ in range(20):
            scores = transformers_scores(sampling, runner.logits, ids)
            token = runner.replay()[:, None]
            assert (scores.gather(1, token) > -float("inf")).all()
            removed += int((scores == -float("inf")).sum())
            ids = torch.cat([ids, token], dim=1)
    assert removed > 0 or name == "temperature"


@pytest.mark.parametrize("penalty", [0.6, 1.5], ids=str)
def test_greedy_with_a_penalty_is_transformers_greedy_with_it(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor, penalty: float
) -> None:
    expected = eager_tokens(model, prompt, NEW, repetition_penalty=penalty)
    with runner_of(model, graphcore_driver, Sampling(repetition_penalty=penalty)) as runner:
        assert torch.equal(runner.generate(prompt, NEW), expected)
    assert not torch.equal(expected, eager_tokens(model, prompt, NEW))


def test_padding_of_a_ragged_prompt_is_not_penalised(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor
) -> None:
    """The pad is a token that the row would choose: penalised it would not."""
    sampling = Sampling(repetition_penalty=5.0)
    one = prompt[:1, 2:]
    with CUDAGraphAR(model, max_seq_len=48, driver=graphcore_driver, sampling=sampling) as runner:
        alone = runner.generate(one, NEW)
    pad = int(alone[0, 3])
    ragged, mask = prompt.clone(), torch.ones_like(prompt)
    ragged[0, :2], mask[0, :2] = pad, 0
    with runner_of(model, graphcore_driver, sampling) as runner:
        ids = runner.generate(ragged, NEW, attention_mask=mask)
        assert torch.equal(ids[:1, 2:], alone)
        unmasked = runner.generate(ragged, NEW)  # control: there the same token counts
        assert int(unmasked[0, 5]) != pad


def test_sampling_of_the_generation_config_draws_what_its_settings_say(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor
) -> None:
    model.generation_config.do_sample = True
    model.generation_config.top_k = 8
    model.generation_config.temperature = 1.2
    configured = Sampling.from_generation_config(model, seed=6)
    with (
        runner_of(model, graphcore_driver, configured) as one,
        runner_of(model, graphcore_driver, samplings["top-k"]) as other,
    ):
        assert torch.equal(one.generate(prompt, NEW), other.generate(prompt, NEW, seed=6))


def test_one_launch_draws_the_tokens_of_replays(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor
) -> None:
    with runner_of(model, graphcore_driver, samplings["all"]) as runner:
        expected = runner.generate(prompt, NEW, seed=5)
        assert torch.equal(runner.generate_in_one_launch(prompt, NEW, seed=5), expected)
        streamed = torch.stack(list(runner.stream_in_one_launch(prompt, NEW, seed=5)), dim=1)
        assert torch.equal(streamed, expected[:, 5:].cpu())
        assert runner.captures == 1


@pytest.mark.parametrize("rows", [1, 2], ids="{}-rows".format)
def test_buckets_draw_the_tokens_of_a_runner_also_where_they_grow(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor, rows: int
) -> None:
    with runner_of(model, graphcore_driver, samplings["all"]) as runner:
        expected = runner.generate(prompt, NEW, seed=5)[:rows]
    options: dict[str, Any] = {"sampling": samplings["all"], "driver": graphcore_driver}
    with DecodeBuckets(model, [9, 32], [ROWS], progress=False, **options) as buckets:
        for grow in (False, True):
            drawn = buckets.generate(prompt[:rows], NEW, grow=grow, seed=5)
            assert torch.equal(drawn.ids, expected)
            assert (drawn.seed, len(drawn.path)) == (5, 1 + grow)


# ---- what it is given later ---------------------------------------------------------------------


def test_a_model_of_another_vocabulary_is_sampled_over_all_of_it(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor
) -> None:
    sampling = Sampling(temperature=1.5, repetition_penalty=1.2)
    with runner_of(model, graphcore_driver, sampling) as runner:
        runner.generate(prompt, NEW, seed=5)
        torch.manual_seed(3)
        model.resize_token_embeddings(VOCABULARY + 400, mean_resizing=False)
        model.lm_head.weight.data[VOCABULARY:] *= 30
        ids = runner.generate(prompt, NEW, seed=5)
        assert runner.captures == 2
        assert int(ids.max()) >= VOCABULARY
        marked = runner.named_tensors()["penalised tokens"]
        assert torch.equal(marked, torch.zeros_like(marked).scatter_(1, ids, True))
    with runner_of(model, graphcore_driver, sampling, capture=False) as eager:
        assert torch.equal(eager.generate(prompt, NEW, seed=5), ids)


def test_another_cache_is_another_text_nothing_is_penalised_and_numbers_begin(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor
) -> None:
    with runner_of(model, graphcore_driver, samplings["all"], capture=False) as other:
        other.generate(prompt, 4)
        held = other.cache
    with runner_of(model, graphcore_driver, samplings["all"]) as runner:
        runner.generate(prompt.flip(1), NEW)
        runner.use(held)
        assert not runner.named_tensors()["penalised tokens"].any()
        more = make_prompt(2, batch=ROWS, device=str(model.device), seed=1)
        runner.capture(more)
        begun = runner.named_tensors()["random state"].clone()
        marked = runner.named_tensors()["penalised tokens"]
        assert torch.equal(marked, torch.zeros_like(marked).scatter_(1, more, True))
        runner.cache.reset()
        runner.capture(more)
        assert torch.equal(runner.named_tensors()["random state"], begun)


# ---- endings, orders ----------------------------------------------------------------------------


def test_finished_rows_take_pads_and_the_others_draw_as_before(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor
) -> None:
    with runner_of(model, graphcore_driver, hot) as runner:
        whole = runner.generate(prompt, NEW, eos_token_id=(), seed=9)
        end = int(whole[0, 8])
        ended = runner.generate(prompt, NEW, eos_token_id=end, pad_token_id=2, seed=9)
    for row in range(ROWS):
        new = whole[row, 5 : ended.shape[1]].tolist()
        kept = new.index(end) + 1 if end in new else len(new)
        assert ended[row, 5 : 5 + kept].tolist() == new[:kept]
        assert set(ended[row, 5 + kept :].tolist()) <= {2}
    assert (ended[0, 9:] == 2).all()


def test_a_model_of_nan_logits_gives_ids_in_range_and_stays_usable(
    graphcore_driver: Driver, model: Any, prompt: torch.Tensor
) -> None:
    with runner_of(model, graphcore_driver, samplings["all"]) as runner:
        runner.capture(prompt, seed=1)
        for value in (float("nan"), float("-inf"), float("inf")):
            runner.logits.fill_(value)
            token = runner.replay()
            assert 0 <= int(token.min()) <= int(token.max()) < VOCABULARY
        assert runner.logits.isfinite().all()


def test_a_sampled_step_orders_its_work_by_dependencies_not_by_luck() -> None:
    driver = open_driver("emulated", order="adversarial", seed=3)
    model, prompt = make_model(), make_prompt(5, batch=ROWS)
    with runner_of(model, driver, samplings["all"], capture=False) as eager:
        expected = eager.generate(prompt, NEW)
    with runner_of(model, driver, samplings["all"]) as runner:
        assert torch.equal(runner.generate(prompt, NEW), expected)


def test_bfloat16_models_draw_the_same_tokens_eager_and_captured(
    graphcore_driver: Driver,
) -> None:
    device = device_of(graphcore_driver)
    model = make_model(device=device, dtype=torch.bfloat16)
    prompt = make_prompt(5, batch=ROWS, device=device)
    with runner_of(model, graphcore_driver, samplings["all"], capture=False) as eager:
        expected = eager.generate(prompt, NEW)
    with runner_of(model, graphcore_driver, samplings["all"]) as runner:
        assert torch.equal(runner.generate(prompt, NEW), expected)


@pytest.mark.lengthy
@pytest.mark.gpu
def test_a_compiled_step_draws_the_tokens_of_the_plain_one() -> None:
    from graphcore.errors import DriverUnavailable

    try:
        driver = open_driver("cuda")
    except DriverUnavailable as error:
        pytest.skip(str(error))
    model = make_model(device=device_of(driver))
    prompt = make_prompt(5, batch=ROWS, device=device_of(driver))
    with runner_of(model, driver, samplings["all"]) as plain:
        expected = plain.generate(prompt, NEW)
    with runner_of(model, driver, samplings["all"], compile=True) as runner:
        for _ in range(2):
            assert torch.equal(runner.generate(prompt, NEW), expected)
        state = plain.named_tensors()["random state"]
        assert torch.equal(runner.named_tensors()["random state"], state)
