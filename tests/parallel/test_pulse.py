"""A pulse tells which rank is silent, and which one failed while this one still waits for it."""

import threading
import time

import pytest

torch = pytest.importorskip("torch")

from torch.distributed import HashStore  # noqa: E402

from graphcore.parallel.pulse import Pulse  # noqa: E402


class Watched(Pulse):
    """A pulse of one of two ranks that notes what it tells."""

    def __init__(self, store, rank, seconds=0.2):
        self.round = 3
        self.told = {"silent": [], "stuck": []}
        self.heard = threading.Event()
        super().__init__(
            store, "test", rank, 2, timeout_seconds=seconds,
            when_silent=lambda ranks: self.note("silent", ranks),
            current_round=lambda: self.round,
            when_stuck=lambda ranks: self.note("stuck", ranks),
        )  # fmt: skip

    def note(self, what, ranks):
        self.told[what].append(list(ranks))
        self.heard.set()


@pytest.fixture
def pair():
    store = HashStore()
    made = [Watched(store, rank) for rank in range(2)]
    yield made
    for each in made:
        each.close()


def test_a_rank_that_beats_is_not_silent_and_one_that_stops_is_told_once(pair):
    mine, other = pair
    other.start()
    mine.start()
    time.sleep(0.5)
    assert mine.told == {"silent": [], "stuck": []}
    other._stop.set()
    assert mine.heard.wait(5)
    time.sleep(0.3)
    assert mine.told == {"silent": [[1]], "stuck": []}
    assert mine.silent() == [1]


def test_a_rank_that_has_left_is_not_silent(pair):
    mine, other = pair
    other.close()
    mine.start()
    time.sleep(0.5)
    assert mine.told["silent"] == []


def test_a_rank_that_failed_in_a_round_that_this_one_does_not_reach_is_told_once(pair):
    mine, other = pair
    other.note_failure(3)
    other.start()
    mine.start()
    assert mine.heard.wait(5)
    time.sleep(0.3)
    assert mine.told == {"silent": [], "stuck": [[1]]}


def test_a_failure_in_a_round_that_is_over_keeps_nobody(pair):
    mine, other = pair
    mine.round = 4
    other.note_failure(3)
    other.start()
    mine.start()
    time.sleep(0.5)
    assert mine.told["stuck"] == []
