"""A step function as what turns tokens into logits: a model of one's own, without transformers.

Legend: R rows, T tokens, S slots of the cache, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from graphcore.decode.cache_state import is_capturing
from graphcore.decode.checks import check_training
from graphcore.decode.forward import Feed, in_one_piece
from graphcore.decode.masks import Masks
from graphcore.decode.prompt import Prompt
from graphcore.decode.static_cache import StaticKVCache
from graphcore.errors import ConfigurationError

_keywords = {
    "position_ids": ("position_ids",),
    "mask": ("mask", "attention_mask"),
    "cache": ("cache", "past_key_values"),
}


class FunctionForward:
    """Any callable that writes its K and V through a :class:`StaticKVCache`.

    It is called as ``function(tokens, position_ids=, mask=, cache=)``: int64 ``[R, T]`` twice, a
    bool mask ``[R, 1, T, S]``, True where a slot is seen, and the cache, whose ``update(k, v,
    layer)`` it calls once for every layer and whose full buffers it attends to. Where layers of the
    cache have a window, a mask is as long as what ``update`` gives; where only some have one, it is
    a dictionary of theirs, "sliding_attention", and the others', "full_attention". Keywords may
    also be called ``attention_mask`` and ``past_key_values``, ``position_ids`` may be missing, and
    ``use_cache`` is True where it is taken. It returns logits ``[R, T, V]``, ``[R, 1, V]`` or ``[R,
    V]``, or something that has them as ``.logits`` or first.

    Weights that are exchanged for others are noticed before a graph is reused where the function
    shows them: it is a module, a method, or a partial, or its closure, or a global that it names,
    holds a module, a tensor or a list or dictionary of them. What it reaches otherwise (through an
    object in a global) is not compared: bind that with ``functools.partial``.

    Args:
        function: The callable; a ``torch.nn.Module`` too.
        cache: Its cache.
        vocabulary: V.
        feed: How a prompt's tokens are handed on.

    Raises:
        ConfigurationError: The function takes no mask or no cache.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        cache: StaticKVCache,
        vocabulary: int,
        feed: Feed = in_one_piece,
    ) -> None:
        self.model: Any = module_of(function) or function
        self.cache = cache
        self.rows = cache.batch_size
        self.vocabulary = vocabulary
        self._function = function
        parameters = _parameters(function)
        self._names = _accepted(function, parameters)
        self._takes_use_cache = "use_cache" in parameters
        self._masks = Masks(None, cache)
        self._feed = feed

    @property
    def key(self) -> tuple[Hashable, ...]:
        """(): one graph serves every position. ("ragged",) while the cache holds pads."""
        return ("ragged",) if self.cache.padding else ()

    def use(self, cache: StaticKVCache) -> None:
        """Works on ``cache``, which is of the same layout, from now on."""
        self.cache = cache
        self._masks.use(cache)

    def prefill(self, prompt: Prompt) -> torch.Tensor:
        """Forwards the prompt behind what the cache holds."""
        self._masks.begin(prompt)
        return self._feed(self, prompt.ids)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``[R, V]`` of the last of ``tokens [R, T]``.

        Raises:
            ConfigurationError: They have another shape or dtype; or the position has not moved by T
                (looked at in the prompt and the warm-up, not in the capture behind them).
        """
        if torch.compiler.is_compiling() or is_capturing():
            return self._call(tokens)
        start = self.cache.seen_tokens
        logits = self._call(tokens)
        self._check_advance(self.cache.seen_tokens - start, tokens.shape[1])
        return logits

    def _call(self, tokens: torch.Tensor) -> torch.Tensor:
        positions, mask = self._masks.for_tokens(tokens.shape[1])
        given = {"position_ids": positions, "mask": mask, "cache": self.cache}
        arguments: dict[str, Any] = {name: given[part] for part, name in self._names.items()}
        if self._takes_use_cache:
            arguments["use_cache"] = True
        return self._checked(self._function(tokens, **arguments), tokens)

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The masks' tensors."""
        return self._masks.named_tensors()

    def changed(self) -> list[torch.Tensor]:
        """None: what a step writes is in the cache."""
        return []

    def _checked(self, result: Any, tokens: torch.Tensor) -> torch.Tensor:
        logits = getattr(result, "logits", result)
        if isinstance(logits, tuple) and logits:
            logits = logits[0]
        rows, count = tokens.shape
        shapes = [[rows, count, self.vocabulary], [rows, 1, self.vocabulary]]
        shapes = [*shapes[: 1 if count == 1 else 2], [rows, self.vocabulary]]
        shape = list(logits.shape) if isinstance(logits, torch.Tensor) else None
        if not isinstance(logits, torch.Tensor) or shape not in shapes:
            raise ConfigurationError(
                f"function: expected logits {' or '.join(map(str, shapes))} for tokens "
                f"{[rows, count]}, got {shape or type(logits).__name__}"
            )
        if not logits.is_floating_point():
            raise ConfigurationError(
                f"function: expected logits of a floating dtype, got {logits.dtype}"
            )
        if logits.device != tokens.device:
            raise ConfigurationError(
                f"function: expected logits on {tokens.device}, got {logits.device}"
            )
        return logits if logits.dim() == 2 else logits[:, -1]

    def _check_advance(self, moved: int, expected: int) -> None:
        if moved == expected:
            return
        last = self.cache.owning_layers[-1]
        raise ConfigurationError(
            f"function: expected it to move the cache's position by the {expected} tokens it was "
            f"given, it moved by {moved}: call cache.update(keys, values, layer) once in a call "
            f"for every layer, the last ({last}) too, which moves it"
        )


def module_of(function: Any) -> torch.nn.Module | None:
    """The module that ``function`` is, or is a method of; None where it is neither."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, torch.nn.Module) else None


def name_of(function: Any) -> str:
    """How messages call it."""
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return name


def check_function(function: Any, cache: Any, vocabulary: object) -> None:
    """Refuses what cannot be a step function, or lacks its cache or its vocabulary.

    Raises:
        ConfigurationError: Says what to give.
    """
    name = name_of(function)
    if cache is None:
        raise ConfigurationError(
            f"cache: expected a StaticKVCache for the step function {name}, got None: its layers "
            "and heads cannot be known without one"
        )
    if not isinstance(vocabulary, int) or isinstance(vocabulary, bool) or vocabulary <= 0:
        raise ConfigurationError(
            f"vocabulary: expected how many ids the step function {name} gives logits for, got "
            f"{vocabulary!r}"
        )
    check_training(module_of(function))


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    called = function.forward if isinstance(function, torch.nn.Module) else function
    return inspect.signature(called).parameters


def _accepted(
    function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]
) -> dict[str, str]:
    """What ``function`` calls each of the parts that it takes."""
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    names = {}
    for part, spellings in _keywords.items():
        found = next((word for word in spellings if word in parameters), None)
        if found is None and takes_any:
            found = part
        if found is not None:
            names[part] = found
        elif part != "position_ids":
            raise ConfigurationError(
                f"function: expected one that takes {'= or '.join(spellings)}=, got "
                f"{name_of(function)}({', '.join(parameters)})"
            )
    return names
