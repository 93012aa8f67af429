"""GraphExec.rebind is all or nothing: failures half way, and ambiguous words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.contract import Bench, copy_1d, copy_2d, fill_1d
from helpers.graph_specs import Step, build
from helpers.kernels import add_one
from helpers.rebinding import graph_of, many, packed, run, structure, values
from helpers.tensors import filled

from graphcore import (
    ConfigurationError,
    CudaError,
    Graph,
)
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import MemsetParams, NodeParams
from graphcore.resources.lifetime import OwnerSet

# ---- all or nothing -----------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_half_way_puts_back_what_was_changed(failing: int) -> None:
    driver = EmulatedDriver()
    bench = Bench(driver)
    x, y, out = bench.put([0.0] * 4), bench.put([0.0] * 4), bench.put([0.0] * 4)
    executable = many(bench, x, out, 3, 20).instantiate()
    before = executable.snapshot()
    driver.faults.inject("set_exec_node_params", after=failing)
    with pytest.raises(CudaError) as caught:
        executable.rebind([((x, 16), (y, 16))])
    assert f"{failing} nodes that were changed before have been put back" in str(
        caught.value.__notes__
    )
    assert executable.snapshot() == before
    run(executable, bench)
    assert (values(bench, x), values(bench, y)) == ([3.0] * 4, [0.0] * 4)
    executable.rebind([((x, 16), (y, 16))])
    run(executable, bench)
    assert values(bench, y) == [3.0] * 4


def test_what_could_not_be_put_back_is_said(bench: Bench) -> None:
    driver = EmulatedDriver()
    bench = Bench(driver)
    x, y, out = bench.put([0.0] * 4), bench.put([0.0] * 4), bench.put([0.0] * 4)
    executable = many(bench, x, out, 2, 20).instantiate()
    driver.faults.inject("set_exec_node_params", count=2, after=1)
    with pytest.raises(CudaError) as caught:
        executable.rebind([((x, 16), (y, 16))])
    assert "could not be put back" in str(caught.value.__notes__)
    assert "node 0" in str(caught.value.__notes__)


@pytest.mark.parametrize("call", ["clone_graph", "set_node_params", "update_exec"])
def test_a_failure_of_a_whole_update_leaves_everything(call: str) -> None:
    driver = EmulatedDriver()
    bench = Bench(driver)
    x, y = bench.put([0.0] * 4), bench.put([0.0] * 4)
    executable = graph_of(bench, bench.kernel_params(add_one, x, 4)).instantiate()
    driver.faults.inject(call)
    with pytest.raises(CudaError):
        executable.rebind([((x, 16), (y, 16))])
    run(executable, bench)
    assert (values(bench, x), values(bench, y)) == ([1.0] * 4, [0.0] * 4)


# ---- ambiguous ----------------------------------------------------------------------------------


def test_a_word_in_two_named_buffers_is_refused_with_node_argument_and_byte(bench: Bench) -> None:
    bench.driver.function(packed)
    pool, y = bench.put([0.0] * 64), bench.put([0.0] * 64)
    graph = graph_of(bench, bench.kernel_params(packed, structure(pool + 32, 0, pool)))
    executable = graph.instantiate()
    names = {"cache": (pool, 128)}
    with pytest.raises(ConfigurationError) as caught:
        executable.rebind([((pool + 32, 32), (y, 32))], names=names)
    text = str(caught.value)
    assert "node 0 (kernel packed): arg 0 (work), byte 0: ambiguous" in text
    assert "old 0 + 0 bytes or cache + 32 bytes" in text
    # named as a whole it can be exchanged
    assert executable.rebind({"cache": (y, 128)}, names=names).words == {"cache": 2}


def test_a_word_that_is_not_aligned_is_refused(bench: Bench) -> None:
    bench.driver.function(packed)
    x, y = bench.put([0.0] * 4), bench.put([0.0] * 4)
    data = bytearray(structure(x, 0, x))
    data[12:20] = x.to_bytes(8, "little")
    executable = graph_of(bench, bench.kernel_params(packed, bytes(data))).instantiate()
    with pytest.raises(ConfigurationError, match="byte 12: a word that is not aligned"):
        executable.rebind([((x, 16), (y, 16))])


STRADDLING: dict[str, tuple[Callable[[int, int], NodeParams], str]] = {
    "past the end": (
        lambda x, out: copy_1d(out, x + 8, 16),
        r"memcpy\): src touches 16 bytes from byte 8 of old 0",
    ),
    "from before": (
        lambda x, out: copy_1d(out, x - 8, 16),
        r"memcpy\): src begins outside old 0 and reaches into it",
    ),
    "a fill": (lambda x, _: MemsetParams(x, 0, 4, 8), r"memset\): address touches 32 bytes"),
}


@pytest.mark.parametrize("name", STRADDLING)
def test_copies_and_fills_that_reach_past_the_buffer_are_refused(bench: Bench, name: str) -> None:
    whole, y, out = bench.put([0.0] * 32), bench.put([0.0] * 4), bench.alloc(64)
    x = whole + 32
    make, message = STRADDLING[name]
    executable = graph_of(bench, make(x, out)).instantiate()
    with pytest.raises(ConfigurationError, match=message):
        executable.rebind([((x, 16), (y, 16))])


def test_copies_of_rows_beside_the_buffer_are_no_part_of_it(bench: Bench) -> None:
    whole, y, out = bench.put([1.0] * 16), bench.put([0.0] * 4), bench.alloc(64)
    # rows at 0 and 32, the buffer from 16 to 32 between them
    rows = copy_2d(out, whole, 16, 2, 16, 32)
    fill = fill_1d(whole + 16, 0, 4)
    executable = graph_of(bench, rows, fill).instantiate()
    assert executable.rebind([((whole + 16, 16), (y, 16))]).nodes == 1


def test_the_holes_of_a_strided_buffer_are_anothers(bench: Bench) -> None:
    both = filled(bench.driver, 0.0, 4, 2)
    left, right = both[:, 0], both[:, 1]
    new = filled(bench.driver, 0.0, 4, 2)[:, 0]
    start = both.data_ptr()
    graph = graph_of(
        bench,
        bench.kernel_params(add_one, start + 8, 1),
        bench.kernel_params(add_one, start + 12, 1),
    )
    owners = OwnerSet().with_(right, label="right")
    executable = Graph(bench.driver, graph.handle, owners=owners, owned=False).instantiate()
    assert executable.rebind([(left, new)]).nodes == 1
    run(executable, bench)
    assert new.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert both.flatten().tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


def test_memory_that_gets_two_names_is_told(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    a, b = filled(bench.driver, 0.0), filled(bench.driver, 0.0)
    add = bench.kernel_params(add_one, a.data_ptr(), 4)
    handle = build(bench, (Step(add), Step(bench.kernel_params(add_one, b.data_ptr(), 4))))
    owners = OwnerSet().with_(a, label="a").with_(b, label="b")
    executable = Graph(bench.driver, handle, owners=owners, owned=False).instantiate()
    executable.rebind([(a, b)])
    assert "a goes to memory that the graph uses as b already" in caplog.text
