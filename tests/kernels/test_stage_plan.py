"""stage_plan on both drivers and its source on the host: who is in which chunk, and its rows."""

from __future__ import annotations

from itertools import accumulate
from random import Random

import numpy
import pytest
from graphcore_kernels import StagePlan, stage_plan
from graphcore_kernels.stage_plan import stage_plan_kernel, stage_shapes
from helpers.host_block import HostBlocks

import graphcore
from graphcore.errors import ConfigurationError
from graphcore.resources.buffer import Buffer

POISON = -77


def expected_lists(counts: list[int], chunks: int, chunk: int) -> dict[str, list[int]]:
    """What must be in the lists for so many rows of each expert."""
    starts = [0, *accumulate(counts)]
    hit = [expert for expert, rows in enumerate(counts) if rows]
    left = chunks * chunk - len(hit)
    return {
        "experts": hit + [-1] * left,
        "starts": [starts[expert] for expert in hit] + [starts[-1]] * (left + 1),
        "counts": [len(hit[c * chunk : (c + 1) * chunk]) for c in range(chunks)],
    }


def random_case(draw: Random) -> tuple[list[int], int, int]:
    experts, chunk = draw.choice([1, 5, 31, 32, 33, 100, 257, 512]), draw.randint(1, 9)
    share = draw.choice([0.0, 0.1, 0.6, 1.0])
    counts = [draw.randint(1, 4) if draw.random() < share else 0 for _ in range(experts)]
    fewest = -(-max(sum(map(bool, counts)), 1) // chunk)
    return counts, draw.randint(fewest, fewest + 2), chunk


def arrays_of(counts: list[int], chunks: int, chunk: int) -> dict[str, numpy.ndarray]:
    made = {
        name: numpy.full(shape, POISON, dtype)
        for name, (dtype, shape) in stage_shapes(chunks, chunk).items()
    }
    return {"offsets": numpy.array([0, *accumulate(counts)], numpy.int32), **made}


@pytest.mark.parametrize("seed", range(6))
def test_every_expert_with_rows_is_in_one_chunk_with_its_rows(graphcore_driver, seed):
    draw = Random(seed)
    for _ in range(8):
        case = random_case(draw)
        lists = {}
        for name, values in arrays_of(*case).items():
            lists[name] = Buffer.allocate(values.shape, "int32", driver=graphcore_driver)
            lists[name].write(values)
        stage_plan(**lists)
        for name, values in expected_lists(*case).items():
            assert lists[name].read().tolist() == values, name


def test_a_replay_follows_the_offsets_of_its_own_time(graphcore_driver):
    lists = {name: Buffer.allocate(values.shape, "int32", driver=graphcore_driver)
             for name, values in arrays_of([1, 1, 1, 1, 1], 3, 2).items()}  # fmt: skip
    with graphcore.capture(driver=graphcore_driver) as captured:
        stage_plan(**lists)
    with captured.graph as graph, graph.instantiate() as made:
        for counts in ([2, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 2, 3, 4, 5]):
            lists["offsets"].write([0, *accumulate(counts)])
            for name, values in expected_lists(counts, 3, 2).items():
                lists[name].write(numpy.full(len(values), POISON))
            made.launch()
            for name, values in expected_lists(counts, 3, 2).items():
                assert lists[name].read().tolist() == values, name


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stage_plan")
    return HostBlocks(stage_plan_kernel.source, [stage_plan_kernel], folder)


@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("threads", [32, 64, 256])
def test_the_source_lists_the_same_in_any_order_of_threads(host, threads, backwards):
    draw = Random(threads)
    for _ in range(40):
        case = random_case(draw)
        lists = arrays_of(*case)
        plan: StagePlan = stage_plan.plan(**lists)
        host.launch(plan.kernel, plan.config, plan.arguments, threads=threads, backwards=backwards)
        for name, values in expected_lists(*case).items():
            assert lists[name].tolist() == values, name


def test_offsets_with_more_experts_than_the_room_write_nothing_beyond_it(host):
    made = []
    for run in (host.launch, lambda kernel, config, arguments: kernel.run_reference(
            config, arguments)):  # fmt: skip
        lists = arrays_of([1] * 9, 3, 1)
        whole = {name: numpy.full(len(values) + 2, POISON, numpy.int32)
                 for name, values in lists.items()}  # fmt: skip
        whole["offsets"][1:-1] = lists["offsets"]
        plan = stage_plan.plan(**{name: values[1:-1] for name, values in whole.items()})
        run(plan.kernel, plan.config, plan.arguments)
        assert all(values[0] == values[-1] == POISON for values in whole.values())
        made.append({name: values.tolist() for name, values in whole.items()})
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("offsets", numpy.zeros(4, numpy.int64), "offsets: expected contiguous int32"),
        ("offsets", numpy.zeros(1, numpy.int32), "at least one expert, got"),
        ("experts", numpy.zeros(5, numpy.int32), "a room of 5, 3 counts"),
        ("starts", numpy.zeros(6, numpy.int32), "starts: expected 7 elements"),
        ("counts", numpy.zeros((1, 3), numpy.int32), "counts: expected contiguous int32 of one"),
        ("counts", numpy.zeros(6, numpy.int32)[::2], "strides"),
        ("counts", numpy.zeros(0, numpy.int32), "0 counts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_lists_that_do_not_fit_are_refused(name, values, message):
    lists = arrays_of([1, 1, 1], 3, 2)
    with pytest.raises(ConfigurationError, match=message):
        stage_plan.plan(**{**lists, name: values})


def test_lists_that_share_memory_are_refused():
    lists = arrays_of([1, 1, 1], 3, 2)
    whole = numpy.zeros(12, numpy.int32)
    with pytest.raises(ConfigurationError, match="shares bytes with experts"):
        stage_plan.plan(**{**lists, "experts": whole[:6], "starts": whole[5:]})
