"""GraphExec.rebind of what was captured: tensors by name, owners, pools, marks and watches."""

from __future__ import annotations

import gc
import weakref

import pytest
from helpers.contract import Bench
from helpers.rebinding import captured, many, run, values
from helpers.tensors import filled, replay

from graphcore import (
    StaleGraphError,
)
from graphcore.driver import Driver

# ---- what was captured --------------------------------------------------------------------------


def test_a_captured_torch_step_works_on_new_tensors_by_name(graphcore_driver: Driver) -> None:
    driver = graphcore_driver
    x, weight, out = (filled(driver, value, 4, 4) for value in (1.0, 2.0, 0.0))

    def step() -> None:
        out.copy_(x @ weight + x)

    graph, stream = captured(driver, step, x=x, weight=weight, out=out)
    executable = graph.instantiate()
    replay(executable, stream)
    assert out.tolist() == [[9.0] * 4] * 4
    new_x, new_out = filled(driver, 3.0, 4, 4), filled(driver, float("nan"), 4, 4)
    outcome = executable.rebind({"x": new_x, "out": new_out})
    assert set(outcome.words) == {"x", "out"}
    out.fill_(-1.0)
    replay(executable, stream)
    assert new_out.tolist() == [[27.0] * 4] * 4
    assert out.tolist() == [[-1.0] * 4] * 4
    weight.fill_(1.0)  # what was not named is as it was
    replay(executable, stream)
    assert new_out.tolist() == [[15.0] * 4] * 4
    # and back, by the tensors
    executable.rebind([(new_x, x), (new_out, out)])
    replay(executable, stream)
    assert out.tolist() == [[5.0] * 4] * 4


def test_an_input_replaced_by_a_new_tensor_after_capture_is_mended(
    graphcore_driver: Driver,
) -> None:
    """The commonest silent failure: the graph goes on reading the memory it was captured with."""
    driver = graphcore_driver
    x, out = filled(driver, 1.0), filled(driver, 0.0)
    graph, stream = captured(driver, lambda: out.copy_(x * 2), x=x, out=out)
    executable = graph.instantiate(guard="full")
    x.data = filled(driver, 5.0)
    assert [stale.label for stale in executable.check()] == ["x"]
    with pytest.raises(StaleGraphError, match="x: address"):
        executable.launch(stream)
    outcome = executable.rebind({"x": x})
    assert outcome.words["x"] >= 1
    assert executable.check() == []
    replay(executable, stream)
    assert out.tolist() == [10.0] * 4


def test_owners_are_swapped_and_the_old_memory_is_let_go(graphcore_driver: Driver) -> None:
    driver = graphcore_driver
    tensors = {"out": filled(driver, 0.0)}
    graph, stream = captured(driver, lambda: tensors["out"].add_(1), **tensors)
    executable = graph.instantiate()
    graph.close()
    gone = weakref.ref(tensors["out"])
    new = filled(driver, 5.0)
    executable.rebind({"out": new})
    tensors.clear()
    gc.collect()
    assert gone() is None
    assert new in executable.owners
    assert executable.owners.labels().count("out") == 1
    replay(executable, stream)
    assert new.tolist() == [6.0] * 4
    alive = weakref.ref(new)
    del new
    gc.collect()
    assert alive() is not None
    assert alive() in executable.graph.owners
    executable.close()
    del executable
    gc.collect()
    assert alive() is None


def test_the_pool_and_temporaries_stay(graphcore_driver: Driver) -> None:
    driver = graphcore_driver
    x, out = filled(driver, 1.0, 64), filled(driver, 0.0, 64)
    graph, stream = captured(driver, lambda: out.copy_((x + 1) * (x + 2)), x=x, out=out)
    executable = graph.instantiate()
    kept = [label for label in executable.owners.labels() if "pool" in label]
    graph.close()
    executable.rebind({"x": filled(driver, 2.0, 64)})
    assert [label for label in executable.owners.labels() if "pool" in label] == kept
    replay(executable, stream)
    assert out.tolist() == [12.0] * 64


def test_a_marked_buffer_is_forgiven_once_it_is_exchanged(graphcore_driver: Driver) -> None:
    driver = graphcore_driver
    x, out = filled(driver, 1.0), filled(driver, 0.0)
    graph, stream = captured(driver, lambda: out.copy_(x * 2), x=x, out=out)
    executable = graph.instantiate(guard="owners")
    executable.mark_stale("grew", "x")
    executable.rebind({"out": filled(driver, 0.0)})
    with pytest.raises(StaleGraphError, match="grew"):
        executable.launch(stream)
    executable.rebind({"x": filled(driver, 3.0)})
    replay(executable, stream)


@pytest.mark.parametrize("share", [1, 9], ids=["a whole update", "node by node"])
def test_old_memory_may_be_freed_and_new_memory_is_watched_instead(
    bench: Bench, share: int
) -> None:
    """Memory that nobody keeps alive: raw addresses, told by what the nodes point into."""
    driver = bench.driver
    x, y, out = driver.alloc(16), bench.put([1.0] * 4), bench.put([0.0] * 4)
    driver.write(x, bytes(16))
    executable = many(bench, x, out, 1, share).instantiate(guard="full")
    run(executable, bench)
    executable.rebind([((x, 16), (y, 16))])
    driver.free(x)
    assert executable.check() == []
    run(executable, bench)
    assert values(bench, y) == [2.0] * 4
    # the other buffer is watched as before
    gone = driver.alloc(16)
    driver.write(gone, bytes(16))
    executable.rebind([((y, 16), (gone, 16))])
    run(executable, bench)
    driver.free(gone)
    with pytest.raises(StaleGraphError, match="freed"):
        executable.launch(bench.stream)


def test_watched_memory_is_exchanged_by_its_name_and_watched_no_more(
    graphcore_driver: Driver,
) -> None:
    driver = graphcore_driver
    tensors = {"x": filled(driver, 1.0)}
    out, new = filled(driver, 0.0), filled(driver, 4.0)
    graph, stream = captured(driver, lambda: out.copy_(tensors["x"] * 2), out=out)
    graph.watch({"x": tensors["x"]})
    executable = graph.instantiate(guard="owners")
    graph.close()
    assert executable.rebind({"x": new}).words["x"] >= 1
    del tensors["x"]
    gc.collect()
    replay(executable, stream)
    assert out.tolist() == [8.0] * 4
    assert new in executable.owners
