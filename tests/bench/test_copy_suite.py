"""Suite copy: stable names, bytes by hand, and no way is timed that writes one wrong word."""

import json
import math

import pytest
import torch

from graphcore.bench import main
from graphcore.bench.suites import BY_CASE, Request, copy, copy_ways
from graphcore.bench.suites.copy_cases import WORD, bytes_touched, cases
from graphcore.bench.suites.copy_operands import CopyOperands, random_bits
from graphcore.bench.suites.copy_ways import OURS, calls_of, ours, pitched_params
from graphcore.driver import open_driver
from graphcore.errors import ConfigurationError, GraphcoreError

NAMES = [
    "contiguous", "pitched", "odd-rows", "transpose", "bshd-bhsd", "bhsd-bhds", "reverse-5d",
    "every-second", "broadcast", "kv-append b=1", "kv-append b=8", "kv-append b=64",
]  # fmt: skip
SMALL = {case.name: case for case in cases(small=True)}


@pytest.fixture(scope="module")
def driver():
    return open_driver("emulated")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "copy.json"
    assert main(["copy", "--driver", "emulated", "--out", str(path)]) == 0
    return json.loads(path.read_text())


def test_suite_copy_gives_a_row_for_every_case_of_the_table_by_its_stable_name(report):
    assert [row["case"] for row in report["rows"]] == NAMES
    for row in report["rows"]:
        assert (row["unit"], row["error"]) == ("us", 0.0)
        assert row["ours"] > 0
        assert row["floor"] > 0
        assert copy_ways.TORCH in row["peers"]


def test_the_floor_of_a_row_is_the_fastest_plain_way_and_all_of_them_are_named(report):
    ways = {"memcpy node", "memcpy on a stream", "torch add", "strided_copy of one run"}
    for row in report["rows"]:
        (note,) = [
            note
            for note in report["notes"]
            if note.get("about", "").startswith(f"{row['case']}: the floor is ")
        ]
        times = {name: time for name, time in note.items() if name != "about"}
        is_fill = row["case"] == "broadcast"
        assert set(times) == ({"memset node", "memset on a stream"} if is_fill else ways)
        fastest = note["about"].partition(": the floor is ")[2]
        assert times[fastest] == min(times.values()) == pytest.approx(row["floor"], abs=0.01)


def test_every_floor_moves_all_that_it_is_timed_for(driver, monkeypatch):
    made = []

    def recorded(*given):
        made.append(random_bits(*given))
        return made[-1]

    monkeypatch.setattr(copy_ways, "random_bits", recorded)
    found = copy_ways.floors(driver, CopyOperands(SMALL["odd-rows"], "cpu", 0), "cpu")
    src, dst = (each.view(torch.int32) for each in made)
    with driver.stream() as stream:
        for floor in found:
            dst.fill_(7)
            for call in floor.calls:
                call(stream)
            stream.synchronize()
            assert torch.equal(dst, src), floor.name
    assert [floor.name for floor in found if not floor.is_captured] == ["memcpy on a stream"]


def test_the_floor_of_a_broadcast_is_a_fill(driver):
    operands = CopyOperands(SMALL["broadcast"], "cpu", 0)
    dst = operands.pairs[0][0]
    with driver.stream() as stream:
        for floor in copy_ways.floors(driver, operands, "cpu"):
            dst.zero_()
            floor.calls[0](stream)
            stream.synchronize()
            assert (dst.view(torch.int32) == 0x3F9D70A4).all()


