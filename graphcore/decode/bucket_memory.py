"""What buckets take of memory, by bucket and by what they share, measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from graphcore.decode.runner import CUDAGraphAR
from graphcore.decode.static_cache import StaticKVCache
from graphcore.executable.memory_report import MemoryReport, covered_bytes, in_words
from graphcore.interop.torch_workspaces import workspace_bytes


@dataclass(frozen=True, slots=True)
class BucketMemory:
    """Bytes of one bucket.

    Attributes:
        name: "batch x capacity".
        step_bytes: Its static tensors: token, history, masks; not K, V and logits, which are
            shared.
        graphs: Of each of its graphs: the steps captured so far (prompts of equal length, padded
            ones), and their loops where a generation was one launch; none where decoding is eager.
        pool_bytes: Their pools where these are not shared; a loop lies in the pool of its step.
    """

    name: str
    step_bytes: int
    graphs: tuple[MemoryReport, ...]
    pool_bytes: int

    @classmethod
    def of(cls, name: str, runner: CUDAGraphAR) -> BucketMemory:
        """Measures the bucket of ``runner``."""
        shared = {"logits", *runner.cache.named_tensors(padded=True)}
        own = [each for name, each in runner.named_tensors().items() if name not in shared]
        graphs = [graph for step in runner._variants for graph in step.graphs]
        reports = tuple(graph.memory_report() for graph in graphs)
        pools = [
            span
            for graph, report in zip(graphs, reports, strict=True)
            if not report.shares_pool
            for span in graph.private_memory()
        ]
        steps = sum(each.numel() * each.element_size() for each in own)
        return cls(name, steps, reports, covered_bytes(pools))

    @property
    def node_bytes(self) -> int:
        """Device memory of its executables."""
        return sum(each.node_bytes for each in self.graphs)

    @property
    def allocation_bytes(self) -> int:
        """What its graphs' own allocation nodes ask for."""
        return sum(each.allocation_bytes for each in self.graphs)

    @property
    def own_bytes(self) -> int:
        """What goes with the bucket alone."""
        return self.step_bytes + self.pool_bytes + self.allocation_bytes + self.node_bytes


@dataclass(frozen=True, slots=True)
class BucketsMemory:
    """Bytes of several buckets.

    Attributes:
        buckets: Each alone.
        kv_bytes: K and V, stored once.
        shared_bytes: Other static tensors that all buckets share: logits, position, pads, and the
            scratch of a cache of another dtype.
        pool_bytes: The torch memory pool, or pools, of all captures; on the emulated driver the
            temporaries that its recordings made, which are not shared.
        is_shared: Whether it is one pool.
        workspace_bytes: What torch's products work in: of the stream that all are captured on.
    """

    buckets: tuple[BucketMemory, ...]
    kv_bytes: int
    shared_bytes: int
    pool_bytes: int
    is_shared: bool
    workspace_bytes: int = 0

    @classmethod
    def of(
        cls, runners: Mapping[str, CUDAGraphAR], cache: StaticKVCache, pool_bytes: int | None
    ) -> BucketsMemory:
        """Measures buckets.

        Args:
            runners: By the bucket's name.
            cache: What their caches are views of.
            pool_bytes: Of the pool that they share; None or 0: each has its own.
        """
        buckets = tuple(BucketMemory.of(name, runner) for name, runner in runners.items())
        private = sum(each.pool_bytes for each in buckets)
        shared = _shared_bytes(runners.values(), cache)
        pools, is_shared = pool_bytes or private, bool(pool_bytes)
        workspaces = _workspace_bytes(runners.values())
        return cls(buckets, cache.kv_bytes, shared, pools, is_shared, workspaces)

    @property
    def node_bytes(self) -> int:
        """Device memory of all executables."""
        return sum(each.node_bytes for each in self.buckets)

    @property
    def parts(self) -> Mapping[str, int]:
        """Bytes by kind, each byte once; the model is left out."""
        steps = sum(each.step_bytes for each in self.buckets)
        workspaces = {"workspaces": self.workspace_bytes} if self.workspace_bytes else {}
        return {
            "K and V, stored once": self.kv_bytes,
            "static tensors": self.shared_bytes + steps,
            "memory pool, shared" if self.is_shared else "memory pools, one each": self.pool_bytes,
            **workspaces,
            "graph allocations": sum(each.allocation_bytes for each in self.buckets),
            "executables": self.node_bytes,
        }

    @property
    def total_bytes(self) -> int:
        """All parts; the model is left out."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        lines = [
            *((f"bucket {each.name} alone", each.own_bytes) for each in self.buckets),
            *self.parts.items(),
            ("in all", self.total_bytes),
        ]
        return "\n".join(f"{name:<28}{in_words(size):>12}" for name, size in lines)


def _shared_bytes(runners: Iterable[CUDAGraphAR], cache: StaticKVCache) -> int:
    """Bytes of what buckets share beside K and V, each byte once: views lie in one storage."""
    kv = [tensor for layer in cache._owners for tensor in layer.named_tensors().values()]
    others = [*cache.named_tensors(padded=True).values()]
    for runner in runners:
        others += runner.cache.named_tensors(padded=True).values()
        if runner._step.has_logits:
            others.append(runner.logits)
    return covered_bytes(map(_storage, others), map(_storage, kv))


def _workspace_bytes(runners: Iterable[CUDAGraphAR]) -> int:
    """Of the streams that the steps were captured on, each once."""
    graphs = [graph for runner in runners for step in runner._variants for graph in step.graphs]
    owners = [owner.object for graph in graphs for owner in graph.owners]
    return sum(map(workspace_bytes, {id(owner): owner for owner in owners}.values()))


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
