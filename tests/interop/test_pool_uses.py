"""Torch memory pools: a dropped one goes when no pool is in use, on any thread."""

import gc
import weakref
from contextlib import contextmanager

import pytest
from helpers.contract import in_thread

from graphcore.interop.pool_uses import PoolUses
from graphcore.testing import run_isolated


class Pool:
    """Stands for torch's pool."""


@contextmanager
def block(events):
    events.append("in")
    yield
    events.append("out")


@pytest.fixture
def uses():
    return PoolUses()


def dropped(uses):
    holder = [Pool()]
    watch = weakref.ref(holder[0])
    uses.drop(holder)
    assert holder == []
    return watch


def test_a_pool_that_is_dropped_while_none_is_used_goes_at_once(uses):
    assert dropped(uses)() is None


def test_a_pool_dropped_inside_a_use_goes_at_its_end_and_not_before(uses):
    events = []
    with uses.use(block(events)):
        watch = dropped(uses)
        gc.collect()
        assert watch() is not None
        assert uses.waiting == 1
    assert watch() is None
    assert events == ["in", "out"]


def test_a_pool_waits_for_the_uses_of_every_thread(uses):
    with uses.use(block([])):
        watch = in_thread(lambda: dropped(uses))
        with uses.use(block([])):
            pass
        assert watch() is not None
    assert watch() is None


def test_an_error_in_a_use_ends_it(uses):
    with pytest.raises(ValueError, match="mine"), uses.use(block([])):
        raise ValueError("mine")
    assert dropped(uses)() is None


DROPS = {
    "in another's capture": """
        with graphcore.capture(driver=driver) as second:
            x.mul_(2)
            del first, step
            gc.collect()
        """,
    "in another's warm-up": """
        def step():
            nonlocal_first.clear()
            x.mul_(2)
        nonlocal_first = [first]
        del first
        second = types.SimpleNamespace(graph=graphcore.capture_function(step, driver=driver))
        """,
    "in a capture on another thread": """
        go, done = threading.Event(), threading.Event()
        kept = []
        def other():
            with graphcore.capture(driver=driver, stream=driver.stream(blocking=True)) as capture:
                x.mul_(2)
                go.set()
                done.wait(20)
            kept.append(capture)
        thread = threading.Thread(target=other)
        thread.start()
        go.wait(20)
        del first
        gc.collect()
        done.set()
        thread.join()
        second = kept[0]
        """,
}


@pytest.mark.gpu
@pytest.mark.parametrize("drop", DROPS.values(), ids=DROPS)
def test_a_graph_with_a_pool_may_be_dropped(drop):
    """torch ends the process where its pool dies while another one is in use."""
    import textwrap

    script = (
        """
import gc, threading, types
import torch
import graphcore

driver = graphcore.open_driver("cuda")
x = torch.ones(4, device="cuda")

def step():
    return x + 1

first = graphcore.capture_function(step, driver=driver)
"""
        + textwrap.dedent(drop)
        + """
x.fill_(3)
torch.cuda.synchronize()
executable = second.graph.instantiate()
executable.launch()
driver.synchronize()
assert x.tolist() == [6.0] * 4, x
print("done")
"""
    )
    done = run_isolated(script, timeout=120)
    assert done.survived, done.stderr
    assert "done" in done.stdout
