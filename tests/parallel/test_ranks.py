"""Ranks agree before anything is launched; who fails, leaves or dies is named on all others."""

import pytest
from helpers import rank_steps
from helpers.ranks import run_ranks

LIMIT = rank_steps.LIMIT
sizes = pytest.mark.parametrize("size", [2, 4])


@sizes
def test_one_rank_that_must_capture_makes_all_capture(size):
    for answer in run_ranks(size, rank_steps.choose):
        agreed, same, values, rounds, is_timed = answer.result
        assert agreed == f"capture: rank {size - 1}: moved"
        assert same == "replay"
        assert values == tuple(range(size))
        assert rounds == 3
        assert is_timed


def test_options_that_differ_by_rank_are_an_error_on_all_and_the_ranks_go_on():
    for answer in run_ranks(4, rank_steps.differ):
        (kind, text, _), values = answer.result
        assert kind == "ConfigurationError"
        assert "max_seq_len" in text
        assert "rank 3 has 9" in text
        assert values == (1, 1, 1, 1)


@sizes
def test_a_rank_that_fails_is_named_on_all_and_the_ranks_go_on(size):
    for rank, answer in enumerate(run_ranks(size, rank_steps.fail_on_one)):
        (kind, text, seconds), values = answer.result
        assert kind == ("ConfigurationError" if rank == 1 else "RankError")
        assert "max_seq_len: expected 8, got 9" in text
        assert "rank 1" in text or rank == 1
        assert seconds < 10
        assert values == tuple(range(size))


def test_ranks_that_make_other_calls_are_told_where_each_of_them_is():
    for answer in run_ranks(2, rank_steps.out_of_order):
        kind, text, _ = answer.result
        assert kind == "RankError"
        assert "rank 0 at 'step 0', rank 1 at 'step 1'" in text


def test_a_rank_that_leaves_is_named_to_those_who_stay():
    answers = run_ranks(2, rank_steps.leave_early)
    assert answers[0].result[:2] == (
        "LifecycleError", "step: expected open ranks, got closed ones",
    )  # fmt: skip
    assert answers[1].result[:2] == ("RankError", "rank 0 has left: KeyError: 'gone'")


@sizes
def test_a_killed_rank_is_named_on_all_others_within_the_timeout(size):
    answers = run_ranks(size, rank_steps.die_before_agreeing, dead=[1], seconds=40)
    for rank, answer in enumerate(answers):
        if rank == 1:
            continue
        (kind, text, seconds), (kind_after, text_after, seconds_after), missing = answer.result
        assert kind == kind_after == "RankError"
        assert "rank 1 gave no sign of life" in text
        assert missing == (1,)
        assert seconds < 3 * LIMIT
        assert "no longer whole" in text_after
        assert seconds_after < LIMIT / 2  # what is known is not waited for again


@sizes
def test_a_rank_killed_between_replays_hangs_nobody_and_is_named_on_all_others(size):
    answers = run_ranks(
        size, rank_steps.die_in_a_replay, dead=[1], seconds=40, patience=1.5 * LIMIT
    )
    for rank, answer in enumerate(answers):
        if rank == 1:
            continue
        (kind, text, seconds), (kind_after, _, _), is_closed = answer.result
        assert kind == kind_after == "RankError"
        assert "rank 1" in text
        assert seconds < 4 * LIMIT
        assert is_closed  # its graph went before its communicator


def test_a_rank_that_comes_late_finds_that_the_others_have_given_up():
    early, late = (answer.result for answer in run_ranks(2, rank_steps.come_late))
    assert early[0] == late[0] == "RankError"
    assert "rank 1 is alive, but did not come within 0.6 s" in early[1]
    assert "rank 0 failed at step: gave up waiting for rank 1" in late[1]


def test_a_rank_that_never_joins_is_named():
    answers = run_ranks(2, rank_steps.do_not_come)
    kind, text, _ = answers[0].result
    assert kind == "RankError"
    assert "rank 1" in text


def test_closed_ranks_agree_on_nothing():
    (kind, text), shown = run_ranks(2, rank_steps.refuse_after_the_end)[0].result
    assert kind == "LifecycleError"
    assert "closed" in text
    assert shown == "<Ranks 0 of 2, closed>"


def test_what_cannot_be_joined_is_refused_by_name():
    found, place = run_ranks(1, rank_steps.join_badly)[0].result
    expected = {
        "timeout": ("ConfigurationError", "timeout_seconds: expected a number above 0, got 0"),
        "timeout kind": ("ConfigurationError", "timeout_seconds: expected a number above 0"),
        "group": ("ConfigurationError", "group: expected a process group that this rank is in"),
        "device": ("", ""),
        "meta": ("ConfigurationError", "group: expected a backend for meta"),
        "backend": ("ConfigurationError", "backend: expected one of ['nccl', 'gloo'], got 'mpi'"),
        "nccl": ("DriverUnavailable", "backend 'nccl' is needed here"),
        "local rank": ("ConfigurationError", "LOCAL_RANK: expected one of 1 devices, got 1"),
        "no store": ("RankError", "rank 1 of 2: the ranks did not meet within 0.3 s"),
        "not built": ("DriverUnavailable", "this torch was built without it"),
    }
    for name, (kind, text) in expected.items():
        if name == "device":  # torch itself says that there is none
            assert found[name][0] != "nothing"
            continue
        assert found[name][0] == kind, (name, found[name])
        assert text in found[name][1]
    assert place == "GPU-7"


def test_two_ranks_on_one_device_or_without_nccl_are_refused_on_both_at_once():
    for answer in run_ranks(2, rank_steps.share_a_device):
        shared, values, absent, alone = answer.result
        assert shared[0] == "ConfigurationError"
        assert "got GPU-1 of a machine for ranks 0 and 1" in shared[1]
        assert values == (0, 1)
        assert absent[0] == "DriverUnavailable"
        assert "backend 'nccl' is needed here" in absent[1]
        assert alone[0] == "ConfigurationError"
        assert "got no WORLD_SIZE; start the processes with torchrun" in alone[1]
        assert max(shared[2], absent[2], alone[2]) < 15  # nobody waited for the other


def test_a_store_whose_process_is_gone_is_told_as_such():
    for answer in run_ranks(2, rank_steps.lose_the_store):
        kind, text = answer.result
        assert kind == "RankError"
        assert "the store that the ranks met at does not answer" in text


def test_a_rank_that_waits_on_a_gpu_for_one_that_failed_is_released():
    lost, (kind, text), shown = run_ranks(2, rank_steps.be_stuck)[0].result
    assert lost == (1,)
    assert kind == "RankError"
    assert "rank 1: failed while this rank waited" in text
    assert shown == "<Ranks 0 of 2, not whole>"
