"""Graphs go before the communicators that they captured, at the end of the process too."""

import os
import subprocess
import sys
import textwrap

from helpers import rank_steps
from helpers.ranks import run_ranks


def test_closing_ranks_closes_the_graphs_of_their_communicator_and_no_others():
    for answer in run_ranks(2, rank_steps.close_graphs_first):
        closed, left, more, stays = answer.result
        assert closed == (True, True, True)
        assert left == (False, False)
        assert more == 1  # that of the other communicator, when all are asked for
        assert stays


def test_a_process_that_leaves_everything_open_exits_and_its_graphs_go_first():
    program = textwrap.dedent(
        """
        import os, torch, torch.distributed as dist, graphcore
        from graphcore.parallel import Ranks
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        ranks = Ranks.join(backend="gloo")
        x = torch.ones(2)
        executable = graphcore.capture_function(lambda: dist.all_reduce(x)).instantiate()
        executable.launch()
        leave = dist.destroy_process_group
        dist.destroy_process_group = lambda *args: (print(executable.is_closed), leave(*args))
        """
    )
    environment = {**os.environ, "GRAPHCORE_DRIVER": "emulated"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=120, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n", done.stdout  # closed by the time its communicator went
