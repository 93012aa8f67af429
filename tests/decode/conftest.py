"""A runner of a small model, a prompt for it, and the tokens that eager decoding gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.decode_models import device_of, eager_tokens, make_model, make_prompt
from helpers.decode_runners import NEW, PROMPT

from graphcore.decode import CUDAGraphAR
from graphcore.driver import Driver


@pytest.fixture
def runner(graphcore_driver: Driver) -> Iterator[CUDAGraphAR]:
    model = make_model(device=device_of(graphcore_driver))
    with CUDAGraphAR(model, max_seq_len=16, driver=graphcore_driver) as made:
        yield made


@pytest.fixture
def prompt(runner: CUDAGraphAR) -> torch.Tensor:
    return make_prompt(PROMPT, device=str(runner.cache.device))


@pytest.fixture
def expected(runner: CUDAGraphAR, prompt: torch.Tensor) -> torch.Tensor:
    return eager_tokens(runner.model, prompt, NEW)
