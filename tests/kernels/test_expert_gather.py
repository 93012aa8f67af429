"""expert_gather on both drivers, from pinned memory, and its source on the host."""

from __future__ import annotations

import random

import numpy
import pytest
from graphcore_kernels import expert_gather
from graphcore_kernels._module import read_source
from graphcore_kernels.expert_gather import MOST_BANKS, expert_gather_kernel
from graphcore_kernels.route_layout import table_shapes
from helpers.host_block import HostBlocks

import graphcore
from graphcore.driver import Driver
from graphcore.driver.kernel import Pointer
from graphcore.errors import CacheTypeError, ConfigurationError
from graphcore.resources.buffer import Buffer
from graphcore.resources.pinned import PinnedMemory
from graphcore.resources.tensors import TensorRef

EXPERTS, SLOTS = 6, 4
# rows of 1, 3, 16, 250 and 16400 * 2 bytes, so that rows begin at any byte
ROWS = {"a byte": ("uint8", ()), "three": ("uint8", (3,)), "a vector": ("float32", (4,)),
        "odd": ("bfloat16", (5, 25)), "long": ("float16", (4, 4100))}  # fmt: skip


def pinned(driver: Driver, dtype: str, row: tuple[int, ...], itemsize: int) -> TensorRef:
    """Experts in pinned memory, of random bytes."""
    count = EXPERTS * int(numpy.prod(row, dtype=int))
    memory = PinnedMemory(driver, count * itemsize)
    data = numpy.random.default_rng(count).integers(0, 256, count * itemsize, numpy.uint8)
    host(memory.address, len(data))[:] = data
    strides = (count // EXPERTS, *(int(numpy.prod(row[i + 1 :], dtype=int))
                                   for i in range(len(row))))  # fmt: skip
    return TensorRef(memory.address, (EXPERTS, *row), strides, dtype, itemsize, "cpu", owner=memory)


def host(address: int, size: int):
    return Pointer(address, "uint8").array(size)


