"""torch.profiler: a Chrome trace of what a block runs on the device, as CUPTI records it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from graphcore.errors import DriverUnavailable
from graphcore.interop.torch import require


def require_profiler() -> Any:
    """torch, which can profile the device.

    Raises:
        DriverUnavailable: It is missing, or has no profiler of the device.
    """
    torch = require()
    profiler = torch.profiler
    if profiler.ProfilerActivity.CUDA not in profiler.supported_activities():
        raise DriverUnavailable(
            f"trace: torch {torch.__version__} cannot profile CUDA: it needs a build with CUPTI "
            "and a CUDA device"
        )
    return torch


def chrome_trace(run: Callable[[], None]) -> dict[str, Any]:
    """The trace of ``run``, which must wait for what it launched; raises as above."""
    torch = require_profiler()
    torch.cuda.init()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recording:
        run()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recording.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return trace
