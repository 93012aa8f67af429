"""What is shipped: two packages under their own names, with their kernels and assets, no tests."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser

import pytest
from graphcore_kernels import __file__ as kernels_file
from helpers.repository import ROOT, tracked_files

PACKAGES = {
    "graphcore": ROOT / "graphcore",
    "graphcore_kernels": ROOT / "kernels/graphcore_kernels",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_folder_of_the_kernels_is_no_package():
    """A package called plain ``kernels`` would hide Hugging Face's of that name."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "kernels" / "graphcore_kernels" / "__init__.py").exists()


def test_the_distribution_is_called_graphcore_cuda_and_both_packages_are_typed():
    assert PROJECT["name"] == "graphcore-cuda"
    for folder in PACKAGES.values():
        assert (folder / "py.typed").exists()


def test_cuda_is_required_where_it_exists_and_everything_else_is_an_extra():
    required = {requirement.partition(">")[0] for requirement in PROJECT["dependencies"]}
    assert required == {"cuda-python", "numpy"}
    everything = PROJECT["optional-dependencies"]["all"][0]
    extras = set(PROJECT["optional-dependencies"]) - {"all"}
    assert set(everything.partition("[")[2].rstrip("]").split(",")) == extras


def test_an_editable_install_serves_the_kernels_from_the_checkout():
    assert kernels_file.startswith(str(PACKAGES["graphcore_kernels"]))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")

    def build(target):
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
        (found,) = folder.glob("*.whl" if target == "wheel" else "*.tar.gz")
        return found

    return build


@pytest.fixture(scope="module")
def wheel(built):
    with zipfile.ZipFile(built("wheel")) as archive:
        yield archive


@pytest.mark.slow
def test_the_wheel_holds_exactly_the_files_of_the_two_packages(wheel):
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {
        f"{package}/{path.relative_to(folder)}"
        for package, folder in PACKAGES.items()
        for path in tracked_files()
        if path.is_relative_to(folder)
    }
    # what was written and is not committed yet is shipped all the same
    assert expected <= shipped
    assert all(name.startswith(("graphcore/", "graphcore_kernels/")) for name in shipped)
    for name in (
        "graphcore/py.typed",
        "graphcore/drawing/assets/page.css",
        "graphcore/drawing/assets/page.js",
        "graphcore_kernels/py.typed",
        "graphcore_kernels/strided_copy.cu",
        "graphcore_kernels/strided_copy_rows.cu",
        "graphcore_kernels/strided_copy_boxes.cu",
    ):
        assert name in shipped
    assert not [name for name in shipped if "test_" in name or name.endswith((".pyc", ".ipynb"))]


@pytest.mark.slow
def test_the_wheel_has_the_command_the_plugin_the_licence_and_the_extras(wheel):
    (info,) = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    assert info.startswith("graphcore_cuda-")
    entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    assert "graphcore = graphcore.cli:main" in entry_points
    assert "graphcore.testing.plugin = graphcore.testing.plugin" in entry_points
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert metadata["Name"] == "graphcore-cuda"
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert "make demo" in metadata.get_payload()


@pytest.mark.slow
def test_the_wheel_works_without_the_checkout(wheel, tmp_path):
    wheel.extractall(tmp_path / "site")
    script = (
        "import graphcore, graphcore_kernels, graphcore.drawing.html\n"
        "from graphcore_kernels import strided_copy\n"
        "import numpy\n"
        "source, target = numpy.arange(12.0).reshape(3, 4), numpy.zeros((4, 3))\n"
        "strided_copy(target.T, source)\n"
        "assert (target.T == source).all()\n"
        "print(graphcore.__file__, graphcore_kernels.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.count(str(tmp_path / "site")) == 2


@pytest.mark.slow
def test_the_source_distribution_has_sources_tests_and_documents_and_nothing_built(built):
    with tarfile.open(built("sdist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        assert name in names
    for folder in ("graphcore", "kernels", "tests", "examples", "notebooks", "docs"):
        assert any(name.startswith(f"{folder}/") for name in names)
    assert not [name for name in names if "__pycache__" in name or name.startswith(".venv")]
