"""LaunchAttributes: what an update must know of a graph's kernel nodes, read once and kept.

The driver accepts an update that changes a kernel's cluster size, or the function of a cooperative
kernel, and then keeps the old one, so an executable compares this summary before it trusts the
driver's word. Reading attributes costs about 1 us a node; comparing two summaries costs nothing to
speak of.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from graphcore.driver.api import Driver
from graphcore.driver.kernel_attributes import KernelAttributes, walk_kernels
from graphcore.driver.records import Dim3, FunctionHandle, GraphHandle, KernelParams
from graphcore.graph.snapshot import GraphSnapshot


@dataclass(frozen=True, slots=True)
class LaunchAttributes:
    """One (cluster, cooperative, priority) per kernel node, inner graphs included, in order.

    ``functions`` are those of the cooperative kernels, in the same order.
    """

    entries: tuple[KernelAttributes, ...]
    functions: tuple[FunctionHandle, ...] = ()
    # an update asks for no more than these, a thousand nodes or not
    _sizes: frozenset[Dim3] = field(init=False, repr=False, compare=False)
    _functions: frozenset[FunctionHandle] = field(init=False, repr=False, compare=False)
    _is_uniform: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes, functions = frozenset(entry[0] for entry in self.entries), frozenset(self.functions)
        object.__setattr__(self, "_sizes", sizes)
        object.__setattr__(self, "_functions", functions)
        object.__setattr__(self, "_is_uniform", len(sizes) <= 1 and len(functions) <= 1)

    @staticmethod
    def of(snapshot: GraphSnapshot) -> LaunchAttributes:
        """The summary of a graph that was read already."""
        params = [node.params for node in snapshot.walk()]
        kernels = [each for each in params if isinstance(each, KernelParams)]
        configs = (kernel.config for kernel in kernels)
        entries = tuple((each.cluster, each.cooperative, each.priority) for each in configs)
        return LaunchAttributes(entries, _cooperative(kernels))

    @staticmethod
    def read(driver: Driver, graph: GraphHandle) -> LaunchAttributes:
        """The summary of a graph, without the rest of a snapshot."""
        entries = tuple(driver.kernel_attributes(graph))
        if not any(entry[1] for entry in entries):
            return LaunchAttributes(entries)
        return LaunchAttributes(entries, _cooperative(walk_kernels(driver, graph)))

    def may_hide_a_change_to(self, new: LaunchAttributes) -> bool:
        """Whether an update to ``new`` could be answered SUCCESS and keep something old.

        False proves that it cannot: all clusters of both graphs are the same size, and all
        cooperative kernels run one function, whichever way the driver pairs the nodes. True asks
        for :func:`graphcore.graph.prediction.trap_differences`.
        """
        if not (self._is_uniform and new._is_uniform):
            return True
        if self._sizes == new._sizes and self._functions == new._functions:
            return False
        # a graph without such nodes hides nothing
        return len(self._sizes | new._sizes) > 1 or len(self._functions | new._functions) > 1


def _cooperative(kernels: Iterable[KernelParams]) -> tuple[FunctionHandle, ...]:
    return tuple(kernel.function for kernel in kernels if kernel.config.cooperative)
