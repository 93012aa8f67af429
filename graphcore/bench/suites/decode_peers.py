"""How others decode, for suite decode: transformers' own generate, and graphs captured by hand.

A peer is a function of the subject that returns an arm, warmed up: compiled, captured and run once.
What it raises becomes a note. Static caches are made once and kept, which spares transformers the
new capture that each ``generate`` with a cache of its own would cost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import EncoderDecoderCache, StaticCache

from graphcore.bench.harness import Arm
from graphcore.bench.suites.decode_arms import generating, looping, warmed
from graphcore.bench.suites.decode_models import Subject
from graphcore.decode import transformers_compat as compat
from graphcore.driver import Driver

HF_EAGER, HF_COMPILED = "transformers eager", "transformers static + compile"
BY_HAND, BY_HAND_COMPILED = "torch graph", "torch graph + inductor"

COMPILED = frozenset({HF_COMPILED, BY_HAND_COMPILED})
"""Peers whose kernels inductor makes."""

_EAGER_SHARE = 8  # ten times slower than the others: fewer tokens
_WARM_UPS = 3

Peer = Callable[[Subject, Driver, int], Arm]
"""(subject, driver, id that ends a row) -> the arm."""


def hf_generate(subject: Subject, end: int, tokens: int, **options: Any) -> torch.Tensor:
    """Greedy ``generate`` of transformers, with a stop test that never hits, as any use has one."""
    ids: torch.Tensor = subject.model.generate(
        subject.prompt,
        attention_mask=torch.ones_like(subject.prompt),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=0,
        **options,
    )
    return ids


def hf_eager(subject: Subject, driver: Driver, end: int) -> Arm:
    """Decodes as transformers does, with its own DynamicCache."""
    generate = functools.partial(hf_generate, subject, end)
    return warmed(generating(HF_EAGER, generate, driver, share=_EAGER_SHARE))


def hf_compiled(subject: Subject, driver: Driver, end: int) -> Arm:
    """As transformers does with a static cache: forward compiled, mode "reduce-overhead"."""
    cache = static_cache(subject)
    option: dict[str, Any] = {str(compat.cache_keyword(subject.model)): cache}

    def generate(tokens: int) -> torch.Tensor:
        cache.reset()
        return hf_generate(subject, end, tokens, **option)

    return warmed(generating(HF_COMPILED, generate, driver))


def by_hand(subject: Subject, driver: Driver, end: int) -> Arm:
    """A ``torch.cuda.CUDAGraph`` of one step, replayed in a loop without any stop test."""
    del end
    step = HandStep(subject)
    step.capture(step.decode)
    return warmed(looping(BY_HAND, step.begin, step.replay, driver))


def by_hand_compiled(subject: Subject, driver: Driver, end: int) -> Arm:
    """The same with the step compiled by inductor, whose own graphs are off."""
    del end
    step = HandStep(subject)
    step.capture(torch.compile(step.decode, options={"triton.cudagraphs": False}, dynamic=False))
    return warmed(looping(BY_HAND_COMPILED, step.begin, step.replay, driver))


def static_cache(subject: Subject) -> Any:
    """A static cache of transformers, of the subject's capacity."""
    config = compat.text_config(subject.model)
    cache = StaticCache(config=config, max_cache_len=subject.capacity)
    if subject.is_encoder_decoder:
        crossing = StaticCache(config=config, max_cache_len=subject.prompt.shape[1])
        return EncoderDecoderCache(cache, crossing)
    return cache


class HandStep:
    """A decode step as it is written by hand: transformers' model and static cache, one token."""

    def __init__(self, subject: Subject) -> None:
        model, prompt = subject.model, subject.prompt
        self._cache = static_cache(subject)
        self.graph: Any = None
        keyword = str(compat.cache_keyword(model))
        first = prompt
        with torch.no_grad():
            if subject.is_encoder_decoder:
                self._fixed = {"encoder_outputs": model.get_encoder()(prompt), keyword: self._cache}
                self._ids = "decoder_input_ids"
                first = prompt.new_full((1, 1), model.config.decoder_start_token_id)
            else:
                self._fixed, self._ids = {keyword: self._cache}, "input_ids"
            self._model = model
            self.token = self._next(first)
        self._at_start = [(tensor, tensor.clone()) for tensor in (self.token, *self._lengths())]

    def decode(self) -> None:
        """One token: forwards the last one, leaves the next in its place."""
        self.token.copy_(self._next(self.token))

    def capture(
        self,
        decode: Callable[[], None],
        pool: Any = None,
        side: Any = None,
        warm_ups: int = _WARM_UPS,
    ) -> None:
        """Captures ``decode``, as torch's documentation says it; into a pool of torch's.

        The warm-up runs on a new stream, or on ``side``, where many would keep memory each.
        """
        self.graph = torch.cuda.CUDAGraph()
        side = side or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(side):
            for _ in range(warm_ups):
                decode()
        torch.cuda.current_stream().wait_stream(side)
        self.begin()
        with torch.no_grad(), torch.cuda.graph(self.graph, pool=pool):
            decode()

    def begin(self) -> None:
        """Back to the end of the prompt: what lies behind is overwritten before it is seen."""
        for tensor, start in self._at_start:
            tensor.copy_(start)

    def replay(self) -> None:
        """One token by replay."""
        self.graph.replay()

    def _next(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self._model(**{self._ids: ids}, **self._fixed).logits
        found: torch.Tensor = logits[:, -1:].argmax(dim=-1)
        return found

    def _lengths(self) -> list[torch.Tensor]:
        own = getattr(self._cache, "self_attention_cache", self._cache)
        return [layer.cumulative_length for layer in own.layers]


def eager_tokens(subject: Subject) -> tuple[torch.Tensor, int]:
    """Prompt and new ids of transformers' eager decoding, and an id that is none of them."""
    vocabulary = subject.model.get_input_embeddings().weight.shape[0]
    ids = hf_generate(subject, vocabulary - 1, subject.tokens)
    while True:
        taken = set(ids.flatten().tolist())
        end = next(token for token in range(vocabulary - 1, 0, -1) if token not in taken)
        longer = hf_generate(subject, end, subject.tokens)
        if end not in set(longer.flatten().tolist()):
            return longer, end
        ids = torch.cat([ids, longer], dim=1)


PEERS: Mapping[str, Peer] = {
    HF_EAGER: hf_eager,
    HF_COMPILED: hf_compiled,
    BY_HAND: by_hand,
    BY_HAND_COMPILED: by_hand_compiled,
}
EMULATED_PEERS: Mapping[str, Peer] = {HF_EAGER: hf_eager}
