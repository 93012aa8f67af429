"""generate(): one call that decodes, by replay where it can, and says how it did."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from graphcore.decode import checks, prompt
from graphcore.decode import transformers_compat as compat
from graphcore.decode import transformers_encoder_decoder as families
from graphcore.decode.compiled_step import Compile
from graphcore.decode.encoder_decoder_cache import EncoderDecoderKVCache
from graphcore.decode.ending import EosIds
from graphcore.decode.guidance import Guidance
from graphcore.decode.guided_encoder import sizes_of_branches
from graphcore.decode.runner import CUDAGraphAR
from graphcore.decode.sampling import Sampling
from graphcore.decode.static_cache import StaticKVCache
from graphcore.decode.whole_generation import Decoded, decode_whole
from graphcore.driver import Driver
from graphcore.errors import CaptureError

_log = logging.getLogger("graphcore")


@dataclass(frozen=True, slots=True)
class Generation:
    """What :func:`generate` decoded, and how.

    Attributes:
        ids: int64 ``[batch, prompt + new]``; of an encoder-decoder: the decoder's.
        prompt_length: Tokens of the prompt; of an encoder-decoder: those the decoder began with.
        execution: "graph" (a replay for each token), "one launch" or "eager".
        reason: Why.
        captures: Graphs that were captured.
        seed: Of the random numbers, given or drawn; None for greedy.
    """

    ids: torch.Tensor
    prompt_length: int
    execution: str
    reason: str
    captures: int
    seed: int | None = None

    @property
    def new_ids(self) -> torch.Tensor:
        """int64 ``[batch, new]``."""
        return self.ids[:, self.prompt_length :]


def generate(  # noqa: PLR0913  (each is a choice of its own)
    model: Any,
    input_ids: torch.Tensor | None,
    max_new_tokens: int,
    *,
    cache: StaticKVCache | EncoderDecoderKVCache | None = None,
    max_seq_len: int | None = None,
    eos_token_id: EosIds = None,
    pad_token_id: int | None = None,
    sampling: Sampling | None = None,
    attention_mask: torch.Tensor | None = None,
    num_beams: int = 1,
    driver: Driver | None = None,
    capture: bool = True,
    compile: Compile = False,  # noqa: A002  (as published)
    seed: int | None = None,
    prefill_chunk_size: int | None = None,
    guidance: Guidance | None = None,
    vocabulary: int | None = None,
    one_launch: bool = False,
    **inputs: Any,
) -> Generation:
    """Decodes ``max_new_tokens`` through a captured step.

    Where the step cannot be captured, decodes eagerly with the same cache and says why, in the
    result and at INFO. A model or an argument that cannot work raises.

    Args:
        model: As for :class:`CUDAGraphAR`.
        input_ids: int64 ``[batch, tokens]`` on the model's device. Of an encoder-decoder: as for
            :meth:`CUDAGraphAR.capture`.
        max_new_tokens: At least 1.
        cache: Emptied first; None makes one that holds prompt and new tokens.
        max_seq_len: Capacity of the cache that is made.
        eos_token_id: As for :meth:`CUDAGraphAR.generate`.
        pad_token_id: As for :meth:`CUDAGraphAR.generate`.
        sampling: None is greedy.
        attention_mask: As for :meth:`CUDAGraphAR.capture`.
        num_beams: Only 1.
        driver: None: the one for the model's device.
        capture: False decodes eagerly.
        compile: As for :class:`CUDAGraphAR`; a step that cannot be compiled is decoded eagerly.
        seed: As for :meth:`CUDAGraphAR.generate`.
        prefill_chunk_size: As for :class:`CUDAGraphAR`.
        guidance: As for :class:`CUDAGraphAR`.
        vocabulary: As for :class:`CUDAGraphAR`, with a step function and its cache.
        one_launch: All tokens in one launch, as :meth:`CUDAGraphAR.generate_in_one_launch`; a step
            that no WHILE node takes is replayed for each token, and the result says why.
        inputs: As for :meth:`CUDAGraphAR.capture`.

    Raises:
        ConfigurationError, CapacityError, CacheTypeError: As :class:`CUDAGraphAR`.
    """
    checks.check_beams(num_beams)
    rows = encoder_len = None
    if families.is_encoder_decoder(model):
        sizes = sizes_of_branches(model, input_ids, inputs)
        tokens = sizes.begin
        if cache is None:
            rows, encoder_len = sizes.rows, sizes.encoder
            if max_seq_len is None:
                max_seq_len = _capacity(model, tokens + prompt.check_count(max_new_tokens))
    elif cache is None:
        rows, tokens = prompt.check_ids(input_ids).shape
        if "negative_input_ids" in inputs:
            negative = prompt.check_ids(inputs["negative_input_ids"], "negative_input_ids")
            tokens = max(tokens, negative.shape[1])
        if max_seq_len is None:
            max_seq_len = _capacity(model, tokens + prompt.check_count(max_new_tokens))

    def decode(capture: bool) -> tuple[Decoded, CUDAGraphAR]:
        runner = CUDAGraphAR(
            model,
            cache,
            max_seq_len=max_seq_len,
            batch_size=rows,
            encoder_len=encoder_len,
            sampling=sampling,
            driver=driver,
            capture=capture,
            compile=compile if capture else False,
            prefill_chunk_size=prefill_chunk_size,
            guidance=guidance,
            vocabulary=vocabulary,
        )
        with runner:
            decoded = decode_whole(
                runner,
                input_ids,
                max_new_tokens,
                eos_token_id,
                pad_token_id,
                one_launch=one_launch,
                attention_mask=attention_mask,
                seed=seed,
                **inputs,
            )
        return decoded, runner

    try:
        decoded, runner = decode(capture)
        reason = decoded.reason
    except CaptureError as error:
        reason = f"the step could not be captured: {error}"
        _log.info("decoding eagerly: %s", reason)
        decoded, runner = decode(capture=False)
    if not families.is_encoder_decoder(model):
        assert input_ids is not None  # the prompt was checked
        tokens = input_ids.shape[1]
    return Generation(decoded.ids, tokens, decoded.execution, reason, runner.captures, runner.seed)


def _capacity(model: Any, wanted: int) -> int:
    """Slots for ``wanted`` tokens, at most those that the model has positions for."""
    checks.check_model(model)
    if families.is_encoder_decoder(model):
        limit = families.position_limit("max_seq_len", model)
    else:
        limit = getattr(compat.text_config(model), "max_position_embeddings", None)
    return wanted if limit is None else min(wanted, int(limit))
