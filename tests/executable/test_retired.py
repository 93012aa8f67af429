"""Owners that an executable gave up live until the launches that use them have run."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from helpers.contract import Bench
from helpers.every_fault import interrupts_instead
from helpers.kernels import fill_value
from helpers.spinning import MILLISECOND, spin
from helpers.tensors import cuda_driver

import graphcore
from graphcore import Graph, GraphExec
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import KernelParams
from graphcore.executable.retired import release_finished
from graphcore.resources.lifetime import OwnerSet
from graphcore.testing import inject


class Owner:
    """Something that a graph keeps alive."""


class LateEvents(EmulatedDriver):
    """An emulated driver whose events have not happened until the test says so."""

    has_happened = False
    recorded = 0

    def record_event(self, *arguments: Any, **keywords: Any) -> None:
        self.recorded += 1
        super().record_event(*arguments, **keywords)

    def query_event(self, event: int) -> bool:  # type: ignore[override]
        return self.has_happened and super().query_event(event)  # type: ignore[arg-type]


def graph_of(bench: Bench, params: KernelParams, *owners: object) -> Graph:
    handle = bench.new_graph()
    bench.add(handle, params)
    kept = OwnerSet().with_(*owners, label="owner")
    return Graph(bench.driver, handle, owners=kept, owned=False)


def filling(bench: Bench, value: float, *owners: object) -> Graph:
    x = bench.alloc(16)
    return graph_of(bench, bench.kernel_params(fill_value, x, value, 4), *owners)


@pytest.fixture
def late() -> Iterator[Bench]:
    """A bench whose launches do not end until ``driver.has_happened``."""
    bench = Bench(LateEvents())
    yield bench
    bench.driver.has_happened = True  # type: ignore[attr-defined]
    release_finished()
    bench.close()


def updated_while_running(bench: Bench) -> tuple[GraphExec, weakref.ref[Owner]]:
    """An executable that was launched and then given other parameters; the old ones' owner."""
    owner = Owner()
    executable = filling(bench, 1, owner).instantiate()
    executable.launch(bench.stream)
    executable.update(filling(bench, 2, Owner()))
    return executable, weakref.ref(owner)


def test_an_update_keeps_the_old_owners_until_the_launch_before_it_has_run(late: Bench) -> None:
    executable, old = updated_while_running(late)
    gc.collect()
    assert old() is not None
    assert old() not in executable.owners
    assert release_finished() == 1
    late.driver.has_happened = True  # type: ignore[attr-defined]
    assert release_finished() == 0
    gc.collect()
    assert old() is None


def test_the_next_update_lets_go_of_what_has_run(late: Bench) -> None:
    executable, old = updated_while_running(late)
    late.driver.has_happened = True  # type: ignore[attr-defined]
    executable.update(filling(late, 3))
    gc.collect()
    assert old() is None


def test_a_close_keeps_the_owners_until_the_last_launch_has_run(late: Bench) -> None:
    owner = Owner()
    watch = weakref.ref(owner)
    executable = filling(late, 1, owner).instantiate()
    executable.launch(late.stream)
    del owner
    executable.close()
    gc.collect()
    assert watch() is not None
    late.driver.has_happened = True  # type: ignore[attr-defined]
    # making another executable looks again
    filling(late, 1).instantiate()
    gc.collect()
    assert watch() is None


