"""A whole mixture of spread experts is decoded through one captured step on every rank."""

import pytest
from helpers import rank_experts
from helpers.ranks import run_ranks

NEW = rank_experts.NEW


@pytest.fixture(scope="module")
def alone():
    found = [rank_experts.decode_alone(rank) for rank in range(4)]
    for each in found:
        assert each["greedy"] == each["exactly"]
    return found


@pytest.mark.parametrize(("size", "slots"), [(2, 3), (4, 4)])
def test_ranks_with_prompts_of_their_own_decode_the_tokens_of_one_process(alone, size, slots):
    # the first rank's rows end early, the others' later or not at all
    new = [row[-NEW:] for row in alone[0]["greedy"]]
    endings = [new[0][1], new[1][2]]
    answers = run_ranks(size, rank_experts.decode_mixture, slots, endings, seconds=200)
    longest = max(len(rank_experts.PROMPTS[rank][0][0]) for rank in range(size))
    lengths = set()
    for rank, answer in enumerate(answers):
        found, mine = answer.result, alone[rank]
        given = len(rank_experts.PROMPTS[rank][0][0])
        assert found["greedy"] == found["again"] == found["eager"] == mine["greedy"]
        assert found["streamed"] == [row[-NEW:] for row in mine["greedy"]]
        assert found["drawn"] == mine["drawn"]
        assert found["length"] == longest + NEW  # shorter prompts took as many slots
        assert found["captures"] == 1
        assert found["exchanges"] == 2 * 3  # of two layers: rows, their experts, and the way back
        assert found["kept"] == [f"communicator '0' of {size} ranks"]
        assert found["ended"] == found["late"] == rank_experts.cut(mine["greedy"], given, endings)
        assert found["held"] == found["held late"] == longest + len(found["ended"][0]) - given
        lengths.add(len(found["ended"][0]) - given)
        assert found["forced"] == [rank, 5]
        assert found["dropped"] != mine["greedy"]
        assert not found["faults"]
    assert len(lengths) > 1  # the ranks did end at different steps


def test_what_the_ranks_cannot_decode_together_is_refused_on_all(alone):
    configuration, rank = "ConfigurationError", "RankError"
    expected = {
        "handle": (configuration, configuration, "expected what spread_experts() gives, got Qwen3"),
        "pieces": (rank, configuration, "capture_prefill: expected False"),
        "rows": (configuration, configuration, "batch_size: expected the same on all ranks"),
        "compile": (rank, configuration, "compile: expected False"),
        "room": ("CapacityError", "CapacityError", "max_seq_len"),
        "too long for one": (rank, "CapacityError", "max_seq_len"),
        "new tokens": (configuration, configuration, "max_new_tokens: expected the same"),
        "batch": (rank, configuration, "expected batch 1"),
        "one launch": ("PlanError", "PlanError", "no conditional body holds"),
        "restored": (rank, "LifecycleError", "expected experts that are spread over ranks"),
    }
    for number, answer in enumerate(run_ranks(2, rank_experts.refuse_mixture)):
        found, after, again, captures = answer.result
        assert set(found) == set(expected)
        for name, (kind, text) in found.items():
            assert (kind, expected[name][2] in text) == (expected[name][number], True), (name, text)
        assert after == again
        assert captures == 2  # anew on both, though the weights of one moved


def test_a_rank_killed_while_decoding_is_named_on_the_others():
    answers = run_ranks(2, rank_experts.die_while_decoding, dead=[1], patience=3, seconds=60)
    kind, text, seconds = answers[0].result
    assert kind == "RankError"
    assert "rank 1 gave no sign of life" in text
    assert seconds < 3 * rank_experts.LIMIT
