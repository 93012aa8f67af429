"""Looks at whether all rows have finished: one look late, and never in the device's way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.decode_models import device_of, make_model, make_prompt

from graphcore.decode import CUDAGraphAR
from graphcore.decode.end_look import EndLook
from graphcore.driver import Driver


def test_a_look_gives_what_the_one_before_it_asked_for(graphcore_driver: Driver) -> None:
    finished = torch.zeros(2, dtype=torch.bool, device=device_of(graphcore_driver))
    look = EndLook(finished)
    finished.fill_(True)
    assert not look.have_all_finished()
    assert look.have_all_finished()


def test_one_row_that_has_not_finished_is_enough_to_go_on(graphcore_driver: Driver) -> None:
    finished = torch.zeros(2, dtype=torch.bool, device=device_of(graphcore_driver))
    look = EndLook(finished)
    finished[1] = True
    assert [look.have_all_finished() for _ in range(3)] == [False] * 3
    finished.fill_(True)
    assert [look.have_all_finished() for _ in range(2)] == [False, True]


def test_a_look_at_once_gives_what_is_now(graphcore_driver: Driver) -> None:
    finished = torch.zeros(2, dtype=torch.bool, device=device_of(graphcore_driver))
    look = EndLook(finished, at_once=True)
    assert not look.have_all_finished()
    finished.fill_(True)
    assert look.have_all_finished()


@pytest.mark.parametrize(("poll_every", "most"), [(1, 0), (3, 6), (8, 16)], ids=str)
def test_a_generation_ends_within_two_looks_of_its_last_row(
    graphcore_driver: Driver, poll_every: int, most: int
) -> None:
    driver = graphcore_driver
    model = make_model(device=device_of(driver))
    prompt = make_prompt(5, device=device_of(driver))
    with CUDAGraphAR(model, max_seq_len=64, driver=driver) as runner:
        whole = runner.generate(prompt, 40, ())[0, 5:].tolist()
        end = next(token for token in whole[4:] if token not in whole[:4])
        ended = whole.index(end) + 1
        ids = runner.generate(prompt, 40, end, poll_every=poll_every)
        assert ids[0, 5:].tolist() == whole[:ended]
        decoded = runner.cache.seen_tokens - 5
    assert ended <= decoded <= ended + most


@pytest.mark.gpu
def test_a_generation_that_may_end_early_waits_for_the_device_once_a_look_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[int] = []
    event: Any = torch.cuda.Event
    synchronize = event.synchronize

    def counted(self: Any) -> None:
        waits.append(1)
        synchronize(self)

    monkeypatch.setattr(event, "synchronize", counted)
    model = make_model(device="cuda:0")
    prompt = make_prompt(5, device="cuda:0")
    with CUDAGraphAR(model, max_seq_len=64) as runner:
        whole = runner.generate(prompt, 40, ())
        unused = next(token for token in range(3, 97) if token not in whole)
        waits.clear()
        torch.cuda.set_sync_debug_mode("error")  # a step that waits for the device raises
        try:
            for _ in range(8):
                runner.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(runner.generate(prompt, 40, unused, poll_every=8), whole)
    assert len(waits) == 4
