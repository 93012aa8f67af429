"""Acceptance of several GPUs: ``torchrun --nproc-per-node N benchmarks/several_gpus WHAT``.

Rank 0 prints a table, and writes the figures to $OUT, or to benchmarks/results; what was wrong on a
rank comes last, and is exit status 1. ``one`` needs one GPU and one process, the others as many
GPUs as processes. ``--small`` runs shapes that a CPU can. Each takes a minute or two.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

_CASES = ("one", "tensor", "expert", "mixture", "buckets", "heads")

sys.path.insert(0, str(Path(__file__).parent))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=_CASES)
    parser.add_argument("--small", action="store_true", help="tiny shapes, also on the CPU")
    parser.add_argument("--steps", type=int, default=0, help="tokens or steps; 0: the full number")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for another rank")
    options = parser.parse_args()
    run = importlib.import_module(f"several_{options.what}").run
    from several_outcome import write

    from graphcore.parallel import Ranks

    ranks = Ranks.join(timeout_seconds=options.timeout)
    with ranks.together(options.what):
        outcome = run(ranks, small=options.small, steps=options.steps)
    costs = ranks.agree("costs", value=ranks.cost.mean_us).values
    problems = list(ranks.agree("problems", value=outcome.problems).values)
    if ranks.rank == 0:
        costs_by_rank = [round(each, 1) for each in costs]
        outcome.figures["agreeing_us_by_rank"] = costs_by_rank
        path = write(options.what, ranks, outcome, problems, options.small)
        lines = [*outcome.lines, f"agreeing: {costs_by_rank} us a round by rank", f"wrote {path}"]
        lines += [
            f"WRONG on rank {rank}: {each}" for rank, all_ in enumerate(problems) for each in all_
        ]
        print("\n".join(lines), flush=True)
    if options.what != "one":  # which leaves everything open, to see that the process exits
        ranks.close()
    return int(any(problems))


if __name__ == "__main__":
    sys.exit(main())
