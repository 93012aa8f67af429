"""SlidingLayer: the K and V of a layer that attends to a window, in a ring of that many slots.

Token t lies in slot t mod W, so W slots serve any length and their addresses never change. What was
overwritten is gone: whatever would need it is refused with that reason.
"""

from __future__ import annotations

import torch

from graphcore.decode.access import Access, Form
from graphcore.decode.cache_layer import Pair, StaticLayer, bytes_of, write_slots
from graphcore.decode.cache_state import CacheState, is_capturing
from graphcore.errors import CaptureError, LifecycleError


class SlidingLayer(StaticLayer):
    """K ``[batch, heads, W, head_dim]`` and V ``[batch, heads, W, v_head_dim]``, W the window.

    ``update`` returns what attention needs: for one token the ring in slot order; for several the
    past that the window reaches and the new tokens, as copies (see :class:`Form`).
    """

    is_sliding = True

    def view(self, state: CacheState, batch_size: int) -> StaticLayer:
        """As of any layer; where nothing leaves the window in it, it is a plain one."""
        twin = super().view(state, batch_size)
        if twin.max_cache_len == state.capacity:
            twin.__class__ = StaticLayer
        return twin

    def get_mask_sizes(self, query_length: int) -> tuple[int, int | torch.Tensor]:
        """(tokens that attention reads, the first one's position), for transformers' own masks.

        Those take keys to be in the order of their tokens, so the next update gives them so. In a
        graph the ring is read as it is: without padding its order makes no difference there, since
        either nothing was overwritten or every slot is visible.

        Raises:
            CaptureError: Several tokens inside a capture or a compiled region.
        """
        state, window = self._state, self.max_cache_len
        if not (torch.compiler.is_compiling() or is_capturing()):
            access = state.begin_access(query_length, form=Form.TOKENS)
            past = access.past(window)
            return past + query_length, state.known_seen() - past
        if query_length > 1:
            raise CaptureError(
                f"{self.name}: {query_length} tokens under masks that transformers makes: "
                "not in a graph, since their shape follows the number of tokens held; forward the "
                "prompt eagerly"
            )
        return window, (state.position - (window - 1)).clamp_min(0)

    def get_max_length(self) -> int:
        """Tokens that may be appended in all; the ring keeps the last ones."""
        return self._state.capacity

    def prefix(self, end: int) -> Pair:
        """Views of the first ``end`` tokens, which have to be all in the ring.

        Raises:
            LifecycleError: The first of them are overwritten.
        """
        self.refuse_overwritten(end)
        return super().prefix(end)

    def refuse_overwritten(self, end: int) -> None:
        """Raises LifecycleError where the first of ``end`` tokens are not held any more."""
        if end > self.max_cache_len:
            raise LifecycleError(
                f"{self.name}: no view of {end} tokens: its window keeps the last "
                f"{self.max_cache_len} of them, in a ring"
            )

    def check_rewind(self, position: int, reached: int) -> None:
        """Raises LifecycleError where a token that position ``position`` sees is overwritten.

        ``reached`` tokens were written so far.
        """
        window = self.max_cache_len
        if 0 < position < reached - 1 and reached > window:
            raise LifecycleError(
                f"{self.name}: cannot go back to {position} of {reached} tokens: its window "
                f"keeps the last {window}, and the token at {position} needs those from "
                f"{max(position - window + 1, 0)} on; only 0 and {reached - 1} can be reached"
            )

    def clear_from(self, start: int, reached: int) -> None:
        """Zeroes the slots of the tokens from ``start`` on, of ``reached`` that were written."""
        window = self.max_cache_len
        if start == 0 or reached <= window:
            super().clear_from(start, reached)
        elif start < reached:
            for buffer in (bytes_of(self._keys), bytes_of(self._values)):
                buffer[:, :, start % window].zero_()

    def slot(self, index: int) -> Pair:
        """Copies of the slot that the token at ``index`` takes; it may hold one still visible."""
        return super().slot(index % self.max_cache_len)

    def put_slot(self, index: int, pair: Pair) -> None:
        """Puts back what :meth:`slot` copied."""
        super().put_slot(index % self.max_cache_len, pair)

    def _append(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> Pair:
        access = self._state.access_for(length)
        self._state.note_reached(length)
        if access.form is Form.SLOTS:
            self._write_to(access.slots(self.max_cache_len), (keys, values))
            return self._converted(keys.dtype)
        past = self._past(access)
        # joined before the write, which may take the slots of what is still seen
        answer = self._joined(past[0], keys), self._joined(past[1], values)
        self._write_to(access.slots(self.max_cache_len), (keys, values))
        return answer

    def _past(self, access: Access) -> Pair:
        """What the window needs of the tokens before ``access``."""
        if access.form is Form.FIXED:
            return self._keys, self._values
        count = access.past(self.max_cache_len)
        assert access.seen is not None
        first = access.seen - count
        at = torch.arange(first, access.seen, device=self.device).remainder(self.max_cache_len)
        return (
            bytes_of(self._keys).index_select(2, at).view(self.dtype),
            bytes_of(self._values).index_select(2, at).view(self.dtype),
        )

    def _joined(self, past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Past and new tokens in the dtype of ``new``, which went through the cache's."""
        return torch.cat((past.to(new.dtype), new.to(self.dtype).to(new.dtype)), dim=2)

    def _write_to(self, slots: torch.Tensor, states: Pair) -> None:
        """Writes the last tokens of ``states``, as many as there are ``slots``."""
        count = slots.shape[0]
        for buffer, new in zip((self._keys, self._values), states, strict=True):
            write_slots(buffer, slots, new[:, :, -count:])
