"""Having the device to oneself for one test, while pytest-xdist runs others beside it.

Free memory is the device's, not the process's: a test that compares it fails when another worker
allocates meanwhile. Every gpu test of a parallel run holds a lock shared with the others; one
marked ``exclusive`` holds it alone. Another run, and another program, are not kept away.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def lock_folder() -> Path | None:
    """Where the workers of this run meet; None where it has no other workers."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    return None if run is None else Path(tempfile.gettempdir()) / f"graphcore-{run}"


@contextmanager
def device_lock(folder: Path | None, *, exclusive: bool) -> Iterator[None]:
    """Holds the device for the block, alone or with others that do not ask to be alone.

    Waits for whoever is in the way. Who asks to be alone is not overtaken by later ones. Does
    nothing without a folder, or where the system has no file locks.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        folder = None
    if folder is None:
        yield
        return
    folder.mkdir(exist_ok=True)
    with (folder / "door").open("w") as door, (folder / "device").open("w") as device:
        # all pass the door one after the other; an exclusive one stands in it while it waits
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(device, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
