"""EndLook: whether all rows have finished, looked at from the host while the device goes on.

The flags are copied to pinned memory behind the steps that were launched so far. A look reads the
copy that the look before it asked for: by then further steps are queued, so that the device is
never idle while the host waits, and the host runs ahead of it by two looks at most.
"""

from __future__ import annotations

from typing import Any

import torch


class EndLook:
    """The looks of one generation.

    Args:
        finished: bool ``[rows]``, the step's flags.
        at_once: Each look waits for its own copy: nothing is decoded past the end.
    """

    def __init__(self, finished: torch.Tensor, *, at_once: bool = False) -> None:
        is_on_device = finished.device.type != "cpu"
        self._finished = finished
        self._copy = torch.zeros(
            finished.shape, dtype=torch.bool, device="cpu", pin_memory=is_on_device
        )
        event: Any = torch.cuda.Event
        self._copied: Any = event() if is_on_device else None
        self._is_asked = False
        self._at_once = at_once

    def have_all_finished(self) -> bool:
        """What the look before this one asked for (False at the first); asks for the next one."""
        if self._is_asked and self._is_set():
            return True
        self._copy.copy_(self._finished, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._finished.device))
        self._is_asked = True
        return self._at_once and self._is_set()

    def _is_set(self) -> bool:
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._copy.all())
