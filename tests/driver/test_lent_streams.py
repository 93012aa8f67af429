"""Streams for captures are lent: to one holder at a time, and again when nobody holds them."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
from helpers.contract import in_thread
from helpers.interrupts import press_at

from graphcore.driver import Driver, Stream, active
from graphcore.driver.active import ActiveCapture
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.lent_streams import give_up, is_given_up, lane_of
from graphcore.errors import LifecycleError
from graphcore.testing import run_isolated


def dropped(driver: Driver, *, blocking: bool = False) -> int:
    """The handle of a stream that was lent and is held by nobody any more."""
    return driver.capture_stream(blocking=blocking).handle


def test_a_stream_that_nobody_holds_is_lent_again(graphcore_driver: Driver) -> None:
    first = graphcore_driver.capture_stream()
    handle = first.handle
    assert (graphcore_driver.capture_streams.lent, graphcore_driver.capture_streams.idle) == (1, 0)
    del first
    assert (graphcore_driver.capture_streams.lent, graphcore_driver.capture_streams.idle) == (0, 1)
    again = graphcore_driver.capture_stream()
    assert again.handle == handle
    again.synchronize()
    assert {dropped(graphcore_driver) for _ in range(5)} == {dropped(graphcore_driver)} - {handle}


def test_a_stream_is_lent_to_one_holder_at_a_time(graphcore_driver: Driver) -> None:
    held = [graphcore_driver.capture_stream() for _ in range(6)]
    assert len({stream.handle for stream in held}) == 6
    kept = held.pop(3)
    del held
    again = [graphcore_driver.capture_stream() for _ in range(6)]
    assert len({stream.handle for stream in again} | {kept.handle}) == 7


def test_blocking_streams_and_others_are_not_mixed_up(graphcore_driver: Driver) -> None:
    handles = {blocking: dropped(graphcore_driver, blocking=blocking) for blocking in (True, False)}
    assert len(set(handles.values())) == 2
    for blocking, handle in handles.items():
        stream = graphcore_driver.capture_stream(blocking=blocking)
        assert stream.handle == handle
        assert stream.is_blocking is blocking


def test_products_are_captured_where_something_is_kept_for_them_and_nothing_else_is(
    graphcore_driver: Driver,
) -> None:
    """Else each stream that ever was idle would come to have a workspace."""
    held = [graphcore_driver.capture_stream() for _ in range(4)]
    furnished = {held[index].handle for index in (0, 2)}
    for index in (0, 2):
        lane = lane_of(held[index])
        assert lane is not None
        lane.belongings.append(Memory())
    del held
    for _ in range(3):
        products = graphcore_driver.capture_stream(products=True)
        plain = graphcore_driver.capture_stream()
        assert products.handle in furnished
        assert plain.handle not in furnished
        del products, plain
    # where there is no other, one is taken before another one is made
    assert {graphcore_driver.capture_stream().handle for _ in range(9)}.isdisjoint(furnished)
    all_four = [graphcore_driver.capture_stream() for _ in range(4)]
    assert furnished < {stream.handle for stream in all_four}
    assert graphcore_driver.capture_streams.lent == 4
    assert graphcore_driver.capture_streams.idle == 0


def test_a_stream_of_the_own_thread_comes_before_one_with_something_kept(
    graphcore_driver: Driver,
) -> None:
    other: list[int] = []

    def elsewhere() -> None:
        stream = graphcore_driver.capture_stream()
        lane = lane_of(stream)
        assert lane is not None
        lane.belongings.append(Memory())
        other.append(stream.handle)

    own = graphcore_driver.capture_stream()
    in_thread(elsewhere)
    handle = own.handle
    del own
    assert graphcore_driver.capture_stream(products=True).handle == handle
    assert other[0] != handle


def test_a_stream_of_ones_own_is_never_lent(graphcore_driver: Driver) -> None:
    own = graphcore_driver.stream()
    assert lane_of(own) is None
    give_up(own)
    assert not is_given_up(own)
    assert dropped(graphcore_driver) != own.handle
    own.synchronize()


def test_a_closed_stream_is_destroyed_and_not_lent_again(graphcore_driver: Driver) -> None:
    stream = graphcore_driver.capture_stream()
    stream.close()
    stream.close()
    assert stream.handle not in graphcore_driver.own_streams()
    assert graphcore_driver.capture_streams.idle == graphcore_driver.capture_streams.lent == 0
    with pytest.raises(LifecycleError):
        stream.synchronize()


def test_a_stream_that_was_given_up_goes_when_it_is_dropped(graphcore_driver: Driver) -> None:
    stream = graphcore_driver.capture_stream()
    handle = stream.handle
    give_up(stream)
    assert is_given_up(stream)
    stream.synchronize()  # its holder still has it
    assert handle in graphcore_driver.own_streams()
    del stream
    assert handle not in graphcore_driver.own_streams()
    assert graphcore_driver.capture_streams.idle == 0


def test_a_finalizer_that_comes_late_leaves_the_stream_to_its_new_holder(
    graphcore_driver: Driver,
) -> None:
    held: list[Stream] = []

    def lend_again() -> None:
        held.append(graphcore_driver.capture_stream())
        give_up(held[0])

    first = graphcore_driver.capture_stream()
    handle = first.handle
    weakref.finalize(first, lend_again)  # finalizers run in the order last made, first run
    del first
    assert held[0].handle == handle
    assert handle in graphcore_driver.own_streams()
    held[0].synchronize()
    held.clear()
    assert handle not in graphcore_driver.own_streams()


def test_an_idle_stream_on_which_somebody_captures_is_not_lent(graphcore_driver: Driver) -> None:
    handle = dropped(graphcore_driver)
    graphcore_driver.begin_capture(handle, "relaxed")
    assert graphcore_driver.capture_stream().handle != handle
    graphcore_driver.destroy_graph(graphcore_driver.end_capture(handle))  # it was not harmed
    held = [graphcore_driver.capture_stream() for _ in range(2)]
    assert handle in {stream.handle for stream in held}


def test_a_stream_whose_driver_refuses_to_look_at_it_is_not_lent() -> None:
    driver = EmulatedDriver()
    handle = dropped(driver)
    driver.destroy_stream(handle)
    with pytest.warns(Warning, match="finalizing"):
        stream = driver.capture_stream()
    stream.synchronize()


def test_closing_the_driver_destroys_what_nobody_holds(graphcore_driver: Driver) -> None:
    held = graphcore_driver.capture_stream()
    handle, idle = held.handle, dropped(graphcore_driver)
    graphcore_driver.close()
    assert idle not in graphcore_driver.own_streams()
    assert handle in graphcore_driver.own_streams()
    del held
    assert handle not in graphcore_driver.own_streams()


def test_idle_streams_do_not_keep_their_driver() -> None:
    driver = EmulatedDriver()
    dropped(driver)
    gone = weakref.ref(driver)
    del driver
    gc.collect()
    assert gone() is None


def test_no_two_threads_hold_a_stream_at_once(graphcore_driver: Driver) -> None:
    guard, held, twice, seen = threading.Lock(), set(), [], set()

    def work() -> None:
        for _ in range(60):
            streams = [graphcore_driver.capture_stream() for _ in range(2)]
            handles = {stream.handle for stream in streams}
            with guard:
                twice.extend(handles & held)
                held.update(handles)
                seen.update(handles)
            with guard:
                held.difference_update(handles)
            del streams

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert twice == []
    assert 2 <= len(seen) <= 12
    assert graphcore_driver.capture_streams.lent == 0


def test_a_thread_gets_the_stream_that_it_had(graphcore_driver: Driver) -> None:
    """Libraries keep workspaces by thread, too: another thread's would cost a second one."""
    together = threading.Barrier(2)
    handles: dict[str, list[int]] = {"one": [], "two": []}

    def work(name: str) -> None:
        for _ in range(4):
            stream = graphcore_driver.capture_stream()
            handles[name].append(stream.handle)
            together.wait(timeout=60)
            del stream
            together.wait(timeout=60)

    threads = [threading.Thread(target=work, args=(name,)) for name in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [len(set(each)) for each in handles.values()] == [1, 1]
    assert handles["one"] != handles["two"]
    # of a thread that is over, another one takes it
    assert dropped(graphcore_driver) in {handles["one"][0], handles["two"][0]}


# ---- what belongs to a stream -------------------------------------------------------------------


@dataclass(eq=False)
class Memory:
    """What a library keeps for a stream."""

    needed: bool = True
    burden: bool = False
    looks: int = 0

    def is_needed(self) -> bool:
        self.looks += 1
        return self.needed

    def is_burden(self) -> bool:
        return self.burden


def with_memory(stream: Stream, *memories: Memory) -> Stream:
    lane = lane_of(stream)
    assert lane is not None
    lane.belongings.extend(memories)
    return stream


def test_what_is_needed_stays_with_the_stream_and_the_rest_goes(graphcore_driver: Driver) -> None:
    needed, other = Memory(), Memory(needed=False)
    gone = weakref.ref(other)
    stream = with_memory(graphcore_driver.capture_stream(), needed, other)
    assert needed.looks == 0  # a graph may work in it as long as the stream is held
    del stream, other
    assert gone() is None
    lane = lane_of(graphcore_driver.capture_stream())
    assert lane is not None
    assert lane.belongings == [needed]


def test_a_stream_whose_memory_is_a_burden_is_destroyed(graphcore_driver: Driver) -> None:
    memory = Memory(burden=True)
    gone = weakref.ref(memory)
    handle = with_memory(graphcore_driver.capture_stream(), memory).handle
    del memory
    assert gone() is None
    assert handle not in graphcore_driver.own_streams()
    assert graphcore_driver.capture_streams.idle == 0


def test_what_belongs_to_a_closed_stream_stays_with_who_holds_the_lane(
    graphcore_driver: Driver,
) -> None:
    memory = Memory()
    gone = weakref.ref(memory)
    stream = with_memory(graphcore_driver.capture_stream(), memory)
    lane = lane_of(stream)
    del memory
    stream.close()
    del stream
    assert gone() is not None
    del lane
    assert gone() is None


def test_what_belongs_to_a_stream_is_looked_at_once_no_capture_is_under_way() -> None:
    driver, memory = EmulatedDriver(), Memory(needed=False)
    stream = with_memory(driver.capture_stream(), memory)
    capture = ActiveCapture(driver, driver.stream().handle, "relaxed")
    active.push(capture)
    try:
        del stream
        assert memory.looks == 0
        assert driver.capture_streams.idle == 1  # lent all the same
    finally:
        active.pop()
    assert memory.looks == 1


def test_what_was_lent_again_meanwhile_is_not_looked_at() -> None:
    driver, memory = EmulatedDriver(), Memory(needed=False)
    stream = with_memory(driver.capture_stream(), memory)
    capture = ActiveCapture(driver, driver.stream().handle, "relaxed")
    active.push(capture)
    try:
        del stream
        again = driver.capture_stream()
    finally:
        active.pop()
    assert memory.looks == 0
    del again
    assert memory.looks == 1


# ---- interruptions ------------------------------------------------------------------------------


def is_free(lock: Any) -> bool:
    if not lock.acquire(timeout=1):
        return False
    lock.release()
    return True


# in a finalizer nothing can be raised: Python prints it and goes on
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_line_leaves_every_stream_to_be_lent() -> None:
    files = ("driver/lent_streams.py",)

    def lend_and_drop(driver: EmulatedDriver) -> None:
        held = [driver.capture_stream() for _ in range(2)]
        held[0].close()
        held.clear()
        driver.capture_stream()

    lines, _ = press_at(0, lambda: lend_and_drop(EmulatedDriver()), files)
    assert lines > 40
    for number in range(1, lines + 1):
        driver = EmulatedDriver()
        _, where = press_at(number, lambda driver=driver: lend_and_drop(driver), files)
        store = driver.capture_streams
        if store.lent:
            gc.collect()
        assert store.lent == 0, where
        assert in_thread(lambda lock=store._lock: is_free(lock)), where
        lost = set(driver.own_streams()) - {lane.handle for lane in store._lanes}
        assert len(lost) <= 1, where  # between the driver's call and its answer
        driver.capture_stream().synchronize()


def test_after_a_fork_the_child_lends_although_a_thread_held_the_lock() -> None:
    done = run_isolated(
        """
import os, signal, threading
from graphcore.driver.emulated import EmulatedDriver
driver = EmulatedDriver()
driver.capture_stream()
taken, over = threading.Event(), threading.Event()
def hold():
    with driver.capture_streams._lock:
        taken.set()
        over.wait(60)
thread = threading.Thread(target=hold)
thread.start()
taken.wait(60)
child = os.fork()
if not child:
    signal.alarm(20)
    driver.capture_stream().synchronize()
    os._exit(7)
_, status = os.waitpid(child, 0)
over.set()
thread.join()
print("child", os.waitstatus_to_exitcode(status))
""",
        timeout=60,
    )
    assert done.survived, done.stderr
    assert "child 7" in done.stdout
