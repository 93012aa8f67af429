"""Inside a host callback CUDA must not be called: what goes there, also as garbage, waits."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from helpers.kernels import ONE_BLOCK, add_one
from helpers.scene import Scene

from graphcore import CudaError, Graph, LifecycleError
from graphcore.driver import Driver, active
from graphcore.driver.cuda.callbacks import HostCallbacks
from graphcore.driver.emulated import EmulatedDriver
from graphcore.resources.buffer import Buffer

GIVES_BACK = ("destroy_exec", "destroy_graph", "destroy_event", "destroy_stream", "free")


@pytest.fixture
def scene(graphcore_driver: Driver) -> Scene:
    return Scene(graphcore_driver)


def graph_of(scene: Scene, *callbacks: Callable[[], object]) -> Graph:
    """A graph of these callbacks, one behind the other."""
    with scene.capture() as capture:
        for callback in callbacks:
            scene.driver.launch_host(lambda call=callback: (call(), None)[1], scene.stream.handle)
    return capture.graph


def run(scene: Scene, *callbacks: Callable[[], object]) -> None:
    with graph_of(scene, *callbacks).instantiate() as executable:
        executable.launch(scene.stream)
        scene.driver.synchronize()


def test_what_becomes_garbage_in_a_callback_is_given_back_outside_of_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, where = scene.driver, []
    for name in GIVES_BACK:
        method = getattr(driver, name)

        def noted(*arguments: Any, method: Any = method, name: str = name) -> Any:
            where.append((name, active.in_callback(), threading.get_ident()))
            return method(*arguments)

        monkeypatch.setattr(driver, name, noted)
    with scene.capture() as capture:
        scene.launch(scene.stream)
    executable = capture.graph.instantiate()
    executable.launch(scene.stream)
    held: list[Any] = [Buffer.allocate(4, driver=driver), driver.event(), driver.stream()]
    held += [executable, capture.graph, held]  # a cycle: garbage for the collector
    del executable, capture
    seen: list[int] = []

    def forget() -> None:
        held.clear()
        gc.collect()
        seen.append(len(where))

    with graph_of(scene, forget).instantiate() as running:
        driver.synchronize()
        gc.collect()
        where.clear()
        running.launch(scene.stream)
        driver.synchronize()
        assert (seen, where) == ([0], [])
        Buffer.allocate(4, driver=driver).close()  # whoever gives something back next
    assert {name for name, _, _ in where} == set(GIVES_BACK)
    assert {(inside, thread) for _, inside, thread in where} == {(False, threading.get_ident())}


def test_an_executable_closed_in_its_own_callback_keeps_its_owners_until_it_has_run(
    scene: Scene,
) -> None:
    alive: list[bool] = []
    made: list[Any] = []

    def close() -> None:
        made[0].close()

    def captured() -> weakref.ref[Buffer]:
        owned = Buffer.allocate(4, driver=scene.driver)
        owned.write(0.0)
        owner = weakref.ref(owned)
        with scene.capture() as capture:
            capture.keep(owned, "owned")
            scene.driver.launch_host(close, scene.stream.handle)
            scene.driver.launch_host(lambda: alive.append(owner() is not None), scene.stream.handle)
            scene.driver.launch(
                scene.function, ONE_BLOCK, add_one.pack(owned, 4), scene.stream.handle
            )
        made.append(capture.graph.instantiate())
        capture.graph.close()
        return owner

    owner = captured()
    made[0].launch(scene.stream)
    scene.driver.synchronize()
    assert alive == [True]
    assert made[0].is_closed
    gc.collect()
    active.run_waiting()
    assert owner() is None


@pytest.mark.parametrize(
    "call",
    [
        lambda scene: scene.driver.synchronize(),
        lambda scene: scene.driver.stream(),
        lambda scene: Buffer.allocate(4, driver=scene.driver),
        lambda scene: scene.capture().__enter__(),
        lambda scene: scene.launch(scene.stream),
    ],
    ids=["wait", "make a stream", "allocate", "capture", "launch"],
)
def test_the_emulated_driver_refuses_what_a_callback_must_not_do(call: Any) -> None:
    scene = Scene(EmulatedDriver())
    raised: list[Any] = []

    def do() -> None:
        with pytest.raises(CudaError, match="a host callback must not call CUDA") as error:
            call(scene)
        raised.append(error.value.code)

    run(scene, do)
    scene.driver.launch_host(do, scene.stream.handle)  # outside of a graph, too
    assert raised == ["CUDA_ERROR_NOT_PERMITTED"] * 2
    assert active.current() is None
    assert scene.is_usable()


def test_a_launch_of_the_running_executable_in_its_callback_is_refused() -> None:
    scene = Scene(EmulatedDriver())
    executable = graph_of(scene, lambda: executable.launch(scene.stream)).instantiate()
    with pytest.raises(CudaError, match="CUDA_ERROR_NOT_PERMITTED"):
        executable.launch(scene.stream)
    executable.close()


def test_a_fence_in_a_callback_tells_nothing_and_is_not_waited_for(scene: Scene) -> None:
    with scene.capture() as capture:
        scene.launch(scene.stream)
    with capture.graph.instantiate() as executable:
        executable.launch(scene.stream)
        scene.driver.synchronize()
        found: list[Any] = []

        def ask() -> None:
            fence = executable.fence()
            assert fence is not None
            found.extend([fence, fence.has_passed()])
            try:
                fence.wait()
            except LifecycleError as error:
                found.append(str(error))

        run(scene, ask)
        fence, has_passed, said = found
        assert not has_passed
        assert said.startswith("a host callback runs on this thread")
        assert fence.has_passed()
        fence.wait()


def test_callbacks_of_cuda_run_as_such_and_the_thread_is_free_behind_them() -> None:
    table, seen = HostCallbacks(), []
    for callback in (lambda: seen.append(active.in_callback()), lambda: 1 / 0):
        number = table.register(callback)  # type: ignore[arg-type]
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(table.function)(number)
        assert not active.in_callback()
    assert seen == [True]