def test_a_pitched_copy_of_the_driver_is_a_peer_where_rows_are_rows(report):
    has_it = {row["case"] for row in report["rows"] if copy_ways.MEMCPY_2D in row["peers"]}
    assert has_it == {"pitched", "odd-rows", "kv-append b=1", "kv-append b=8", "kv-append b=64"}
    assert not [note for note in report["notes"] if "left out" in note]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("contiguous", 2 * (1 << 28)),
        ("pitched", 2 * 32768 * 4096),
        ("odd-rows", 2 * 131072 * 1021),
        ("transpose", 2 * 16384**2),
        ("bshd-bhsd", 2 * 8 * 4096 * 32 * 128),
        ("bhsd-bhds", 2 * 8 * 4096 * 32 * 128),
        ("reverse-5d", 2 * 64 * 64 * 64 * 32 * 16),
        ("every-second", 16384**2 + 16384 * 8192),  # what lies between is moved, but not written
        ("broadcast", 4096 + 65536 * 4096),
        ("kv-append b=64", 2 * 64 * 8 * 128),
    ],
)
def test_bytes_of_a_case_count_each_word_once_and_gaps_below_a_sector(name, words):
    case = next(case for case in cases() if case.name == name)
    src, dst = (torch.empty(shape, device="meta") for shape in (case.src, case.dst))
    found = bytes_touched(case.source(src)) + bytes_touched(case.destinations(dst)[0])
    assert found == words * WORD


def test_words_far_apart_cost_a_sector_each():
    assert bytes_touched(torch.empty(100, 64, device="meta")[:, :3]) == 100 * 32
    assert bytes_touched(torch.empty(100, 5, device="meta")[:, :3]) == 100 * 5 * WORD
    assert bytes_touched(torch.empty(100, 9, device="meta")[:, :8]) == 100 * 8 * WORD


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL.keys())
def test_memory_is_used_again_only_after_more_than_the_caches_hold(driver, case):
    operands = CopyOperands(case, "cpu", 100_000)
    pieces = {view.data_ptr() for view, _ in operands.pairs}
    is_rotated = operands.bytes_moved * len(pieces) >= 100_000
    assert is_rotated or len(case.destinations(torch.empty(case.dst))) > 1
    assert len(operands.pairs) >= 8


def _all_but_one(launch):
    def wrong(driver, dst, src):
        call = launch(driver, dst, src)

        def run(stream):
            kept = dst.flatten()[0].clone()
            call(stream)
            dst[(0,) * dst.dim()] = kept

        return run

    return wrong


def _beside(launch):
    def wrong(driver, dst, src):
        call = launch(driver, dst, src)
        storage = torch.empty(0).set_(dst.untyped_storage())

        def run(stream):
            call(stream)
            storage[-1] = 1.0

        return run

    return wrong


def _numbers(driver, dst, src):
    """Copies numbers, not bits: -0.0 becomes 0.0."""
    return lambda stream: dst.copy_(torch.where(src == 0, 0.0, src))


@pytest.mark.parametrize(
    ("name", "spoil", "wrong"),
    [
        ("transpose", _all_but_one, "got 1 wrong words of 2304"),
        ("kv-append b=1", _beside, "got 1 wrong words of 256"),
    ],
)
def test_a_way_that_misses_a_word_or_writes_one_beside_is_found_out(driver, name, spoil, wrong):
    operands = CopyOperands(SMALL[name], "cpu", 0)
    for way, is_right in ((ours, True), (spoil(copy_ways.torch_copy), False)):
        calls = calls_of(way, driver, operands.pairs)

        def run(calls=calls):
            with driver.stream() as stream:
                for call in calls:
                    call(stream)

        if is_right:
            operands.check(OURS, run)
        else:
            with pytest.raises(GraphcoreError, match=f"{name}: arm spoilt: .*{wrong}"):
                operands.check("spoilt", run)


def test_a_way_that_moves_numbers_and_not_words_is_found_out(driver):
    operands = CopyOperands(SMALL["contiguous"], "cpu", 0)
    src = operands.pairs[0][1]
    src[:3] = torch.tensor([-0.0, 1.0, -0.0])
    calls = calls_of(_numbers, driver, operands.pairs[:1])
    with pytest.raises(GraphcoreError, match="got 2 wrong words"):
        operands.check("numbers", lambda: calls[0](None))


