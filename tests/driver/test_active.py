"""Captures under way: what waits for them, what they wait for, and what is noted meanwhile."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
from helpers.contract import in_thread

from graphcore.driver import active
from graphcore.driver.active import ActiveCapture
from graphcore.driver.codes import cuda_error
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import StreamHandle
from graphcore.errors import GraphcoreWarning, LifecycleError


def _capture(name: str = "a capture") -> ActiveCapture:
    return ActiveCapture(EmulatedDriver(), StreamHandle(7), "global", name)


@pytest.fixture(autouse=True)
def _none_left() -> Iterator[None]:
    yield
    assert active.under_way() == ()
    assert not active._waiting.turns


class Slow:
    """An action that has begun and ends when it is told to."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.ended = False
        self.thread = threading.Thread(target=active.when_idle, args=(self,))

    def __call__(self) -> None:
        self.begun.set()
        assert self.may_end.wait(10)
        self.ended = True

    def __enter__(self) -> Slow:
        self.thread.start()
        assert self.begun.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.may_end.set()
        self.thread.join()


def _begin_and_look(look: Callable[[], object]) -> object:
    active.push(_capture())
    try:
        return look()
    finally:
        active.pop()


def test_a_capture_waits_for_a_destroy_that_another_thread_has_begun() -> None:
    with Slow() as slow:
        threading.Timer(0.05, slow.may_end.set).start()
        assert _begin_and_look(lambda: slow.ended) is True


def test_no_further_action_begins_while_a_capture_waits_to_begin() -> None:
    ran: list[str] = []
    with Slow() as slow:
        waiting = threading.Thread(target=_begin_and_look, args=(lambda: ran.append("capture"),))
        waiting.start()
        while not active.under_way():
            pass
        in_thread(lambda: active.when_idle(lambda: ran.append("action")))
        assert ran == []
        slow.may_end.set()
        waiting.join()
    assert ran == ["capture", "action"]


def test_an_action_may_capture_itself_without_waiting_for_itself() -> None:
    seen: list[object] = []
    active.when_idle(lambda: seen.append(_begin_and_look(active.current)))
    assert isinstance(seen[0], ActiveCapture)


def test_two_actions_that_both_capture_do_not_wait_for_each_other() -> None:
    meet = threading.Barrier(2)

    def act() -> None:
        meet.wait(10)
        _begin_and_look(active.current)

    threads = [threading.Thread(target=active.when_idle, args=(act,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_a_destroy_that_never_ends_is_told_and_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(active, "_PATIENCE_SECONDS", 0.02)
    with Slow() as slow, caplog.at_level(logging.WARNING, "graphcore"):
        assert _begin_and_look(lambda: slow.ended) is False
    assert "begins while another thread still destroys something" in caplog.text


def test_a_wait_that_is_interrupted_leaves_no_capture_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(active._waiting.changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            active.push(_capture())
    assert active.current() is None


def test_an_action_that_raises_is_a_warning_and_the_others_run() -> None:
    ran: list[int] = []

    def fail() -> None:
        raise ValueError("no such handle")

    active.push(_capture())
    active.when_idle(fail)
    active.when_idle(lambda: ran.append(1))
    with pytest.warns(GraphcoreWarning, match="ValueError: no such handle"):
        active.pop()
    assert ran == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", [ValueError("why"), GraphcoreWarning("why")], ids=repr)
def test_where_warnings_are_errors_the_end_of_a_capture_still_does_not_raise(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[BaseException | None] = []
    monkeypatch.setattr("sys.unraisablehook", lambda what: reported.append(what.exc_value))

    def fail() -> None:
        raise error

    active.push(_capture())
    active.when_idle(fail)
    active.pop()
    assert [type(each) for each in reported] == [GraphcoreWarning]
    assert "why" in str(reported[0])


def test_a_refusal_on_any_thread_is_noted_with_every_capture_and_its_place() -> None:
    capture = _capture()
    active.push(capture)
    try:
        error = cuda_error("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "cuMemAlloc")
        thread = threading.Thread(target=active.note_error, args=(error,), name="loader")
        thread.start()
        thread.join()
        active.note_error(cuda_error("CUDA_ERROR_OUT_OF_MEMORY", "cuMemAlloc"))
    finally:
        active.pop()
    (trouble,) = capture.troubles
    assert trouble.thread == "loader"
    assert trouble.code == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    assert "cuMemAlloc answered" in trouble.what
    assert any(path.endswith("threading.py") for path, _ in trouble.frames)


def test_only_the_first_troubles_are_kept_and_none_outside_a_capture() -> None:
    capture = _capture()
    active.note("before")
    active.push(capture)
    for number in range(20):
        active.note(f"trouble {number}")
    active.pop()
    active.note("after")
    assert [trouble.what for trouble in capture.troubles] == [f"trouble {n}" for n in range(8)]


# ---- blocks beside which no other thread captures ----------------------------------------------


def test_a_block_outside_captures_waits_for_one_that_another_thread_has_under_way() -> None:
    order: list[str] = []

    def block() -> None:
        with active.outside_captures():
            order.append("block")

    active.push(_capture())
    thread = threading.Thread(target=block)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    order.append("over")
    active.pop()
    thread.join(10)
    assert order == ["over", "block"]


def test_a_capture_begins_behind_the_block_of_another_thread_and_is_none_until_then() -> None:
    order: list[str] = []

    def capture() -> None:
        _begin_and_look(lambda: order.append("capture"))

    with active.outside_captures():
        thread = threading.Thread(target=capture)
        thread.start()
        thread.join(0.05)
        # it waits for us, so that a block inside this one must not wait for it
        assert [each.is_waiting for each in active.under_way()] == [True]
        with active.outside_captures(0.0):
            order.append("block")
    thread.join(10)
    assert order == ["block", "capture"]


def test_a_block_inside_a_capture_of_its_own_thread_waits_for_nothing() -> None:
    def look() -> bool:
        with active.outside_captures(0.0):
            return active.current() is not None

    assert _begin_and_look(look)


def test_a_capture_that_does_not_end_is_named_and_the_block_not_entered() -> None:
    entered: list[int] = []

    def block() -> None:
        with active.outside_captures(0.01):
            entered.append(1)

    active.push(_capture("the capture of somebody"))
    try:
        result = in_thread(_error_of(block))
    finally:
        active.pop()
    assert "the capture of somebody" in str(result)
    assert "nothing was done" in str(result)
    assert not entered


def _error_of(block: Callable[[], None]) -> Callable[[], object]:
    def run() -> object:
        try:
            block()
        except LifecycleError as error:
            return error
        return None

    return run


def test_a_stream_in_use_is_that_of_the_innermost_block_for_the_device() -> None:
    driver = EmulatedDriver()
    assert active.used_stream(driver) is None
    with active.using(driver, StreamHandle(7)), active.using(driver, StreamHandle(8)):
        assert active.used_stream(driver) == 8
        assert in_thread(lambda: active.used_stream(driver)) is None
    assert active.used_stream(driver) is None


def test_a_stream_in_use_is_forgotten_with_its_block_where_nobody_could_take_it_back():
    driver = EmulatedDriver()
    left = active._Use(driver, StreamHandle(77))  # Ctrl-C came into the block's own last lines
    active._captures.used.append(weakref.ref(left))
    assert active.used_stream(driver) == 77
    del left
    assert active.used_stream(driver) is None
    with active.using(driver, StreamHandle(78)):
        assert active.used_stream(driver) == 78
    assert active._captures.used == []
