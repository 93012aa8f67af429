"""Tiles of F32 in F32 arithmetic, by their own source: however many tokens and stages there are."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy
import pytest
from graphcore_kernels._gemm_forms import forms_of, product_kernel
from helpers.gemm_problems import Case, placed, poison
from helpers.host_gemm import HostGemm

from graphcore.driver import Kernel, open_driver

KINDS = [(layout, form) for layout in ("nk", "kn") for form in ("tile128", "tile64")]
DEPTH = 32  # of a stage
# rings of six (tile64: eight) and of three stages (four)
CAPABILITIES = {"large ring": (9, 0), "small ring": (8, 6)}


def kernel_of(layout: str, form: str, capability: tuple[int, int]) -> Kernel:
    return product_kernel("ieee", layout, forms_of("ieee", layout)[form], capability)


def built(folder, kernels: list[Kernel]) -> HostGemm:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: neither g++ nor clang++ is on the path")
    return HostGemm(compiler, folder, kernels)


@pytest.fixture(scope="module", params=CAPABILITIES)
def host(request, tmp_path_factory):
    capability = CAPABILITIES[request.param]
    kernels = [kernel_of(*kind, capability) for kind in KINDS]
    return built(tmp_path_factory.mktemp("host_lanes"), kernels)


def run(host: HostGemm, operands, grid: int) -> None:
    """The plan's launch, by the source, on as many blocks."""
    x, weights = operands.refs["x"], operands.refs["weights"]
    host.allow_reads((x.address, x.nbytes), (weights.address, weights.nbytes))
    (launch,) = operands.plan().launches
    values = [getattr(value, "address", value) for value in launch.kernel.unpack(launch.arguments)]
    host.run(launch.kernel, grid, launch.config, values)
    assert host.wrong_copies == 0


def of(case: Case, layout: str, form: str) -> Case:
    return replace(case, dtype="float32", precision="ieee", layout=layout, form=form)


@pytest.mark.parametrize(("layout", "form"), KINDS)
def test_a_tile_of_any_number_of_tokens_is_right_and_has_the_same_bits(host, layout, form):
    case = of(Case((200,), has_slots=False, columns=136, depth=72), layout, form)
    with placed(open_driver("emulated"), case) as operands:
        run(host, operands, 3)
        operands.check()
        whole = operands.read("out")
        for count in (1, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 128, 129, 192):
            operands.change("offsets", numpy.array([0, count], numpy.int32))
            operands.change("out", poison(whole.shape, case.dtype))
            run(host, operands, 2)
            got = operands.read("out")
            assert got[:count].tobytes() == whole[:count].tobytes()
            assert numpy.isnan(got[count:]).all()


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize(("layout", "form"), KINDS)
def test_any_number_of_stages_is_right_whenever_copies_are_made(host, layout, form, is_late):
    host.copy_late(is_late)
    try:
        for stages in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13):
            for depth in (stages * DEPTH, stages * DEPTH - 12):
                case = of(Case((3, 0, 70, 40), columns=40, depth=depth), layout, form)
                with placed(open_driver("emulated"), case) as operands:
                    run(host, operands, 2)
                    operands.check()
    finally:
        host.copy_late(False)


FAULTS = {
    "of a stage nobody waited for": ("wait_for_copies<STAGES - 3>();", ""),
    "of other threads nobody waited for": (
        "wait_for_copies<STAGES - 3>();\n                __syncthreads();",
        "wait_for_copies<STAGES - 3>();",
    ),
    "into the stage that is read": (
        "copies.begin(n + STAGES - 1, old)", "copies.begin(n + STAGES - 1, stage)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_copy_is_seen(tmp_path, fault):
    right, wrong = FAULTS[fault]
    kernel = kernel_of("nk", "tile128", CAPABILITIES["small ring"])
    assert kernel.source.count(right) == 1
    changed = replace(kernel, source=kernel.source.replace(right, wrong))
    case = of(Case((70, 128), columns=40, depth=12 * DEPTH), "nk", "tile128")
    host = built(tmp_path, [changed])
    is_seen = False
    for is_late in (False, True):
        host.copy_late(is_late)
        with placed(open_driver("emulated"), case) as operands:
            run(host, operands, 2)
            try:
                operands.check()
            except AssertionError:
                is_seen = True
    assert is_seen
