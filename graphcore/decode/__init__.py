"""Static key/value caches and autoregressive decoding of transformers models through one graph.

Everything here needs torch and transformers, which load when a name is first used, not before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphcore.decode.generation import Generation, generate
    from graphcore.decode.runner import CUDAGraphAR
    from graphcore.decode.sampling import Sampling
    from graphcore.decode.static_cache import StaticKVCache

__all__ = ["CUDAGraphAR", "Generation", "Sampling", "StaticKVCache", "generate"]

_homes = {
    "CUDAGraphAR": "graphcore.decode.runner",
    "Generation": "graphcore.decode.generation",
    "Sampling": "graphcore.decode.sampling",
    "StaticKVCache": "graphcore.decode.static_cache",
    "generate": "graphcore.decode.generation",
}


def __getattr__(name: str) -> Any:
    if name not in _homes:
        raise AttributeError(f"module 'graphcore.decode' has no attribute {name!r}")
    return getattr(import_module(_homes[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
