"""Span: a stretch of memory under a name, and which addresses in it are elements of its tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphcore.errors import ConfigurationError
from graphcore.resources.tensors import TensorRef, describe


@dataclass(frozen=True, slots=True)
class Span:
    """Memory from ``start`` to ``start + size``.

    Args:
        name: What messages call it.
        start: The lowest address.
        size: Bytes to the end.
        tensor: The tensor that spans it; None for plain bytes. A strided one has holes, which are
            another's memory.
    """

    name: str
    start: int
    size: int
    tensor: TensorRef | None = None

    @classmethod
    def of(cls, name: str, item: Any) -> Span:
        """The span of a tensor, a buffer, or (address, bytes); raises as :func:`extent`."""
        tensor = None if isinstance(item, tuple) else describe(item, name=f"names[{name!r}]")
        start, size = extent(name, item if tensor is None else tensor)
        return cls(name, start, size, tensor)

    @property
    def end(self) -> int:
        """The address past the last byte."""
        return self.start + self.size

    def holds(self, address: int) -> bool:
        """Whether ``address`` is a byte of it; one past the end is not, nor is a hole."""
        if not self.start <= address < self.end:
            return False
        tensor = self.tensor
        return tensor is None or tensor.is_contiguous or _is_element(tensor, address - self.start)

    def overlaps(self, other: Span) -> bool:
        """Whether the two have an address between their ends in common."""
        return self.start < other.end and other.start < self.end

    def covers(self, other: Span) -> bool:
        """Whether ``other`` lies between its ends."""
        return self.start <= other.start and other.end <= self.end


def _is_element(tensor: TensorRef, offset: int) -> bool:
    """Whether a byte at ``offset`` from the lowest one belongs to an element."""
    left = offset // tensor.itemsize
    steps = sorted(
        ((abs(step), count) for step, count in zip(tensor.strides, tensor.shape, strict=True)),
        reverse=True,
    )
    for step, count in steps:
        if step:
            left -= min(left // step, count - 1) * step
    return not left


def extent(name: str, item: Any) -> tuple[int, int]:
    """(lowest address, bytes to its end) of anything a name may stand for.

    Raises:
        CacheTypeError: ``item`` is no tensor, no buffer and no (address, bytes).
        ConfigurationError: A negative address or size.
    """
    if isinstance(item, tuple) and len(item) == 2 and all(isinstance(part, int) for part in item):
        if min(item) < 0:
            raise ConfigurationError(
                f"names[{name!r}]: expected (address, bytes) of 0 or more, got {item}"
            )
        return item
    tensor = describe(item, name=f"names[{name!r}]")
    if not tensor.size:
        return tensor.address, 0
    # strides count elements; a view reaches further than its number of bytes says
    steps = [(count - 1) * step for count, step in zip(tensor.shape, tensor.strides, strict=True)]
    low, high = sum(min(0, step) for step in steps), sum(max(0, step) for step in steps)
    return tensor.address + low * tensor.itemsize, (high - low + 1) * tensor.itemsize
