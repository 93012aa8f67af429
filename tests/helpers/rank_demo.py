"""What ranks do in the tests of ``graphcore demo --parallel``."""

from __future__ import annotations

import contextlib
import io
import os
from dataclasses import replace

from graphcore.cli import main, parallel_demo


def demo(*arguments):
    """(exit status, standard output, standard error) of the command on this rank."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["demo", *arguments, "--timeout", "20"])
    return status, out.getvalue(), err.getvalue()


def differ_on_one():
    """As :func:`demo`, where what rank 1 alone decodes is something else."""
    run = parallel_demo._expert

    def changed(ranks, count):
        found = run(ranks, count)
        return replace(found, alone=[-1, *found.alone[1:]]) if ranks.rank == 1 else found

    parallel_demo._expert = changed
    return demo("--parallel", "expert", "--max-new-tokens", "4")


def divide_by_three():
    """Three ranks divide neither heads nor experts."""
    return [demo("--parallel", kind, "--max-new-tokens", "4") for kind in ("tensor", "expert")]


def without_torchrun():
    """One process that nobody has started as one of several, without a process group."""
    import torch.distributed as dist

    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    return demo("--parallel", "expert")
