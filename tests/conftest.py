"""The session of the whole suite looks after the tests that the page of features names."""

import pytest
from helpers.named_tests import NamedTests


def pytest_configure(config):
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if is_whole and not config.option.keyword and not hasattr(config, "workerinput"):
        config.pluginmanager.register(NamedTests(), "graphcore-named-tests")
