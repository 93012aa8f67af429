"""Whether this thread records a graph now, through graphcore or through torch."""

from __future__ import annotations

import torch

from graphcore.driver import active
from graphcore.errors import CaptureError


def refuse_inside_capture(action: str) -> None:
    """Raises CaptureError while this thread records a graph, through graphcore or torch."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if active.current() is not None or (initialized and torch.cuda.is_current_stream_capturing()):
        raise CaptureError(f"{action}: not while a graph is captured; do it before the capture")
