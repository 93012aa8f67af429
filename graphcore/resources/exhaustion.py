"""Memory that runs out while something of several pieces is made: what all of it needs.

The error itself, the driver's or torch's, knows the one piece that found no room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from graphcore.driver.codes import is_out_of_memory
from graphcore.errors import CudaError


@contextmanager
def telling_need(need: Callable[[], str]) -> Iterator[None]:
    """Notes on an error for want of memory what is needed in all, as ``need`` says."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            with suppress(CudaError):  # the driver may not even say what there is
                error.add_note(need())
        raise
