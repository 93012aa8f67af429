"""Sampler: what transformers' processors keep is drawn, with the probabilities they give it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.decode_models import device_of
from helpers.decode_sampling import transformers_scores
from transformers import RepetitionPenaltyLogitsProcessor

import graphcore
from graphcore.decode import Sampling
from graphcore.decode.sampler import Sampler
from graphcore.decode.token_filters import TIED_PLACES, penalise
from graphcore.driver import Driver
from graphcore.errors import ConfigurationError

INFINITY = float("inf")
NAN = float("nan")


def sampler_of(sampling: Sampling, rows: int = 1, vocabulary: int = 50, **begin: Any) -> Sampler:
    device = begin.pop("device", "cpu")
    made = Sampler(sampling, rows, vocabulary, torch.device(device))
    ids = begin.pop("ids", torch.zeros(rows, 1, dtype=torch.int64, device=device))
    made.begin(ids, **{"seed": 0} | begin)
    return made


def probabilities(sampler: Sampler, logits: torch.Tensor) -> torch.Tensor:
    """``[R, V]`` with which the sampler draws each token."""
    scores = logits
    penalty = sampler.sampling.repetition_penalty
    if penalty != 1.0:
        scores = penalise(scores, sampler.named_tensors()["penalised tokens"], penalty)
    scores, ids = sampler._filters.candidates(scores)
    drawn = (scores.double() / sampler.sampling.temperature).softmax(dim=-1)
    if ids is None:
        return drawn
    return torch.zeros(logits.shape, dtype=torch.float64).scatter_(1, ids, drawn)


def random_logits(
    kind: str, rows: int, vocabulary: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(rows, vocabulary, generator=generator)
    if kind == "ties":
        logits = logits.round()
    if kind == "masked":
        logits[torch.rand(rows, vocabulary, generator=generator) < 0.7] = -INFINITY
        logits[:, 1] = 0.5
    return logits.to(dtype)


settings: dict[str, dict[str, Any]] = {
    "temperature-0.7": {"temperature": 0.7},
    "temperature-1": {},
    "temperature-5": {"temperature": 5.0},
    "top-k-1": {"top_k": 1},
    "top-k-5": {"top_k": 5, "temperature": 1.7},
    "top-k-past-v": {"top_k": 10**6},
    "top-p-0.9": {"top_p": 0.9},
    "top-p-0.5-hot": {"top_p": 0.5, "temperature": 2.5},
    "top-p-0.5-cold": {"top_p": 0.5, "temperature": 0.4},
    "top-p-0": {"top_p": 0.0},
    "top-p-1": {"top_p": 1.0},
    "min-p-0.1": {"min_p": 0.1},
    "min-p-0.02-hot": {"min_p": 0.02, "temperature": 1.6},
    "min-p-1": {"min_p": 1.0},
    "penalty-1.3": {"repetition_penalty": 1.3},
    "penalty-0.8": {"repetition_penalty": 0.8},
    "k-and-p": {"top_k": 6, "top_p": 0.8, "temperature": 1.3},
    "k-and-min": {"top_k": 6, "min_p": 0.15, "temperature": 1.3},
    "p-and-min": {"top_p": 0.93, "min_p": 0.08, "temperature": 1.3},
    "all": {
        "top_k": 20,
        "top_p": 0.85,
        "min_p": 0.04,
        "temperature": 1.4,
        "repetition_penalty": 1.2,
    },
}
floats = (torch.float32, torch.bfloat16, torch.float16)


# ---- equal to transformers ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", floats, ids=str)
@pytest.mark.parametrize("kind", ["plain", "ties", "masked"])
@pytest.mark.parametrize("name", settings)
def test_tokens_have_the_probabilities_that_transformers_processors_give_them(
    name: str, kind: str, dtype: torch.dtype
) -> None:
    sampling = Sampling(**{"temperature": 1.0} | settings[name])
    for vocabulary in (7, 40, 1000):
        logits = random_logits(kind, 4, vocabulary, dtype)
        ids = torch.arange(12).reshape(4, 3) % vocabulary
        before = logits.clone()
        sampler = sampler_of(sampling, 4, vocabulary, ids=ids)
        scores = transformers_scores(sampling, logits, ids)
        expected = scores.double().softmax(dim=-1)
        actual = probabilities(sampler, logits)
        assert torch.equal(logits, before)
        # which of several equal logits are kept at the edge of top-p is up to torch's unstable sort
        torch.testing.assert_close(
            actual.sort(dim=-1).values, expected.sort(dim=-1).values, atol=1e-5, rtol=0
        )
        if kind != "ties" and dtype == torch.float32:
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
            assert torch.equal(actual > 0, expected > 0)


@pytest.mark.parametrize("name", ["top-k-1", "top-k-5", "min-p-0.1", "k-and-min"])
def test_equal_logits_are_kept_or_removed_together_as_in_transformers(name: str) -> None:
    sampling = Sampling(**{"temperature": 1.0} | settings[name])
    logits = random_logits("ties", 6, 60)
    scores = transformers_scores(sampling, logits, torch.zeros(6, 1, dtype=torch.int64))
    actual = probabilities(sampler_of(sampling, 6, 60), logits)
    assert torch.equal(actual > 0, scores > -INFINITY)
    assert len(logits[0].unique()) < 30


def test_of_equal_logits_at_the_edge_of_top_p_those_of_the_highest_ids_are_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 1.0, -2.0]])
    actual = probabilities(sampler_of(Sampling(temperature=1.0, top_p=0.8), 1, 6), logits)
    assert (actual[0] > 0).tolist() == [False, True, False, True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["top-k-5", "top-p-0.9", "min-p-0.1", "k-and-p", "all"])
def test_a_vocabulary_of_128_thousand_is_filtered_as_in_transformers(
    name: str, dtype: torch.dtype
) -> None:
    sampling = Sampling(**{"temperature": 1.0} | settings[name])
    logits = random_logits("plain", 1, 128_256, dtype)
    ids = torch.arange(4).reshape(1, 4)
    scores = transformers_scores(sampling, logits, ids)
    actual = probabilities(sampler_of(sampling, 1, 128_256, ids=ids), logits)
    # its float32 running sum has an error of some 1e-6 of the probability at the edge of top-p
    close = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(
        actual.sort(dim=-1).values, scores.double().softmax(dim=-1).sort(dim=-1).values, **close
    )
    assert 0 < int((actual > 0).sum()) < logits.numel()


def test_more_equal_logits_than_there_is_room_for_are_a_part_of_what_transformers_keeps() -> None:
    logits = torch.zeros(1, 1000)
    actual = probabilities(sampler_of(Sampling(temperature=1.0, top_k=5), 1, 1000), logits)
    assert int((actual > 0).sum()) == 5 + TIED_PLACES


@pytest.mark.parametrize("top_p", [0.1, 0.3, 0.5, 0.7, 0.9], ids=str)
def test_equal_probabilities_that_meet_top_p_exactly_are_cut_as_in_transformers(
    top_p: float,
) -> None:
    sampling = Sampling(temperature=1.0, top_p=top_p)
    logits = torch.zeros(1, 8).where(torch.arange(8) < 4, -INFINITY)
    scores = transformers_scores(sampling, logits, torch.zeros(1, 1, dtype=torch.int64))
    actual = probabilities(sampler_of(sampling, 1, 8), logits)
    assert int((actual > 0).sum()) == int((scores > -INFINITY).sum())


def test_a_vocabulary_of_one_token_gives_it() -> None:
    for values in settings.values():
        sampling = Sampling(**{"temperature": 1.0} | values)
        assert sampler_of(sampling, 2, 1).choose(torch.randn(2, 1)).tolist() == [0, 0]


# ---- what is drawn ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", settings)
def test_tokens_are_drawn_as_often_as_their_probabilities_say(name: str) -> None:
    """A chi-square test over 12 000 draws of rows that have the same logits."""
    sampling = Sampling(**{"temperature": 1.0} | settings[name])
    rows, draws = 1500, 8
    logits = 1.5 * random_logits("plain", 1, 12).expand(rows, 12) / 3
    ids = torch.arange(3).expand(rows, 3)
    sampler = sampler_of(sampling, rows, 12, ids=ids, seed=5)
    chosen = torch.cat([sampler.choose(logits) for _ in range(draws)])
    expected = transformers_scores(sampling, logits[:1], ids[:1]).double().softmax(dim=-1)[0]
    counts = torch.bincount(chosen, minlength=12).double()
    kept = expected > 0
    assert int(counts[~kept].sum()) == 0
    expected = expected[kept] * rows * draws
    statistic = float(((counts[kept] - expected) ** 2 / expected).sum())
    freedom = int(kept.sum()) - 1
    assert statistic <= freedom + 5 * (2 * freedom) ** 0.5
    assert float(expected.min()) > 4


def test_rows_and_draws_are_independent_of_each_other() -> None:
    rows, draws = 400, 60
    logits = torch.zeros(rows, 4)
    sampler = sampler_of(Sampling(temperature=1.0), rows, 4)
    chosen = torch.stack([sampler.choose(logits) for _ in range(draws)])
    for pairs in (chosen[1:] * 4 + chosen[:-1], chosen[:, 1:] * 4 + chosen[:, :-1]):
        counts = torch.bincount(pairs.flatten(), minlength=16).double()
        expected = pairs.numel() / 16
        assert float(((counts - expected) ** 2 / expected).sum()) < 15 + 5 * 30**0.5


def test_a_temperature_near_zero_draws_the_largest_logit() -> None:
    logits = random_logits("plain", 8, 50)
    for settings_of in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        for temperature in (1e-6, 1e-30):
            sampler = sampler_of(Sampling(temperature=temperature, **settings_of), 8)
            assert torch.equal(sampler.choose(logits), logits.argmax(dim=-1))


def test_an_unlikely_token_is_drawn_with_its_probability() -> None:
    """One of 2^-14: noise of few bits would draw it never, or far too often."""
    logits = torch.tensor([[0.0, -14 * 0.6931471805599453]]).expand(1 << 14, 2)
    sampler = sampler_of(Sampling(temperature=1.0), 1 << 14, 2)
    seen = sum(int(sampler.choose(logits).sum()) for _ in range(48))
    assert 20 < seen < 80  # 48 are expected


# ---- what is not a number -----------------------------------------------------------------------

odd_rows = {
    "nan-at-3": ([0.0, 1, 2, NAN, 4, 5, 6], 3),
    "nan-and-infinity": ([0.0, INFINITY, 2, NAN, 4, 5, 6], 3),
    "infinity-at-5": ([0.0, 1, 2, 3, 4, INFINITY, 6], 5),
    "one-unmasked": ([-INFINITY] * 4 + [-5.0] + [-INFINITY] * 2, 4),
    "all-masked": ([-INFINITY] * 7, None),
    "all-nan": ([NAN] * 7, None),
    "lowest-finite": ([torch.finfo(torch.float32).min] * 6 + [0.0], 6),
}


@pytest.mark.parametrize("row", odd_rows)
@pytest.mark.parametrize("name", [*settings, "greedy"])
def test_an_id_is_in_range_whatever_the_logits_are(name: str, row: str) -> None:
    """NaN wins over all, as in argmax; an infinite logit wins; a masked one loses to any other."""
    sampling = Sampling(**{"temperature": 1.0} | settings[name]) if name != "greedy" else Sampling()
    values, expected = odd_rows[row]
    logits = torch.tensor([values]).expand(50, 7)
    sampler = sampler_of(sampling, 50, 7)
    for _ in range(3):
        chosen = sampler.choose(logits)
        assert 0 <= int(chosen.min()) <= int(chosen.max()) < 7
        if expected is not None:
            assert set(chosen.tolist()) == {expected}


def test_logits_wider_than_what_can_be_fed_are_cut_and_narrower_ones_served() -> None:
    for sampling in (
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(temperature=1.0, top_k=3, repetition_penalty=1.5),
        Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.5),
    ):
        sampler = sampler_of(sampling, 30, 10)
        wide = torch.zeros(30, 16)
        wide[:, 10:] = 100.0
        assert int(sampler.choose(wide).max()) < 10
        assert int(sampler.choose(torch.zeros(30, 6)).max()) < 6


# ---- penalty ------------------------------------------------------------------------------------


def marks_of(sampler: Sampler) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in sampler.named_tensors()["penalised tokens"]]


def test_prompt_and_taken_tokens_are_penalised_and_padding_is_not() -> None:
    ids = torch.tensor([[0, 0, 5, 6], [7, 7, 0, 8]])
    mask = torch.tensor([[False, False, True, True], [True, True, True, True]])
    sampler = sampler_of(Sampling(repetition_penalty=1.2), 2, 10, ids=ids, mask=mask)
    assert marks_of(sampler) == [[5, 6], [0, 7, 8]]
    sampler.accept(torch.tensor([1, 9]))
    assert marks_of(sampler) == [[1, 5, 6], [0, 7, 8, 9]]
    sampler.begin(torch.tensor([[2], [3]]), continues=True)
    assert marks_of(sampler) == [[1, 2, 5, 6], [0, 3, 7, 8, 9]]
    sampler.begin(torch.tensor([[4], [4]]))
    assert marks_of(sampler) == [[4], [4]]


@pytest.mark.parametrize("dtype", floats, ids=str)
@pytest.mark.parametrize("penalty", [0.5, 1.3, 7.0], ids=str)
def test_penalised_logits_are_bit_equal_to_transformers(penalty: float, dtype: Any) -> None:
    logits = random_logits("masked", 3, 200, dtype)
    ids = torch.arange(60).reshape(3, 20) % 50
    sampler = sampler_of(Sampling(repetition_penalty=penalty), 3, 200, ids=ids)
    marked = sampler.named_tensors()["penalised tokens"]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.float())
    assert torch.equal(penalise(logits, marked, penalty), expected)
    assert torch.equal(sampler.choose(logits), expected.argmax(dim=-1))


# ---- seeds --------------------------------------------------------------------------------------


def tokens_of(sampler: Sampler, count: int = 12) -> list[list[int]]:
    logits = torch.zeros(3, 50)
    return [sampler.choose(logits).tolist() for _ in range(count)]


def test_a_seed_begins_the_same_sequence_again_and_another_one_another() -> None:
    sampler = sampler_of(Sampling(temperature=1.0, seed=11), 3, seed=None)
    assert sampler.seed == 11
    first = tokens_of(sampler)
    sampler.begin(torch.zeros(3, 1, dtype=torch.int64))
    assert tokens_of(sampler) == first
    sampler.begin(torch.zeros(3, 1, dtype=torch.int64), seed=12)
    assert (sampler.seed, tokens_of(sampler) != first) == (12, True)
    assert len({tuple(row) for row in zip(*first, strict=True)}) == 3


def test_what_continues_goes_on_with_the_numbers_unless_given_a_seed() -> None:
    prompt = torch.zeros(3, 1, dtype=torch.int64)
    whole = tokens_of(sampler_of(Sampling(temperature=1.0), 3))
    sampler = sampler_of(Sampling(temperature=1.0), 3)
    halves = tokens_of(sampler, 6)
    sampler.begin(prompt, continues=True)
    assert halves + tokens_of(sampler, 6) == whole
    sampler.begin(prompt, continues=True, seed=0)
    assert tokens_of(sampler) == whole


def test_what_continues_behind_nothing_begins() -> None:
    sampler = Sampler(Sampling(temperature=1.0, seed=0), 3, 50, torch.device("cpu"))
    sampler.begin(torch.zeros(3, 1, dtype=torch.int64), continues=True)
    assert tokens_of(sampler) == tokens_of(sampler_of(Sampling(temperature=1.0), 3))


def test_without_a_seed_one_is_drawn_from_torchs_generator_each_time() -> None:
    prompt = torch.zeros(3, 1, dtype=torch.int64)
    sampler = Sampler(Sampling(temperature=1.0), 3, 50, torch.device("cpu"))
    runs = []
    for _ in range(2):
        torch.manual_seed(42)
        for _ in range(2):
            sampler.begin(prompt)
            runs.append((sampler.seed, tokens_of(sampler)))
    assert runs[:2] == runs[2:]
    assert runs[0][0] != runs[1][0]
    assert runs[0][1] != runs[1][1]


def test_greedy_draws_no_number_of_torchs_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    sampler = sampler_of(Sampling(repetition_penalty=1.2), 3, seed=None)
    assert sampler.seed is None
    assert torch.equal(torch.get_rng_state(), before)


def test_a_wrong_seed_changes_nothing() -> None:
    sampler = sampler_of(Sampling(temperature=1.0), 3)
    state = {name: held.clone() for name, held in sampler.named_tensors().items()}
    with pytest.raises(ConfigurationError, match="seed: expected an int"):
        sampler.begin(torch.zeros(3, 1, dtype=torch.int64), seed=1.5)  # type: ignore[arg-type]
    assert all(torch.equal(state[name], held) for name, held in sampler.named_tensors().items())


# ---- in a graph ---------------------------------------------------------------------------------


def nodes_of(driver: Driver, function: Any, *keep: torch.Tensor) -> int:
    """Nodes that ``function`` makes."""
    capturing = graphcore.capture(driver=driver)
    capturing.warm_up(function, 1)
    with capturing:
        capturing.keep(list(keep), "kept")
        function()
    return len(capturing.graph.snapshot().nodes)


def test_greedy_is_one_argmax_and_holds_nothing(graphcore_driver: Driver) -> None:
    device = device_of(graphcore_driver)
    logits = random_logits("plain", 3, 50, torch.bfloat16).to(device)
    sampler = sampler_of(Sampling(), 3, device=device)
    assert torch.equal(sampler.choose(logits), logits.argmax(dim=-1))
    assert (sampler.named_tensors(), sampler.changed()) == ({}, [])

    def step() -> None:
        sampler.accept(sampler.choose(logits))

    assert nodes_of(graphcore_driver, step, logits) == nodes_of(
        graphcore_driver, lambda: logits.argmax(dim=-1), logits
    )


operations = {
    "temperature-0.7": 11,
    "temperature-1": 11,
    "top-k-5": 15,
    "min-p-0.1": 15,
    "top-p-0.9": 18,
    "k-and-p": 21,
    "penalty-1.3": 15,
    "all": 28,
}


@pytest.mark.parametrize("name", operations)
def test_a_choice_takes_as_many_operations_as_counted(name: str) -> None:
    driver = graphcore.open_driver("emulated")
    logits = random_logits("plain", 2, 100)
    sampler = sampler_of(Sampling(**{"temperature": 1.0} | settings[name]), 2, 100)
    count = nodes_of(driver, lambda: sampler.choose(logits), logits)
    assert count == operations[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", settings)
def test_replays_choose_what_eager_calls_choose_and_a_capture_leaves_no_trace(
    graphcore_driver: Driver, name: str, dtype: torch.dtype
) -> None:
    device = device_of(graphcore_driver)
    sampling = Sampling(**{"temperature": 1.0} | settings[name])
    logits = random_logits("plain", 3, 300, dtype).to(device)
    sampler = sampler_of(sampling, 3, 300, device=device)
    chosen = torch.empty(3, dtype=torch.int64, device=device)

    def step() -> None:
        picked = sampler.choose(logits)
        sampler.accept(picked)
        chosen.copy_(picked)

    eager = []
    for _ in range(8):
        step()
        eager.append(chosen.tolist())
    capturing = graphcore.capture(driver=graphcore_driver)
    capturing.warm_up(step, 1)
    sampler.begin(torch.zeros(3, 1, dtype=torch.int64, device=device), seed=0)
    graphcore_driver.synchronize()
    before = [held.clone() for held in sampler.changed()]
    with capturing:
        capturing.keep([logits, chosen, *sampler.named_tensors().values()], "sampler")
        step()
    graphcore_driver.synchronize()
    assert all(map(torch.equal, before, sampler.changed()))
    with capturing.graph.instantiate(guard="owners") as executable:
        for expected in eager:
            chosen.fill_(-1)
            graphcore_driver.synchronize()
            executable.launch(capturing.stream)
            graphcore_driver.synchronize()
            assert chosen.tolist() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", settings)
def test_a_device_chooses_what_the_host_chooses(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    sampling = Sampling(**{"temperature": 1.0} | settings[name])
    logits = random_logits("plain", 3, 32_000)
    host, device = sampler_of(sampling, 3, 32_000), sampler_of(sampling, 3, 32_000, device="cuda")
    on_device = logits.cuda()
    for _ in range(20):
        assert torch.equal(host.choose(logits), device.choose(on_device).cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["top-p-0.9", "all"])
def test_one_row_of_128_thousand_is_cut_alike_every_time(name: str) -> None:
    """A running sum of floating-point numbers in one row would differ from call to call."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    sampling = Sampling(**{"temperature": 1.0} | settings[name])
    logits = random_logits("plain", 1, 128_256, torch.bfloat16).cuda()
    sampler = sampler_of(sampling, 1, 128_256, device="cuda")
    first, ids = sampler._filters.candidates(logits)
    for _ in range(30):
        again, same_ids = sampler._filters.candidates(logits)
        assert torch.equal(first, again)
        assert ids is not None
        assert same_ids is not None
        assert torch.equal(ids, same_ids)
