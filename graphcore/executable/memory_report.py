"""MemoryReport: what one graph and its executable take of memory, by kind, measured.

The pool's segments are what torch holds of the device for the graph's temporaries and outputs, used
or not. Owners are what the graph keeps alive and somebody else allocated: inputs, weights; dropping
the graph frees them only where nobody else holds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphcore.driver import Driver
from graphcore.driver.records import (
    AllocParams,
    ChildParams,
    ConditionalParams,
    GraphHandle,
    NodeKind,
)
from graphcore.executable.calibration import expected_bytes, node_memory
from graphcore.interop.torch import MemoryPool
from graphcore.interop.torch_workspaces import workspace_bytes
from graphcore.resources.lifetime import OwnerSet

if TYPE_CHECKING:
    from graphcore.executable.graph import Graph

Span = tuple[int, int]  # address, bytes
_EXACT = 1 << 53  # a budget of "as much as you like" may be larger than any float


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes of one graph with one executable.

    Args:
        pool_bytes: Segments of its torch memory pool, and temporaries that the emulated driver's
            recording made.
        shares_pool: Whether other graphs lie in that pool too: its bytes count for all of them.
        allocation_bytes: Memory that the graph's own allocation nodes ask for.
        nodes: Nodes, those of inner graphs included.
        bytes_per_node: Device memory of one, as measured on this driver.
        owner_bytes: Tensors that the graph keeps alive, outside the pool; overlaps count once.
        workspace_bytes: What torch's products work in, of the graph's capture streams: they stay
            with the streams, for the next captures. Not in the totals.
    """

    pool_bytes: int
    shares_pool: bool
    allocation_bytes: int
    nodes: int
    bytes_per_node: float
    owner_bytes: int
    workspace_bytes: int = 0

    @property
    def node_bytes(self) -> int:
        """Device memory of the executable itself."""
        return round(self.nodes * self.bytes_per_node)

    @property
    def own_bytes(self) -> int:
        """What goes with the graph alone: nodes, allocations, and a pool that is not shared."""
        pool = 0 if self.shares_pool else self.pool_bytes
        return pool + self.allocation_bytes + self.node_bytes

    @property
    def total_bytes(self) -> int:
        """Pool, allocations and nodes; owners are others' memory."""
        return self.pool_bytes + self.allocation_bytes + self.node_bytes

    def __str__(self) -> str:
        shared = " (shared with other graphs)" if self.shares_pool else ""
        nodes = f" ({self.nodes} x {self.bytes_per_node:.0f} bytes)"
        lines = [
            ("pool", self.pool_bytes, shared),
            ("graph allocations", self.allocation_bytes, ""),
            ("executable", self.node_bytes, nodes),
            ("in all", self.total_bytes, ""),
            ("kept alive, others' memory", self.owner_bytes, ""),
        ]
        if self.workspace_bytes:
            lines.append(("workspaces of its streams", self.workspace_bytes, ""))
        return "\n".join(f"{name:<28}{in_words(size):>12}{more}" for name, size, more in lines)


def memory_report(graph: Graph) -> MemoryReport:
    """Measures ``graph``; LifecycleError where it is closed."""
    driver, handle = graph.driver, graph.handle
    pools = pools_of(graph.owners)
    private = list(dict.fromkeys(graph.private_memory()))
    nodes, allocated = count_nodes(driver, handle)
    return MemoryReport(
        pool_bytes=sum(size for _, size in private),
        shares_pool=any(pool.is_shared for pool in pools),
        allocation_bytes=allocated,
        nodes=nodes,
        bytes_per_node=node_memory(driver).bytes_per_node,
        owner_bytes=covered_bytes(_tensor_spans(graph.owners), private),
        workspace_bytes=sum(workspace_bytes(owner.object) for owner in graph.owners),
    )


def pools_of(owners: OwnerSet) -> list[MemoryPool]:
    """The torch memory pools among ``owners``."""
    return [owner.object for owner in owners if isinstance(owner.object, MemoryPool)]


def count_nodes(driver: Driver, graph: GraphHandle) -> tuple[int, int]:
    """(nodes, bytes of allocation nodes) of ``graph`` and the graphs inside it."""
    count, allocated = 0, 0
    waiting = [graph]
    while waiting:
        for node in driver.nodes(waiting.pop()):
            count += 1
            kind = driver.node_kind(node)
            if kind not in _READ:
                continue
            params = driver.node_params(node)
            if isinstance(params, AllocParams):
                allocated += params.size
            elif isinstance(params, ChildParams):
                waiting.append(params.graph)
            elif isinstance(params, ConditionalParams):
                waiting.extend(params.bodies)
    return count, allocated


def need_of(driver: Driver, graph: GraphHandle) -> str:
    """What an executable of ``graph`` needs of device memory, in words."""
    nodes, allocated = count_nodes(driver, graph)
    words = (
        f"an executable of its {nodes} nodes takes some {in_words(expected_bytes(driver, nodes))}"
    )
    if allocated:
        words += f", and its allocation nodes {in_words(allocated)} at a launch"
    return words


_READ = frozenset({NodeKind.ALLOC, NodeKind.CHILD, NodeKind.CONDITIONAL})


def covered_bytes(spans: Iterable[Span], without: Iterable[Span] = ()) -> int:
    """Bytes that ``spans`` cover, each byte once, outside the spans ``without``."""
    others = list(without)  # looked through twice
    return _union(spans, others) - _union((), others)


def _union(spans: Iterable[Span], others: Iterable[Span]) -> int:
    covered, end = 0, 0
    for address, size in sorted((*spans, *others)):
        start = max(address, end)
        if address + size > start:
            covered += address + size - start
            end = address + size
    return covered


def _tensor_spans(owners: OwnerSet) -> Iterator[Span]:
    for owner in owners:
        if owner.record is not None:
            tensor = owner.record.tensor
            yield tensor.address, tensor.nbytes


def in_words(size: float) -> str:
    """``size`` bytes, as 1.5 MiB."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size = size / 1024 if size < _EXACT else size // 1024
    return f"{size:.1f} GiB" if size < _EXACT else f"{size} GiB"
