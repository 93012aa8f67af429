"""A cache that others use too: written past a runner, copied, replayed in another capture."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.decode_models import device_of, eager_tokens, make_model, make_prompt

import graphcore
from graphcore.decode import CUDAGraphAR, StaticKVCache
from graphcore.decode.transformers_compat import cache_keyword
from graphcore.driver import Driver
from graphcore.errors import CacheTypeError, CaptureError, LifecycleError

NEW = 7


@pytest.fixture(params=[True, False], ids=["graph", "eager"])
def runner(graphcore_driver: Driver, request: pytest.FixtureRequest) -> Iterator[CUDAGraphAR]:
    model = make_model(device=device_of(graphcore_driver))
    with CUDAGraphAR(model, max_seq_len=16, driver=graphcore_driver, capture=request.param) as made:
        yield made


@pytest.fixture
def prompt(runner: CUDAGraphAR) -> torch.Tensor:
    return make_prompt(5, device=str(runner.cache.device))


def test_tokens_written_past_the_runner_make_its_logits_unusable_but_not_the_cache(
    runner: CUDAGraphAR, prompt: torch.Tensor
) -> None:
    expected = eager_tokens(runner.model, prompt, NEW)
    runner.capture(prompt[:, :3])
    with torch.no_grad():
        positions = torch.tensor([[3, 4]], device=prompt.device)
        cache = {str(cache_keyword(runner.model)): runner.cache}
        own = runner.model(prompt[:, 3:], position_ids=positions, **cache)
    with pytest.raises(LifecycleError, match="written to the cache by somebody else"):
        runner.replay()
    assert int(runner.replay(own.logits[:, -1].argmax(dim=-1))) == int(expected[0, 5])
    assert [int(runner.replay()) for _ in range(NEW - 1)] == expected[0, 6:].tolist()


@pytest.mark.parametrize("token", [None, 3])
def test_a_replay_inside_a_capture_is_refused_and_counts_no_token(
    runner: CUDAGraphAR, prompt: torch.Tensor, token: int | None
) -> None:
    expected = eager_tokens(runner.model, prompt, NEW)
    runner.capture(prompt)
    refused = pytest.raises(CaptureError, match=r"replay\(\): not while a graph is captured")
    with graphcore.capture(driver=runner.driver) as capture, refused:
        runner.replay(token)
    assert not capture.graph.snapshot().nodes
    assert runner.cache.seen_tokens == int(runner.position) == 5
    assert [int(runner.replay()) for _ in range(NEW)] == expected[0, 5:].tolist()


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copied_cache_has_the_contents_and_a_life_of_its_own(
    runner: CUDAGraphAR, prompt: torch.Tensor, how: str
) -> None:
    expected = eager_tokens(runner.model, prompt, NEW)
    runner.capture(prompt[:, :4])
    twin: StaticKVCache = COPIES[how](runner.cache)
    assert (twin.seen_tokens, int(twin.position), twin.is_captured) == (4, 4, False)
    assert twin.layers[1].keys.data_ptr() != runner.cache.layers[1].keys.data_ptr()
    assert torch.equal(twin.layers[1].keys, runner.cache.layers[1].keys)
    with CUDAGraphAR(runner.model, twin, driver=runner.driver) as other:
        other.capture(prompt[:, 4:])
        assert [int(other.replay()) for _ in range(NEW)] == expected[0, 5:].tolist()
    assert runner.cache.seen_tokens == int(runner.position) == 4


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_runner_is_not_copied(runner: CUDAGraphAR, duplicate: Callable[[Any], Any]) -> None:
    with pytest.raises(CacheTypeError, match="cannot be copied or pickled"):
        duplicate(runner)
