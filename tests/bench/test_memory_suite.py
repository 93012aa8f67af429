"""Suite memory: what buckets and executables take, beside what the library predicted."""

import json

import pytest

from graphcore.bench import main
from graphcore.bench.suites import Request, memory
from graphcore.driver import open_driver
from graphcore.errors import ConfigurationError


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "memory.json"
    assert main(["memory", "--driver", "emulated", "--out", str(path)]) == 0
    return json.loads(path.read_text())


def test_what_buckets_take_is_what_was_predicted(report):
    (row,) = report["rows"]
    assert (row["case"], row["unit"]) == ("k=4 buckets", "MiB")
    assert row["ours"] > 0
    assert row["of_floor"] == pytest.approx(1.0, abs=0.05)
    assert row["peers"].keys() == {memory.PRIVATE}


def test_each_bucket_and_what_they_share_are_notes(report):
    notes = {note["case"]: note["ours"] for note in report["notes"] if "case" in note}
    for capacity in (8, 16, 24, 48):
        assert notes[f"bucket 1 x {capacity}: alone"] > 0
    assert notes["K and V, stored once"] > 0
    assert notes["executable: measured"] > 0
    predicted, measured = (notes[f"bytes of a node, {how}"] for how in ("predicted", "measured"))
    assert measured == pytest.approx(predicted, rel=0.05)


def test_a_peer_that_is_none_cannot_be_left_out():
    with pytest.raises(ConfigurationError, match="--without: expected peers"):
        memory.run(open_driver("emulated"), Request(7, frozenset({"torch"})))
