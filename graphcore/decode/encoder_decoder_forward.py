"""An encoder-decoder model with its cache: encoder and first decoder tokens eagerly, then steps.

Legend: R rows, T tokens, S slots of the self half, E slots of the cross half, V vocabulary. The
prompt's forward writes the cross half; a step only reads it. It reads either all E slots under a
mask ("padded", one graph for every encoder length) or exactly the encoder's tokens ("exact", a
graph for each length). Which of the two, and that the cross half is written, is in the key.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from graphcore.decode import transformers_encoder_decoder as families
from graphcore.decode.cache_state import static_zeros
from graphcore.decode.encoder_decoder_cache import EncoderDecoderKVCache
from graphcore.decode.first_step import FirstStep
from graphcore.decode.forward import Feed, in_one_piece
from graphcore.decode.prompt import Prompt, vocabulary_size
from graphcore.errors import CapacityError, ConfigurationError, LifecycleError


class EncoderDecoderForward:
    """A transformers encoder-decoder with an :class:`EncoderDecoderKVCache`.

    Args:
        model: T5, BART, Whisper and their kin.
        cache: One that fits it.
        feed: How the decoder's tokens are handed on. In pieces, the first token goes alone: its
            forward writes the cross half.
        first: Forwards the first token by replay; None: eagerly.
        exact: Read exactly the encoder's tokens. Models whose cross attention takes no mask
            (Whisper's) always do.
    """

    def __init__(
        self,
        model: Any,
        cache: EncoderDecoderKVCache,
        feed: Feed = in_one_piece,
        first: FirstStep | None = None,
        *,
        exact: bool = False,
    ) -> None:
        self.model = model
        self.cache = cache
        self.rows = cache.batch_size
        self.is_exact = exact or not families.is_masked(model)
        self._windows = dict(families.layer_kinds(model))
        self._feed = feed
        self._first = first
        self.held_length = 0
        """Encoder tokens whose states are held; known before the cross half is written."""
        self._states: torch.Tensor | None = None
        self._is_masked = False
        self._contents = -1
        self._slots = static_zeros((cache.max_seq_len,), torch.int64, cache.device)
        self._slots.copy_(torch.arange(cache.max_seq_len, device="cpu"))
        self._encoder_mask = static_zeros((self.rows, cache.encoder_len), torch.bool, cache.device)

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Whether the cross half is written, and what a step reads of it.

        Nothing is captured for a cross half that is not written, or not by the last prompt here.
        """
        if self._missing() is not None:
            return (("cross K/V", "not written"),)  # no step comes before a prompt
        return ("cross K/V", "written"), *self._read(self.cache.encoder_tokens), *self._ragged

    @property
    def first_key(self) -> tuple[Hashable, ...]:
        """As :attr:`key`, of the first token's forward, which writes the cross half."""
        return ("cross K/V", "not written"), *self._read(self.held_length), *self._ragged

    @property
    def _ragged(self) -> tuple[Hashable, ...]:
        """("ragged",) while the self half holds pads."""
        return ("ragged",) if self.cache.decoder_half.padding else ()

    def _read(self, length: int) -> tuple[Hashable, ...]:
        """What of the encoder's ``length`` tokens a forward reads."""
        if self.is_exact:
            return ("encoder", length), ("masked", self._is_masked)
        return (("encoder", "padded"),)

    @property
    def vocabulary(self) -> int:
        """Rows of the input embedding."""
        return vocabulary_size(self.model)

    def use(self, cache: EncoderDecoderKVCache) -> None:
        """Works on ``cache``, which is of the same layout, from now on; a prompt comes first."""
        self.cache = cache
        self._contents = -1

    def prefill(self, prompt: Prompt) -> torch.Tensor:
        """Logits ``[R, V]``: runs the encoder, where the prompt has one, then the decoder's tokens.

        Raises:
            CapacityError: The encoder's output is longer than the cross half.
            LifecycleError: A prompt without an encoder's side, and no cross K/V to continue with.
            ConfigurationError: Pads behind held tokens where slots are counted.
        """
        self._hide_pads(prompt)
        if not prompt.inputs:
            return self._feed(self, prompt.ids)
        states = self._encoded(prompt.inputs)
        length = states.shape[1]
        self._hold(states, prompt.inputs.get("attention_mask"))
        self.cache.forget_encoder()
        count = prompt.length if self._feed is in_one_piece and self._first is None else 1
        begin = prompt.ids[:, :count]
        if self._first is None:
            logits = self._decode(begin, states, self._visible(length))
        else:
            logits = self._first(self, begin)
        self._contents = self._cross_contents
        rest = prompt.ids[:, count:]
        return self._feed(self, rest) if rest.shape[1] else logits

    def first_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``[R, V]`` of ``tokens [R, 1]``; writes the cross half from the held states.

        What lies behind the encoder's tokens, where all of it is read, is written too: K and V of
        states that are zero, which the mask hides.
        """
        assert self._states is not None
        length = self.held_length
        states = self._states[:, :length] if self.is_exact else self._states
        return self._decode(tokens, states, self._visible(length))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``[R, V]`` of the last of ``tokens [R, T]``; reads the cross half.

        Raises:
            LifecycleError: It is not written by the last prompt.
        """
        self.check_continues()
        assert self._states is not None
        length = self.cache.encoder_tokens
        states = self._states[:, :length] if self.is_exact else self._states
        return self._decode(tokens, states, self._visible(length))

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Slot numbers, the encoder's states and the mask over them."""
        named = {"slot numbers": self._slots, "encoder mask": self._encoder_mask}
        return named if self._states is None else {**named, "encoder states": self._states}

    def changed(self) -> list[torch.Tensor]:
        """None: a step writes nothing outside the cache here."""
        return []

    def _decode(
        self, tokens: torch.Tensor, states: torch.Tensor, visible: torch.Tensor | None
    ) -> torch.Tensor:
        count = tokens.shape[1]
        positions = self.cache.position + self._slots[:count]
        # not a context manager: a compiled step is traced through this
        self.cache.encoder_state.whole = not self.is_exact
        try:
            return families.decode_logits(
                self.model,
                tokens,
                positions=self._position_ids(positions),
                mask=self._self_masks(positions),
                states=states,
                encoder_mask=None if visible is None else self._as_mask(visible, count),
                cache=self.cache,
            )
        finally:
            self.cache.encoder_state.whole = False

    def _hide_pads(self, prompt: Prompt) -> None:
        """A prompt is about to be forwarded behind what the cache holds: hides its pads."""
        start, windows = self.cache.seen_tokens, [w for w in self._windows.values() if w]
        counts_slots = windows or not families.takes_decoder_positions(self.model)
        if prompt.mask is not None and start and counts_slots:
            how = (
                f"layers see a window of {windows[0]} tokens"
                if windows
                else f"{type(self.model).__name__} counts how far tokens are apart in slots"
            )
            raise ConfigurationError(
                f"decoder_attention_mask: expected rows of one length behind the {start} tokens "
                f"held, got padding: {how}, where pads would take the places of tokens"
            )
        self.cache.decoder_half.padding.append(start, prompt.mask)

    def _position_ids(self, positions: torch.Tensor) -> torch.Tensor:
        """int64 ``[R, T]`` of the tokens at ``positions [T]``: pads do not count."""
        padding = self.cache.decoder_half.padding
        if padding:
            return (positions - padding.pads[:, None]).clamp(min=0)
        return positions.expand(self.rows, len(positions))

    def _self_masks(self, positions: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Which slots of the self half the tokens at ``positions`` see; by type of layer, or one.

        Every token keeps its slot: what left a window is hidden.
        """
        count = len(positions)
        causal = self._slots <= positions[:, None]
        padding = self.cache.decoder_half.padding
        if padding:
            causal = causal & ~padding.hidden[:, None, None, :]
            if count > 1:  # a pad sees itself: a row that sees nothing may be NaN
                causal = causal | (self._slots == positions[:, None])
        if not any(self._windows.values()):
            return self._as_mask(causal, count)
        return {
            kind: self._as_mask(
                causal if window is None else causal & (self._slots > positions[:, None] - window),
                count,
            )
            for kind, window in self._windows.items()
        }

    def _encoded(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """The encoder's states ``[R, tokens, width]``, which fit."""
        states = families.encode(self.model, inputs)
        rows, length = states.shape[:2]
        if rows != self.rows or not length:
            raise ConfigurationError(
                f"encoder output: expected {self.rows} rows of at least one token, got "
                f"{list(states.shape)}"
            )
        if length > self.cache.encoder_len:
            raise CapacityError(
                f"encoder output: {length} tokens; encoder_len is {self.cache.encoder_len}"
            )
        mask = inputs.get("attention_mask")
        if mask is not None and families.is_masked(self.model) and mask.shape[1] != length:
            raise ConfigurationError(
                f"attention_mask: expected {length} tokens (the encoder's), got {mask.shape[1]}"
            )
        return states

    def _hold(self, states: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Copies the encoder's states and mask to where steps read them; the rest is zero."""
        self.held_length = length = states.shape[1]
        shape = (self.rows, self.cache.encoder_len, states.shape[2])
        held = self._states
        if held is None or (tuple(held.shape), held.dtype) != (shape, states.dtype):
            held = self._states = static_zeros(shape, states.dtype, states.device)
        held[:, :length].copy_(states)
        held[:, length:].zero_()
        self._encoder_mask.zero_()
        self._is_masked = False
        if mask is None or not families.is_masked(self.model):
            self._encoder_mask[:, :length].fill_(True)
            return
        self._encoder_mask[:, :length].copy_(mask != 0)
        self._is_masked = not bool(self._encoder_mask[:, :length].all())

    def _visible(self, length: int) -> torch.Tensor | None:
        """Bool ``[R, 1, 1, read]``: which slots of the cross half count; None: all of them."""
        if not self.is_exact:
            return self._encoder_mask[:, None, None, :]
        if not self._is_masked:
            return None
        return self._encoder_mask[:, None, None, :length]

    def _as_mask(self, visible: torch.Tensor, count: int) -> torch.Tensor:
        """``visible``, spread over rows and tokens, in the form that the attention takes."""
        spread = visible.expand(self.rows, 1, count, visible.shape[-1])
        under_autocast = torch.is_autocast_enabled(spread.device.type)
        if families.attention_implementation(self.model) == "sdpa" and not under_autocast:
            return spread
        lowest = torch.finfo(self.model.dtype).min
        if under_autocast:
            # T5 puts a bool mask over a bias of autocast's dtype, which the lowest of the cache's
            # dtype does not fit; half of it does
            lowest /= 2
        return torch.zeros_like(spread, dtype=self.model.dtype).masked_fill_(~spread, lowest)

    @property
    def _cross_contents(self) -> int:
        return self.cache.encoder_state.contents

    def check_continues(self) -> None:
        """Raises LifecycleError where the cross half is not that of the last prompt here."""
        missing = self._missing()
        if missing is not None:
            raise LifecycleError(f"cross K/V: {missing}: capture a prompt first")

    def _missing(self) -> str | None:
        if not self.cache.encoder_tokens:
            return "expected them written by an encoder prompt, they are empty"
        if self._contents != self._cross_contents:
            return "expected those of this runner's last prompt, somebody else has written others"
        return None
