"""Which executable to use again: keys, the cache of executables, its budget and its reasons."""

from graphcore.reuse.cache import GraphCache
from graphcore.reuse.counters import CacheCounters
from graphcore.reuse.decisions import (
    CaptureDecision,
    CaptureReason,
    Cause,
    Departure,
    Eviction,
    Outcome,
)
from graphcore.reuse.eager import EagerExec
from graphcore.reuse.keys import TensorKey, check_key, key_of
from graphcore.reuse.thrash import Churn, Thrash

__all__ = [
    "CacheCounters",
    "CaptureDecision",
    "CaptureReason",
    "Cause",
    "Churn",
    "Departure",
    "EagerExec",
    "Eviction",
    "GraphCache",
    "Outcome",
    "TensorKey",
    "Thrash",
    "check_key",
    "key_of",
]
