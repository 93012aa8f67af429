"""The kernels compile for every listed architecture, without spills; needs NVRTC, not a GPU."""

from __future__ import annotations

import re

import pytest
from graphcore_kernels._gemm_forms import (
    ARITHMETIC,
    combine_kernel,
    forms_of,
    product_kernel,
    warpgroup_product,
    warpgroups_of,
)
from graphcore_kernels._module import read_source
from graphcore_kernels.copy_plan import CopyForm
from graphcore_kernels.decode_loop import begin_decode_loop, end_decode_step
from graphcore_kernels.expert_gather import expert_gather_kernel
from graphcore_kernels.route_plan import route_plan_i32, route_plan_i64
from graphcore_kernels.stage_plan import stage_plan_kernel
from graphcore_kernels.strided_copy import copy_kernel
from helpers.host_cuda import KERNELS as COPIES
from helpers.host_cuda import whole_source

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")


@pytest.fixture(scope="module")
def nvrtc():
    module = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-python is not installed")
    try:
        module.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(f"NVRTC could not be loaded: {error}")
    return module


def answer(result):
    code, *values = result
    assert int(code) == 0, code
    return values[0] if values else None


def image(nvrtc, program, code: int) -> bytes:
    """The cubin, or the PTX where a virtual architecture was asked for."""
    if code:
        return b""
    size = answer(nvrtc.nvrtcGetCUBINSize(program))
    if size:
        cubin = bytearray(size)
        answer(nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin)
    ptx = bytearray(answer(nvrtc.nvrtcGetPTXSize(program)))
    answer(nvrtc.nvrtcGetPTX(program, ptx))
    return bytes(ptx)