class Group:
    """Banks of one group: experts in pinned memory, slots on the device, and the miss list."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        sizes = {"uint8": 1, "float32": 4, "bfloat16": 2, "float16": 2}
        self.banks = [
            (pinned(driver, dtype, row, sizes[dtype]),
             Buffer.allocate((SLOTS, *row), dtype, driver=driver))
            for dtype, row in ROWS.values()
        ]  # fmt: skip
        shapes = table_shapes(EXPERTS, SLOTS)
        self.tables = {
            name: Buffer.allocate(shapes[name][1], "int32", driver=driver)
            for name in ("miss_expert", "miss_slot", "miss_count")
        }
        for _, slots in self.banks:
            self.driver.write(slots.address, b"\xaa" * slots.nbytes)

    def misses(self, *pairs: tuple[int, int], count: int | None = None) -> None:
        padded = [*pairs, *[(0, 0)] * (SLOTS - len(pairs))]
        self.tables["miss_expert"].write([expert for expert, _ in padded])
        self.tables["miss_slot"].write([slot for _, slot in padded])
        self.tables["miss_count"].write(len(pairs) if count is None else count)

    def held(self, bank: int) -> list[bytes]:
        """The bytes of each slot."""
        _, slots = self.banks[bank]
        data, row = self.driver.read(slots.address, slots.nbytes), slots.nbytes // SLOTS
        return [data[slot * row : (slot + 1) * row] for slot in range(SLOTS)]

    def check(self, expected: dict[int, int]) -> None:
        """Slots hold the given experts; the others what they held first."""
        for bank, (source, slots) in enumerate(self.banks):
            row = slots.nbytes // SLOTS
            for slot, data in enumerate(self.held(bank)):
                expert = expected.get(slot)
                wanted = (
                    b"\xaa" * row
                    if expert is None
                    else host(source.address + expert * row, row).tobytes()
                )
                assert data == wanted, (bank, slot)


@pytest.fixture
def group(graphcore_driver: Driver) -> Group:
    return Group(graphcore_driver)


def test_the_listed_experts_are_copied_bit_for_bit_and_nothing_else_is_touched(group):
    group.misses((5, 0), (2, 3))
    expert_gather(group.banks, group.tables)
    group.check({0: 5, 3: 2})


def test_no_misses_copy_nothing(group):
    group.misses()
    expert_gather(group.banks, group.tables)
    group.check({})


def test_a_replay_follows_the_list_of_its_own_time(group):
    plan = expert_gather.plan(group.banks, group.tables)
    with graphcore.capture(driver=group.driver) as captured:
        plan.launch()
    with captured.graph as graph, graph.instantiate() as made, group.driver.stream() as stream:
        assert len(graph.snapshot().nodes) == 1
        labels = set(graph.owners.labels())
        assert {f"expert_gather {name}" for name in plan.operands} <= labels
        held: dict[int, int] = {}
        for pairs in ([(1, 1)], [], [(3, 0), (0, 1), (4, 2), (5, 3)], [(2, 2)]):
            group.misses(*pairs)
            made.launch(stream)
            held |= {slot: expert for expert, slot in pairs}
            group.driver.synchronize()
            group.check(held)


@pytest.mark.parametrize("pair", [(6, 0), (-1, 0), (0, 4), (0, -1)], ids=str)
def test_an_entry_out_of_range_leads_nowhere(group, pair):
    group.misses(pair, (1, 2))
    expert_gather(group.banks, group.tables)
    group.check({2: 1})


def test_a_count_beyond_the_list_is_cut(group):
    group.misses((0, 0), (1, 1), (2, 2), (3, 3), count=1000)
    expert_gather(group.banks, group.tables)
    group.check({slot: slot for slot in range(SLOTS)})


# ---- the source ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("expert_gather")
    return HostBlocks(read_source("expert_gather.cu"), [expert_gather_kernel], folder)


@pytest.mark.parametrize("apart", [0, 8, 4, 2, 1], ids=lambda apart: f"{apart} bytes apart")
def test_the_source_copies_any_bytes_at_any_alignment(kernels, apart):
    draw = random.Random(apart)
    for blocks in (1, 3, 7):
        banks, expected = [], []
        for size in (1, 15, 16, 17, 999, 16384, 16385, 40000):
            gap = draw.randrange(3)
            source = numpy.random.default_rng(size).integers(0, 256, 16 + EXPERTS * (size + gap),
                                                             numpy.uint8)  # fmt: skip
            slots = numpy.full(64 + SLOTS * size, 0xAA, numpy.uint8)
            first = draw.randrange(16)
            start = 16 + (source.ctypes.data + first + apart - slots.ctypes.data) % 16
            rows = source[first : first + EXPERTS * (size + gap)].reshape(EXPERTS, -1)[:, :size]
            banks.append((rows, slots[start : start + SLOTS * size].reshape(SLOTS, size)))
            wanted = slots.copy()
            for expert, slot in ((5, 1), (0, 3)):
                wanted[start + slot * size : start + (slot + 1) * size] = rows[expert]
            expected.append((slots, wanted))
        lists = {name: numpy.array(values, numpy.int32) for name, values in
                 {"miss_expert": [5, 0, 9, 9], "miss_slot": [1, 3, 9, 9],
                  "miss_count": [2]}.items()}  # fmt: skip
        plan = expert_gather.plan(banks, lists)
        kernels.launch(expert_gather_kernel, plan.config, plan.arguments, threads=64, blocks=blocks)
        for slots, wanted in expected:
            assert (slots == wanted).all()


# ---- errors -------------------------------------------------------------------------------------


def numpy_lists(**more):
    shapes = table_shapes(EXPERTS, SLOTS)
    names = ("miss_expert", "miss_slot", "miss_count")
    return {name: numpy.zeros(shapes[name][1], numpy.int32) for name in names} | more


def bank(experts=EXPERTS, slots=SLOTS, row=(8,), dtype="float32", slot_row=None):
    return numpy.zeros((experts, *row), dtype), numpy.zeros((slots, *(slot_row or row)), dtype)


@pytest.mark.parametrize(
    ("banks", "says"),
    [
        ([], "expected 1 to 12, got 0"),
        ([bank()] * (MOST_BANKS + 1), "got 13"),
        ([bank(slot_row=(9,))], r"banks\[0\] slots: expected rows of float32 \(8,\)"),
        ([bank(), bank(experts=5)], r"banks\[1\]: expected 6 experts and 4 slots"),
        ([(bank()[0].T, bank()[1].T)], "expected rows"),
        ([(numpy.broadcast_to(numpy.zeros(8, "f4"), (6, 8)), bank()[1])], "apart from the next"),
        ([(numpy.zeros((0, 8), "f4"), bank()[1])], "expected rows"),
        ([(bank()[0].astype("f8"), bank()[1])], "expected rows of float64"),
    ],
    ids=["none", "too many", "row", "count", "strides", "broadcast", "empty", "type"],
)
def test_banks_that_do_not_fit_are_refused(banks, says):
    with pytest.raises(ConfigurationError, match=says):
        expert_gather.plan(banks, numpy_lists())


def test_lists_that_do_not_fit_are_refused():
    with pytest.raises(ConfigurationError, match=r"miss_slot.*\(4,\)"):
        expert_gather.plan([bank()], numpy_lists(miss_slot=numpy.zeros(3, numpy.int32)))
    lists = numpy_lists()
    del lists["miss_count"]
    with pytest.raises(ConfigurationError, match="miss_count"):
        expert_gather.plan([bank()], lists)
    with pytest.raises(CacheTypeError, match="source"):
        expert_gather.plan([([1], bank()[1])], numpy_lists())


@pytest.mark.gpu
def test_pageable_experts_are_refused_on_a_device():
    group = Group(graphcore.open_driver("cuda"))
    source, slots = group.banks[2]
    pageable = numpy.zeros(source.shape, source.dtype)
    with pytest.raises(ConfigurationError, match="pinned host memory"):
        expert_gather.plan([(pageable, slots)], group.tables)
