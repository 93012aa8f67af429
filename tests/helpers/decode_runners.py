"""What a runner of a small model must still do, whatever happened to it before."""

from __future__ import annotations

import torch

from graphcore.decode import CUDAGraphAR

PROMPT = 5
NEW = 7


def assert_works(runner: CUDAGraphAR, prompt: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(runner.generate(prompt, NEW), expected)
    assert runner.cache.seen_tokens == int(runner.position) == PROMPT + NEW
