"""Experts spread over ranks give what one process gives; every rank does the same step."""

import pytest
from helpers import rank_experts
from helpers.ranks import run_ranks

LIMIT = rank_experts.LIMIT


@pytest.mark.parametrize(("size", "overlap"), [(2, 1), (2, 0), (4, 1)])
def test_decode_with_prompts_and_boundaries_is_what_one_process_computes(size, overlap):
    answers = [each.result for each in run_ranks(size, rank_experts.take_turns, 12, overlap)]
    for rank, found in enumerate(answers):
        assert not found["wrong"]
        assert found["kinds"] == answers[0]["kinds"]
        assert found["kinds"][:3] == ["direct", "capture", "replay"]
        assert found["kinds"].count("update") == (2 if overlap else 0)
        assert found["staged"] or size == 4  # all experts of a rank are resident there
        assert found["key"] == (rank, size)
        part = 16 // size
        assert found["manifest"] == (rank, size, rank * part, part, 16)
        assert f"rank {rank} of {size}" in found["report"]
        assert not found["faults"]
        count, routes, faults = found["sent"]
        assert (count, faults) == (size, 0)
        assert routes >= 12 * 2 + 3 * 10
        assert found["hits"]
        assert found["shown"][0] == f"<SpreadExperts rank {rank} of {size}, {part} experts here>"
        assert f"16 experts over {size} ranks" in found["shown"][1]
        assert found["restored"]
        assert found["after"].endswith("restored>")


def test_a_boundary_of_one_rank_is_an_update_on_all():
    answers = [each.result for each in run_ranks(2, rank_experts.change_on_one, 1)]
    for kinds, _ in answers:
        assert kinds == ["direct", "capture", "replay", "update", "replay", "replay", "replay"]
    assert answers[0][1].startswith("another rank: rank 1: changed outside")


def test_a_rank_that_declines_makes_all_decline_and_capture_again_together():
    answers = [each.result for each in run_ranks(2, rank_experts.change_on_one, 0)]
    for kinds, _ in answers:
        assert kinds == answers[0][0]
        assert kinds[3] == "declined"
        assert kinds[-2:] == ["replay", "replay"]
        assert kinds.count("capture") == 2
    assert answers[0][1].startswith("another rank: rank 1: ")


def test_a_step_that_one_rank_cannot_capture_runs_without_a_graph_on_all():
    answers = [each.result for each in run_ranks(2, rank_experts.not_captured_on_one)]
    for kinds, detail in answers:
        assert kinds == answers[0][0]
        assert kinds[:2] == ["direct", "declined"]
        assert kinds[-1] == "replay"
        assert "broken on purpose" in detail
    assert answers[0][1].startswith("rank 1: ")


def test_a_step_that_one_rank_refuses_is_an_error_on_all_and_the_next_one_runs():
    answers = [each.result for each in run_ranks(2, rank_experts.fail_on_one)]
    assert answers[1][0][0] == "ConfigurationError"
    kind, text = answers[0][0]
    assert kind == "RankError"
    assert "rank 1 failed at step layers: ConfigurationError: prompt_rows" in text
    for _, kinds in answers:
        assert kinds == ["direct", "capture", "replay"]


def test_a_rank_killed_between_steps_hangs_nobody_and_is_named():
    answers = run_ranks(2, rank_experts.die_between_steps, dead=[1], patience=3, seconds=60)
    kind, text, seconds = answers[0].result
    assert kind == "RankError"
    assert "rank 1 gave no sign of life" in text
    assert seconds < 3 * LIMIT


def test_what_cannot_be_spread_is_refused_on_all_ranks_by_name():
    expected = {
        "capacity": "capacity: expected above 0, to 1, got 1.5",
        "slots": "slots_per_layer: expected the same on all ranks",
        "too many slots": "slots_per_layer: expected 1 to 8",
        "experts": "ranks: expected a number that divides the 7 experts",
        "rows": "rows: expected the same on all ranks, but rank 0 has 1, rank 1 has 2",
        "options": "options: expected the same on all ranks",
    }
    for rank, answer in enumerate(run_ranks(2, rank_experts.refuse)):
        found = answer.result
        for name, text in expected.items():
            assert found[name][0] == "ConfigurationError", (name, found[name])
            assert text in found[name][1]
        assert found["kind"][0] == ("ConfigurationError" if rank else "RankError")
        assert found["restore"][0] == "LifecycleError"
        assert found["copy"][0] == "CacheTypeError"
        for name in ("saved", "loaded"):
            assert found[name][0] == "LifecycleError"
            assert "restore() first" in found[name][1]


@pytest.mark.parametrize(
    ("capacity", "bad"), [(1.0, False), (1.0, True), (0.2, False)],
    ids=["room for all", "an id that is none", "too little room"],
)  # fmt: skip
def test_rows_come_back_from_the_owners_of_their_experts(capacity, bad):
    answers = [each.result for each in run_ranks(2, rank_experts.exchange, capacity, bad)]
    for rank, (is_right, is_zero, faults, routes, shape) in enumerate(answers):
        is_bad = capacity < 1 or (bad and rank == 0)
        assert is_right is not is_bad
        assert is_zero is is_bad  # never half right
        assert faults == is_bad
        assert routes == 6
        assert shape == (2 * (6 if capacity == 1 else 2), 4)
