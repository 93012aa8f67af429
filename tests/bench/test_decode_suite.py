"""Suite decode: stable names, tokens counted, what cannot run is a note and costs nothing else."""

import json
import types

import pytest
import torch
from transformers import GenerationMixin

from graphcore.bench import main
from graphcore.bench.harness import Arm
from graphcore.bench.streaming_read import StreamingRead
from graphcore.bench.suites import PARTS, Request, decode, decode_arms, decode_peers
from graphcore.bench.suites.decode_checks import agreement, step_bytes
from graphcore.bench.suites.decode_models import CASES, Subject, subject_of
from graphcore.bench.suites.decode_ours import PLAIN, OurWay
from graphcore.decode import CUDAGraphAR
from graphcore.driver import open_driver
from graphcore.errors import ConfigurationError, GraphcoreError


@pytest.fixture(scope="module")
def driver():
    return open_driver("emulated")


@pytest.fixture(scope="module")
def llama(driver):
    return subject_of("llama-1b", driver)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "decode.json"
    assert main(["decode", "--driver", "emulated", "--only", "llama-1b", "--out", str(path)]) == 0
    return json.loads(path.read_text())


def notes_of(report):
    return {note["case"]: note["ours"] for note in report["notes"] if "case" in note}


def test_suite_decode_gives_rows_of_stable_names_with_the_error_beside_the_speed(report):
    rows = {row["case"]: row for row in report["rows"]}
    assert {"llama-1b", "llama-1b host"} <= set(rows)
    row = rows["llama-1b"]
    assert row["unit"] == "tokens/s"
    assert row["peers"].keys() == {decode_peers.HF_EAGER}
    assert row["ours"] > 0
    assert row["floor"] > 0
    assert 0 <= row["error"] < 1e-5
    assert rows["llama-1b host"]["unit"] == "us"


def test_equality_with_eager_bytes_and_costs_paid_once_are_notes(report):
    notes = notes_of(report)
    assert notes[f"llama-1b {PLAIN}: tokens equal to eager"] == 3
    assert notes[f"llama-1b {PLAIN}: choices equal, tokens forced"] == 3
    assert notes[f"llama-1b {PLAIN}: nodes"] > 20
    for what in ("capture", "first replay", "GPU time of a step", "bytes of a step"):
        assert f"llama-1b {PLAIN}: {what}" in notes


def test_a_step_is_compared_with_a_streaming_read_of_the_same_run(driver, llama, monkeypatch):
    monkeypatch.setattr(StreamingRead, "__init__", lambda self, *_: None)
    monkeypatch.setattr(StreamingRead, "bytes_a_second", 5e11, raising=False)
    monkeypatch.setattr(decode, "step_bytes", lambda subject, cache: 3 * 10**9)
    monkeypatch.setattr(decode, "subject_of", lambda name, driver: llama)
    measured = decode.run(driver, Request(7, only=frozenset({"llama-1b"})))
    notes = {note["case"]: note["ours"] for note in measured.notes if "case" in note}
    assert notes["llama-1b streaming read"] == 500.0
    seconds = notes[f"llama-1b {PLAIN}: GPU time of a step"] / 1e6
    share = 100 * (3e9 / 5e11) / seconds
    assert notes[f"llama-1b {PLAIN}: of the read bandwidth"] == pytest.approx(share, rel=0.01)


def test_a_streaming_read_that_fails_costs_its_own_notes_only(driver, llama, monkeypatch):
    def broken(driver):
        raise GraphcoreError("expected the sum 0x1 of all words, got 0x0")

    monkeypatch.setattr(decode, "read_bandwidth", broken)
    monkeypatch.setattr(decode, "subject_of", lambda name, driver: llama)
    measured = decode.run(driver, Request(7, only=frozenset({"llama-1b"})))
    cases = {note["case"] for note in measured.notes if "case" in note}
    assert f"llama-1b {PLAIN}: bytes of a step" in cases
    assert not {case for case in cases if "read bandwidth" in case or "streaming" in case}
    left_out = [note["left out"] for note in measured.notes if "left out" in note]
    assert "llama-1b streaming read" in left_out
    assert "llama-1b" in {row.case for row in measured.rows}


def test_what_a_driver_cannot_do_is_left_out_by_name_and_with_the_reason(report):
    left_out = {note["left out"]: note["reason"] for note in report["notes"] if "left out" in note}
    assert "expected the cuda driver" in left_out["llama-1b ours compiled"]


def test_the_parts_of_the_suite_are_its_cases():
    assert PARTS["decode"] == CASES


@pytest.mark.parametrize("name", CASES)
def test_every_case_has_a_small_model_that_transformers_decodes(driver, name):
    subject = subject_of(name, driver)
    ids, end = decode_peers.eager_tokens(subject)
    prompt = 1 if subject.is_encoder_decoder else subject.prompt.shape[1]
    assert ids.shape == (1, prompt + subject.tokens)
    assert end not in ids
    assert len(set(ids[0, prompt:].tolist())) > 1  # equality with one token would say little
    assert isinstance(subject.model, GenerationMixin)


@pytest.mark.parametrize("name", ["llama-1b", "qwen3-moe", "t5-base"])
def test_the_step_written_by_hand_decodes_the_eager_tokens_and_begins_again(driver, name):
    subject = subject_of(name, driver)
    ids, _ = decode_peers.eager_tokens(subject)
    expected = ids[0, -subject.tokens :].tolist()
    step = decode_peers.HandStep(subject)
    for _ in range(2):
        step.begin()
        found = [int(step.token)]
        with torch.no_grad():
            for _ in range(subject.tokens - 1):
                step.decode()
                found.append(int(step.token))
        assert found == expected


