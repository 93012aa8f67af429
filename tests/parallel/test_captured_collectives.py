"""Collectives in captured graphs: sent by every replay, of communicators that were there before."""

from helpers import rank_steps
from helpers.ranks import run_ranks


def test_a_replay_of_every_kind_of_collective_gives_what_eager_gives():
    for answer in run_ranks(2, rank_steps.capture_every_collective):
        before, replayed, eager = answer.result
        assert not any(before)  # a capture sends nothing
        assert replayed == eager
        assert replayed[0] == [30.0, 30.0]


def test_functional_collectives_and_sharded_tensors_are_captured_too():
    for answer in run_ranks(2, rank_steps.capture_functional_collectives):
        found, kept = answer.result
        assert found == {"total": [31.0, 31.0], "whole": [60.0, 60.0]}
        assert kept  # the graph keeps the communicators


def test_a_captured_collective_can_be_pointed_at_other_memory():
    for answer in run_ranks(2, rank_steps.repoint_a_collective):
        x, y, node = answer.result
        assert x == [1.0, 1.0]
        assert y == [10.0, 10.0]
        assert "allreduce_" in node


def test_a_communicator_that_has_run_nothing_is_refused_inside_a_capture():
    for answer in run_ranks(2, rank_steps.capture_with_a_new_group):
        cold, inside, warm = answer.result
        for kind, text, _ in (cold, inside):
            assert kind == "CaptureError"
            assert "expected a communicator that has run a collective before" in text
            assert "of 2 ranks" in text
        assert warm[0] == "nothing", warm


def test_what_waits_for_the_host_or_for_other_ranks_is_refused_inside_a_capture():
    for answer in run_ranks(2, rank_steps.refuse_in_a_capture):
        found = answer.result
        assert {kind for kind, _ in found.values()} == {"CaptureError"}, found
        assert "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" in found["barrier"][1]


def test_a_capture_on_a_device_refuses_new_communicators_and_keeps_those_that_it_used():
    for answer in run_ranks(2, rank_steps.watch_on_a_device):
        (kind, text), labels = answer.result
        assert kind == "CaptureError"
        assert "has run a collective before" in text
        assert labels == ["communicator '0' of 2 ranks"]
