"""Buckets of a mixture whose experts are spread: all ranks take one, and move to the next together.

Each rank decodes prompts of its own, of other rows and lengths.
"""

import itertools

import pytest
from helpers import rank_expert_buckets as steps
from helpers import rank_experts
from helpers.rank_experts import cut
from helpers.ranks import run_ranks

NEW = steps.NEW
WAY = ["2 x 8", "2 x 12", "2 x 16"]


@pytest.fixture(scope="module")
def alone():
    found = [steps.decode_alone(rank) for rank in range(4)]
    for each in found:
        assert each["greedy"] == each["exactly"]
    return found


def all_end_between(alone, first, last):
    """Ids by which every row ends, and the last one at a place from ``first`` to ``last``."""
    rows = [row[-NEW:] for each in alone for row in each["greedy"]]
    for chosen in itertools.product(*(row[: last + 1] for row in rows)):
        ends = [min(map(row.index, set(chosen) & set(row))) for row in rows]
        if first <= max(ends) <= last:
            return sorted(set(chosen))
    raise AssertionError("no ids end all rows there")


def ids_that_end_the_second_alone(alone):
    """Ids by which both rows of the second rank end within 3 tokens, and the first rank's never."""
    rows = [row[-NEW:] for row in alone[1]["greedy"]]
    for chosen in itertools.product(*(row[:3] for row in rows)):
        if not set(chosen) & set(alone[0]["greedy"][0][-NEW:]):
            return sorted(set(chosen))
    raise AssertionError("no ids end the second rank alone")


@pytest.mark.parametrize(("size", "slots"), [(2, 3), (4, 4)])
def test_ranks_with_prompts_of_their_own_decode_in_one_bucket_what_one_process_does(
    alone, size, slots
):
    # the first rank ends in the first bucket, whose second row stands for nothing; or the second
    # rank, which has both, and forgets what it decoded past its end
    first = [alone[0]["greedy"][0][4 + 1]]
    second = ids_that_end_the_second_alone(alone)
    endings = {1: second, 3: first, 16: second}
    # of the longest prompt the first bucket holds 4 tokens more, the second 8
    early, later = (all_end_between(alone[:size], *places) for places in ((0, 2), (4, 6)))
    answers = run_ranks(size, steps.decode, slots, endings, early, later, seconds=300)
    new = []
    for rank, answer in enumerate(answers):
        found, mine = answer.result, alone[rank]
        given = len(steps.PROMPTS[rank][0][0])
        assert found["captures"] == 6
        assert found["captures after"] == 6 + 3  # once more with pads hidden, of two rows
        assert found["slots"]  # no bucket has any of its own
        assert found["fits"] == found["after"] == (mine["greedy"], ["2 x 16"])
        assert found["grown"] == found["eager"] == (mine["greedy"], WAY)
        for every, ids in endings.items():
            assert found[f"ended {every}"] == (cut(mine["greedy"], given, ids), WAY), every
        new.append([len(found[f"ended {every}"][0][0]) - given for every in endings])
        assert found["early"] == (cut(mine["greedy"], given, early), ["2 x 8"])
        assert found["later"] == (cut(mine["greedy"], given, later), WAY[:2])
        assert found["looped"] == (mine["greedy"], WAY)
        assert "not in one launch: generate_in_one_launch: expected one rank" in found["why"]
        assert found["streamed"] == [row[-NEW:] for row in mine["greedy"]]
        assert found["drawn"] == (mine["drawn"], WAY)
        assert found["nodes"] == [2 * 3] * 6  # of two layers: rows, their experts, the way back
        assert found["dropped"][0] != mine["greedy"]
        assert found["memory"] == (6, 2 * 2 * 2 * 2 * 16 * 16 * 4)  # stored once, for the largest
        assert found["closed"][0] == "LifecycleError"
        assert not found["faults"]
    # one was done in the first bucket, and others went on through all of them
    assert [min(each) <= 3 for each in zip(*new, strict=True)] == [True] * 3
    assert [max(each) for each in zip(*new, strict=True)] == [NEW] * 3


def test_guided_rows_of_ranks_move_through_the_buckets_too(alone):
    for rank, answer in enumerate(run_ranks(2, steps.decode_guided)):
        ids, path = answer.result
        assert ids == alone[rank]["guided"]
        assert ids != alone[rank]["greedy"]
        assert path == ["1 x 8", "1 x 12", "1 x 16"]


def test_a_rank_that_ended_goes_on_where_layers_slide(alone):
    endings = [alone[1]["sliding"][0][2 + 1]]
    for rank, answer in enumerate(run_ranks(2, steps.decode_sliding, endings)):
        whole, ended, after = answer.result
        mine, given = alone[rank]["sliding"], len(steps.PROMPTS[rank][0][0])
        assert whole == (mine, ["1 x 8", "1 x 12", "1 x 16"])
        assert ended == [(cut(mine, given, endings), whole[1])] * 2
        assert after == (mine, ["1 x 16"])


def test_what_the_ranks_cannot_do_in_one_bucket_is_refused_on_all():
    configuration, rank = "ConfigurationError", "RankError"
    capacity, lifecycle = "CapacityError", "LifecycleError"
    expected = {
        "handle": (configuration, configuration, "expected what spread_experts() gives, got Qwen3"),
        "lengths": (configuration, configuration, "max_seq_lens: expected the same on all ranks"),
        "rows": (configuration, configuration, "batch_sizes: expected the same on all ranks"),
        "sizes of one": (rank, configuration, "max_seq_lens: expected sizes that differ"),
        "compile": (rank, configuration, "compile: expected False"),
        "agree_every": (rank, configuration, "agree_every: expected an int of at least 1"),
        "capture on one": (configuration, configuration, "capture: expected the same"),
        "tokens": (capacity, capacity, "1 rows of 20 tokens fit none of them"),
        "batch": (capacity, capacity, "3 rows of 8 tokens fit none of them"),
        "new tokens": (configuration, configuration, "max_new_tokens: expected the same"),
        "grow": (configuration, configuration, "grow: expected the same"),
        "ids": (rank, configuration, "input_ids"),
        "looks": (configuration, configuration, "poll_every: expected the same"),
        "ends": (configuration, configuration, "eos_token_id: expected the same"),
        "cache": (rank, configuration, "keep_cache: expected none"),
        "closed": (rank, lifecycle, "expected open buckets"),
        "restored": (rank, lifecycle, "expected experts that are spread over ranks"),
        "made of restored": (rank, lifecycle, "expected experts that are spread over ranks"),
    }
    for number, answer in enumerate(run_ranks(2, steps.refuse, patience=10, seconds=200)):
        found, after = answer.result
        assert set(found) == set(expected)
        for name, (kind, text) in found.items():
            assert (kind, expected[name][2] in text) == (expected[name][number], True), (name, text)
        assert after[1] == ["1 x 16"]


def test_a_bucket_that_one_rank_cannot_capture_is_an_error_on_all():
    answers = [each.result for each in run_ranks(2, steps.fail_to_capture, patience=3)]
    assert answers[1][0] == "CaptureError"
    assert answers[0][0] == "RankError"
    for kind, text, seconds in answers:
        assert "broken on purpose" in text, kind
        assert seconds < 30


def test_a_rank_killed_between_two_buckets_is_named_on_the_others():
    answers = run_ranks(2, steps.die_between_buckets, dead=[1], patience=3, seconds=60)
    kind, text, seconds = answers[0].result
    assert kind == "RankError"
    assert "rank 1 gave no sign of life" in text
    assert seconds < 3 * rank_experts.LIMIT
