"""Lists the lines of graphcore/ that coverage is told to leave out, and counts them."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARK = "pragma: no " + "cover"


def pragmas(folder):
    """(file, line number, line) of every line below ``folder`` that has the mark."""
    for path in sorted(folder.rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if MARK in line:
                yield path, number, line.strip()


def main(folder=ROOT / "graphcore", root=ROOT):
    """Prints the lines and their number."""
    found = list(pragmas(folder))
    for path, number, line in found:
        print(f"{path.relative_to(root)}:{number}: {line}")
    print(f"{len(found)} lines of {folder.name}/ are marked '{MARK}'")
    return 0


if __name__ == "__main__":
    sys.exit(main())
