"""The command ``graphcore``: demo, doctor, bench.

Errors of ours end in one line and exit status 2 (``--debug`` shows the traceback); Ctrl-C in 130.
"""

from graphcore.cli.command import main

__all__ = ["main"]
