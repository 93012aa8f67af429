"""The module that runs a model's decoder layers in turn: which it is, and what its forward heeds.

Masks are given to a model ready-made; whether its forward uses them as they are shows in how it is
written, before anything is launched.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from graphcore.decode import transformers_compat as compat


def takes_masks_by_type(model: Any) -> bool:
    """Whether the decoder's forward takes a mask for each type of layer, as a dict."""
    source = _source_of_stack(model)
    return source is None or ("dict)" in source and "attention_mask" in source)


def hides_what_left_a_window(model: Any) -> bool:
    """Whether the decoder's forward knows of windows (Moshi's configuration names one, alone)."""
    source = _source_of_stack(model)
    return source is None or "create_causal_mask(" not in source or "sliding" in source


def masks_single_tokens(model: Any) -> bool:
    """Whether the decoder's forward heeds the mask of a single token (LED's drops it)."""
    source = _source_of_stack(model)
    return source is None or "input_shape[-1] > 1:" not in source


def masks_causally(model: Any) -> bool:
    """Whether tokens see only those before them where the model makes masks itself.

    In some versions decoders made of BERT's kin (MegatronBert, RemBert) let a prompt see itself.
    """
    stack, _ = _stack(model)
    around = [] if stack is None else [m for m in model.modules() if stack in m.modules()]
    sources = [source for source in map(_source, around) if source is not None]
    sees_all = any(" attention_mask = create_bidirectional_mask(" in source for source in sources)
    return not sees_all or any("create_causal_mask(" in source for source in sources)


def _source_of_stack(model: Any) -> str | None:
    """What the forward over the decoder's layers is written as; None where nobody kept it."""
    stack, _ = _stack(model)
    return None if stack is None else _source(stack)


def _source(module: Any) -> str | None:
    try:
        return inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return None


def decoder_layers(model: Any) -> list[Any]:
    """The decoder's layer modules, in order; empty where the model does not list them."""
    return _stack(model)[1] if hasattr(model, "config") else []


def _stack(model: Any) -> tuple[Any, list[Any]]:
    """(the module that goes through the decoder's layers, those layers); (None, []): unknown."""
    config = compat.text_config(model)
    # of two stacks of layers the configuration names one only, not always the decoder's
    root, count = (
        (model.get_decoder(), None)
        if config.is_encoder_decoder
        else (model, int(config.num_hidden_layers))
    )
    for module in root.modules():
        for part in module.children():
            if isinstance(part, torch.nn.ModuleList) and len(part) == (count or len(part)):
                return module, list(part)
    return None, []
