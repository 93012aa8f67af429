"""Acceptance of several GPUs: ``torchrun --nproc-per-node N benchmarks/several_gpus WHAT``.

Checks come first and raise; the last lines are a table, printed by rank 0. ``one`` needs one GPU
and one process, the others as many GPUs as processes. ``--small`` runs shapes that a CPU can.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("one", "tensor", "expert"))
    parser.add_argument("--small", action="store_true", help="tiny shapes, also on the CPU")
    parser.add_argument("--steps", type=int, default=0, help="tokens or steps; 0: the full number")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for another rank")
    options = parser.parse_args()
    run = importlib.import_module(f"several_{options.what}").run
    from graphcore.parallel import Ranks

    ranks = Ranks.join(timeout_seconds=options.timeout)
    with ranks.together(options.what):
        lines = run(ranks, small=options.small, steps=options.steps)
    costs = ranks.agree("done", value=ranks.cost.mean_us).values
    if ranks.rank == 0:
        lines.append(f"agreeing: {' '.join(f'{each:.0f}' for each in costs)} us a round by rank")
        print("\n".join(lines), flush=True)
    if options.what != "one":  # which leaves everything open, to see that the process exits
        ranks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
