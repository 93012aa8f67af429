"""Suites update and inspect: stable names, arms that do nothing are found out, peers' own calls."""

import ctypes
import json
import types

import pytest

from graphcore.bench import main
from graphcore.bench.cloop import KernelNode
from graphcore.bench.suites import update, update_nodes, update_pairs, update_peers
from graphcore.bench.suites.chain import Chain
from graphcore.bench.suites.update_nodes import NodeChanges
from graphcore.errors import GraphcoreError


@pytest.fixture
def pair():
    from graphcore.driver import open_driver

    driver = open_driver("emulated")
    with driver.stream(blocking=True) as stream:
        yield Chain(driver, stream, 4), Chain(driver, stream, 4)


def _report(tmp_path, suite):
    path = tmp_path / f"{suite}.json"
    assert main([suite, "--driver", "emulated", "--out", str(path)]) == 0
    return json.loads(path.read_text())


def test_suite_update_gives_rows_of_stable_names_and_its_notes(tmp_path):
    report = _report(tmp_path, "update")
    assert [row["case"] for row in report["rows"]] == [
        "whole n=16",
        "rebind n=16",
        "nodes k=2 n=16",
    ]
    for row in report["rows"]:
        assert row["ours"] > 0
        assert row["floor"] > 0
        assert row["peers"]
    notes = {note["case"]: note["ours"] for note in report["notes"] if "case" in note}
    assert notes["growth over 20 updates"] == 0
    assert "instantiate and first launch n=16" in notes
    assert "whole n=16: its speed over that" in notes
    assert "whole n=16: the floor's speed over that" in notes
    steps = [case.split(" at every step of ")[0] for case in notes if "every step" in case]
    assert steps == [
        "changing every node", "two executables in turn", "changing 3 nodes",
        "changing every node", "two executables in turn",
    ]  # fmt: skip


def test_suite_inspect_measures_every_look_at_every_size(tmp_path):
    cases = [note["case"] for note in _report(tmp_path, "inspect")["notes"]]
    looks = ("snapshot", "fingerprint", "diff", "check")
    assert cases == [
        *(f"{look} n={length}" for length in (10, 40) for look in looks),
        "owners check of a launch",
    ]


def test_every_arm_runs_the_other_chain_at_each_call(pair):
    for step in (update._ours(pair), update._rebound(pair), update_peers.driver_call(pair)):
        update_pairs.check_pair("it", step, pair)


@pytest.mark.parametrize(
    "step_of",
    [
        pytest.param(lambda pair: lambda: None, id="launches nothing"),
        pytest.param(
            lambda pair: lambda: pair[0].graph.instantiate().launch(pair[0].stream),
            id="updates nothing",
        ),
    ],
)
def test_an_arm_that_does_not_do_the_work_is_found_out(pair, step_of):
    with pytest.raises(GraphcoreError, match="arm lazy"):
        update_pairs.check_pair("lazy", step_of(pair), pair)


def test_an_arm_that_changes_other_nodes_than_asked_is_found_out(pair):
    one, two = NodeChanges(pair, 1), NodeChanges(pair, 2)
    two.check("it", two.step)
    with pytest.raises(GraphcoreError, match="arm lazy"):
        one.check("lazy", two.step)


def test_the_structure_of_a_node_is_read_by_the_bindings_as_it_was_written(pair):
    bindings = pytest.importorskip("cuda.bindings.driver")
    node = KernelNode(NodeChanges(pair, 1).params()[0])
    structure = update_nodes._structure(bindings, node)
    assert (structure.gridDimX, structure.blockDimX, structure.sharedMemBytes) == (1, 1, 0)
    assert int(structure.kernelParams) == ctypes.addressof(node._pointers)


def test_a_missing_peer_is_a_note_and_another_one_stands(pair, monkeypatch):
    def broken(pair):
        raise ImportError("no such library")

    peers = {"absent": broken, "driver call": update_peers.driver_call}
    monkeypatch.setattr(update, "EMULATED_PEERS", peers)
    notes = []
    request = types.SimpleNamespace(without=frozenset(), rounds=7)
    arms = update._peers(pair, request, notes)
    assert [arm.name for arm in arms] == ["driver call"]
    assert notes == [{"left out": "absent", "reason": "ImportError: no such library"}]
