"""Runs the tests of the pages' script in Chromium and writes down what passed: `make browser`.

Where there is no Chromium those tests are skipped; the file says what a browser passed, and of
which script and which tests, so that one that has changed since does not count as proved.
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.repository import ROOT

TESTS = "tests/drawing/test_page_script.py"
RECORD = "tests/drawing/browser.json"
# what the outcome depends on: the tests, the graphs they draw, and what makes a page of them
SOURCES = (
    TESTS,
    "tests/helpers/snapshots.py",
    *(
        f"graphcore/drawing/{name}"
        for name in (
            "assets/page.js",
            "assets/page.css",
            "document_html.py",
            "html.py",
            "svg.py",
            "svg_box.py",
            "svg_head.py",
        )
    ),
)


def digests():
    """SHA-256 of each file that the outcome depends on."""
    return {name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest() for name in SOURCES}


def recorded():
    """What the last run in a browser wrote."""
    return json.loads((ROOT / RECORD).read_text(encoding="utf-8"))


def passed_in_a_browser():
    """Test functions that a browser passed, of the script and the tests as they are now."""
    record = recorded()
    return set(record["passed_functions"]) if record["sources"] == digests() else set()


def main():
    """Runs, and writes only where everything passed; the exit status is pytest's."""
    target = ROOT / RECORD
    before = target.read_text(encoding="utf-8") if target.exists() else None
    command = [sys.executable, "-m", "pytest", "-q", TESTS, f"--graphcore-summary={target}"]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    summary = recorded() if target.exists() else {"skipped": 1}
    if status or summary["skipped"]:
        if before is not None:
            target.write_text(before, encoding="utf-8")
        print(f"{RECORD} is left as it was: not every test passed", file=sys.stderr)
        return status or 1
    kept = {name: summary[name] for name in ("date", "passed", "passed_functions", "python")}
    record = kept | {"browser": _browser(), "sources": digests()}
    target.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


def _browser():
    from drawing.test_page_script import CHROMIUM

    done = subprocess.run([CHROMIUM, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
