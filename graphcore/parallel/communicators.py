"""Communicators: what joins the ranks, made and warmed up before anything is captured."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from graphcore.driver import active
from graphcore.errors import CaptureError, ConfigurationError, DriverUnavailable, RankError
from graphcore.interop.torch import require

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def distributed() -> Any:
    """``torch.distributed``.

    Raises:
        DriverUnavailable: torch is missing, or was built without it.
    """
    dist = require().distributed
    if not dist.is_available():
        raise DriverUnavailable(
            "torch.distributed is needed here, and this torch was built without it"
        )
    return dist


def begin(backend: str, seconds: float, device: Any) -> None:
    """Makes the default process group of what torchrun (or the like) has started.

    Args:
        backend: "nccl" or "gloo".
        seconds: Of patience with a collective.
        device: ``torch.device`` of this rank.

    Raises:
        ConfigurationError: Nobody has started this process as one of several.
        DriverUnavailable: The backend is not there.
        RankError: The ranks did not meet in time.
    """
    dist = distributed()
    check_backend(dist, backend)
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise ConfigurationError(
            f"environment: expected {', '.join(_VARIABLES)}, got no {missing[0]}; start the "
            "processes with torchrun --nproc-per-node N, or make a process group before"
        )
    try:
        dist.init_process_group(
            backend,
            timeout=timedelta(seconds=seconds),
            device_id=device if backend == "nccl" else None,
        )
    except RuntimeError as error:
        raise RankError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: the ranks did not meet "
            f"within {seconds:g} s: {error}"
        ) from error


def check_backend(dist: Any, backend: str) -> None:
    """Raises DriverUnavailable where ``backend`` is not there, ConfigurationError for others."""
    known = {"nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available}
    if backend not in known:
        raise ConfigurationError(f"backend: expected one of {list(known)}, got {backend!r}")
    if not known[backend]():
        hint = "install a build of torch for CUDA" if backend == "nccl" else "install another torch"
        raise DriverUnavailable(
            f"backend {backend!r} is needed here, and this torch was built without it: {hint}"
        )


def check_fits(group: Any, device: Any) -> None:
    """Refuses a group that cannot send what lies on ``device``.

    Raises:
        ConfigurationError: It has no backend for it; or another one than NCCL on a GPU, whose
            collectives no capture takes.
    """
    backends = {each.type for each in group._device_types}
    if device.type not in backends:
        raise ConfigurationError(
            f"group: expected a backend for {device.type}, got one for {sorted(backends)}"
        )
    name = group._get_backend(device).name()
    if device.type == "cuda" and name != "nccl":
        raise ConfigurationError(
            f"group: expected NCCL on {device}, whose collectives can be captured, got {name}"
        )


def default_device(group: Any) -> Any:
    """The device whose memory a group is for: the current GPU with NCCL, else the CPU."""
    import torch

    gpu = torch.device("cuda")
    kinds = {each.type for each in group._device_types}
    if gpu.type in kinds and torch.cuda.is_available() and group._get_backend(gpu).name() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def warm_up(group: Any = None, device: Any = None) -> None:
    """Runs each kind of collective once, so that captures may use the communicator.

    NCCL makes its connections when they are first needed, and other ones for an all-to-all than
    for an all-reduce. All ranks of the group must call it.

    Args:
        group: A process group; None: the default one.
        device: ``torch.device`` whose memory will travel; None: as of :func:`default_device`.

    Raises:
        CaptureError: Inside a capture.
        ConfigurationError: A group that cannot send what lies there.
    """
    import torch

    if active.current() is not None:
        raise CaptureError("warm_up: not inside a capture, which would hold its collectives")
    dist = distributed()
    chosen = dist.group.WORLD if group is None else group
    where = default_device(chosen) if device is None else torch.device(device)
    check_fits(chosen, where)
    size = chosen.size()
    small, large = (torch.zeros(count, device=where) for count in (1, size))
    dist.all_reduce(small, group=chosen)
    # newer versions have other names for these two
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gather(large, small, group=chosen)
    scatter(small, large, group=chosen)
    dist.all_to_all_single(torch.empty_like(large), large, group=chosen)
    if where.type == "cuda":
        torch.cuda.current_stream(where).synchronize()
