"""Values a user gives for a buffer's contents, as an array of its element type or refused.

What the element type cannot hold is refused, not cut off: NumPy would wrap, truncate or write the
bits of another number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphcore.errors import ConfigurationError
from graphcore.resources.dtypes import DType

if TYPE_CHECKING:
    import numpy


def as_contents(values: Any, dtype: DType) -> numpy.ndarray[Any, Any]:
    """``values`` as a NumPy array of ``dtype`` (of its stand-in where NumPy lacks the type).

    Raises:
        ConfigurationError: Not numbers, or numbers that ``dtype`` does not hold.
    """
    import numpy

    try:
        array = numpy.asarray(values)
    except (TypeError, ValueError) as error:  # nested lists of unequal length, for example
        raise ConfigurationError(f"values: expected numbers, got {values!r}: {error}") from None
    if array.dtype.kind not in "biufc":
        raise ConfigurationError(f"values: expected numbers, got {values!r} ({array.dtype})")
    if not dtype.is_numpy and array.dtype.kind not in "biu" and array.size:
        raise ConfigurationError(
            f"values: expected the bits of {dtype.name} as {dtype.numpy}, got {array.dtype}: NumPy "
            "has no such type; write them through torch.from_dlpack(buffer)"
        )
    target = numpy.dtype(dtype.numpy)
    is_held = array.dtype.kind != "c" or target.kind == "c"
    if is_held:
        with numpy.errstate(all="ignore"):
            cast = array.astype(target)
        is_held = target.kind not in "biu" or bool((cast == array).all())
    if not is_held:
        raise ConfigurationError(f"values: expected numbers that {target} holds, got {values!r}")
    return cast
