"""torch.distributed in a capture on a device: which communicators a graph uses, and which it may.

Nothing happens where the process has no process group. Code that torch compiled is not looked into:
what it used is found out afterwards.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from graphcore.driver import Driver, active, collectives


@contextmanager
def watching_collectives(driver: Driver) -> Iterator[None]:
    """Lets a capture refuse new communicators, and its graph keep those that it uses.

    The emulated driver's recorder does both by itself.

    Raises:
        CaptureError: From a collective in the block whose communicator has run none before.
    """
    if driver.is_emulated or not collectives.is_in_use():
        yield
        return
    before = _sequence_numbers()
    with _watch()():
        yield
    for group, number in _sequence_numbers().items():
        if number != before.get(group, 0):
            active.keep(group, collectives.label_of(group))


def _sequence_numbers() -> dict[Any, int]:
    """Group -> how many collectives it has run, of the groups that this rank is in."""
    world: Any = sys.modules["torch.distributed.distributed_c10d"]
    groups = [each for each in world._world.pg_map if hasattr(each, "group_name")]
    return {each: each._get_sequence_number_for_group() for each in groups}


@functools.cache
def _watch() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class CollectiveWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Sees the collectives of this thread before they are sent."""

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True  # compiled code stays compiled

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            del types
            given = kwargs or {}
            if collectives.is_collective(func) and collectives.does_work(func):
                group = collectives.group_of(args, given)
                if group is not None:
                    collectives.check_has_worked(func._schema.name, group)
            return func(*args, **given)

    return CollectiveWatch
