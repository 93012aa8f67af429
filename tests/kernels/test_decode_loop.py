"""The ends of a decode loop: what the kernels write and decide, in a graph on both drivers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
from graphcore_kernels.decode_loop import (
    BUDGET,
    CONTROL_WORDS,
    OVER,
    PUBLISHED,
    STOP,
    begin_decode_loop,
    end_decode_step,
    loop_config,
)

from graphcore import GraphPlan, kernel
from graphcore.driver import Driver
from graphcore.driver.kernel import Pointer
from graphcore.driver.records import LaunchConfig
from graphcore.resources.buffer import Buffer
from graphcore.resources.pinned import PinnedMemory

ROOM = 12


def _count_up(_config: LaunchConfig, token: Pointer, finished: Pointer, ends: Pointer, n: int):
    tokens = token.array(n)
    tokens += numpy.arange(1, n + 1)
    finished.array(n)[:] |= tokens >= ends.array(n)


# stands for a decode step: row r counts in steps of r + 1, and has finished at its end
count_up = kernel(
    "count_up",
    "i64* token, bool* finished, const i64* ends, i32 n",
    """
    extern "C" __global__ void count_up(
        long long* token, bool* finished, const long long* ends, int n) {
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            token[i] += i + 1;
            finished[i] = finished[i] || token[i] >= ends[i];
        }
    }
    """,
    _count_up,
)


class Loop:
    """A WHILE node around :data:`count_up`, between the two kernels."""

    def __init__(self, driver: Driver, rows: int) -> None:
        self.driver, self.rows = driver, rows
        self.memory = PinnedMemory(driver, 8 * (CONTROL_WORDS + ROOM * rows))
        words = Pointer(self.memory.address, "int64").array(CONTROL_WORDS + ROOM * rows)
        self.control, ring = words[:CONTROL_WORDS], words[CONTROL_WORDS:]
        self.ring = ring.reshape(ROOM, rows)
        names = {"token": "int64", "finished": "bool", "ends": "int64"}
        self.buffers = {name: Buffer.allocate(rows, kind, driver=driver)
                        for name, kind in names.items()}  # fmt: skip
        self.buffers["progress"] = Buffer.allocate(2, "int64", driver=driver)
        self.graph = self._plan().build(self.buffers, driver=driver)
        self.executable = self.graph.instantiate()

    def _plan(self) -> GraphPlan:
        plan = GraphPlan()
        held = {
            name: plan.buffer(name, each.shape, each.dtype) for name, each in self.buffers.items()
        }
        more, config, rows = plan.condition("more"), loop_config(self.rows), self.rows
        control = self.memory.address
        ring = control + 8 * CONTROL_WORDS
        plan.launch(
            begin_decode_loop, config, more, held["finished"], held["progress"], control, rows
        )
        with plan.while_loop(more) as body:
            body.launch(count_up, config, held["token"], held["finished"], held["ends"], rows)
            body.launch(
                end_decode_step, config, more, held["token"], held["finished"], held["progress"],
                ring, control, rows,
            )  # fmt: skip
        return plan

    def run(self, budget: int, ends: Any, *, stop: int = 0, finished: Any = False) -> int:
        """Tokens published by a launch whose ring was poisoned before."""
        self.ring[:] = -1
        for word, value in ((BUDGET, budget), (STOP, stop), (PUBLISHED, 0), (OVER, 0)):
            self.control[word] = value
        self.buffers["token"].write(0)
        self.buffers["ends"].write(ends)
        self.buffers["finished"].write(finished)
        self.executable.launch()
        self.driver.synchronize()
        assert self.control[OVER] == 1
        return int(self.control[PUBLISHED])


@pytest.fixture(params=[1, 3, 40, 300], ids=lambda rows: f"{rows} rows")
def loop(graphcore_driver: Driver, request: pytest.FixtureRequest) -> Iterator[Loop]:
    made = Loop(graphcore_driver, request.param)
    yield made
    made.executable.close()
    made.graph.close()


def expected(loop: Loop, count: int) -> Any:
    steps = numpy.arange(1, loop.rows + 1)
    return numpy.arange(1, count + 1)[:, None] * steps


def test_every_token_of_the_budget_is_in_the_ring_and_no_other(loop: Loop) -> None:
    for budget in (5, 1, ROOM, 2):
        assert loop.run(budget, ends=10**9) == budget
        assert (loop.ring[:budget] == expected(loop, budget)).all()
        assert (loop.ring[budget:] == -1).all()
        assert loop.buffers["progress"].read().tolist() == [budget, budget]


def test_the_loop_ends_when_the_last_row_has_finished(loop: Loop) -> None:
    ends = numpy.full(loop.rows, 1)
    ends[-1] = 4 * loop.rows  # the last row reaches it in four steps, the others at once
    assert loop.run(ROOM, ends=ends) == 4
    assert (loop.ring[:4] == expected(loop, 4)).all()
    assert loop.buffers["finished"].read().all()


def test_a_single_row_that_has_not_finished_goes_on_alone(loop: Loop) -> None:
    finished = numpy.full(loop.rows, True)
    finished[-1] = False
    assert loop.run(3, ends=10**9, finished=finished) == 3


@pytest.mark.parametrize(
    "reason", [{"budget": 0}, {"stop": 1}, {"finished": True}], ids=lambda r: next(iter(r))
)
def test_there_is_no_first_step_where_the_first_test_says_no(
    loop: Loop, reason: dict[str, Any]
) -> None:
    assert loop.run(**({"budget": 4, "ends": 10**9} | reason)) == 0
    assert not loop.buffers["token"].read().any()
    assert (loop.ring == -1).all()


def test_the_block_has_a_warp_for_every_32_rows_up_to_256_threads() -> None:
    assert [loop_config(rows).block[0] for rows in (1, 32, 33, 256, 1000)] == [
        32, 32, 64, 256, 256,
    ]  # fmt: skip
