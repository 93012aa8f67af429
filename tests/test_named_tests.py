"""A test that the page of features names has run: here, on a device, or in a browser."""

import json
import subprocess
import sys

import pytest
from helpers import browser_run, documents, named_tests
from helpers.repository import ROOT

A, B = "tests/x.py::test_a", "tests/x.py::test_b"


@pytest.mark.parametrize(
    ("outcomes", "on_device", "found"),
    [
        pytest.param({A: {"passed"}}, set(), [], id="passed here"),
        pytest.param({A: {"passed", "skipped"}}, set(), [], id="one case passed here"),
        pytest.param({A: {"skipped"}}, {A}, [], id="passed on a device"),
        pytest.param({A: {"skipped"}}, {B}, [A], id="skipped everywhere"),
        pytest.param({A: {"failed"}}, set(), [], id="failed, which is told by itself"),
        pytest.param({}, set(), [], id="left out of this run"),
    ],
)
def test_what_ran_nowhere_is_found(outcomes, on_device, found):
    assert named_tests.never_run({A}, outcomes, on_device) == found


def test_a_file_stands_for_its_tests_together():
    some, none = {A: {"skipped"}, B: {"passed"}}, {A: {"skipped"}, B: {"skipped"}}
    assert named_tests.never_run({"tests/x.py"}, some, set()) == []
    assert named_tests.never_run({"tests/x.py"}, none, set()) == ["tests/x.py"]
    assert named_tests.never_run({"tests/x.py"}, none, {B}) == []


def test_a_run_on_a_device_that_is_on_file_has_passed_tests_of_this_suite():
    passed = named_tests.passed_on_a_device()
    named = documents.named_tests(documents.read(named_tests.PAGE))
    assert len(passed & named) > 20


def test_a_browser_has_passed_the_script_of_the_pages_as_it_is_now():
    record = browser_run.recorded()
    assert record["sources"] == browser_run.digests(), "a page has changed since: make browser"
    assert len(browser_run.passed_in_a_browser()) == record["passed"] >= 5


def test_what_a_browser_passed_before_the_script_changed_does_not_count(monkeypatch):
    before = dict.fromkeys(browser_run.SOURCES, "other")
    monkeypatch.setattr(browser_run, "digests", lambda: before)
    assert browser_run.passed_in_a_browser() == set()


def test_a_session_with_a_named_test_that_ran_nowhere_fails_and_names_it(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text(
        "import pytest\n\n\n@pytest.mark.skip(reason='never')\ndef test_named():\n    assert True\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    (tmp_path / "tests/conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "from helpers import documents, named_tests\n"
        "documents.read = lambda page: '`tests/test_it.py::test_named`'\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(named_tests.NamedTests())\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "names tests/test_it.py::test_named: skipped here" in done.stdout


def test_functions_are_listed_where_a_case_passed_and_none_failed(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\n\n"
        "@pytest.mark.parametrize('n', [1, 2])\ndef test_good(n):\n    assert n\n\n\n"
        "@pytest.mark.parametrize('n', [0, 1])\ndef test_half(n):\n    assert n\n"
    )
    summary = tmp_path / "summary.json"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        + ([] if "graphcore.testing.plugin" in _installed() else ["-p", "graphcore.testing.plugin"])
        + ["--graphcore-summary", str(summary)],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    told = json.loads(summary.read_text())
    assert told["passed_functions"] == ["test_it.py::test_good"]
    assert told["failed_tests"] == ["test_it.py::test_half[0]"]


def _installed():
    from importlib import metadata

    return {point.name for point in metadata.entry_points(group="pytest11")}
