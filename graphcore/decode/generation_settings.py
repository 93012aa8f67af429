"""What of a model's generation config decides the next token, followed by ours or not."""

from __future__ import annotations

import logging
from typing import Any

from graphcore.decode import transformers_compat as compat
from graphcore.decode.sampling import Sampling

_log = logging.getLogger("graphcore")

_neutral: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": (None,),
    "begin_suppress_tokens": (None,),
    "constraints": (None,),
    "dola_layers": (None,),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "exponential_decay_length_penalty": (None,),
    "force_words_ids": (None,),
    "forced_bos_token_id": (None,),
    "forced_decoder_ids": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1),
    "max_time": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None, 0.0),
    "remove_invalid_values": (None, False),
    "sequence_bias": (None,),
    "stop_strings": (None,),
    "suppress_tokens": (None,),
    "top_h": (None,),
    "typical_p": (None, 1.0),
    "watermarking_config": (None,),
}
"""Settings that no runner follows, with the values that change nothing."""


def configured_sampling(model: Any, seed: int | None) -> Sampling:
    """What the model's own ``generate`` would do without arguments; see Sampling."""
    chosen = {
        "temperature": compat.sampling_setting(model, "temperature"),
        "top_k": compat.sampling_setting(model, "top_k"),
        "top_p": compat.sampling_setting(model, "top_p"),
        "min_p": compat.sampling_setting(model, "min_p") or 0.0,
    }
    if not compat.sampling_setting(model, "do_sample"):
        chosen = {}
    penalty = compat.sampling_setting(model, "repetition_penalty")
    return Sampling(**chosen, repetition_penalty=penalty, seed=seed)


def tell_unfollowed(model: Any, sampling: Sampling | None) -> None:
    """Says at INFO which settings of the generation config are not followed.

    Args:
        model: Whose ``generation_config`` counts; one without follows nothing.
        sampling: What the caller gave; it stands in place of what the config says of sampling.
    """
    if sampling is None:
        for name, neutral in (("do_sample", (None, False)), ("repetition_penalty", (None, 1.0))):
            setting = compat.generation_setting(model, name)
            if setting not in neutral:
                _log.info(
                    "generation_config.%s=%s is not followed: decoding is greedy; "
                    "sampling=Sampling.from_generation_config(model) follows it",
                    name,
                    setting,
                )
    for name, neutral in _neutral.items():
        setting = compat.generation_setting(model, name)
        if setting not in neutral:
            _log.info("generation_config.%s=%s is not followed", name, setting)