def test_a_copy_that_does_nothing_is_found_out(driver):
    operands = CopyOperands(SMALL["pitched"], "cpu", 0)
    with pytest.raises(GraphcoreError, match=r"arm idle: .* wrong words"):
        operands.check("idle", lambda: None)


def test_pitched_copies_of_the_driver_are_planned_as_rows_and_slices():
    storage = torch.empty(4, 6, 16)
    params = pitched_params(torch.empty(4, 5, 12), storage[:, :5, :12])
    assert (params.width, params.height, params.depth) == (12 * WORD, 5, 4)
    assert (params.src.pitch, params.src.rows) == (16 * WORD, 6)
    assert (params.dst.pitch, params.dst.rows) == (12 * WORD, 5)
    whole = pitched_params(torch.empty(24, 16), storage.view(24, 16))
    assert whole.is_1d
    assert whole.width == storage.numel() * WORD


@pytest.mark.parametrize(
    "src",
    [
        torch.empty(12, 4).t(),
        torch.empty(4, 24)[:, ::2],
        torch.empty(12).expand(4, 12),
        torch.empty(8, 4, 3, 4).permute(1, 0, 2, 3).reshape(4, -1)[:, :12].t().contiguous().t(),
    ],
    ids=["transpose", "every second", "broadcast", "columns"],
)
def test_what_is_no_rows_is_no_pitched_copy(src):
    assert pitched_params(torch.empty(4, 12), src) is None


def test_slices_are_copied_right_by_the_driver(driver):
    storage = torch.rand(4, 6, 16)
    dst = torch.zeros(4, 5, 12)
    call = copy_ways.memcpy_3d(driver, dst, storage[:, :5, :12])
    with driver.stream() as stream:
        call(stream)
        stream.synchronize()
    assert torch.equal(dst, storage[:, :5, :12])


def test_a_peer_that_is_wrong_is_left_out_with_the_reason(driver, monkeypatch):
    peers = {"fine": copy_ways.torch_copy, "spoilt": _all_but_one(copy_ways.torch_copy)}
    monkeypatch.setattr(copy, "EMULATED_PEERS", peers)
    monkeypatch.setattr(copy, "PEERS", peers)
    measured = copy.run(driver, Request(7, only=frozenset({"transpose"})))
    assert set(measured.rows[0].peers) == {"fine"}
    (note,) = [note for note in measured.notes if "left out" in note]
    assert note["left out"] == "transpose spoilt"
    assert "wrong words" in note["reason"]


def test_our_copy_that_is_wrong_costs_the_run(driver, monkeypatch):
    monkeypatch.setattr(copy, "ours", _all_but_one(copy_ways.torch_copy))
    with pytest.raises(GraphcoreError, match="transpose: arm ours"):
        copy.run(driver, Request(7, only=frozenset({"transpose"})))


def test_without_any_peer_there_is_no_row_to_make(driver):
    without = frozenset({copy_ways.TORCH, copy_ways.MEMCPY_2D, copy_ways.MEMCPY_3D})
    with pytest.raises(ConfigurationError, match="peers: expected at least one"):
        copy.run(driver, Request(7, without, frozenset({"transpose"})))


def test_one_case_alone_and_no_unknown_one(capsys):
    assert "copy" in BY_CASE
    assert main(["copy", "--driver", "emulated", "--only", "pitched"]) == 0
    assert "transpose" not in capsys.readouterr().out
    assert main(["copy", "--driver", "emulated", "--only", "pitch"]) == 2
    assert "--only: expected cases of the suite" in capsys.readouterr().err


def test_every_case_of_the_device_is_there_small_with_the_same_axes():
    for large, small in zip(cases(), cases(small=True), strict=True):
        assert large.name == small.name
        assert (len(large.src), len(large.dst)) == (len(small.src), len(small.dst))
        assert math.prod(small.dst) <= 1 << 17
        assert large.target.vs_best_peer == 1.0
