"""Static key/value caches and autoregressive decoding of transformers models through one graph.

Everything here needs torch and transformers, which load when a name is first used, not before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphcore.decode.bucket import Bucket, BucketGeneration
    from graphcore.decode.buckets import DecodeBuckets
    from graphcore.decode.cache_binding import BindingRoute, CacheBinding
    from graphcore.decode.encoder_decoder_cache import EncoderDecoderKVCache
    from graphcore.decode.generation import Generation, generate
    from graphcore.decode.guidance import Guidance
    from graphcore.decode.runner import CUDAGraphAR
    from graphcore.decode.sampling import Sampling
    from graphcore.decode.static_cache import StaticKVCache
    from graphcore.decode.token_stream import TokenStream

__all__ = [
    "BindingRoute",
    "Bucket",
    "BucketGeneration",
    "CUDAGraphAR",
    "CacheBinding",
    "DecodeBuckets",
    "EncoderDecoderKVCache",
    "Generation",
    "Guidance",
    "Sampling",
    "StaticKVCache",
    "TokenStream",
    "generate",
]

_homes = {
    "BindingRoute": "graphcore.decode.cache_binding",
    "Bucket": "graphcore.decode.bucket",
    "BucketGeneration": "graphcore.decode.bucket",
    "CUDAGraphAR": "graphcore.decode.runner",
    "CacheBinding": "graphcore.decode.cache_binding",
    "DecodeBuckets": "graphcore.decode.buckets",
    "EncoderDecoderKVCache": "graphcore.decode.encoder_decoder_cache",
    "Generation": "graphcore.decode.generation",
    "Guidance": "graphcore.decode.guidance",
    "Sampling": "graphcore.decode.sampling",
    "StaticKVCache": "graphcore.decode.static_cache",
    "TokenStream": "graphcore.decode.token_stream",
    "generate": "graphcore.decode.generation",
}


def __getattr__(name: str) -> Any:
    if name not in _homes:
        raise AttributeError(f"module 'graphcore.decode' has no attribute {name!r}")
    return getattr(import_module(_homes[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
