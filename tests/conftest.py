"""The session looks after names: of tests that the page of features has, and of cases."""

import gc
import os
import re
import time

import pytest
from helpers.device_run import UNTIL
from helpers.named_tests import NamedTests

SET_IN_A_NAME = re.compile(r"\{(?=[^{}:]*')[^{}:]*, [^{}:]*\}")
"""A set with strings, printed: {3, '4'}. Its order is another in every process."""


def pytest_configure(config):
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if is_whole and not config.option.keyword and not hasattr(config, "workerinput"):
        config.pluginmanager.register(NamedTests(), "graphcore-named-tests")


def pytest_collection_modifyitems(items):
    for item in items:
        # another name in every process: runs cannot be shared
        if " at 0x" in item.nodeid or SET_IN_A_NAME.search(item.nodeid):
            raise pytest.UsageError(f"{item.nodeid}: give the case an id")


def pytest_runtest_setup():
    until = os.environ.get(UNTIL)
    if until is not None and time.time() > float(until):
        pytest.skip("the run's time limit is past")


@pytest.fixture(autouse=True)
def _garbage_goes_with_its_test():
    """Collections look at what the test made: all of torch takes half a second each time."""
    gc.freeze()
    yield
    gc.collect()
    gc.unfreeze()
