"""Collectives of torch.distributed as captures see them: which operators, whose communicator.

A communicator is made by its first collective. That takes memory, starts threads and waits for the
other ranks, none of which a capture allows: the first one must have run before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graphcore.errors import CaptureError

_NAMESPACES = frozenset({"c10d", "_c10d_functional"})
_WITHOUT_WORK = frozenset({"wait_tensor", "_wrap_tensor_autograd"})


def is_in_use() -> bool:
    """Whether the process has a process group."""
    module = sys.modules.get("torch.distributed")
    return module is not None and module.is_available() and bool(module.is_initialized())


def is_collective(func: Any) -> bool:
    """Whether an operator overload is a collective, or belongs to one."""
    return getattr(func, "namespace", None) in _NAMESPACES


def does_work(func: Any) -> bool:
    """Whether a collective operator sends anything; not where it only waits or wraps."""
    return func._schema.name.partition("::")[2] not in _WITHOUT_WORK


def group_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The process group that a collective operator is called with; None where it names none."""
    import torch
    from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group

    for value in (*args, *kwargs.values()):
        if isinstance(value, ProcessGroup):
            return value
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return ProcessGroup.unbox(value)
    names = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
    return _resolve_process_group(names[-1]) if names else None  # type: ignore[arg-type]


def label_of(group: Any) -> str:
    """What messages call a process group."""
    return f"communicator {group.group_name!r} of {group.size()} ranks"


def check_has_worked(operator: str, group: Any) -> None:
    """Refuses a communicator whose first collective would be the captured one.

    Raises:
        CaptureError: It has run none so far; nothing was sent.
    """
    if group._get_sequence_number_for_group() == 0:
        raise CaptureError(
            f"{operator}: expected a communicator that has run a collective before this capture, "
            f"got {label_of(group)}, which has run none: its first one would be made inside the "
            "capture. Make groups before, and run the step once outside (a warm-up does, and "
            "graphcore.parallel.warm_up(group))"
        )


def groups_in(owners: Iterator[Any]) -> list[Any]:
    """The process groups among objects that a graph keeps."""
    if not is_in_use():
        return []
    from torch._C._distributed_c10d import ProcessGroup

    return [each for each in owners if isinstance(each, ProcessGroup)]