@pytest.mark.parametrize("fault", ["Ctrl-C", "a warning that is an error"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_where_the_destroy_fails_the_owners_still_wait_for_the_last_launch(
    late: Bench, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner()
    watch = weakref.ref(owner)
    graph = filling(late, 1, owner)
    executable = graph.instantiate()
    executable.launch(late.stream)
    del owner
    graph.keep(OwnerSet())
    if fault == "Ctrl-C":
        interrupts_instead(monkeypatch)
    # the filter of this suite makes the warning of a failed destroy an error
    with inject(late.driver, "destroy_exec") as injected, suppress(KeyboardInterrupt):
        executable.close()
    assert injected.fired == 1
    gc.collect()
    assert watch() is not None, "the launch still runs"
    assert graph.resource.live == 0
    late.driver.has_happened = True  # type: ignore[attr-defined]
    release_finished()
    gc.collect()
    assert watch() is None


def test_an_executable_that_is_dropped_keeps_its_owners_until_it_has_run(late: Bench) -> None:
    owner = Owner()
    watch = weakref.ref(owner)
    executable = filling(late, 1, owner).instantiate()
    executable.launch(late.stream)
    del owner, executable
    gc.collect()
    assert watch() is not None
    late.driver.has_happened = True  # type: ignore[attr-defined]
    release_finished()
    gc.collect()
    assert watch() is None


def test_what_was_never_launched_lets_go_at_once(late: Bench) -> None:
    first, second = Owner(), Owner()
    watches = weakref.ref(first), weakref.ref(second)
    executable = filling(late, 1, first).instantiate()
    executable.update(filling(late, 2, second))
    executable.close()
    del first, second, executable
    gc.collect()
    assert [watch() for watch in watches] == [None, None]


def test_owners_that_the_new_version_keeps_too_need_no_fence(late: Bench) -> None:
    owner = Owner()
    executable = filling(late, 1, owner).instantiate()
    executable.launch(late.stream)
    executable.update(filling(late, 2, owner, Owner()))
    assert release_finished() == 0


def test_two_versions_that_take_turns_cost_no_fence(late: Bench) -> None:
    graphs = [filling(late, value, Owner()) for value in (1, 2)]
    executable = graphs[0].instantiate()
    executable.launch(late.stream)
    executable.update(graphs[1])
    before = late.driver.recorded  # type: ignore[attr-defined]
    for number in range(6):
        executable.launch(late.stream)
        executable.update(graphs[number % 2])
    assert late.driver.recorded == before  # type: ignore[attr-defined]
    # a third version has the two looked at
    executable.update(filling(late, 3, Owner()))
    assert late.driver.recorded == before  # type: ignore[attr-defined]
    late.driver.has_happened = True  # type: ignore[attr-defined]
    assert release_finished() == 0


def test_a_queue_that_never_empties_keeps_what_it_uses_and_no_more(late: Bench) -> None:
    owners = [Owner() for _ in range(6)]
    watches = [weakref.ref(owner) for owner in owners]
    executable = filling(late, 0).instantiate()
    for number in range(6):
        executable.update(filling(late, number, owners.pop(0)))
        executable.launch(late.stream)
    assert [watch() is None for watch in watches] == [False] * 6
    late.driver.has_happened = True  # type: ignore[attr-defined]
    executable.update(filling(late, 7, Owner()))
    gc.collect()
    assert [watch() is None for watch in watches] == [True] * 6
    executable.close()


def test_nothing_is_asked_while_a_capture_is_under_way(late: Bench) -> None:
    executable, old = updated_while_running(late)
    late.driver.has_happened = True  # type: ignore[attr-defined]
    x = late.alloc(16)
    with graphcore.capture(driver=late.driver) as capture:
        assert release_finished() == 1
        late.launch(fill_value, x, 1.0, 4, stream=capture.stream)
    assert release_finished() == 0
    gc.collect()
    assert old() is None
    executable.close()


def test_a_stream_that_was_closed_meanwhile_is_waited_for_with_the_device(late: Bench) -> None:
    owner = Owner()
    watch = weakref.ref(owner)
    stream = late.driver.stream()
    executable = filling(late, 1, owner).instantiate()
    executable.launch(stream)
    stream.close()
    executable.update(filling(late, 2))
    del owner
    gc.collect()
    assert watch() is None


def test_a_lost_context_keeps_nothing(late: Bench) -> None:
    executable, old = updated_while_running(late)
    late.driver.faults.inject("query_event", code="CUDA_ERROR_ILLEGAL_ADDRESS")  # type: ignore[attr-defined]
    late.driver.has_happened = True  # type: ignore[attr-defined]
    assert release_finished() == 0
    gc.collect()
    assert old() is None
    executable.close()


def test_two_threads_may_look_at_once(late: Bench) -> None:
    executables = [updated_while_running(late)[0] for _ in range(20)]
    late.driver.has_happened = True  # type: ignore[attr-defined]
    threads = [threading.Thread(target=release_finished) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert release_finished() == 0
    for executable in executables:
        executable.close()


@pytest.mark.gpu
def test_a_running_launch_keeps_the_buffers_of_the_version_it_was_launched_with() -> None:
    bench = Bench(cuda_driver())
    out, other = bench.put([0.0]), bench.put([0.0])
    owner = Owner()
    watch = weakref.ref(owner)

    def spinning(address: int, value: float, kept: object, length: int) -> Graph:
        params = bench.kernel_params(spin, address, value, length)
        return graph_of(bench, params, kept)

    executable = spinning(out, 1.0, owner, 300 * MILLISECOND).instantiate()
    executable.launch(bench.stream)
    executable.update(spinning(other, 2.0, Owner(), 1))
    del owner
    gc.collect()
    assert watch() is not None  # the launch still runs
    executable.launch(bench.stream)
    bench.stream.synchronize()
    assert release_finished() == 0
    gc.collect()
    assert watch() is None
    assert (bench.get(out, 1), bench.get(other, 1)) == ([1.0], [2.0])
    executable.close()
    bench.close()


class SlowAnswers(EmulatedDriver):
    """An emulated driver whose events have happened only at the fifth question, as on a device."""

    questions = 0

    def query_event(self, event: int) -> bool:  # type: ignore[override]
        self.questions += 1
        return self.questions > 4 and super().query_event(event)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_what_ran_long_ago_is_given_back_by_the_end_of_its_executable(how: str) -> None:
    bench = Bench(SlowAnswers())
    owner = Owner()
    held = weakref.ref(owner)
    graph = filling(bench, 1.0, owner)
    executable = graph.instantiate()
    del owner
    executable.launch(bench.stream)
    graph.close()
    if how == "closed":
        executable.close()
    del executable, graph
    gc.collect()
    assert held() is None
    assert bench.driver.questions > 4  # type: ignore[attr-defined]
