"""Suite moe: stable names, the bits of the model without graphs, what boundaries came to."""

import json

import pytest
import torch

from graphcore.bench import main
from graphcore.bench.suites import BY_CASE, Request, moe
from graphcore.bench.suites.moe_conversation import logits_of, requests_arm
from graphcore.bench.suites.moe_ways import DirectWay, GraphWay, ReuseWay, Steps
from graphcore.driver import open_driver
from graphcore.errors import ConfigurationError, GraphcoreError
from graphcore.moe import accelerate

CASES = ["slots=25% options=boundary", "slots=100% options=off"]


@pytest.fixture(scope="module")
def driver():
    return open_driver("emulated")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "moe.json"
    asked = [part for name in CASES for part in ("--only", name)]
    assert main(["moe", "--driver", "emulated", *asked, "--out", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def suite(driver):
    with driver.stream(blocking=True) as stream:
        yield moe._Suite(driver, stream, Request(7))


@pytest.fixture
def handle(suite):
    with accelerate(suite.model, suite.model.config.num_experts, driver=suite.driver) as made:
        yield made


@pytest.fixture
def eager(suite):
    return DirectWay(moe.EAGER, suite.talk, suite.driver, suite.stream)


def notes_of(report, case):
    return {
        note["case"].removeprefix(f"{case}: "): note["ours"]
        for note in report["notes"]
        if note.get("case", "").startswith(f"{case}: ")
    }


def test_suite_moe_gives_rows_of_stable_names_with_the_bits_of_the_model_without_graphs(report):
    rows = {row["case"]: row for row in report["rows"]}
    assert list(rows) == CASES
    for row in rows.values():
        assert (row["unit"], row["error"]) == ("tokens/s", 0.0)
        assert row["ours"] > 0
        assert row["floor"] > 0
        assert row["peers"].keys() == set(moe.PEERS)


def test_there_is_a_case_for_every_share_of_experts_with_every_setting_of_the_options():
    assert len(moe.cases()) == 12
    assert {"slots=25% options=off", "slots=50% options=both"} <= set(moe.cases())
    assert [len(options) for options in moe.OPTIONS.values()] == [0, 1, 1, 2]


def test_with_the_option_a_boundary_is_an_update_or_a_replay_and_a_prompt_is_staged(report):
    notes = notes_of(report, "slots=25% options=boundary")
    kinds = {name.split(",")[0] for name in notes if name.startswith("boundary by")}
    assert kinds == {"boundary by direct", "boundary by update", "boundary by replay"}
    assert any(name.startswith("staged, ") for name in notes)
    assert any(name.endswith("host beyond its capture") for name in notes)
    assert 50 < notes["replays"] < 100


def test_without_it_a_boundary_that_writes_elsewhere_is_declined_and_captured_again(report):
    notes = notes_of(report, "slots=100% options=off")
    kinds = {name.split(",")[0] for name in notes if name.startswith("boundary by")}
    assert kinds == {"boundary by direct", "boundary by declined", "boundary by replay"}
    calls = {name.split(",")[0]: int(name.split()[1]) for name in notes if " calls, " in name}
    assert calls["capture"] == 2 + calls["declined"]
    total = sum(calls.values())
    assert notes["replays"] == pytest.approx(100 * calls["replay"] / total, abs=0.01)
    assert "staged" not in calls


def test_hits_are_fewer_where_fewer_experts_are_resident(report):
    hits = [notes_of(report, f"slots={share}%")["hits"] for share in (25, 100)]
    assert hits[0] < hits[1] < 100


def test_a_way_over_spoilt_slots_is_found_out(suite, handle, eager):
    way = ReuseWay("ours", suite.talk, handle, suite.stream, {})
    assert suite._error(way, eager) == 0.0
    for group in handle.pool.groups.values():
        down = torch.from_dlpack(group.rows["down"])
        down.copy_(down.flip(1))
    with pytest.raises(GraphcoreError, match="arm ours: expected the logits of the model without"):
        suite._error(way, eager)
    way.close()


def test_a_way_that_runs_nothing_is_found_out(suite, handle, eager):
    class Idle:
        name = "idle"

        def request(self, number, look=lambda: None):
            for _ in range(1 + suite.talk.tokens):
                look()

    suite.talk.logits.fill_(float("nan"))
    with pytest.raises(GraphcoreError, match=r"arm idle: .* a difference of inf"):
        suite._error(Idle(), eager)


def test_a_step_that_the_device_refused_is_found_out(suite, handle):
    moe._check(handle)
    layer = next(iter(handle.layers.values()))
    x = torch.zeros(1, suite.model.config.hidden_size)
    layer(x, torch.full((1, 2), 99), torch.ones(1, 2))
    with pytest.raises(GraphcoreError, match="expected steps without faults"):
        moe._check(handle)


def test_requests_differ_and_their_tokens_are_no_repetition(suite, handle):
    way = GraphWay(suite.talk, Steps(suite.talk, handle).fits_prompts, suite.driver, suite.stream)
    assert way.obstacle == ""
    chosen = logits_of(way, suite.talk, range(3), suite.driver).argmax(dim=-1)
    assert chosen.shape == (3, 1 + suite.talk.tokens)
    assert len({tuple(each) for each in chosen.tolist()}) == 3
    assert all(len(set(each)) > 2 for each in chosen.tolist())
    way.close()


def test_an_arm_runs_whole_requests_and_counts_tokens(suite, monkeypatch):
    numbers = []

    class Counted:
        name = "counted"

        def request(self, number, look=None):
            numbers.append(number)

    tokens = suite.talk.tokens
    for share, runs in ((1, 4), (2, 2), (9, 1)):
        numbers.clear()
        requests_arm(Counted(), tokens, suite.driver, share=share).burst(4 * tokens)
        assert numbers == list(range(runs))
    ticks = iter([10.0, 12.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    arm = requests_arm(Counted(), tokens, suite.driver, share=2)
    assert arm.burst(4 * tokens) == pytest.approx(4.0)  # half of the requests took 2


def test_unknown_cases_and_peers_are_refused_and_one_peer_must_be_left(driver, capsys):
    assert "moe" in BY_CASE
    assert main(["moe", "--driver", "emulated", "--only", "slots=10% options=off"]) == 2
    assert "'slots=25% options=off'" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="--without: expected peers"):
        moe.run(driver, Request(7, frozenset({"vllm"})))
    with pytest.raises(ConfigurationError, match="peers: expected at least one"):
        moe.run(driver, Request(7, frozenset(moe.PEERS), frozenset(CASES[:1])))
