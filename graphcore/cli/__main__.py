"""``python -m graphcore.cli``: the same as the command ``graphcore``; what torchrun starts."""

import sys

from graphcore.cli import main

sys.exit(main())
