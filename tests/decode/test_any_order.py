"""A runner whose calls come in any order, beside one that decodes eagerly.

Both are told the same. What one answers the other answers, and behind every call the logits are
those of the model without any cache, given the tokens that are held.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from helpers.decode_models import device_of, make_model
from helpers.encoder_decoder_models import eager_logits, encoder_inputs, make_encoder_decoder
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from graphcore.decode import CUDAGraphAR, EncoderDecoderKVCache, StaticKVCache
from graphcore.driver import Driver
from graphcore.errors import GraphcoreError, LifecycleError

CAPACITY = 12
ENCODER = 6
ROWS = 2
CACHES = 3

tokens = st.integers(1, CAPACITY)
seeds = st.integers(0, 5)
caches = st.integers(0, CACHES - 1)


class AnyOrder(RuleBasedStateMachine):
    """Two runners over caches of their own; the last cache of each has another capacity."""

    family: ClassVar[str]
    driver: ClassVar[Driver]

    def __init__(self) -> None:
        super().__init__()
        self.device = device_of(self.driver)
        make = make_encoder_decoder if self.has_encoder else make_model
        self.model = make(self.family, device=self.device)
        self.caches = [[self._cache(at) for at in range(CACHES)] for _ in range(2)]
        self.inputs: dict[int, dict[str, Any]] = {}
        self.texts: dict[int, torch.Tensor] = {}
        self.at = 0
        self.ends: tuple[int, ...] = ()

    @property
    def has_encoder(self) -> bool:
        return self.family in ("t5", "bart")

    def _cache(self, at: int) -> Any:
        capacity = CAPACITY - 2 * (at == CACHES - 1)
        if self.has_encoder:
            return EncoderDecoderKVCache.for_model(self.model, capacity, ENCODER, batch_size=ROWS)
        return StaticKVCache.for_model(self.model, capacity, batch_size=ROWS)

    @initialize(chunk=st.sampled_from([None, 1, 3]), captured=st.booleans())
    def make(self, chunk: int | None, captured: bool) -> None:
        self.options = {"driver": self.driver, "prefill_chunk_size": chunk}
        self.captured = {"capture_prefill": captured and chunk is not None}
        if self.has_encoder:
            self.captured["capture_first_step"] = captured
        self.runners = [self._runner(which) for which in range(2)]
        self.streams: list[Any] = []

    def _runner(self, which: int) -> CUDAGraphAR:
        how = {"capture": False} if which else self.captured
        return CUDAGraphAR(self.model, self.caches[which][self.at], **self.options, **how)

    def leave(self) -> None:
        """Notes the tokens that the cache holds: a runner knows those that it has written."""
        runner = self.runners[0]
        self.texts[self.at] = runner._step.history[:, : runner.cache.seen_tokens].clone()

    def arrive(self) -> None:
        for runner in self.runners:
            text = self.texts.get(self.at, runner._step.history[:, :0])
            runner._step.history[:, : text.shape[1]] = text

    def both(self, call: Callable[[CUDAGraphAR, int], Any]) -> list[Any]:
        """What the call gives, or the kind of its error; the same of both."""
        answers: list[Any] = []
        for which, runner in enumerate(self.runners):
            try:
                answers.append(call(runner, which))
            except (GraphcoreError, StopIteration) as error:
                answers.append(type(error))
        first, second = answers
        if isinstance(first, torch.Tensor):
            assert torch.equal(first, second)
            self.ends = tuple(first.flatten()[-2:].tolist())
        else:
            assert first == second
        return answers

    def prompt(self, count: int, seed: int, *, anew: bool) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 90, (ROWS, count), generator=generator).to(self.device)
        if not self.has_encoder:
            return {"input_ids": ids}
        made: dict[str, Any] = {"input_ids": None, "decoder_input_ids": ids}
        if anew:
            made |= encoder_inputs(
                self.family, 1 + seed, batch=ROWS, padded=seed // 2, seed=seed, device=self.device
            )
        return made

    def _prompted(self, answers: list[Any], given: dict[str, Any]) -> None:
        if not isinstance(answers[0], type) and given["input_ids"] is not None:
            self.inputs[self.at] = {
                name: value for name, value in given.items() if not name.startswith("decoder")
            }

    # ---- calls ----------------------------------------------------------------------------------

    @rule(count=tokens, seed=seeds, anew=st.booleans())
    def capture(self, count: int, seed: int, anew: bool) -> None:
        given = self.prompt(count, seed, anew=anew)
        self._prompted(self.both(lambda runner, _: runner.capture(**given)), given)

    @rule(
        how=st.sampled_from(["generate", "generate_in_one_launch"]),
        count=tokens,
        new=tokens,
        seed=seeds,
        keep=st.booleans(),
        ends=st.booleans(),
    )
    def generate(self, how: str, count: int, new: int, seed: int, keep: bool, ends: bool) -> None:
        given = self.prompt(count, seed, anew=not keep)
        options: dict[str, Any] = {"keep_cache": keep, "eos_token_id": self.ends * ends}
        if how == "generate":
            options["poll_every"] = 1 + seed // 2
        call = lambda runner, _: getattr(runner, how)(**given, max_new_tokens=new, **options)  # noqa: E731
        self._prompted(self.both(call), given)

    @rule(how=st.sampled_from(["stream", "stream_in_one_launch"]), new=tokens, seed=seeds)
    def stream(self, how: str, new: int, seed: int) -> None:
        given = self.prompt(1 + seed, seed, anew=True)
        streams: list[Any] = []
        call = lambda runner, _: streams.append(  # noqa: E731
            getattr(runner, how)(**given, max_new_tokens=new)
        )
        answers = self.both(call)
        self._prompted(answers, given)
        if how == "stream":
            self.streams = streams or self.streams
        elif streams:  # how far a launch has come when it is stopped is for the device to say
            read = [torch.stack(list(each)) for each in streams]
            assert torch.equal(*read)

    @precondition(lambda self: self.streams)
    @rule()
    def read(self) -> None:
        self.both(lambda _, which: next(self.streams[which]))

    @rule()
    def replay(self) -> None:
        self.both(lambda runner, _: runner.replay().clone())

    @rule(token=st.sampled_from([-1, 0, 5, 96, 97]))
    def force(self, token: int) -> None:
        if self.runners[0]._limit < 0 and self.runners[0]._captured is None:
            return  # an eager step needs no graph to go on from here
        self.both(lambda runner, _: runner.replay(token).clone())

    @rule(at=caches)
    def use(self, at: int) -> None:
        self.leave()
        self.both(lambda runner, which: runner.use(self.caches[which][at]) and None)
        self.at = at
        self.arrive()

    @rule()
    def reset(self) -> None:
        self.both(lambda runner, _: runner.cache.reset())

    @rule(to=tokens)
    def rewind(self, to: int) -> None:
        self.both(lambda runner, _: runner.cache.rewind(min(to, runner.cache.seen_tokens)))

    @rule()
    def close_and_make_anew(self) -> None:
        self.leave()
        for which, runner in enumerate(self.runners):
            runner.close()
            with pytest.raises(LifecycleError):
                runner.replay()
            self.runners[which] = self._runner(which)
        self.arrive()

    # ---- what holds behind each of them ---------------------------------------------------------

    @invariant()
    def mirror_and_position_agree(self) -> None:
        held = [each.cache.seen_tokens for each in self.runners]
        assert held == [int(each.position) for each in self.runners]
        assert held[0] == held[1]

    @invariant()
    def logits_are_those_of_the_model_without_a_cache(self) -> None:
        for runner in self.runners:
            if runner._limit < 0:
                continue  # refuses to go on
            ids = runner._step.history[:, : runner.cache.seen_tokens]
            if self.has_encoder:
                right = eager_logits(self.model, self.inputs[self.at], ids)
            else:
                with torch.no_grad():
                    right = self.model(ids, use_cache=False).logits
            torch.testing.assert_close(runner.logits, right[:, -1], atol=2e-4, rtol=2e-4)

    def teardown(self) -> None:
        for runner in getattr(self, "runners", ()):
            runner.close()


@pytest.mark.parametrize("family", ["llama", "gemma3", "t5", "bart"])
def test_calls_in_any_order_decode_what_eager_decoding_does(
    graphcore_driver: Driver, family: str
) -> None:
    machine = type(family, (AnyOrder,), {"family": family, "driver": graphcore_driver})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=12 if graphcore_driver.is_emulated else 4,
            stateful_step_count=14,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
