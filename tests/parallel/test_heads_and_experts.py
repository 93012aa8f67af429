"""Heads and experts of one model over ranks: all decode the tokens of one process together."""

import pytest
import transformers
from helpers import rank_decode
from helpers import rank_heads_experts as steps
from helpers.ranks import run_ranks

NEW = steps.NEW


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen")
    alone = steps.save_mixture(path)
    assert alone["greedy"] == alone["exactly"]
    return path, alone


@pytest.mark.parametrize(("size", "slots"), [(2, 3), (4, 2)])
def test_ranks_decode_one_conversation_each_with_its_heads_and_its_experts(qwen, size, slots):
    path, alone = qwen
    for answer in run_ranks(size, steps.decode, path, slots, seconds=200):
        found = answer.result
        greedy = alone["greedy"]
        assert found["greedy"] == found["again"] == found["eager"] == found["after"] == greedy
        assert found["streamed"] == greedy[0][-NEW:]
        assert found["drawn"] == alone["drawn"]
        assert found["without"] != greedy  # what the last rank's experts give is missing
        assert found["heads"] == 4 // size
        assert found["experts"] == (8 // size, True)
        assert found["captures"] == 1
        assert found["exchanges"] == 0  # no row travels
        assert found["sums"] >= 2 * 2  # of two layers: heads, and experts
        for routes, faults in found["totals"]:
            assert (len(routes), faults) == (size, 0)
            assert all(routes)  # each rank's experts were asked
        assert found["hits"]
        assert not found["faults"]


def test_ragged_and_guided_batches_and_buckets_are_those_of_one_process(qwen):
    path, alone = qwen
    for answer in run_ranks(2, steps.decode_batches, path, seconds=200):
        found = answer.result
        assert found["ragged"] == alone["ragged"]
        assert found["guided"] == alone["guided"] != alone["greedy"]
        assert found["grown"] == (alone["greedy"], ["1 x 8", "1 x 16"])
        assert found["put back"] == ((8, 64, 32), 4)  # a weight of all ranks, of which 4 are here
        assert found["part"] == (4, 64, 32)
        assert found["again"] == alone["greedy"]
        assert not found["faults"]


@pytest.mark.parametrize(
    ("kind", "size", "shared"),
    [
        ("Mixtral", 4, []),
        ("Qwen2Moe", 2, ["whole"]),  # no rule for it: every rank computes it
        ("Glm4Moe", 2, ["(16, 64)"]),  # its plan spreads it: half of 32
    ],
)
def test_other_mixtures_and_their_shared_experts_are_those_of_one_process(
    kind, size, shared, tmp_path
):
    plan = getattr(transformers, f"{kind}Config")().base_model_tp_plan
    if "moe_tp_experts" not in plan.values():
        pytest.skip(f"transformers {transformers.__version__} spreads no experts of {kind}")
    alone = steps.save_mixture(tmp_path, kind)
    assert alone["greedy"] == alone["exactly"]
    for answer in run_ranks(size, steps.decode_kind, tmp_path, 2):
        assert answer.result == (alone["greedy"], shared, {})


def test_a_step_of_reuse_over_rows_that_all_ranks_have_is_what_one_process_computes(qwen):
    path, _ = qwen
    for rank, answer in enumerate(run_ranks(2, steps.step_by_reuse, path)):
        kinds, rows, experts = answer.result
        assert kinds == ["direct", "capture", "replay", "replay"]
        assert rows == 2 * 2  # a row for each route; none of another rank's
        assert experts == (4 * rank, 4, 8)


def test_a_part_of_every_expert_on_each_rank_decodes_too_but_lies_in_no_slots(qwen):
    path, alone = qwen
    for answer in run_ranks(2, steps.decode_with_parts_of_each, path):
        found, (kind, text) = answer.result
        assert found == alone["greedy"]
        assert kind == "ConfigurationError"
        assert "a part of every expert" in text
        assert "whole_experts=True" in text


def test_what_cannot_be_combined_is_refused_by_name_on_all_ranks(qwen, tmp_path):
    path, alone = qwen
    rank_decode.save_llama(tmp_path)
    configuration, rank, lifecycle = "ConfigurationError", "RankError", "LifecycleError"
    expected = {
        "dense": (configuration, configuration, "expected a mixture whose tp_plan spreads"),
        "not spread": (lifecycle, lifecycle, "spread_experts(model, ranks, ...) first"),
        "buckets not spread": (lifecycle, lifecycle, "spread_experts(model, ranks, ...) first"),
        "capacity": (configuration, rank, "capacity: expected 1.0 for a model whose heads"),
        "device": (configuration, configuration, "device: expected None for a model whose heads"),
        "plan": (configuration, configuration, "whole_experts: expected transformers to give"),
        "slots": (configuration, configuration, "slots_per_layer: expected the same"),
        "too many slots": (configuration, configuration, "slots_per_layer: expected 1 to 4"),
        "own rows": (
            configuration,
            configuration,
            "sharded over 2 ranks by its tp_plan, got whole",
        ),
        "twice": (configuration, configuration, "got ParallelExperts"),
        "own prompts": (configuration, configuration, "got one whose heads are, too"),
        "own buckets": (configuration, configuration, "got one whose heads are, too"),
        "compile": (rank, configuration, "compile: expected False"),
        "prompt": (configuration, configuration, "prompt: expected the same"),
        "one launch": ("PlanError", "PlanError", "no conditional body holds"),
        "restored on one": (rank, lifecycle, "spread_experts(model, ranks, ...) first"),
    }
    answers = run_ranks(2, steps.refuse, path, tmp_path, patience=10, seconds=200)
    for number, answer in enumerate(answers):
        found, after = answer.result
        assert set(found) == set(expected)
        for name, (kind, text) in found.items():
            assert (kind, expected[name][2] in text) == (expected[name][number], True), (name, text)
        assert after == alone["greedy"]


def test_a_number_of_ranks_that_does_not_divide_the_experts_is_refused_on_all(tmp_path):
    steps.model_of("Qwen3Moe", num_experts=7).save_pretrained(tmp_path)
    for answer in run_ranks(2, steps.not_divided, tmp_path):
        kind, text = answer.result
        assert kind == "ConfigurationError"
        assert text == "ranks: expected a number that divides the 7 experts, got 2"


def test_a_rank_that_fails_while_all_decode_is_an_error_on_all(qwen):
    path, _ = qwen
    answers = [each.result for each in run_ranks(2, steps.fail_while_decoding, path, patience=3)]
    for kind, text, seconds in answers:
        assert kind == "RankError"
        assert "broken on purpose" in text
        assert seconds < 10


def test_a_rank_killed_while_decoding_is_named_on_the_others(qwen):
    path, _ = qwen
    answers = run_ranks(2, steps.die_while_decoding, path, dead=[1], patience=3, seconds=60)
    kind, text, seconds = answers[0].result
    assert kind == "RankError"
    assert "rank 1 gave no sign of life" in text
    assert seconds < 3 * steps.LIMIT


@pytest.mark.parametrize("bad", [0, -1, 8], ids=["experts", "below", "above"])
def test_what_the_experts_of_all_ranks_give_is_added_up(bad):
    counts = []
    for answer in run_ranks(2, steps.add_up, bad):
        is_right, is_nothing, is_zero, faults, routes, here = answer.result
        assert is_right is not bool(bad)
        assert is_nothing is bool(bad)  # never half right
        assert is_zero  # of a row whose expert is elsewhere nothing is computed here
        assert faults == bool(bad)
        assert sum(routes) == 6
        counts.append(here)
    assert sum(counts) == 6 - bool(bad)
