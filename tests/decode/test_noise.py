"""RowNoise: exact integers, the numbers they should be, independent of each other."""

from __future__ import annotations

import pytest
import torch
from helpers.decode_models import device_of

import graphcore
from graphcore.decode.noise import RowNoise, mixed
from graphcore.driver import Driver

WORD = 1 << 64
TOKEN = 0x9E3779B97F4A7C15
DRAW = 0xD1342543DE82EF95


def noise_of(seed: int, rows: int = 1, device: str = "cpu") -> RowNoise:
    noise = RowNoise(rows, torch.device(device))
    noise.begin(seed)
    return noise


def expected_words(seed: int, row: int, draw: int, ids: list[int]) -> list[int]:
    """The definition, with Python's integers: signed high words of mixed Weyl sequences."""
    state = mixed((mixed(seed % WORD) + (row + 1) * TOKEN) % WORD)
    words = [mixed((state + draw * DRAW + token * TOKEN) % WORD) >> 32 for token in ids]
    return [word - (1 << 32) if word >= 1 << 31 else word for word in words]


@pytest.mark.parametrize("word", [0, 1, TOKEN, WORD - 1, 0x0123456789ABCDEF, 1 << 63], ids=hex)
def test_the_published_inverse_undoes_the_mixer(word: int) -> None:
    undone = mixed(word)
    for _ in range(2):
        undone = ((undone ^ (undone >> 32)) * 0xA6F8E26927E132CB) % WORD
    assert undone ^ (undone >> 32) == word
    assert mixed(word) != word or word == 0


@pytest.mark.parametrize("seed", [0, 1, -1, 12345, 2**63, 2**64 - 1, -(2**63)], ids=str)
def test_words_are_those_of_the_definition_in_every_row_and_draw(
    graphcore_driver: Driver, seed: int
) -> None:
    noise = noise_of(seed, 3, device_of(graphcore_driver))
    ids = [0, 1, 2, 5, 31999, 128255, 2**31]
    on_device = torch.tensor(ids, device=noise.state.device)
    for draw in range(4):
        words = noise.words(on_device)
        assert (words.dtype, words.shape) == (torch.int32, (3, 7))
        assert words.tolist() == [expected_words(seed, row, draw, ids) for row in range(3)]


def test_replays_draw_the_eager_numbers_and_a_capture_draws_none(graphcore_driver: Driver) -> None:
    device = device_of(graphcore_driver)
    noise, ids = noise_of(7, 2, device), torch.arange(50, device=device)
    drawn = torch.empty(2, 50, dtype=torch.float64, device=device)

    def step() -> None:
        drawn.copy_(noise.log_exponentials(ids))

    eager = []
    for _ in range(4):
        step()
        eager.append(drawn.clone())
    capturing = graphcore.capture(driver=graphcore_driver)
    capturing.warm_up(step, 1)
    noise.begin(7)
    graphcore_driver.synchronize()
    begun = noise.state.clone()
    with capturing:
        capturing.keep([drawn, ids, *noise.named_tensors().values()], "noise")
        step()
    graphcore_driver.synchronize()
    assert torch.equal(noise.state, begun)
    with capturing.graph.instantiate(guard="owners") as executable:
        for expected in eager:
            drawn.fill_(float("nan"))
            graphcore_driver.synchronize()
            executable.launch(capturing.stream)
            graphcore_driver.synchronize()
            assert torch.equal(drawn, expected)
    assert len({float(each[0, 0]) for each in eager}) == 4


def test_a_number_belongs_to_seed_row_draw_and_id_whatever_else_is_asked_for() -> None:
    ids = torch.arange(20)
    few, many = noise_of(3, 2).words(ids), noise_of(3, 9).words(ids)
    assert torch.equal(few, many[:2])
    picked = torch.tensor([[4, 19, 4], [7, 0, 1]])
    assert torch.equal(noise_of(3, 2).words(picked), few.gather(1, picked))
    assert not torch.equal(noise_of(4, 2).words(ids), few)
    assert not (few[0] == few[1]).any()


def test_numbers_are_finite_for_the_smallest_and_the_largest_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = torch.tensor([[-(2**31), -1, 0, 2**31 - 1]], dtype=torch.int32)
    monkeypatch.setattr(RowNoise, "words", lambda self, ids: ends)
    logs = noise_of(1).log_exponentials(torch.arange(4))
    uniform = (ends.double() + 0.5) / 2**32 + 0.5
    torch.testing.assert_close(logs, (-uniform.log()).log(), rtol=1e-12, atol=0)
    assert logs.isfinite().all()
    assert -22.9 < float(logs.min()) < float(logs.max()) < 3.2


def test_a_compiled_step_draws_the_same_words() -> None:
    ids = torch.arange(100)
    plain, compiled = noise_of(7, 3), noise_of(7, 3)
    draw = torch.compile(lambda: compiled.words(ids), backend="aot_eager", fullgraph=True)
    for _ in range(3):
        assert torch.equal(draw(), plain.words(ids))
    assert torch.equal(compiled.state, plain.state)


# ---- how random they are ------------------------------------------------------------------------


def drawn(seed: int, draws: int, rows: int, ids: int) -> torch.Tensor:
    """Words ``[draws, rows, ids]``."""
    noise, numbers = noise_of(seed, rows), torch.arange(ids)
    return torch.stack([noise.words(numbers) for _ in range(draws)])


def chi_square(counts: torch.Tensor, expected: torch.Tensor | float) -> float:
    """In standard deviations of its distribution above its mean."""
    freedom = counts.numel() - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("seed", [0, 1, 2**63])
@pytest.mark.parametrize("shift", [0, 11, 22], ids="bits-from-{}".format)
def test_every_ten_bits_of_the_words_are_uniform(seed: int, shift: int) -> None:
    values = (drawn(seed, 40, 5, 2000) >> shift) & 1023
    counts = torch.bincount(values.flatten(), minlength=1024).double()
    assert abs(chi_square(counts, values.numel() / 1024)) < 5


neighbours = {
    "tokens": (slice(None), slice(None), slice(1, None)),
    "rows": (slice(None), slice(1, None), slice(None)),
    "draws": (slice(1, None), slice(None), slice(None)),
    "draws-and-tokens": (slice(1, None), slice(None), slice(1, None)),
}


@pytest.mark.parametrize("which", neighbours)
def test_neighbours_are_independent(which: str) -> None:
    """Pairs of four bits each fall into all 256 cells alike."""
    words = drawn(99, 60, 12, 300)
    later = neighbours[which]
    earlier = tuple(slice(None, -1) if part.start else part for part in later)
    pairs = ((words[later] >> 28) & 15) * 16 + ((words[earlier] >> 28) & 15)
    counts = torch.bincount(pairs.flatten(), minlength=256).double()
    assert abs(chi_square(counts, pairs.numel() / 256)) < 5


def test_the_control_of_independence_would_notice_rows_that_share_numbers() -> None:
    words = drawn(99, 60, 1, 300).expand(60, 2, 300)
    pairs = ((words[:, 1] >> 28) & 15) * 16 + ((words[:, 0] >> 28) & 15)
    counts = torch.bincount(pairs.flatten(), minlength=256).double()
    assert chi_square(counts, pairs.numel() / 256) > 1000
