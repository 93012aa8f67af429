"""``python -m graphcore``: the same as the command ``graphcore``."""

import sys

from graphcore.cli import main

sys.exit(main())
