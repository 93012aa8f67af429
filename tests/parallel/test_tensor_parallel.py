"""A model spread over ranks decodes the tokens of one process, through one captured step each."""

import pytest
from helpers import rank_decode
from helpers.ranks import run_ranks

NEW = rank_decode.NEW


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    return path, rank_decode.save_llama(path)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_decode_the_tokens_of_one_process_by_replays_of_one_capture(llama, size):
    path, (greedy, drawn) = llama
    answers = [each.result for each in run_ranks(size, rank_decode.decode, path)]
    for found in answers:
        assert found["greedy"] == found["again"] == found["eager"] == greedy
        assert found["streamed"] == greedy[0][-NEW:]
        assert found["forced"] == [5]
        assert found["heads"] == 4 // size
        assert found["captures"] == 1
        assert found["kept"] == 1  # the graph keeps the communicator
        assert found["drawn"] == drawn
    assert len({str(found["own"]) for found in answers}) == 1  # a seed that nobody gave is shared


def test_a_rank_whose_weights_moved_makes_all_capture_anew(llama):
    path, (greedy, _) = llama
    for answer in run_ranks(2, rank_decode.recapture, path):
        first, second, third, captures = answer.result
        assert first == second == third == greedy
        assert captures == 2


def test_what_differs_by_rank_is_an_error_on_all_and_decoding_goes_on(llama):
    path, (greedy, _) = llama
    expected = {
        "options": ("ConfigurationError", "ConfigurationError", "max_seq_len"),
        "compile on one": ("RankError", "ConfigurationError", "compile: expected False"),
        "agree_every on one": ("RankError", "ConfigurationError", "agree_every: expected an int"),
        "guidance": ("ConfigurationError", "ConfigurationError", "guidance: expected the same"),
        "sampling": ("ConfigurationError", "ConfigurationError", "sampling: expected the same"),
        "values": ("ConfigurationError", "ConfigurationError", "model.values: expected the same"),
        "config": ("ConfigurationError", "ConfigurationError", "model.config: expected the same"),
        "sharded": ("RankError", "ConfigurationError", "transformers model"),
        "before": ("LifecycleError", "LifecycleError", "expected a prompt first"),
        "prompt": ("ConfigurationError", "ConfigurationError", "prompt: expected the same"),
        "room": ("RankError", "CapacityError", "max_seq_len"),
        "one launch": ("PlanError", "PlanError", "no conditional body holds"),
        "stream one launch": ("PlanError", "PlanError", "use stream"),
        "one launch on one": ("RankError", "PlanError", "no conditional body holds"),
        "new tokens": ("ConfigurationError", "ConfigurationError", "max_new_tokens: expected the"),
        "end": ("ConfigurationError", "ConfigurationError", "eos_token_id: expected the same"),
        "looks": ("ConfigurationError", "ConfigurationError", "poll_every: expected the same"),
        "seed": ("ConfigurationError", "ConfigurationError", "rank 0 has 7, rank 1 has 8"),
        "eager on one": ("ConfigurationError", "ConfigurationError", "decodes: expected the same"),
        "forced": ("ConfigurationError", "ConfigurationError", "token: expected the same"),
        "stale": ("RankError", "StaleGraphError", "position"),
    }
    answers = [each.result for each in run_ranks(2, rank_decode.refuse, path)]
    for rank, (found, after, held) in enumerate(answers):
        assert set(found) == set(expected)
        assert after == greedy
        assert held == 4  # of a forced token that differs nothing was decoded
        for name, (kind, text) in found.items():
            assert (kind, expected[name][2] in text) == (expected[name][rank], True), (name, text)


