"""What buffers and views of a plan have in common: new views of them, as NumPy makes views."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphcore.plan.records import View


class Operand:
    """A buffer of a plan, or a view of one. Nothing here copies; what would need to is refused."""

    __slots__ = ()
    # NumPy is not to go through it element by element where the two meet in an expression
    __array_ufunc__ = None

    @property
    def whole(self) -> View:
        """All of it as a view."""
        raise AttributeError("whole")  # each operand has its own

    def __getitem__(self, index: Any) -> View:
        """A view by basic indexing (int, slice, ..., None), as in NumPy.

        Raises:
            ConfigurationError: The index does not fit.
        """
        from graphcore.plan.views import index_view

        return index_view(self.whole, index)

    def __len__(self) -> int:
        shape = self.whole.shape
        if not shape:
            raise TypeError(f"a view of {self.whole.buffer.name} without axes has no length")
        return shape[0]

    def __iter__(self) -> Iterator[View]:
        """The views along the first axis."""
        return (self[position] for position in range(len(self)))

    def __bool__(self) -> bool:
        return True

    @property
    def T(self) -> View:  # noqa: N802 -- NumPy's and torch's name
        """The view with its axes reversed."""
        return self.transpose()

    def transpose(self, *axes: Any) -> View:
        """Axes in the order given; without any, reversed (NumPy's ``transpose``).

        Raises:
            ConfigurationError: Not each axis once.
        """
        from graphcore.plan.views import permute_view

        return permute_view(self.whole, axes)

    def permute(self, *axes: Any) -> View:
        """Torch's name of :meth:`transpose`."""
        return self.transpose(*axes)

    def reshape(self, *shape: Any) -> View:
        """The same elements under another shape; one size may be -1.

        Raises:
            ConfigurationError: Another number of elements, or a shape that would need a copy.
        """
        from graphcore.plan.views import reshape_view

        return reshape_view(self.whole, shape)

    def view(self, dtype: Any) -> View:
        """The same bytes as elements of another type; the last axis grows or shrinks.

        Raises:
            ConfigurationError: The bytes do not divide into whole, aligned elements.
        """
        from graphcore.plan.views import retype_view

        return retype_view(self.whole, dtype)

    def as_strided(
        self, shape: Sequence[int], strides: Sequence[int] | None = None, offset: int = 0
    ) -> View:
        """Any shape and strides, ``offset`` elements after the first one.

        Nothing is checked here but the form; the plan's validation checks the bounds.
        """
        from graphcore.plan.views import as_strided

        return as_strided(self.whole, shape, strides, offset)
