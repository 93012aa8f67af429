"""All captures of a runner share one stream, and with it one workspace; so do those of buckets."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from helpers.decode_models import device_of, eager_tokens, make_model, make_prompt

import graphcore
from graphcore import CaptureError
from graphcore.decode import CUDAGraphAR, DecodeBuckets
from graphcore.driver import Driver, Stream
from graphcore.driver.lent_streams import lane_of
from graphcore.interop.torch import MemoryPool

ROOM = 24


def streams_of(*runners: CUDAGraphAR) -> set[int]:
    """Of all graphs that the runners hold, chunks of prompts too."""
    held = [step for runner in runners for step in runner._variants._steps.values()]
    for runner in runners:
        for kind in runner._prompt_graphs._kinds:
            held += kind._variants._steps.values()
    owners = [owner.object for step in held for owner in step.graph.owners]
    return {owner.handle for owner in owners if isinstance(owner, Stream)}


@pytest.fixture
def model(graphcore_driver: Driver) -> Any:
    return make_model(device=device_of(graphcore_driver))


def prompt_of(driver: Driver, tokens: int, rows: int = 1) -> torch.Tensor:
    return make_prompt(tokens, batch=rows, device=device_of(driver))


class Kept:
    """What a library keeps for a stream."""

    def is_needed(self) -> bool:
        return True

    def is_burden(self) -> bool:
        return False


def test_runners_one_after_another_capture_where_something_is_kept_and_other_captures_do_not(
    graphcore_driver: Driver, model: Any
) -> None:
    prompt = prompt_of(graphcore_driver, 3)
    idle = [graphcore_driver.capture_stream(blocking=True) for _ in range(3)]
    furnished = idle[0].handle
    lane = lane_of(idle[0])
    assert lane is not None
    lane.belongings.append(Kept())
    del idle
    x = torch.ones(4, device=device_of(graphcore_driver))
    for _ in range(3):
        graph = graphcore.capture_function(lambda: x + 1, driver=graphcore_driver)
        assert furnished not in {
            owner.object.handle for owner in graph.owners if isinstance(owner.object, Stream)
        }
        with CUDAGraphAR(model, max_seq_len=ROOM, driver=graphcore_driver) as runner:
            runner.generate(prompt, 3)
            assert streams_of(runner) == {furnished}
            graphcore_driver.synchronize()
        del graph
        gc.collect()


def test_every_variant_and_the_chunks_of_a_runner_are_captured_on_one_stream(
    graphcore_driver: Driver, model: Any
) -> None:
    prompt = prompt_of(graphcore_driver, 9, rows=2)
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    with CUDAGraphAR(
        model, max_seq_len=ROOM, batch_size=2, driver=graphcore_driver,
        prefill_chunk_size=4, capture_prefill=True,
    ) as runner:  # fmt: skip
        assert torch.equal(runner.generate(prompt, 6), eager_tokens(model, prompt, 6))
        runner.cache.reset()
        runner.generate(prompt, 4, attention_mask=mask)
        assert runner.captures >= 3
        assert len(streams_of(runner)) == 1
        assert graphcore_driver.capture_streams.lent == 1
        graphcore_driver.synchronize()  # what a launch may still use outlives a close
    assert graphcore_driver.capture_streams.lent == 0
    assert graphcore_driver.capture_streams.idle == 1


def test_runners_one_after_another_are_captured_on_one_stream_and_at_once_on_two(
    graphcore_driver: Driver, model: Any
) -> None:
    prompt = prompt_of(graphcore_driver, 5)
    expected = eager_tokens(model, prompt, 4)

    def runner() -> CUDAGraphAR:
        return CUDAGraphAR(model, max_seq_len=ROOM, driver=graphcore_driver)

    used = set()
    for _ in range(3):
        with runner() as one:
            assert torch.equal(one.generate(prompt, 4), expected)
            used |= streams_of(one)
    assert len(used) == 1
    with runner() as one, runner() as two:
        for each in (one, two):
            assert torch.equal(each.generate(prompt, 4), expected)
        assert len(streams_of(one, two)) == 2
    assert graphcore_driver.capture_streams.lent == 0


def test_runners_with_one_pool_share_its_stream(graphcore_driver: Driver, model: Any) -> None:
    pool = MemoryPool(graphcore_driver.device)
    prompt = prompt_of(graphcore_driver, 5)
    runners = [
        CUDAGraphAR(model, max_seq_len=ROOM, driver=graphcore_driver, pool=pool) for _ in range(2)
    ]
    for runner in runners:
        runner.generate(prompt, 2)
    assert len(streams_of(*runners)) == 1
    for runner in runners:
        runner.close()


@pytest.mark.parametrize("share_pool", [True, False], ids=["one pool", "a pool each"])
def test_buckets_are_captured_on_one_stream(
    graphcore_driver: Driver, model: Any, share_pool: bool
) -> None:
    with DecodeBuckets(
        model, [8, 16], [1, 2], driver=graphcore_driver, share_pool=share_pool, progress=False
    ) as buckets:
        runners = [buckets.runner(each) for each in buckets.buckets]
        assert all(runner.captures == 1 for runner in runners)
        assert len(streams_of(*runners)) == 1
        prompt = prompt_of(graphcore_driver, 4, rows=2)
        assert torch.equal(buckets.generate(prompt, 4).ids, eager_tokens(model, prompt, 4))
    del runners, buckets
    assert graphcore_driver.capture_streams.lent == 0


def test_a_runner_whose_capture_was_broken_captures_on_the_same_stream_again(
    graphcore_driver: Driver, model: Any
) -> None:
    prompt = prompt_of(graphcore_driver, 5)
    used: list[int] = []

    def break_it(module: Any, *_: Any) -> None:
        for stream in graphcore_driver.own_streams():
            if graphcore_driver.capture_status(stream).state.name != "NONE":
                used.append(stream)
                graphcore_driver.synchronize_stream(stream)

    with CUDAGraphAR(model, max_seq_len=ROOM, driver=graphcore_driver) as runner:
        hook = model.model.norm.register_forward_hook(break_it)
        with pytest.raises(CaptureError):
            runner.generate(prompt, 3)
        hook.remove()
        assert len(used) == 1
        assert torch.equal(runner.generate(prompt, 3), eager_tokens(model, prompt, 3))
        assert streams_of(runner) == {used[0]}


def test_what_a_broken_capture_of_a_runner_held_is_free_as_soon_as_nobody_has_its_error(
    graphcore_driver: Driver, model: Any
) -> None:
    prompt = prompt_of(graphcore_driver, 5)
    held: list[weakref.ref[torch.Tensor]] = []

    def break_it(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        for stream in graphcore_driver.own_streams():
            if graphcore_driver.capture_status(stream).state.name != "NONE":
                held.append(weakref.ref(output))
                graphcore_driver.synchronize_stream(stream)

    def fail(runner: CUDAGraphAR) -> None:
        try:
            runner.generate(prompt, 3)
        except CaptureError:
            return
        pytest.fail("expected a CaptureError")

    hook = model.model.norm.register_forward_hook(break_it)
    gc.disable()  # a cycle would keep it
    try:
        for _ in range(3):
            with CUDAGraphAR(model, max_seq_len=ROOM, driver=graphcore_driver) as runner:
                fail(runner)
                assert [each() for each in held] == [None] * len(held)
        assert len(held) == 3
        assert graphcore_driver.capture_streams.lent == 0
        assert graphcore_driver.capture_streams.idle == 1
    finally:
        gc.enable()
        hook.remove()
