"""What buckets take of memory, by bucket and by what they share, measured."""

from __future__ import annotations

from dataclasses import dataclass

from graphcore.decode.runner import CUDAGraphAR
from graphcore.executable.memory_report import MemoryReport, in_words


@dataclass(frozen=True, slots=True)
class BucketMemory:
    """Bytes of one bucket.

    Attributes:
        name: "batch x capacity".
        step_bytes: Its static tensors: token, history, masks; not K, V and logits, which are
            shared.
        graph: Of its graph; None where decoding is eager.
    """

    name: str
    step_bytes: int
    graph: MemoryReport | None

    @classmethod
    def of(cls, name: str, runner: CUDAGraphAR) -> BucketMemory:
        """Measures the bucket of ``runner``."""
        shared = {"logits", *runner.cache.named_tensors(padded=True)}
        own = [each for name, each in runner.named_tensors().items() if name not in shared]
        graph = None if runner.graph is None else runner.graph.memory_report()
        return cls(name, sum(each.numel() * each.element_size() for each in own), graph)

    @property
    def own_bytes(self) -> int:
        """What goes with the bucket alone."""
        return self.step_bytes + (0 if self.graph is None else self.graph.own_bytes)


@dataclass(frozen=True, slots=True)
class BucketsMemory:
    """Bytes of several buckets.

    Attributes:
        buckets: Each alone.
        kv_bytes: K and V, stored once.
        pool_bytes: The torch memory pool, or pools, of all captures; on the emulated driver the
            temporaries that its recordings made, which are not shared.
        is_shared: Whether it is one pool.
    """

    buckets: tuple[BucketMemory, ...]
    kv_bytes: int
    pool_bytes: int
    is_shared: bool

    @classmethod
    def of(
        cls, buckets: tuple[BucketMemory, ...], kv_bytes: int, pool_bytes: int | None
    ) -> BucketsMemory:
        """Of ``buckets`` that share a pool of ``pool_bytes``; None or 0: each has its own."""
        private = sum(each.graph.pool_bytes for each in buckets if each.graph is not None)
        return cls(buckets, kv_bytes, pool_bytes or private, bool(pool_bytes))

    @property
    def node_bytes(self) -> int:
        """Device memory of all executables."""
        return sum(each.graph.node_bytes for each in self.buckets if each.graph is not None)

    @property
    def total_bytes(self) -> int:
        """K and V, pools, graphs and static tensors; the model and the logits are left out."""
        steps = sum(each.step_bytes for each in self.buckets)
        allocated = sum(each.graph.allocation_bytes for each in self.buckets if each.graph)
        return self.kv_bytes + self.pool_bytes + self.node_bytes + steps + allocated

    def __str__(self) -> str:
        pool = "memory pool, shared" if self.is_shared else "memory pools, one each"
        lines = [
            *((f"bucket {each.name} alone", each.own_bytes) for each in self.buckets),
            (pool, self.pool_bytes),
            ("K and V, stored once", self.kv_bytes),
            ("in all", self.total_bytes),
        ]
        return "\n".join(f"{name:<28}{in_words(size):>12}" for name, size in lines)