def test_an_arm_of_a_generation_that_ends_early_is_found_out(driver):
    def generate(tokens):
        return torch.zeros(1, 5 + min(tokens, 2), dtype=torch.int64)

    with pytest.raises(GraphcoreError, match="arm lazy: expected 3 tokens more, got 1"):
        decode_arms.generating("lazy", generate, driver).burst(3)


def test_the_time_of_a_token_is_without_the_prompt_s(driver, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(decode_arms.time, "perf_counter", lambda: now[0])

    def generate(tokens):
        now[0] += 100.0 + 2.0 * tokens
        return torch.zeros(1, 5 + tokens, dtype=torch.int64)

    assert decode_arms.generating("it", generate, driver).burst(8) == pytest.approx(16.0)
    assert decode_arms.generating("it", generate, driver, share=4).burst(8) == pytest.approx(16.0)


def test_a_loop_begins_anew_at_every_burst_and_that_is_not_timed(driver):
    calls = []
    for arm_of in (decode_arms.looping, decode_arms.submitting, decode_arms.on_device):
        calls.clear()
        arm = arm_of("it", lambda: calls.append("begin"), lambda: calls.append("step"), driver)
        arm.burst(2)
        arm.burst(1)
        assert calls == ["begin", "step", "step", "begin", "step"]


def test_calls_behind_a_step_are_each_made_while_one_runs_and_only_they_count(driver, monkeypatch):
    log = []
    monkeypatch.setattr(
        decode_arms, "_behind", lambda driver: log.append("queued") or (lambda: log.append("wait"))
    )
    seconds = iter([3.0, 0.5])

    def step():
        log.append("step")
        return next(seconds)

    arm = decode_arms.behind_a_step("it", lambda: log.append("begin"), step, driver)
    assert arm.burst(2) == 3.5
    step_behind = ["step", "queued", "wait"]
    assert log == ["begin", "queued", *step_behind, *step_behind]


def test_only_experts_that_are_hit_and_no_encoder_count_as_bytes(driver):
    moe, t5 = subject_of("qwen3-moe", driver), subject_of("t5-base", driver)
    nothing = types.SimpleNamespace(named_tensors=dict)
    every = sum(weight.nbytes for weight in moe.model.parameters())
    experts = sum(weight.nbytes for weight in moe.model.parameters() if weight.dim() == 3)
    table = moe.model.get_input_embeddings().weight
    row_only = table.nbytes - table[0].nbytes
    assert step_bytes(moe, nothing) == every - experts // 2 - row_only
    decoder = sum(weight.nbytes for weight in t5.model.decoder.parameters())
    assert step_bytes(t5, nothing) < decoder + t5.model.lm_head.weight.nbytes


def test_a_runner_that_decodes_something_else_does_not_agree_with_eager(driver, llama):
    ids, end = decode_peers.eager_tokens(llama)
    other = ids.clone()
    other[0, -llama.tokens :] = (ids[0, -llama.tokens :] + 1) % 97
    with CUDAGraphAR(llama.model, max_seq_len=llama.capacity, driver=driver) as runner:
        assert agreement(runner, llama, ids, end).equal == llama.tokens
        assert agreement(runner, llama, other, end).equal == 0


def test_the_cost_of_a_peer_that_breaks_is_a_note(driver, llama, monkeypatch):
    def broken(subject, driver, end):
        raise RuntimeError("overwritten by a subsequent run\nand more")

    peers = {"broken": broken, "fine": lambda *_: Arm("fine", lambda calls: 1e-3 * calls)}
    monkeypatch.setattr(decode, "EMULATED_PEERS", peers)
    monkeypatch.setattr(decode, "subject_of", lambda name, driver: llama)
    measured = decode.run(driver, Request(7, only=frozenset({"llama-1b"})))
    assert set(measured.rows[0].peers) == {"fine"}
    assert {
        "left out": "llama-1b broken",
        "reason": "RuntimeError: overwritten by a subsequent run",
    } in measured.notes


def test_an_unknown_case_is_refused_with_the_known_ones(driver):
    with pytest.raises(ConfigurationError, match=r"--only: .*'llama-1b'.* got \['llama'\]"):
        decode.run(driver, Request(7, only=frozenset({"llama"})))


def test_ways_of_compiling_are_compared_where_asked_for(driver):
    measured = decode.run(driver, Request(7, only=frozenset({"smollm2 compile"})))
    assert measured.rows == []
    cases = [note["case"] for note in measured.notes if "case" in note]
    assert "smollm2 compile, no: GPU time of a step" in cases
    left_out = [note["left out"] for note in measured.notes if "left out" in note]
    assert "smollm2 compile fused products" in left_out


def test_our_way_starts_every_loop_at_the_end_of_the_prompt(driver, llama):
    way = OurWay(PLAIN, llama, driver, 96)
    start = llama.prompt.shape[1]
    for arm in (way.step_arm(), way.loop_arm(), way.host_arm()):
        arm.burst(2)
        assert int(way.runner.position) == start + 2
    way.close()


def test_smollm2_without_its_file_says_so_in_its_subject(monkeypatch, tmp_path):
    from graphcore.bench.suites import decode_models

    monkeypatch.setenv("GRAPHCORE_SMOLLM2", str(tmp_path / "absent.gguf"))
    with pytest.raises(ConfigurationError, match="GRAPHCORE_SMOLLM2: expected a file"):
        decode_models._smollm2_file()
    (tmp_path / "absent.gguf").write_bytes(b"GGUF")
    assert decode_models._smollm2_file() == tmp_path / "absent.gguf"
    assert isinstance(subject_of("smollm2", open_driver("emulated")), Subject)
