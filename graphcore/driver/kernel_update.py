"""KernelUpdate: repeated changes of one kernel node of an executable, prepared once.

The arguments lie in one block, as the kernel takes them: a change writes the block and commits it.
What was written and not committed means nothing to the executable. Not locked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from graphcore.driver.codes import cuda_error
from graphcore.driver.records import KernelParams, NodeHandle

CALL = "cuGraphExecKernelNodeSetParams"


class KernelUpdate:
    """Made by :meth:`Driver.bind_exec_kernel_update`.

    Args:
        node: The node, by its handle in the source graph.
        params: The parameters it has now.
        hand_over: Gives parameters to the driver; raises CudaError.

    Attributes:
        block: The argument bytes, at the offsets of ``layout``.
        layout: (offset, size) of each argument.
        commit: Hands the block over, one call without arguments. Its result is falsy; anything else
            goes to :meth:`refuse`. It may also raise CudaError. Until it has succeeded the
            executable is as before.
    """

    __slots__ = ("_hand_over", "block", "commit", "layout", "node", "params")

    def __init__(
        self,
        node: NodeHandle,
        params: KernelParams,
        hand_over: Callable[[KernelParams], None] | None = None,
    ) -> None:
        self.node = node
        self.params = params
        self.layout = _packed([len(data) for data in params.arguments])
        self.block = bytearray(sum(-(-size // 8) * 8 for _, size in self.layout))
        self.commit: Callable[[], object] = self._commit
        self._hand_over = hand_over
        self.write(params.arguments)

    def __call__(self, changed: KernelParams) -> None:
        """Changes the node to ``changed``.

        Raises:
            CudaError: INVALID_VALUE where an argument has another size; the driver's refusal. The
                node is as before.
        """
        self._check_sizes(changed)
        before, held = self.params, bytes(self.block)
        try:
            self._shape(changed)
            self.params = changed
            self.write(changed.arguments)
            result = self.commit()
            if result:
                self.refuse(result)
        except BaseException:
            self.block[:] = held
            self._shape(before)
            self.params = before
            raise

    def arguments(self) -> tuple[bytes, ...]:
        """What the block holds, argument by argument."""
        block = bytes(self.block)
        return tuple([block[offset : offset + size] for offset, size in self.layout])

    def write(self, arguments: tuple[bytes, ...]) -> None:
        """Puts ``arguments`` of the right sizes into the block."""
        for (offset, size), data in zip(self.layout, arguments, strict=True):
            self.block[offset : offset + size] = data

    def refuse(self, result: object) -> NoReturn:
        """Raises the CudaError of a commit that failed."""
        raise cuda_error("CUDA_ERROR_UNKNOWN", CALL, node=self.node, description=repr(result))

    def _shape(self, params: KernelParams) -> None:
        """Takes function and launch shape over, where a driver has prepared them."""

    def _commit(self) -> object:
        assert self._hand_over is not None
        return self._hand_over(replace(self.params, arguments=self.arguments()))

    def _check_sizes(self, changed: KernelParams) -> None:
        expected = [size for _, size in self.layout]
        got = [len(data) for data in changed.arguments]
        if got != expected:
            raise cuda_error(
                "CUDA_ERROR_INVALID_VALUE",
                CALL,
                node=self.node,
                description=f"arguments: expected sizes {expected}, got {got} bytes",
            )


def _packed(sizes: list[int]) -> tuple[tuple[int, int], ...]:
    """Places one after the other, each at a multiple of 8: an order that one struct format has."""
    layout, end = [], 0
    for size in sizes:
        layout.append((end, size))
        end += -(-size // 8) * 8
    return tuple(layout)
