"""Decoding with the next step queued while one runs: no bit differs, whatever comes between."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: the model of these tests is made of it")

from helpers.every_fault import each_fault
from helpers.late_driver import LateDriver
from helpers.moe_decode import REQUESTS, SETTINGS, SHAPE, Decoding, expected

from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import CapacityError, ConfigurationError, CudaError, LifecycleError
from graphcore.moe import DecodeRequest, Kind, OverlappedDecode, OverlapRule, Row, StepTicket
from graphcore.moe.overlap.turn_buffers import TurnBuffer, TurnBuffers
from graphcore.testing import inject

NAMES = [f"boundary {boundary}, overlap {overlap}" for boundary, overlap in SETTINGS]
ROWS = (Row(1, 0, 0), Row(2, 1, 0))
GIVEN = {0: 5, 1: 9}


def following(rows: tuple[Row, ...], by: int = 1) -> tuple[Row, ...]:
    return tuple(replace(row, position=row.position + by) for row in rows)


@pytest.fixture(scope="module")
def wanted() -> dict[int, list[int]]:
    """What the requests get on the emulated driver."""
    return expected(EmulatedDriver())


# ---- the bits ------------------------------------------------------------------------------------


def test_all_four_settings_give_the_same_tokens(graphcore_driver: Driver) -> None:
    alone = expected(graphcore_driver)
    for boundary, overlap in SETTINGS:
        decoding = Decoding(graphcore_driver, boundary, overlap)
        assert decoding.run() == alone, (boundary, overlap)
        # two boundaries, each an update (which a device may refuse) or a decline
        changed = {Kind.UPDATE, Kind.REINSTANTIATE} & decoding.reuse.totals.keys()
        declined = Kind.DECLINED in decoding.reuse.totals
        assert (bool(changed), declined) == (boundary == 1, boundary == 0)
        assert (decoding.decode.totals.ahead > 15) == (overlap == 1)
        assert decoding.decode.outstanding == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("boundary", "overlap"), SETTINGS, ids=NAMES)
def test_a_late_device_with_nodes_in_any_order_gives_the_same_tokens(
    boundary: int, overlap: int, seed: int, wanted: dict[int, list[int]]
) -> None:
    driver = LateDriver(draw=random.Random(seed), order="adversarial", seed=seed)
    assert Decoding(driver, boundary, overlap).run() == wanted


def test_a_late_device_shows_an_input_buffer_that_is_filled_too_early(
    monkeypatch: pytest.MonkeyPatch, wanted: dict[int, list[int]]
) -> None:
    def first(self: TurnBuffers, kept: TurnBuffer | None = None) -> TurnBuffer:
        if kept is not None or len(self._buffers[0].words) == SHAPE.rows:
            return take(self, kept)
        self._buffers[0]._is_copying = False
        return self._buffers[0]

    take = TurnBuffers.take
    monkeypatch.setattr(TurnBuffers, "take", first)
    driver = LateDriver(draw=random.Random(0))
    assert Decoding(driver, 0, 1).run() != wanted


def test_a_late_device_shows_tokens_that_are_read_too_early(
    monkeypatch: pytest.MonkeyPatch, wanted: dict[int, list[int]]
) -> None:
    def wait(self: TurnBuffer) -> None:
        self._is_copying = False

    monkeypatch.setattr(TurnBuffer, "wait", wait)
    assert Decoding(LateDriver(draw=random.Random(0)), 0, 1).run() != wanted


@pytest.mark.parametrize("slots", [1, 2, 6])
def test_fewer_and_more_slots_give_the_same_tokens(
    slots: int, wanted: dict[int, list[int]], graphcore_driver: Driver
) -> None:
    if not graphcore_driver.is_emulated:
        wanted = expected(graphcore_driver)
    assert Decoding(graphcore_driver, 1, 1, slots).run() == wanted


# ---- ends, cancelled and new requests ------------------------------------------------------------


def ended(tokens: list[int], count: int) -> tuple[frozenset[int], list[int]]:
    """Ends that are met at ``count`` tokens or before, and what is made until then."""
    end = tokens[count - 1]
    return frozenset({end}), tokens[: tokens.index(end) + 1]


def test_a_sequence_that_ends_is_taken_back_and_its_place_goes_to_the_next(
    graphcore_driver: Driver,
) -> None:
    alone = expected(graphcore_driver)
    ends, short = ended(alone[1], 5)
    requests = [replace(REQUESTS[0], ends=ends), *REQUESTS[1:]]
    for boundary, overlap in SETTINGS:
        decoding = Decoding(graphcore_driver, boundary, overlap)
        assert decoding.run(requests) == alone | {1: short}
        assert decoding.decode.totals.rolled_back == overlap
        new = next(step for step in decoding.steps if 3 in step.tokens)
        assert not new.ticket.is_ahead
        rules = set(new.ticket.obstacles)
        assert rules >= ({OverlapRule.MATCHED} if overlap else {OverlapRule.OPTION})


@pytest.mark.parametrize(("boundary", "overlap"), SETTINGS, ids=NAMES)
@pytest.mark.parametrize("at", [1, 4, 8])
def test_a_cancelled_request_gets_nothing_more_and_harms_nobody(
    at: int, boundary: int, overlap: int, wanted: dict[int, list[int]]
) -> None:
    def cancel(decoding: Decoding, step: object) -> None:
        if len(decoding.steps) == at:
            decoding.loop.cancel(1)

    decoding = Decoding(EmulatedDriver(), boundary, overlap)
    assert decoding.run(after=cancel) == wanted | {1: wanted[1][:at]}
    assert decoding.decode.totals.rolled_back == overlap


def test_a_waiting_request_can_be_cancelled(wanted: dict[int, list[int]]) -> None:
    decoding = Decoding(EmulatedDriver(), 1, 1)
    got = decoding.run(after=lambda it, _: it.loop.cancel(3))
    assert got == {number: wanted[number] for number in (1, 2)}


@pytest.mark.parametrize("seed", range(6))
def test_any_arrival_end_and_cancelling_gives_each_request_its_own_tokens(
    seed: int, wanted: dict[int, list[int]]
) -> None:
    draw = random.Random(seed)
    requests, told = [], {}
    for number in range(1, 8):
        like = draw.choice(REQUESTS)
        whole = wanted[like.number]
        count = draw.randint(1, len(whole))
        ends, made = ended(whole, count) if draw.random() < 0.5 else (frozenset(), whole[:count])
        requests.append(DecodeRequest(number, like.token, count, ends=ends))
        told[number] = made
    victim, at = draw.randint(1, 7), draw.randint(1, 6)

    def cancel(decoding: Decoding, step: object) -> None:
        if len(decoding.tokens.get(victim, [])) == at:
            decoding.loop.cancel(victim)

    told[victim] = told[victim][:at]
    boundary, overlap = SETTINGS[seed % 4]
    driver = LateDriver(draw=draw, order="adversarial", seed=seed)
    assert Decoding(driver, boundary, overlap).run(requests, cancel) == told


# ---- when it is not done -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("devices", 2, OverlapRule.ONE_DEVICE),
        ("embeddings_on_device", False, OverlapRule.EMBEDDINGS),
        ("is_sampled_on_device", False, OverlapRule.SAMPLED_ON_DEVICE),
        ("can_roll_back", False, OverlapRule.ROLLBACK),
        ("grows", lambda rows: True, OverlapRule.NO_GROWTH),
    ],
)
def test_a_model_that_cannot_decodes_ordinarily_and_says_why(
    name: str,
    value: object,
    rule: OverlapRule,
    wanted: dict[int, list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    decoding = Decoding(EmulatedDriver(), 0, 1)
    setattr(decoding.model, name, value)
    with caplog.at_level(logging.INFO, "graphcore"):
        assert decoding.run() == wanted
    totals = decoding.decode.totals
    assert totals.ahead == 0
    assert dict(totals.obstacles)[rule] == totals.steps - 1
    assert f"is an ordinary one: not so: {rule.value}" in caplog.text
    assert rule.value in str(decoding.reuse.report(decode=decoding.decode))


def test_a_second_step_is_not_queued_behind_a_queued_one() -> None:
    decode = Decoding(EmulatedDriver(), 0, 1).decode
    decode.submit(ROWS, GIVEN)
    assert isinstance(decode.queue(following(ROWS)), StepTicket)
    assert decode.queue(following(ROWS, 2)) == (OverlapRule.OUTSTANDING,)
    assert decode.outstanding == 2
    decode.take()
    assert isinstance(decode.queue(following(ROWS, 2)), StepTicket)


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (lambda decode: decode.take(), "take: expected a running step"),
        (lambda decode: decode.queue(ROWS), "queue: expected a running step"),
        (lambda decode: decode.roll_back(0), "roll_back: expected a queued row of sequence 0"),
        (lambda decode: (decode.submit(ROWS, GIVEN), decode.roll_back(0)), "a queued row"),
        (lambda decode: (decode.submit(ROWS, GIVEN), decode.submit(ROWS)), "not taken, got 1"),
    ],
    ids=["take", "queue", "roll back", "roll back what runs", "submit"],
)
def test_calls_out_of_turn_are_refused(do: object, said: str) -> None:
    decode = Decoding(EmulatedDriver(), 0, 1).decode
    with pytest.raises(LifecycleError, match=said):
        do(decode)


@pytest.mark.parametrize(
    ("rows", "tokens", "said"),
    [
        ((), {}, "expected rows of different sequences from 0 to 1"),
        ((ROWS[0], ROWS[0]), GIVEN, "expected rows of different sequences"),
        ((Row(1, 2, 0),), {2: 1}, "from 0 to 1"),
        (ROWS, {0: 5}, r"expected one for Row\(request=2, sequence=1, position=0\)"),
        (ROWS, {0: 5, 1: -1}, r"tokens\[1\]: expected 0 or more, got -1"),
    ],
    ids=["none", "twice", "no place", "no token", "no token id"],
)
def test_rows_that_are_none_are_refused_before_anything_runs(
    rows: tuple[Row, ...], tokens: dict[int, int], said: str
) -> None:
    decoding = Decoding(EmulatedDriver())
    with pytest.raises(ConfigurationError, match=said):
        decoding.decode.submit(rows, tokens)
    assert decoding.reuse.counters.calls == 0


def test_a_token_on_the_device_is_read_only_by_the_row_that_follows_it() -> None:
    decode = Decoding(EmulatedDriver(), 0, 1).decode
    decode.submit(ROWS, GIVEN)
    decode.take()
    other = replace(ROWS[0], request=7, position=1)
    for row in (other, replace(ROWS[0], position=2), ROWS[0]):
        with pytest.raises(ConfigurationError, match="does not follow what the device holds"):
            decode.submit([row])
    assert decode.submit(following(ROWS)).rows == following(ROWS)


def test_a_row_that_was_taken_back_needs_its_token_given() -> None:
    decoding = Decoding(EmulatedDriver(), 0, 1)
    decode = decoding.decode
    decode.submit(ROWS, GIVEN)
    decode.queue(following(ROWS))
    _, first = decode.take()
    assert decode.roll_back(0) == following(ROWS)[0]
    _, made = decode.take()
    assert set(made) == {following(ROWS)[1]}
    with pytest.raises(ConfigurationError, match="expected one for"):
        decode.submit(following(ROWS)[:1])
    decode.submit(following(ROWS)[:1], {0: first[ROWS[0]]})
    _, again = decode.take()
    plain = expected(EmulatedDriver(), REQUESTS[:1])[1]
    assert [first[ROWS[0]], again[following(ROWS)[0]]] == plain[:2]


@pytest.mark.parametrize("name", ["inputs", "tokens"])
def test_static_tensors_of_another_form_are_refused(name: str) -> None:
    decoding = Decoding(EmulatedDriver())
    setattr(decoding.model, name, getattr(decoding.model, name).float())
    with pytest.raises(ConfigurationError, match=f"{name}: expected contiguous int64"):
        OverlappedDecode(decoding.reuse, decoding.model)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"token": -1}, "token: expected 0 or more"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected 1 or more"),
        ({"position": -1}, "position: expected 0 or more"),
        ({"token": True}, "token: expected an int"),
        ({"max_new_tokens": 2.0}, "max_new_tokens: expected an int"),
        ({"position": None}, "position: expected an int"),
        ({"ends": 3}, "ends: expected a set of token ids"),
        ({"ends": frozenset({3, "4"})}, "ends: expected a set of token ids"),
    ],
    ids=["negative token", "no tokens", "negative position", "bool", "float", "None", "int", "str"],
)
def test_a_request_that_is_none_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        replace(REQUESTS[0], **values)


def test_two_requests_of_one_number_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected different numbers"):
        Decoding(EmulatedDriver()).run([REQUESTS[0], REQUESTS[0]])


# ---- what fails ----------------------------------------------------------------------------------


def test_after_a_queued_step_that_failed_the_running_ones_tokens_are_there(
    wanted: dict[int, list[int]],
) -> None:
    driver = EmulatedDriver()
    decoding = Decoding(driver, 0, 1)
    decoding.run()
    decode = decoding.decode
    decode.submit(ROWS, GIVEN)
    with inject(driver, "launch_graph"), pytest.raises(CudaError):
        decode.queue(following(ROWS))
    _, first = decode.take()
    assert list(first.values()) == [wanted[1][0], wanted[2][0]]
    decode.submit(following(ROWS), {row.sequence: token for row, token in first.items()})
    assert list(decode.take()[1].values()) == [wanted[1][1], wanted[2][1]]


def test_after_any_driver_call_of_a_queued_step_failed_decoding_goes_on_right(
    wanted: dict[int, list[int]],
) -> None:
    def prepare(driver: EmulatedDriver) -> Decoding:
        decoding = Decoding(driver, 1, 1)
        decoding.run([replace(request, max_new_tokens=3) for request in REQUESTS[:2]])
        decoding.decode.submit(ROWS, GIVEN)
        return decoding

    seen = set()
    for _, fault in each_fault(prepare, lambda decoding: decoding.decode.queue(following(ROWS))):
        decoding = fault.state
        seen.add(fault.where.split()[0])
        if fault.error is None:
            assert decoding.decode.outstanding == 2, fault.where
        _, first = decoding.decode.take()
        assert list(first.values()) == [wanted[1][0], wanted[2][0]], fault.where
        decoding.decode.abandon()
        assert decoding.run() == wanted, fault.where
    assert {"copy", "record_event", "launch_graph"} <= seen


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends in time"])
def test_a_cache_that_is_full_is_refused_only_where_its_next_token_is_wanted(
    ends: bool, overlap: int, wanted: dict[int, list[int]]
) -> None:
    decoding = Decoding(EmulatedDriver(), 0, overlap, shape=replace(SHAPE, positions=6, bucket=8))
    request = replace(REQUESTS[0], ends=frozenset({wanted[1][5]} if ends else ()))
    assert wanted[1].index(wanted[1][5]) == 5
    if ends:
        assert decoding.run([request]) == {1: wanted[1][:6]}
    else:
        with pytest.raises(CapacityError, match="position: expected at most 5"):
            decoding.run([request])
        assert decoding.tokens == {1: wanted[1][:6]}
    assert decoding.decode.totals.ahead == 5 * overlap


def test_what_a_queued_step_raises_comes_behind_the_tokens_made_before(
    wanted: dict[int, list[int]],
) -> None:
    driver = EmulatedDriver()
    decoding = Decoding(driver, 0, 1)
    decoding.run()

    def fail(it: Decoding, step: object) -> None:
        if len(it.tokens[1]) == 4:
            inject(driver, "launch_graph")

    with pytest.raises(CudaError):
        decoding.run(after=fail)
    # of the fifth token the step was queued already
    assert decoding.tokens[1] == wanted[1][:5]
    assert decoding.decode.outstanding == 0
    assert decoding.run() == wanted


def test_two_runs_at_once_are_refused_and_the_first_goes_on(
    wanted: dict[int, list[int]],
) -> None:
    decoding = Decoding(EmulatedDriver(), 0, 1)
    first = decoding.loop.run(REQUESTS[:1])
    got = [next(first).tokens[1]]
    with pytest.raises(LifecycleError, match="run: expected no step whose tokens are not taken"):
        next(decoding.loop.run(REQUESTS[1:]))
    assert [*got, *(step.tokens[1] for step in first)] == wanted[1]


def test_a_loop_that_is_left_early_leaves_nothing_outstanding(
    wanted: dict[int, list[int]],
) -> None:
    decoding = Decoding(EmulatedDriver(), 0, 1)
    steps = decoding.loop.run(REQUESTS)
    next(steps)
    assert decoding.decode.outstanding == 1
    steps.close()
    assert decoding.decode.outstanding == 0
    assert decoding.run() == wanted