def compile_source(nvrtc, source: str, *options: str) -> tuple[int, bytes, str]:
    """(code, image, log) of a source."""
    program = answer(nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, None, None))
    try:
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = bytearray(answer(nvrtc.nvrtcGetProgramLogSize(program)))
        answer(nvrtc.nvrtcGetProgramLog(program, log))
        return int(code), image(nvrtc, program, int(code)), log.decode().replace("\0", "")
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_strided_copy_compiles_with_every_kernel_and_no_spill(nvrtc, architecture):
    code, cubin, log = compile_source(nvrtc, whole_source(), f"-arch={architecture}", "-Xptxas=-v")
    assert code == 0, log
    assert "warning" not in log
    assert {name for name in COPIES if name.encode() + b"\0" in cubin} == set(COPIES)
    usage = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", log)
    assert usage == [("0", "0", "0")] * len(COPIES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_decode_loop_compiles_without_a_spill_and_calls_the_setter_of_conditions(
    nvrtc, architecture
):
    code, cubin, log = compile_source(
        nvrtc, read_source("decode_loop.cu"), f"-arch={architecture}", "-Xptxas=-v"
    )
    assert code == 0, log
    assert "warning" not in log
    for kernel in (begin_decode_loop, end_decode_step):
        assert kernel.name.encode() + b"\0" in cubin
    usage = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", log)
    assert usage
    assert set(usage) == {("0", "0", "0")}


SLOT_KERNELS = (route_plan_i32, route_plan_i64, expert_gather_kernel, stage_plan_kernel)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", SLOT_KERNELS[1:], ids=lambda k: k.name)
def test_the_kernels_of_slots_compile_without_a_spill(nvrtc, architecture, kernel):
    code, cubin, log = compile_source(nvrtc, kernel.source, f"-arch={architecture}", "-Xptxas=-v")
    assert code == 0, log
    assert "warning" not in log
    assert kernel.name.encode() + b"\0" in cubin
    usage = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", log)
    assert usage
    assert set(usage) == {("0", "0", "0")}


@pytest.mark.parametrize("kernel", SLOT_KERNELS, ids=lambda k: k.name)
def test_the_kernels_of_slots_have_the_parameters_that_their_signatures_say(nvrtc, kernel):
    code, ptx, log = compile_source(nvrtc, kernel.source, "-arch=compute_90")
    assert code == 0, log
    entries = dict(re.findall(r"\.entry (\w+)\((.*?)\n\)", ptx.decode(), re.DOTALL))
    sizes = [parameter_size(text) for text in entries[kernel.name].split(",\n")]
    assert sizes == [parameter.size for parameter in kernel.parameters]


@pytest.mark.parametrize("kernel", [begin_decode_loop, end_decode_step], ids=lambda k: k.name)
def test_the_decode_loop_has_the_parameters_that_its_signature_says(nvrtc, kernel):
    code, ptx, log = compile_source(nvrtc, read_source("decode_loop.cu"), "-arch=compute_90")
    assert code == 0, log
    entries = dict(re.findall(r"\.entry (\w+)\((.*?)\)", ptx.decode(), re.DOTALL))
    sizes = [parameter_size(text) for text in entries[kernel.name].split(",")]
    assert sizes == [parameter.size for parameter in kernel.parameters]


def test_a_spill_would_be_seen_in_the_log(nvrtc):
    source = """extern "C" __global__ void spills(const float* x, float* y) {
        float held[512];
        for (int i = 0; i < 512; ++i) held[i] = x[i * 7];
        for (int i = 0; i < 512; ++i) y[i] = held[(i * int(y[0])) & 511];
    }"""
    code, _, log = compile_source(nvrtc, source, "-arch=sm_90a", "-Xptxas=-v")
    assert code == 0, log
    assert not re.search(r"\b0 bytes stack frame, 0 bytes spill stores", log)


@pytest.fixture(scope="module")
def declared(nvrtc):
    """Kernel name -> bytes of each parameter, as the compiler has it."""
    code, ptx, log = compile_source(nvrtc, whole_source(), "-arch=compute_90")
    assert code == 0, log
    entries = re.findall(r"\.entry (\w+)\((.*?)\)", ptx.decode(), re.DOTALL)
    return {name: [parameter_size(text) for text in body.split(",")] for name, body in entries}


def parameter_size(text: str) -> int:
    array = re.search(r"\.b8 \w+\[(\d+)\]", text)
    return int(array.group(1)) if array else int(re.search(r"\.[ubs](\d+) ", text).group(1)) // 8


@pytest.mark.parametrize("name", COPIES)
def test_the_signature_has_the_sizes_that_the_compiler_gives_it(declared, name):
    kernel = COPIES[name]
    assert declared[kernel.name] == [parameter.size for parameter in kernel.parameters]


def test_kernels_of_the_same_kind_are_one_object_with_the_sources_names():
    for form in CopyForm:
        kernel = copy_kernel(form, 4, 64)
        assert kernel is copy_kernel(form, 4, 64)
        assert kernel.name in COPIES
        assert kernel.loader is not None


# those of every decode step and of long prompts; the rest are the slow test's
HOT_GEMMS = [
    ("bf16", "nk", "direct"), ("bf16", "nk", "flow"), ("bf16", "nk", "tile128"),
    ("ieee", "nk", "tile128"),
]  # fmt: skip
OTHER_GEMMS = [
    (arithmetic, layout, form)
    for arithmetic in ARITHMETIC
    for layout in ("nk", "kn")
    for form in forms_of(arithmetic, layout)
    if (arithmetic, layout, form) not in HOT_GEMMS
]


def check_gemm(nvrtc, architecture, arithmetic, layout, form) -> None:
    number = re.search(r"\d+", architecture).group()
    capability = (int(number[:-1]), int(number[-1]))
    kernel = product_kernel(arithmetic, layout, forms_of(arithmetic, layout)[form], capability)
    options = (f"-arch={architecture}", "-Xptxas=-v")
    code, cubin, log = compile_source(nvrtc, kernel.source, *options)
    assert code == 0, log
    assert "warning" not in log
    assert kernel.name.encode() + b"\0" in cubin
    usage = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", log)
    assert usage == [("0", "0", "0")]


@pytest.mark.parametrize("kind", [pytest.param(kind, id="-".join(kind)) for kind in HOT_GEMMS])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_hot_grouped_products_compile_without_a_spill(nvrtc, architecture, kind):
    check_gemm(nvrtc, architecture, *kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(kind, id="-".join(kind)) for kind in OTHER_GEMMS])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_grouped_product_compiles_without_a_spill(nvrtc, architecture, kind):
    check_gemm(nvrtc, architecture, *kind)


