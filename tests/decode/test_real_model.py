"""SmolLM2-135M-Instruct answers with one text, however its tokens are decoded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.decode_models import device_of, eager_tokens

from graphcore.cli.model import find_model, load_model
from graphcore.decode import CUDAGraphAR
from graphcore.driver import Driver
from graphcore.errors import ConfigurationError

QUESTION = "What is the capital of France?"
NEW = 12


@pytest.fixture(scope="module")
def model_file() -> Path:
    try:
        return find_model()
    except ConfigurationError as error:
        pytest.skip(f"no SmolLM2: {error}")


@pytest.mark.slow
def test_smollm2_answers_alike_eager_captured_and_in_one_launch(
    graphcore_driver: Driver, model_file: Path
) -> None:
    language = load_model(model_file, device=device_of(graphcore_driver), dtype="float32")
    ids = language.encode(QUESTION)
    length = ids.shape[1]
    eager = eager_tokens(language.model, ids, NEW)
    with CUDAGraphAR(language.model, max_seq_len=length + NEW, driver=graphcore_driver) as runner:
        captured = runner.generate(ids, NEW)
        in_one_launch = runner.generate_in_one_launch(ids, NEW)
        streamed = [int(token) for token in runner.stream_in_one_launch(ids, NEW)]
        assert runner.captures == 1
    texts = {
        language.decode(new)
        for new in (*(each[0, length:].tolist() for each in (eager, captured, in_one_launch)),
                    streamed)
    }  # fmt: skip
    assert len(texts) == 1
    assert "Paris" in texts.pop()
    assert torch.equal(captured, in_one_launch)
