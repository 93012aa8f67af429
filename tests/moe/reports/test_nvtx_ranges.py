"""Ranges for profilers: each block has one, by name, and what else watches is told too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from helpers.moe_decode import Decoding, expected
from helpers.tensors import cuda_driver

from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import ConfigurationError
from graphcore.moe import NvtxRanges, StepTrace


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch's NVTX was told."""
    told: list[str] = []
    nvtx = torch.cuda.nvtx
    monkeypatch.setattr(nvtx, "mark", lambda text: None)
    monkeypatch.setattr(nvtx, "range_push", lambda text: told.append(f"+{text}"))
    monkeypatch.setattr(nvtx, "range_pop", lambda: told.append("-"))
    return told


def test_each_block_of_a_step_has_a_range(ranges: list[str]) -> None:
    driver = EmulatedDriver()
    wanted = expected(driver)
    assert ranges == []
    decoding = Decoding(driver, 0, 0, make_watch=lambda _: NvtxRanges())
    assert decoding.run() == wanted
    assert ranges[:6] == ["+prepare 1", "-", "+step 1", "-", "+wait 1", "-"]
    assert len(ranges) == 6 * decoding.decode.totals.steps


def test_a_trace_behind_the_ranges_sees_the_same(ranges: list[str]) -> None:
    driver = EmulatedDriver()
    trace = StepTrace(driver)
    decoding = Decoding(driver, 0, 1, make_watch=lambda _: NvtxRanges(trace))
    decoding.run()
    seen = [f"+{span.name} {span.step}" for span in trace.spans]
    assert sorted(seen) == sorted(each for each in ranges if each != "-")


def test_a_block_that_raises_ends_its_range(ranges: list[str]) -> None:
    class Broken:
        @contextmanager
        def host(self, name: str, step: int) -> Iterator[None]:
            yield

    with pytest.raises(ValueError, match="in the block"), NvtxRanges(Broken()).host("wait", 3):
        raise ValueError("in the block")
    assert ranges == ["+wait 3", "-"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch was built with CUDA")
def test_a_torch_without_cuda_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="NVTX: expected a torch that was built with CUDA"):
        NvtxRanges()


@pytest.mark.gpu
def test_ranges_of_a_device_change_no_token() -> None:
    driver = cuda_driver()
    decoding = Decoding(driver, 1, 1, make_watch=lambda _: NvtxRanges())
    assert decoding.run() == expected(driver)
