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
        "sharded": ("RankError", "ConfigurationError", "transformers model"),
        "before": ("LifecycleError", "LifecycleError", "expected a prompt first"),
        "prompt": ("ConfigurationError", "ConfigurationError", "prompt: expected the same"),
        "room": ("RankError", "CapacityError", "max_seq_len"),
        "one launch": ("ConfigurationError", "ConfigurationError", "use generate"),
        "stream one launch": ("ConfigurationError", "ConfigurationError", "use stream"),
        "stale": ("RankError", "StaleGraphError", "position"),
    }
    answers = [each.result for each in run_ranks(2, rank_decode.refuse, path)]
    for rank, (found, after) in enumerate(answers):
        assert after == greedy
        for name, (kind, text) in found.items():
            assert (kind, expected[name][2] in text) == (expected[name][rank], True), (name, text)


def test_options_that_cannot_work_are_refused_by_name(llama):
    path, _ = llama
    found = run_ranks(2, rank_decode.refuse_options, path)[0].result
    assert {kind for kind, _ in found.values()} == {"ConfigurationError"}, found
    texts = {name: text for name, (_, text) in found.items()}
    assert texts["ranks"] == "ranks: expected Ranks, got int"
    assert texts["agree_every"] == "agree_every: expected an int of at least 1, got 0"
    assert "compile: expected none for a model spread over ranks" in texts["compile"]
    assert texts["cache"] == "cache: expected a StaticKVCache, got int"
    assert "expected 2 (the model's), got 4" in texts["heads"]


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