def check_warpgroups(nvrtc, arithmetic, form, **choice) -> None:
    kernel = warpgroup_product(arithmetic, warpgroups_of(arithmetic)[form], **choice)
    code, cubin, log = compile_source(nvrtc, kernel.source, *kernel.options, "-Xptxas=-v")
    assert code == 0, log
    # such as registers that are not given and taken, or products that wait for each other
    assert "warning" not in log
    assert "setmaxnreg" not in log
    assert "wgmma" not in log
    assert kernel.name.encode() + b"\0" in cubin
    usage = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", log)
    assert usage == [("0", "0", "0")]


@pytest.mark.parametrize(
    ("arithmetic", "form", "choice"),
    [
        ("bf16", "warpgroup64", {"has_pairs": False, "is_combined": True}),
        ("bf16", "warpgroup256", {"has_pairs": True, "is_combined": False}),
        ("tf32x3", "warpgroup128", {"has_pairs": True, "is_combined": False}),
    ],
)
def test_the_hot_products_of_warpgroups_compile_without_a_spill(nvrtc, arithmetic, form, choice):
    check_warpgroups(nvrtc, arithmetic, form, **choice)


@pytest.mark.slow
@pytest.mark.parametrize("is_combined", [False, True], ids=["out", "combined"])
@pytest.mark.parametrize("has_pairs", [False, True], ids=["plain", "pairs"])
@pytest.mark.parametrize(
    ("arithmetic", "form"),
    [(arithmetic, form) for arithmetic in ARITHMETIC for form in warpgroups_of(arithmetic)],
)
def test_every_product_of_warpgroups_compiles_without_a_spill(
    nvrtc, arithmetic, form, has_pairs, is_combined
):
    check_warpgroups(nvrtc, arithmetic, form, has_pairs=has_pairs, is_combined=is_combined)


def test_warpgroups_are_refused_by_another_compiler_target(nvrtc):
    kernel = warpgroup_product(
        "bf16", warpgroups_of("bf16")["warpgroup64"], has_pairs=False, is_combined=False
    )
    code, _, log = compile_source(nvrtc, kernel.source, "-arch=sm_90")
    assert code
    assert "sm_90a" in log


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("element", ["bf16", "f16", "ieee"])
def test_combining_compiles_without_a_spill(nvrtc, architecture, element):
    kernel = combine_kernel(element)
    options = (f"-arch={architecture}", "-Xptxas=-v")
    code, cubin, log = compile_source(nvrtc, kernel.source, *options)
    assert code == 0, log
    assert "warning" not in log
    assert kernel.name.encode() + b"\0" in cubin
    assert ", 0 bytes spill stores" in log


@pytest.mark.parametrize(
    "kernel",
    [
        product_kernel("bf16", "nk", forms_of("bf16", "nk")["direct"], (9, 0)),
        combine_kernel("bf16"),
        warpgroup_product(
            "bf16", warpgroups_of("bf16")["warpgroup64"], has_pairs=False, is_combined=False
        ),
    ],
    ids=["product", "combine", "warpgroups"],
)
def test_the_grouped_product_has_the_parameters_that_its_signature_says(nvrtc, kernel):
    virtual = "compute_90a" if kernel.options else "compute_90"
    code, ptx, log = compile_source(nvrtc, kernel.source, f"-arch={virtual}")
    assert code == 0, log
    entries = dict(re.findall(r"\.entry (\w+)\((.*?)\)", ptx.decode(), re.DOTALL))
    sizes = [parameter_size(text) for text in entries[kernel.name].split(",")]
    assert sizes == [parameter.size for parameter in kernel.parameters]


def test_grouped_products_of_the_same_kind_are_one_object():
    form = forms_of("tf32", "kn")["wide"]
    kernel = product_kernel("tf32", "kn", form, (9, 0))
    assert kernel is product_kernel("tf32", "kn", form, (10, 0))
    assert kernel is not product_kernel("tf32", "kn", form, (12, 0))  # a smaller ring
    assert combine_kernel("tf32") is combine_kernel("ieee")
    names = {product_kernel(a, n, f, (9, 0)).name for a in ARITHMETIC for n in ("nk", "kn")
             for f in forms_of(a, n).values()}  # fmt: skip
    assert len(names) == len(HOT_GEMMS) + len(OTHER_GEMMS)
