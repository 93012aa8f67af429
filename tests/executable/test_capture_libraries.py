"""One capture over several libraries at once: each finds the capture's stream by itself."""

from __future__ import annotations

import pytest
import torch
from graphcore_kernels import strided_copy
from helpers.tensors import cuda_driver, replay

import graphcore

pytestmark = pytest.mark.gpu


def test_torch_cupy_triton_and_our_kernels_share_a_capture() -> None:
    cupy = pytest.importorskip("cupy")
    pytest.importorskip("triton")
    from helpers.triton_kernels import scaled_sum

    driver = cuda_driver()
    device = f"cuda:{driver.device}"
    x = torch.arange(6.0, device=device).reshape(2, 3)
    twice, total = torch.zeros_like(x), torch.zeros_like(x)
    turned = torch.zeros(3, 2, device=device)
    square = cupy.from_dlpack(twice)  # the same memory

    def step() -> None:
        torch.mul(x, 2, out=twice)
        cupy.multiply(square, square, out=square)
        scaled_sum(twice, x, total, 0.5)
        strided_copy(turned.T, total)

    capture = graphcore.capture(driver=driver, expect=4)
    capture.warm_up(step, 3)
    with capture:
        step()
    executable = capture.graph.instantiate()
    for offset in (0.0, 10.0):  # the second time on contents that no capture saw
        x.copy_(torch.arange(6.0, device=device).reshape(2, 3) + offset)
        for tensor in (twice, total, turned):
            tensor.fill_(float("nan"))
        replay(executable, capture.stream)
        torch.testing.assert_close(turned.T, ((2 * x) ** 2 + x) * 0.5)
