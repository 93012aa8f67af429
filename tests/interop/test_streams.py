"""Current streams of other libraries: read, set for a block, and put back."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from graphcore_kernels import strided_copy
from helpers.tensors import cuda_driver, filled
from helpers.threads import in_thread

import graphcore
from graphcore import CacheTypeError
from graphcore.driver import LEGACY_STREAM, Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.interop import cupy, current_stream, torch, use_stream
from graphcore.resources.buffer import Buffer


def test_the_current_stream_of_the_emulated_driver_is_the_captures(
    graphcore_driver: Driver,
) -> None:
    other = EmulatedDriver()
    assert current_stream(other) == LEGACY_STREAM
    with graphcore.capture(driver=graphcore_driver) as capture:
        filled(graphcore_driver, 1.0)
        assert current_stream(graphcore_driver) == capture.stream.handle
        assert current_stream(other) == LEGACY_STREAM
    assert current_stream(graphcore_driver) == LEGACY_STREAM


def test_a_stream_in_use_is_the_current_one_without_a_library_too() -> None:
    driver = EmulatedDriver()
    stream = driver.stream()
    x, y = (Buffer.allocate((4,), "float32", driver=driver) for _ in range(2))
    x.write(3.0)
    with use_stream(driver, stream):
        assert current_stream(driver) == stream.handle
        # a kernel that names no stream: on the legacy one it would break this capture
        with in_capture_of_another_thread(driver):
            strided_copy(y, x)
    assert current_stream(driver) == LEGACY_STREAM
    assert y.read().tolist() == [3.0] * 4


@contextmanager
def in_capture_of_another_thread(driver: Driver) -> Iterator[None]:
    begun, over = threading.Event(), threading.Event()

    def capture() -> None:
        with graphcore.capture(driver=driver):
            begun.set()
            assert over.wait(10)

    with in_thread(capture) as result:
        assert begun.wait(10)
        yield
        over.set()
    assert result == [None]


def test_what_is_no_stream_cannot_be_used(graphcore_driver: Driver) -> None:
    with (
        pytest.raises(CacheTypeError, match="stream: expected"),
        use_stream(graphcore_driver, "name"),
    ):
        pass


@pytest.mark.gpu
def test_torch_and_cupy_work_on_the_stream_that_is_used() -> None:
    import cupy as cupy_module
    import torch as torch_module

    driver = cuda_driver()
    stream = driver.stream()
    before = torch_module.cuda.current_stream(driver.device).cuda_stream
    with use_stream(driver, stream):
        assert current_stream(driver) == stream.handle
        assert torch_module.cuda.current_stream(driver.device).cuda_stream == stream.handle
        assert cupy_module.cuda.get_current_stream().ptr == stream.handle
    assert torch_module.cuda.current_stream(driver.device).cuda_stream == before
    assert current_stream(driver) == LEGACY_STREAM


# ---- with doubles of the libraries, which this machine may lack a device for --------------------


class _Device:
    """A driver that claims to be a device; no call of it is made."""

    is_emulated = False
    device = 3
    name = "cuda"


class _Torch:
    """As much of torch.cuda as graphcore asks for."""

    def __init__(self, *, available: bool = True, initialized: bool = True) -> None:
        self.log: list[tuple[str, Any]] = []
        self.current = 0
        self.cuda = SimpleNamespace(
            is_available=lambda: available,
            is_initialized=lambda: initialized,
            device=lambda number: self._block("device", number),
            default_stream=lambda number: ("default", number),
            ExternalStream=lambda handle, device: ("external", handle, device),
            stream=lambda stream: self._block("stream", stream),
            MemPool=lambda: SimpleNamespace(id=(0, 1)),
            memory_snapshot=lambda pool: [{"address": 64, "total_size": 2, "other": 1}],
            use_mem_pool=lambda pool, device: self._block("pool", device),
        )
        self._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: self.current)

    @contextmanager
    def _block(self, name: str, value: Any) -> Iterator[None]:
        self.log.append((name, value))
        yield
        self.log.append((f"end {name}", value))


class _CuPy:
    """As much of cupy.cuda as graphcore asks for."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []
        self.cuda = SimpleNamespace(
            get_current_stream=lambda device: SimpleNamespace(ptr=77),
            Device=lambda number: self._block("device", number),
            Stream=SimpleNamespace(
                from_external=lambda stream: self._block("stream", stream.__cuda_stream__())
            ),
        )

    @contextmanager
    def _block(self, name: str, value: Any) -> Iterator[None]:
        self.log.append((name, value))
        yield
        self.log.append((f"end {name}", value))


def _install(patch: pytest.MonkeyPatch, **modules: Any) -> None:
    for name in ("torch", "cupy"):
        patch.setitem(sys.modules, name, modules.get(name))


def test_both_libraries_are_told_and_told_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch, fake_cupy = _Torch(), _CuPy()
    _install(monkeypatch, torch=fake_torch, cupy=fake_cupy)
    with use_stream(_Device(), 55):  # type: ignore[arg-type]
        assert fake_torch.log == [("device", 3), ("stream", ("external", 55, 3))]
        assert fake_cupy.log == [("device", 3), ("stream", (0, 55))]
    assert [name for name, _ in fake_torch.log[2:]] == ["end stream", "end device"]
    assert [name for name, _ in fake_cupy.log[2:]] == ["end stream", "end device"]


def test_the_legacy_stream_is_torchs_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch = _Torch()
    _install(monkeypatch, torch=fake_torch)
    with use_stream(_Device(), LEGACY_STREAM):  # type: ignore[arg-type]
        assert fake_torch.log[1] == ("stream", ("default", 3))


def test_torch_comes_before_cupy_and_both_before_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = _Device()
    _install(monkeypatch)
    assert current_stream(device) == LEGACY_STREAM
    _install(monkeypatch, cupy=_CuPy())
    assert current_stream(device) == 77
    fake_torch = _Torch()
    fake_torch.current = 99
    _install(monkeypatch, cupy=_CuPy(), torch=fake_torch)
    assert current_stream(device) == 99
    fake_torch.current = 0
    assert current_stream(device) == LEGACY_STREAM
    _install(monkeypatch, cupy=_CuPy(), torch=_Torch(initialized=False))
    assert current_stream(device) == 77


def test_libraries_that_are_not_loaded_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch)
    assert not torch.is_loaded()
    assert not cupy.is_loaded()
    with use_stream(_Device(), 55):  # type: ignore[arg-type]
        assert "torch" not in vars(sys.modules["graphcore.interop.torch"])
    pool = torch.MemoryPool(0)
    assert pool.pool is None
    assert pool.segments() == []
    with pool.use(), torch.memory_pool(0) as other:
        assert other.pool is None


def test_a_memory_pool_is_torchs_and_lists_its_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch = _Torch()
    _install(monkeypatch, torch=fake_torch)
    with torch.memory_pool(2) as pool:
        assert fake_torch.log == [("pool", 2)]
    assert fake_torch.log[-1] == ("end pool", 2)
    assert pool.segments() == [(64, 2)]
    _install(monkeypatch, torch=_Torch(available=False))
    assert torch.MemoryPool(2).pool is None
