"""The public names: sorted, importable, and loaded from where the package says they live."""

import importlib
import importlib.metadata
import inspect
import pkgutil

import graphcore_kernels
import pytest

import graphcore

# packages whose __all__ is a promise to users
PUBLIC = (
    "graphcore",
    "graphcore.bench",
    "graphcore.cli",
    "graphcore.decode",
    "graphcore.driver",
    "graphcore.errors",
    "graphcore.executable",
    "graphcore.graph",
    "graphcore.interop",
    "graphcore.moe",
    "graphcore.testing",
    "graphcore_kernels",
)
NAMES = [(module, name) for module in PUBLIC for name in importlib.import_module(module).__all__]

MODULES = [
    module.name
    for package in (graphcore, graphcore_kernels)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.endswith(".__main__")  # importing it is running it
]


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names_are_sorted_without_repetition(module):
    names = importlib.import_module(module).__all__
    assert list(names) == sorted(set(names), key=_constants_classes_functions)


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{m}.{n}" for m, n in NAMES])
def test_a_public_name_is_there_and_says_what_it_is(module, name):
    value = getattr(importlib.import_module(module), name)
    if inspect.isclass(value) or inspect.isroutine(value):
        assert value.__doc__, f"{module}.{name} has no docstring"


def test_the_lazy_homes_are_the_public_names_and_nothing_else():
    assert list(graphcore._HOMES) == graphcore.__all__


@pytest.mark.parametrize("name", graphcore.__all__)
def test_a_lazy_name_is_the_object_of_its_home(name):
    assert getattr(graphcore, name) is getattr(
        importlib.import_module(graphcore._HOMES[name]), name
    )
    assert name in dir(graphcore)


@pytest.mark.parametrize(
    "module", ["graphcore", "graphcore.decode", "graphcore.moe", "graphcore.parallel"]
)
def test_an_unknown_name_is_an_attribute_error_that_names_the_module(module):
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'captures'"):
        importlib.import_module(module).captures  # noqa: B018


@pytest.mark.parametrize("part", ["decode", "moe", "testing"])
def test_a_part_that_nobody_imported_is_told_with_its_import(part, monkeypatch):
    monkeypatch.delattr(graphcore, part, raising=False)
    with pytest.raises(AttributeError, match=f"'{part}'; write: import graphcore.{part}$"):
        getattr(graphcore, part)


def test_every_part_is_told_with_its_import():
    found = {module.name for module in pkgutil.iter_modules(graphcore.__path__) if module.ispkg}
    told = {name for name in found if graphcore._advice(name)}
    assert found - told == {"cli", "drawing", "driver", "executable", "graph"}
    assert graphcore._advice("captures") == ""


def test_every_exception_of_ours_descends_from_the_root_and_is_public():
    errors = importlib.import_module("graphcore.errors")
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), (errors.GraphcoreError, errors.GraphcoreWarning))
        assert name in graphcore.__all__


@pytest.mark.parametrize("module", MODULES)
def test_every_module_imports_on_its_own_and_says_what_it_owns(module):
    assert importlib.import_module(module).__doc__


def test_what_makes_html_has_the_same_name_everywhere():
    names = {
        name
        for module in MODULES
        for cls in vars(importlib.import_module(module)).values()
        if inspect.isclass(cls) and cls.__module__ == module
        for name in vars(cls)
        if "html" in name and not name.startswith("_") and inspect.isroutine(vars(cls)[name])
    }
    assert names == {"to_html", "to_html_page"}


def test_the_version_is_that_of_the_distribution():
    assert importlib.metadata.version("graphcore-cuda") == graphcore.__version__


def _constants_classes_functions(name):
    return 0 if name.isupper() else 1 if name[0].isupper() else 2, name
