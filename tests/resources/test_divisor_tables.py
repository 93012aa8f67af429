"""torch's tables of divisors: found by their numbers; what nobody wrote there is no address."""

from __future__ import annotations

import math
import random
import struct
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from helpers.snapshots import kernel_node, snapshot

import graphcore
from graphcore.driver import Driver
from graphcore.driver.records import Allocation, MemoryKind
from graphcore.errors import ConfigurationError
from graphcore.resources.addresses import words
from graphcore.resources.attribution import attribute
from graphcore.resources.divisor_tables import divisor_tables, outside
from graphcore.resources.fingerprint import fingerprint
from graphcore.resources.footprint import record
from graphcore.resources.repointing import Move, repoint
from graphcore.resources.spans import Span

X, Y = 0x7F0000000000, 0x7F0000100000
ENTRIES, TABLE = 25, 304


def divisor(value: int) -> tuple[int, int, int]:
    """Value, multiplier and shift, as torch's IntDivider has them."""
    shift = next(each for each in range(32) if 1 << each >= value)
    return value, (1 << 32) * ((1 << shift) - value) // value + 1, shift


def table(divisors: list[int], junk: bytes = b"") -> bytes:
    """The count, and 25 entries of which only ``divisors`` are written; ``junk`` is repeated."""
    written = b"".join(struct.pack("<3I", *divisor(each)) for each in divisors)
    rest = TABLE - 4 - len(written)
    filler = (junk * (rest // max(len(junk), 1) + 1))[:rest] if junk else bytes(rest)
    return struct.pack("<I", len(divisors)) + written + filler


def structure(divisors: list[int], junk: int = 0, first: int = 0, operands: int = 2) -> bytes:
    """As torch's elementwise kernels take it: table, strides, addresses, what is done to them.

    ``junk`` stands at each aligned word of the entries that are not written, the strides' too.
    """
    strides = first + TABLE
    end = strides + 100 * operands
    found = bytearray(first) + table(divisors) + bytes(100 * operands)
    for written, last in ((first + 4 + 12 * len(divisors), strides), (strides + 8, end)):
        for at in range(written + -written % 8, last - 7, 8):
            found[at : at + 8] = junk.to_bytes(8, "little")
    found += bytes(-len(found) % 8)
    addresses = [Y + 64 * index for index in range(operands)]
    return bytes(found) + struct.pack(f"<{operands}Q", *addresses) + bytes(16)


def device(*known: int) -> Any:
    """A driver that knows 4096 bytes at each of ``known``."""
    driver = create_autospec(Driver, instance=True, is_emulated=False)
    driver.allocation_of.side_effect = lambda address: next(
        (
            Allocation(base, 4096, base >> 20, MemoryKind.DEVICE, 0)
            for base in known
            if base <= address < base + 4096
        ),
        None,
    )
    return driver


# ---- the table itself -------------------------------------------------------------------------


def test_the_numbers_beside_a_divisor_divide_by_it() -> None:
    rng = random.Random(0)
    values = [rng.randrange(1, 2**31) for _ in range(99)]
    for value in [1, 2, 3, 7, 64, 97, 4096, 2**31 - 1, *values]:
        _, multiplier, shift = divisor(value)
        for n in [0, 1, value, 2**31 - 1, *(rng.randrange(2**31) for _ in range(20))]:
            assert (((n * multiplier) >> 32) + n) >> shift == n // value


@pytest.mark.parametrize("first", [0, 4, 8, 16, 36])
@pytest.mark.parametrize("dimensions", [1, 2, 3, 24, 25])
@pytest.mark.parametrize("operands", [1, 2, 3, 4, 5])
def test_a_table_and_its_strides_are_found_wherever_they_stand(
    first: int, dimensions: int, operands: int
) -> None:
    rng = random.Random(dimensions)
    divisors = [rng.randrange(2, 5000) for _ in range(dimensions)]
    data = structure(divisors, junk=X, first=first, operands=operands)
    assert divisor_tables(data) == ((first, first + TABLE + 100 * operands),)
    held = [value for _, value in words(data)]
    assert held.count(X) == 0
    assert [value for value in held if value] == [Y + 64 * index for index in range(operands)]


def test_strides_are_not_counted_where_nothing_tells_how_many_there_are() -> None:
    data = structure([12, 4], junk=X) + X.to_bytes(8, "little") * 6
    assert divisor_tables(data) == ((0, TABLE),)
    assert X in [value for _, value in words(data)]


def test_a_table_ends_where_the_next_one_begins_and_each_is_found() -> None:
    one, two = table([5, 64]) + bytes(100), table([3]) + bytes(200) + bytes(84)
    assert divisor_tables(one + two) == ((0, 404), (404, 404 + TABLE))
    two = table([3]) + bytes(200) + bytes(4 + 16 + 48)
    assert divisor_tables(one + two) == ((0, 404), (404, 404 + TABLE + 200))
    # torch's sums take 1048 bytes: settings, one input, two outputs, and what they work on
    assert divisor_tables(bytes(72) + one + table([3]) + bytes(268)) == ((72, 476), (476, 980))


@pytest.mark.parametrize("operands", [1, 2, 4])
def test_an_argument_that_is_a_table_with_its_strides_holds_nothing_else(operands: int) -> None:
    data = table([12, 4], X.to_bytes(8, "little")) + bytes(100 * operands)
    assert divisor_tables(data) == ((0, len(data)),)


@pytest.mark.parametrize(("operands", "size"), [(1, 432), (2, 536), (3, 648), (4, 752), (4, 760)])
def test_the_sizes_that_torch_has_are_known(operands: int, size: int) -> None:
    data = structure([12, 4], operands=operands)
    data += bytes(size - len(data))
    assert divisor_tables(data) == ((0, TABLE + 100 * operands),)


def changed(data: bytes, at: int, by: int) -> bytes:
    value = int.from_bytes(data[at : at + 4], "little") + by
    return data[:at] + value.to_bytes(4, "little") + data[at + 4 :]


@pytest.mark.parametrize(
    "data",
    [
        changed(structure([12, 4], X), 8, 1),
        changed(structure([12, 4], X), 8, -1),
        changed(structure([12, 4], X), 12, 1),
        changed(structure([12, 4], X), 16, 1),
        changed(structure([12, 4], X), 0, 1),
        changed(structure([12, 4], X), 0, 24),
        structure([1, 1], X),
        structure([], X),
        table([12, 4]) + bytes(96),
        table([12, 4])[:-4],
        b"",
        bytes(600),
        struct.pack("<150I", *range(150)),
    ],
)
def test_what_only_resembles_a_table_is_none(data: bytes) -> None:
    assert divisor_tables(data) == ()


def test_words_that_reach_into_a_table_are_left_out_and_their_neighbours_are_not() -> None:
    found = [(0, 1), (4, 2), (8, 3), (12, 4), (16, 5), (20, 6)]
    assert list(outside(found, [(8, 16)])) == [(0, 1), (16, 5), (20, 6)]
    assert list(outside(found, [])) == found


# ---- what depends on it -------------------------------------------------------------------------


def graph(data: bytes) -> Any:
    return snapshot([kernel_node(0, "k", arguments=[(7).to_bytes(8, "little"), data])])


def test_memory_that_only_unwritten_entries_point_into_is_not_watched() -> None:
    driver = device(X, Y)
    footprint = record(graph(structure([12, 4], X)), driver)
    assert [piece.allocation.base for piece in footprint if piece.allocation] == [Y]
    # a control: the same bytes, but for one of a multiplier
    other = record(graph(changed(structure([12, 4], X), 8, 1)), driver)
    assert {piece.allocation.base for piece in other if piece.allocation} == {X, Y}


def test_they_are_in_no_report_and_make_no_other_fingerprint() -> None:
    driver = device(X, Y)
    plain, dirty = (graph(structure([12, 4], junk)) for junk in (0, X))
    assert fingerprint(plain, driver=driver) == fingerprint(dirty, driver=driver)
    assert [found.address for found in attribute(dirty, driver=driver)] == [Y, Y + 64]
    wrong = [graph(changed(structure([12, 4], junk), 8, 1)) for junk in (0, X)]
    assert fingerprint(wrong[0], driver=driver) != fingerprint(wrong[1], driver=driver)


def test_exchanging_buffers_is_not_refused_for_an_unwritten_word_that_is_not_aligned() -> None:
    move = Move(Span("x", X, 4096), by=1 << 30)
    data = bytearray(structure([12, 4]) + X.to_bytes(8, "little"))
    data[204:212] = data[444:452] = (X + 8).to_bytes(8, "little")
    [changed_params] = repoint(graph(bytes(data)), [move]).params.values()
    moved = changed_params.arguments[1]  # type: ignore[union-attr]
    assert moved == bytes(data)[:-8] + (X + (1 << 30)).to_bytes(8, "little")
    with pytest.raises(ConfigurationError, match="not aligned points into x"):
        repoint(graph(changed(bytes(data), 8, 1)), [move])


def test_exchanging_buffers_moves_an_aligned_word_wherever_it_stands() -> None:
    # one too many is read by nobody; one too few would leave a kernel on the old memory
    move = Move(Span("x", X, 4096), by=1 << 30)
    repointing = repoint(graph(structure([12, 4], junk=X)), [move])
    [changed_params] = repointing.params.values()
    moved = changed_params.arguments[1]  # type: ignore[union-attr]
    assert moved == structure([12, 4], junk=X + (1 << 30))


# ---- torch's own ---------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("operands", [1, 2])
def test_torch_writes_such_tables(operands: int) -> None:
    driver = graphcore.open_driver("cuda")
    x = torch.randn(6, 5, 97, device="cuda")[:, :, ::2].transpose(0, 1)
    out = torch.empty_like(x.transpose(0, 1)).transpose(0, 1)
    step = (lambda: torch.neg(x, out=out)) if operands == 1 else (lambda: torch.add(x, x, out=out))
    capturing = graphcore.capture(driver=driver)
    capturing.warm_up(step, 2)
    with capturing:
        capturing.keep(x, "x")
        capturing.keep(out, "out")
        step()
    [node] = capturing.graph.snapshot().nodes
    held = [argument for argument in node.arguments if divisor_tables(argument.data)]
    assert held, [argument.size for argument in node.arguments]
    [argument] = held
    [(start, end)] = divisor_tables(argument.data)
    dimensions = int.from_bytes(argument.data[start : start + 4], "little")
    sizes = struct.unpack_from("<" + "3I" * dimensions, argument.data, start + 4)[::3]
    assert dimensions > 1
    assert math.prod(sizes) == x.numel()
    # the addresses follow, and are found
    behind = struct.unpack_from(f"<{operands + 1}Q", argument.data, end + -end % 8)
    assert behind == (out.data_ptr(), *[x.data_ptr()] * operands)
    reported = {found.address for found in capturing.graph.attributions()}
    assert {x.data_ptr(), out.data_ptr()} <= reported
