"""A half of an encoder-decoder cache before its shapes are known: layers and a capacity, no memory.

transformers' users make a cache from a capacity first, and its shapes come with
``early_initialization`` or with the first K/V. Either makes the half a :class:`StaticKVCache`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphcore.decode import transformers_compat as compat
from graphcore.decode.cache_layer import Pair
from graphcore.decode.cache_state import refuse_inside_capture
from graphcore.decode.sizes import PerLayer, check_positive
from graphcore.decode.static_cache import StaticKVCache


class CacheShell(compat.Cache):  # type: ignore[misc]  # transformers is untyped
    """Stands in for a half until it is made; ``install`` puts the made half in its place.

    Args:
        field: The half in messages: "self_cache" or "cross_cache".
        num_layers: Layers of the decoder.
        capacity: Slots.
        install: Called with the made half.

    Raises:
        ConfigurationError: A size that is not a positive int.
    """

    def __init__(
        self,
        field: str,
        num_layers: int,
        capacity: int,
        install: Callable[[StaticKVCache], None],
    ) -> None:
        check_positive(f"{field} num_layers", num_layers)
        check_positive(f"{field} capacity", capacity)
        self.field = field
        self.num_layers = num_layers
        self.max_seq_len = capacity
        self._install = install
        super().__init__(layers=[ShellLayer(index, self) for index in range(num_layers)])

    def early_initialization(
        self,
        batch_size: int,
        num_heads: PerLayer,
        head_dim: PerLayer,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Makes the half; see :meth:`EncoderDecoderKVCache.early_initialization`."""
        self.make(batch_size, num_heads, head_dim, head_dim, dtype, device)

    def make(
        self,
        batch_size: int,
        num_heads: PerLayer,
        head_dim: PerLayer,
        v_head_dim: PerLayer,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> StaticKVCache:
        """Makes the half with these shapes and installs it.

        Raises:
            ConfigurationError: A size, a list, a dtype or a device that cannot be.
            CaptureError: A graph is being captured or a region compiled.
        """
        refuse_inside_capture(f"initialising {self.field}")
        made = StaticKVCache(
            self.num_layers,
            batch_size,
            num_heads,
            self.max_seq_len,
            head_dim,
            dtype,
            device,
            v_head_dim=v_head_dim,
        )
        self._install(made)
        return made

    def reset(self) -> None:
        """Nothing: there is no memory yet."""

    def __repr__(self) -> str:
        return f"CacheShell({self.field}, {self.num_layers} layers, capacity {self.max_seq_len})"


class ShellLayer(compat.CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """A layer of a shell: it has a capacity, and its first K/V make the whole half."""

    is_compileable = True
    is_croppable = False
    is_sliding = False
    supports_early_init = True

    def __init__(self, index: int, shell: CacheShell) -> None:
        super().__init__()
        self.index = index
        self._shell = shell

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Makes the whole half with the shapes of these K and V ``[batch, heads, tokens, dim]``."""
        self._made(key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Pair:
        """Makes the half, then writes K and V into it.

        Raises:
            CaptureError: A graph is being captured or a region compiled; nothing was made.
        """
        made = self._made(key_states, value_states)
        return made.update(key_states, value_states, self.index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(slots that attention will read, first slot)."""
        return self._shell.max_seq_len, 0

    def get_seq_length(self) -> int:
        """0: nothing is held."""
        return 0

    def get_max_length(self) -> int:
        """Slots."""
        return self._shell.max_seq_len

    def _made(self, keys: torch.Tensor, values: torch.Tensor) -> StaticKVCache:
        batch, heads, _, head_dim = keys.shape
        return self._shell.make(batch, heads, head_dim, values.shape[3], keys.dtype, keys.device)