def test_options_that_cannot_work_are_refused_by_name(llama):
    path, _ = llama
    found = run_ranks(2, rank_decode.refuse_options, path)[0].result
    assert {kind for kind, _ in found.values()} == {"ConfigurationError"}, found
    texts = {name: text for name, (_, text) in found.items()}
    assert texts["ranks"] == "ranks: expected Ranks, got int"
    assert texts["agree_every"] == "agree_every: expected an int of at least 1, got 0"
    assert "compile: expected False for a model spread over ranks" in texts["compile"]
    assert "one order of collectives" in texts["compile"]
    assert "encoder-decoders are not spread" in texts["encoder-decoder"]
    assert texts["cache"] == "cache: expected a StaticKVCache, got int"
    assert "expected 2 (the model's), got 4" in texts["heads"]


def test_ragged_drawn_and_guided_batches_are_those_of_one_process(llama):
    path, (greedy, _) = llama
    alone = rank_decode.batches_alone(path)
    assert alone["ragged"] == alone["ragged exactly"]
    assert alone["guided"] == alone["guided exactly"]
    assert alone["guided"] != greedy == alone["not guided"]
    answers = [each.result for each in run_ranks(2, rank_decode.decode_batches, path)]
    for found, own in answers:
        for name in ("ragged", "drawn", "guided"):
            assert found[name] == alone[name], name
        assert found["captures"] == 1
        assert found["after"] == alone["guided"]
        assert found["scale"][0] == found["negative"][0] == "ConfigurationError"
        assert "guidance.scale: expected the same on all ranks" in found["scale"][1]
        assert "negative prompt: expected the same on all ranks" in found["negative"][1]
        assert own == answers[0][1]  # drawn by a seed that nobody gave, the same on all ranks
        assert own[0] != own[1]  # and another one each time


def test_buckets_over_ranks_give_the_tokens_of_one_process_and_no_loop_holds_collectives(llama):
    path, (greedy, _) = llama
    for rank, answer in enumerate(run_ranks(2, rank_decode.decode_in_buckets, path)):
        found = answer.result
        assert found["captures"] == 4
        assert found["fits"] == found["looped"] == found["after"] == (greedy, ["1 x 16"])
        assert found["grown"] == (greedy, ["1 x 8", "1 x 16"])
        assert found["streamed"] == greedy[0][-NEW:]
        assert "not in one launch: generate_in_one_launch: expected one rank" in found["why"]
        assert found["too long"][0] == "CapacityError"
        assert found["sizes"][0] == "ConfigurationError"
        assert "max_seq_lens: expected the same on all ranks" in found["sizes"][1]
        assert found["compile"][0] == ("ConfigurationError" if rank else "RankError")
        kind, text = found["loop"]
        assert kind == "PlanError"
        assert "expected one without collectives for a conditional body" in text
        assert "of 2 ranks" in text
        assert found["no loop"] == greedy
        (first, captures), (second, after) = found["pieces"]
        assert first == second == greedy
        assert (captures, after) == (2, 4)  # piece and step, both again on both ranks


def test_a_number_of_ranks_that_does_not_divide_the_heads_is_refused_on_all(tmp_path):
    rank_decode.save_llama(tmp_path, kv_heads=1, layers=1)
    for answer in run_ranks(2, rank_decode.not_divided, tmp_path):
        kind, text = answer.result
        assert kind == "ConfigurationError"
        assert text == "ranks: expected a number that divides num_key_value_heads (1), got 2"


def test_a_step_that_one_rank_cannot_capture_is_decoded_by_none(llama):
    path, _ = llama
    answers = [each.result for each in run_ranks(2, rank_decode.fail_to_capture, path, patience=3)]
    (found, held), (kind, text) = answers[0], answers[1][0]
    assert kind == "CaptureError"
    assert "broken on purpose" in text
    assert found[0] == "RankError"
    assert "rank 1" in found[1]
    assert held == answers[1][1] == 0


def test_a_rank_killed_while_decoding_is_named_on_the_others(llama):
    path, _ = llama
    answers = run_ranks(2, rank_decode.die_while_decoding, path, dead=[1], patience=3)
    kind, text, seconds = answers[0].result
    assert kind == "RankError"
    assert "rank 1 gave no sign of life" in text
    assert seconds < 6
