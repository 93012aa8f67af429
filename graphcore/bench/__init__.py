"""Benchmarks: ours against a floor and against peers, in one process, interleaved."""

from graphcore.bench.command import main

__all__ = ["main"]
