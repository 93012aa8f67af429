"""Masks and positions of a forward, made on the device from the cache's position.

One mask for each kind of layer, whatever the number of layers: which tokens a buffer holds, which
of them a token sees; pads are seen by themselves alone. Nothing here depends on a host number but
T (and, outside of graphs, how much of the past a ring gives), so a captured step masks right at
whatever position it is replayed.

Legend: B rows of the cache, S slots, W window, T tokens of one forward, K tokens that attention
reads ("columns").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphcore.decode import decoder_stack
from graphcore.decode import transformers_compat as compat
from graphcore.decode.access import Access, Form
from graphcore.decode.cache_state import static_zeros
from graphcore.decode.prompt import Prompt
from graphcore.decode.static_cache import StaticKVCache
from graphcore.errors import ConfigurationError

_alignment = 8  # elements a mask's rows are apart by a multiple of, else attention copies it


@dataclass(frozen=True, slots=True)
class Layout:
    """What the layers of one kind hold and see.

    Attributes:
        window: Tokens seen, the newest one counted; None: all.
        ring: Whether only those are held, in a ring; else each token has its slot.
    """

    window: int | None
    ring: bool


def layouts(model: Any, cache: StaticKVCache) -> dict[str, Layout]:
    """The layout of each layer type of ``model``; without a model, of what the cache holds.

    Raises:
        ConfigurationError: Layers of one type differ, or the model takes but one mask and its
            layers differ; names layer, expected and actual.
    """
    found: dict[str, Layout] = {}
    for index, (kind, window) in enumerate(_kinds(model, cache)):
        if index not in cache.owning_layers:
            continue
        seen = window if window is not None and window < cache.max_seq_len else None
        layout = Layout(seen, cache.windows[index] is not None)
        if found.setdefault(kind, layout) != layout:
            raise ConfigurationError(
                f"layer {index}: expected {found[kind]}, as of the other {kind} layers, got "
                f"{layout}: a model takes one mask for each type of layer"
            )
    if model is not None:  # a step function makes of the masks what it likes
        _check_forward(model, found)
    return found


def _check_forward(model: Any, found: dict[str, Layout]) -> None:
    """Refuses a model whose forward does not heed the masks that its layers need."""
    if len(set(found.values())) > 1 and not decoder_stack.takes_masks_by_type(model):
        raise ConfigurationError(
            f"model: expected layers that all take one mask, got {found}: the forward of "
            f"{type(model).__name__} takes no mask for each type of layer"
        )
    windows = [layout.window for layout in found.values() if layout.window is not None]
    if windows and not decoder_stack.hides_what_left_a_window(model):
        raise ConfigurationError(
            f"model: expected a forward that hides what left a window, got "
            f"{type(model).__name__}, whose configuration names a window of {windows[0]} tokens "
            f"which its forward does not heed; give max_seq_len={windows[0]} or less"
        )


class Masks:
    """Which tokens each token sees, in the form ``model``'s attention takes.

    Without a model (None): bool, True where a token is seen.
    """

    def __init__(self, model: Any, cache: StaticKVCache) -> None:
        self._model = model
        self._slots = static_zeros((_aligned(cache.max_seq_len),), torch.int64, cache.device)
        self._slots.copy_(torch.arange(_aligned(cache.max_seq_len), device="cpu"))
        self._shades: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}
        self.use(cache)

    def use(self, cache: StaticKVCache) -> None:
        """Works on another cache of the same capacity from now on."""
        found = layouts(self._model, cache)
        # longest first, so that of masks which differ in their length alone the first serves all
        self._layouts = sorted(
            set(found.values()), key=lambda each: (each.ring, -(each.window or 0))
        )
        self._of_kind = {kind: self._layouts.index(layout) for kind, layout in found.items()}
        self._cache = cache

    def begin(self, prompt: Prompt) -> None:
        """A prompt is about to be forwarded behind what the cache holds: hides its pads.

        Raises:
            ConfigurationError: Pads behind held tokens where layers see a window.
        """
        start = self._cache.seen_tokens
        windows = [layout.window for layout in self._layouts if layout.window is not None]
        if prompt.mask is not None and start and windows:
            raise ConfigurationError(
                f"attention_mask: expected rows of one length behind the {start} tokens held, got "
                f"padding: layers see a window of {windows[0]} tokens, where pads would take the "
                "places of tokens"
            )
        self._cache.padding.append(start, prompt.mask)

    def for_tokens(
        self, count: int, *, fixed: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | dict[str, torch.Tensor]]:
        """(position ids ``[B, T]``, mask ``[B, 1, T, K]``) of the next ``count`` tokens.

        Layers of different kinds have a mask each, by the name of their type. ``fixed``: K is the
        same at every position, as in a graph; for several tokens that are compiled or captured
        elsewhere.
        """
        positions = self._cache.position + self._slots[:count]
        form = Form.FIXED if fixed and count > 1 else None
        access = self._cache._state.begin_access(count, positions=positions, form=form)
        ids = positions.expand(self._cache.batch_size, count)
        if self._cache.padding:
            ids = (positions - self._cache.padding.pads[:, None]).clamp(min=0)
        masks = self._masks(access)
        if len(masks) == 1:
            return ids, masks[0]
        return ids, {kind: masks[at] for kind, at in self._of_kind.items()}

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Its static tensors by the name reports use."""
        names = {"slot numbers": self._slots}
        for dtype, (shown, hidden) in self._shades.items():
            short = str(dtype).removeprefix("torch.")
            names |= {f"mask shown {short}": shown, f"mask hidden {short}": hidden}
        return names

    def _masks(self, access: Access) -> list[torch.Tensor]:
        """The mask of each layout; those that only differ in their length are parts of one."""
        masks: list[torch.Tensor] = []
        causal: torch.Tensor | None = None
        for layout in self._layouts:
            if causal is not None and self._is_causal(layout, access):
                mask = causal
            else:
                mask = self._mask(layout, access)
            if self._is_causal(layout, access):
                causal = mask
            masks.append(mask[..., : self._read(layout, access)])
        return masks

    def _mask(self, layout: Layout, access: Access) -> torch.Tensor:
        """``[B, 1, T, K or more]``."""
        columns = self._columns(layout, access)
        queries = access.positions[:, None]
        visible = columns <= queries
        if layout.window is not None and not self._is_causal(layout, access):
            visible &= columns > queries - layout.window
            visible &= columns >= 0
        visible = visible.expand(self._cache.batch_size, 1, *visible.shape)
        if self._cache.padding:
            visible = visible & ~self._hidden(columns)[:, None, None, :]
            if access.length > 1:
                # a pad sees itself: some attentions give NaN for a row that sees nothing
                visible = visible | (columns == queries)
        return self._form(visible)

    def _is_causal(self, layout: Layout, access: Access) -> bool:
        """Whether each column up to the token's own is visible, slots counted as tokens.

        So it is in a ring that one token reads, as long as no slot holds a pad: what is in a slot
        beyond the token's own was not written yet, or nothing is left in the ring but what is
        visible.
        """
        if layout.window is None:
            return True
        return layout.ring and access.form is Form.SLOTS and not self._cache.padding

    def _columns(self, layout: Layout, access: Access) -> torch.Tensor:
        """int64 ``[K or more]``: the token in each column that attention reads; negative: none."""
        window = layout.window
        if not layout.ring or window is None:
            return self._slots
        if self._is_causal(layout, access):
            return self._slots[: _aligned(window)]
        if access.form is Form.SLOTS:
            return self._in_ring(access.positions[0], window)
        if access.form is Form.TOKENS:
            past = access.past(window)
            return self._slots[: past + access.length] + (access.positions[0] - past)
        return torch.cat((self._in_ring(access.positions[0] - 1, window), access.positions))

    def _in_ring(self, newest: torch.Tensor, window: int) -> torch.Tensor:
        """int64 ``[W]``: the token in each slot of a ring whose last token is ``newest``."""
        return newest - (newest - self._slots[:window]).remainder(window)

    def _hidden(self, columns: torch.Tensor) -> torch.Tensor:
        """Which columns hold a pad, bool ``[B, K]``; those past the last slot say anything."""
        hidden = self._cache.padding.hidden
        return hidden.index_select(1, columns.clamp(0, self._cache.max_seq_len - 1))

    def _form(self, visible: torch.Tensor) -> torch.Tensor:
        """``visible`` as attention takes it."""
        return visible if self._model is None else torch.where(visible, *self._shade())

    def _read(self, layout: Layout, access: Access) -> int:
        """K."""
        if not layout.ring or layout.window is None:
            return self._cache.max_seq_len
        if access.form is Form.SLOTS:
            return layout.window
        past = layout.window if access.form is Form.FIXED else access.past(layout.window)
        return past + access.length

    def _shade(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What is added to the score of a visible and of a hidden token: 0-d, the model's dtype."""
        dtype = self._model.dtype
        if dtype not in self._shades:
            device = self._cache.device
            hidden = static_zeros((), dtype, device).fill_(compat.hidden_score(self._model))
            self._shades[dtype] = (static_zeros((), dtype, device), hidden)
        return self._shades[dtype]


def _kinds(model: Any, cache: StaticKVCache) -> list[tuple[str, int | None]]:
    if model is not None:
        return compat.layer_kinds(compat.text_config(model))
    return [
        ("full_attention" if window is None else "sliding_attention", window)
        for window in cache.windows
    ]


def _aligned(count: int) -> int:
    return -(-count // _alignment) * _alignment
