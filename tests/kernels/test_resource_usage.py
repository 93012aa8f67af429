"""The table of registers and shared memory: every kernel is in it, and NVRTC says the same now."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from graphcore_kernels import _catalogue, resource_usage
from graphcore_kernels._catalogue import CAPABILITIES, catalogue, copies
from graphcore_kernels.copy_plan import CopyClass, CopyForm, CopyLayout
from graphcore_kernels.resource_usage import (
    BEGIN,
    END,
    Usage,
    blocks_by_registers,
    cells_of,
    differences,
    parse_usage,
    read_table,
    written,
)
from graphcore_kernels.route_plan import _SHARED_BYTES
from graphcore_kernels.strided_copy import CopyPlan, block_sizes
from helpers.repository import ROOT

from graphcore.driver import kernel, open_driver
from graphcore.driver.cuda.compiler import assembler_log, compiler_version
from graphcore.driver.records import LaunchConfig
from graphcore.errors import ConfigurationError, DriverUnavailable, GraphcoreError

PAGE = (ROOT / "docs/kernel-resources.md").read_text(encoding="utf-8")
HOT = [
    ("sm_90a", "strided_copy_contiguous"),
    ("sm_80", "strided_copy_tile_w4"),
    ("sm_120", "strided_copy_few_w16"),
    ("sm_90a", "moe_grouped_gemm_bf16_nk_direct"),
    ("sm_86", "moe_combine_f16"),
    ("sm_100", "expert_gather"),
    ("sm_89", "end_decode_step"),
    ("sm_90a", "stage_plan"),
]


@pytest.fixture(scope="module")
def compiler() -> None:
    """NVRTC, of the version that the page is of: another one may give other registers."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-python is not installed")
    try:
        found = "{}.{}".format(*compiler_version())
    except DriverUnavailable as error:
        pytest.skip(str(error))
    wanted = re.search(r"Compiled by NVRTC (\d+\.\d+)\.", PAGE)
    assert wanted is not None
    if found != wanted[1]:
        pytest.skip(f"the page is of NVRTC {wanted[1]}, this is {found}")


# ---- the page ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "name"), HOT, ids=[f"{each}-{name}" for each, name in HOT]
)
def test_a_row_is_what_the_compiler_says_now(compiler, architecture, name):
    (entry,) = [each for each in catalogue(architecture) if each.kernel.name == name]
    assert cells_of(entry, architecture) == read_table(PAGE)[name, architecture]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", CAPABILITIES)
def test_every_row_of_an_architecture_is_what_the_compiler_says_now(compiler, architecture):
    now = {
        (each.kernel.name, architecture): cells_of(each, architecture)
        for each in catalogue(architecture)
    }
    page = {key: cells for key, cells in read_table(PAGE).items() if key[1] == architecture}
    assert differences(page, now) == []


def test_the_page_has_every_kernel_for_every_architecture_and_nothing_else():
    expected = {(each.kernel.name, name) for name in CAPABILITIES for each in catalogue(name)}
    assert read_table(PAGE).keys() == expected


def test_the_page_is_laid_out_as_it_is_written(compiler):
    text = PAGE.partition(BEGIN)[2].partition(END)[0]
    assert text == f"\n{written(read_table(PAGE))}\n"


def test_no_kernel_of_the_page_spills_a_register():
    spills = {key: cells[5] for key, cells in read_table(PAGE).items() if cells[5] != "0 / 0"}
    assert spills == {}


def test_launches_and_shared_memory_of_the_page_are_the_launchers_plan():
    table = read_table(PAGE)
    for architecture in CAPABILITIES:
        for entry in catalogue(architecture):
            cells = table[entry.kernel.name, architecture]
            threads = ", ".join(map(str, entry.threads))
            assert (cells[0], cells[3]) == (threads, str(entry.dynamic_bytes))
            blocks = (blocks_by_registers(int(cells[1]), each) for each in entry.threads)
            assert cells[6] == ", ".join(map(str, blocks))


# ---- the catalogue ----------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", CAPABILITIES)
def test_names_of_an_architecture_differ_and_only_sm_90a_has_warpgroups(architecture):
    names = [each.kernel.name for each in catalogue(architecture)]
    assert len(names) == len(set(names))
    has_warpgroups = any("warpgroup" in name for name in names)
    assert has_warpgroups == (architecture == "sm_90a")


def test_every_module_of_the_package_that_makes_kernels_is_in_the_catalogue():
    folder = ROOT / "kernels/graphcore_kernels"
    declared = {
        path.stem
        for path in folder.glob("*.py")
        if re.search(r"[ =]kernel\($", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    makers = {
        "_gemm_forms", "_gemm_warpgroup", "decode_loop", "expert_gather", "route_plan",
        "stage_plan", "strided_copy",
    }  # fmt: skip
    assert declared == makers
    imported = (folder / "_catalogue.py").read_text(encoding="utf-8")
    assert {name for name in makers if f"graphcore_kernels.{name} import" not in imported} == set()


@pytest.mark.parametrize("form", CopyForm)
def test_threads_of_a_copy_are_those_of_its_launches_and_no_others(form):
    driver = open_driver("emulated")
    found = set()
    for copy_class in (CopyClass.ROWS, CopyClass.GENERAL):
        for count in (1000, 100_000, 10**9):
            layout = CopyLayout(copy_class, form, 16, 64, count)
            if form is CopyForm.FEW and not layout.is_small:
                continue  # few words only
            plan = CopyPlan(None, None, layout, None, ())
            found.add(plan.config(driver).block[0])
    assert tuple(sorted(found)) == block_sizes(form, 16)


def test_the_most_experts_and_slots_fit_a_block_of_the_route_plan():
    shared = {
        each.dynamic_bytes for each in catalogue("sm_80") if each.kernel.name.startswith("route_")
    }
    assert len(shared) == 1
    assert 0 < shared.pop() <= _SHARED_BYTES


def test_rings_are_as_large_as_their_devices_allow():
    def shared(architecture):
        return max(each.dynamic_bytes for each in catalogue(architecture))

    assert shared("sm_86") <= 99 * 1024 < shared("sm_90a") <= 227 * 1024
    assert shared("sm_100") <= 227 * 1024
    assert shared("sm_120") <= 99 * 1024


# ---- what the assembler says ------------------------------------------------------------------

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'other' for 'sm_90a'
ptxas info    : Function properties for other
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 12 registers, used 1 barriers, 64 bytes smem
ptxas info    : Compiling entry function 'mine' for 'sm_90a'
ptxas info    : Function properties for mine
ptxas         .     16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers, 16384 bytes smem, 640 bytes cmem[0]
"""


def test_a_log_is_read_for_the_kernel_that_is_asked_for():
    assert parse_usage(LOG, "mine") == Usage(40, 16384, 16, 0, 0)
    assert parse_usage(LOG, "other") == Usage(12, 64, 8, 4, 4)
    with pytest.raises(ConfigurationError, match="expected registers and stack of neither"):
        parse_usage(LOG, "neither")


def test_functions_that_are_called_count_as_the_kernel_s():
    called = LOG + (
        "ptxas info    : Function properties for helper\n"
        "ptxas         .     24 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\n"
    )
    assert parse_usage(called, "mine") == Usage(40, 16384, 24, 12, 20)


def test_spills_stack_and_shared_memory_are_seen_where_a_kernel_has_them(compiler):
    source = """extern "C" __global__ void spills(const float* x, float* y) {
        __shared__ float shared[300];
        shared[threadIdx.x % 300] = x[0];
        float held[512];
        for (int i = 0; i < 512; ++i) held[i] = x[i * 7] + shared[i % 300];
        for (int i = 0; i < 512; ++i) y[i] = held[(i * int(y[0])) & 511];
    }"""
    made = kernel("spills", "const f32* x, f32* y", source, lambda config, x, y: None)
    usage = parse_usage(assembler_log(made, "sm_90a"), "spills")
    assert usage.stack_bytes >= 2048
    assert usage.static_bytes == 1200
    bounded = replace(made, options=("-maxrregcount=16",))
    few = """extern "C" __global__ void spills(const float* x, float* y) {
        float held[40];
        for (int i = 0; i < 40; ++i) held[i] = x[i * 7];
        __syncthreads();
        for (int i = 0; i < 40; ++i) y[i] = held[i] * held[39 - i];
    }"""
    usage = parse_usage(assembler_log(replace(bounded, source=few), "sm_90a"), "spills")
    assert usage.registers <= 24
    assert usage.spill_stores > 0
    assert usage.spill_loads > 0


def test_an_architecture_among_the_kernel_s_options_comes_first(compiler):
    made = kernel(
        "nothing", "u32 x", 'extern "C" __global__ void nothing(unsigned x) {}',
        lambda config, x: None, options=("-arch=sm_90a",),
    )  # fmt: skip
    assert "for 'sm_90a'" in assembler_log(made, "sm_80")
    assert "for 'sm_80'" in assembler_log(replace(made, options=()), "sm_80")


def test_a_kernel_that_does_not_compile_is_told_with_its_log(compiler):
    made = kernel("odd", "u32 x", "not c", lambda config, x: None)
    with pytest.raises(GraphcoreError, match="kernel odd does not compile"):
        assembler_log(made, "sm_80")


@pytest.mark.parametrize(
    ("registers", "threads", "blocks"),
    [
        (32, 256, 8), (33, 256, 6), (40, 256, 6), (64, 256, 4), (65, 256, 3), (128, 512, 1),
        (168, 384, 1), (255, 256, 1), (129, 512, 0), (32, 1024, 2), (123, 128, 4), (24, 32, 84),
    ],
)  # fmt: skip
def test_blocks_by_registers_are_whole_warps_of_each_part(registers, threads, blocks):
    assert blocks_by_registers(registers, threads) == blocks


# ---- the document -----------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A document, and two kernels for two architectures whose registers are made up."""
    registers = {"sm_80": 40, "sm_90a": 40}
    entries = [each for each in copies() if each.kernel.name.endswith(("contiguous", "repeat"))]

    def log(made, architecture):
        assert made.name in {each.kernel.name for each in entries}
        own = LOG.replace("mine", made.name)
        return own.replace("Used 40", f"Used {registers[architecture]}")

    for module in (_catalogue, resource_usage):
        monkeypatch.setattr(module, "CAPABILITIES", {"sm_80": (8, 0), "sm_90a": (9, 0)})
    monkeypatch.setattr(resource_usage, "catalogue", lambda architecture: entries)
    monkeypatch.setattr(resource_usage, "assembler_log", log)
    monkeypatch.setattr(resource_usage, "compiler_version", lambda: (13, 0))
    path = tmp_path / "page.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    return path, registers


def test_a_page_is_written_between_its_markers_and_checked(small, capsys):
    path, registers = small
    assert resource_usage.main([str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{BEGIN}\nCompiled by NVRTC 13.0.\n\n## strided_copy\n")
    assert text.endswith(f"{END}\nafter\n")
    row = "| `strided_copy_contiguous` | sm_80, sm_90a | 256, 512 | 40 | 16384 | 0 | 16 | 0 / 0 |"
    assert f"{row} 6, 3 |\n" in text
    assert resource_usage.main([str(path), "--check"]) == 0
    registers["sm_90a"] = 41
    assert resource_usage.main([str(path), "--check"]) == 1
    said = capsys.readouterr().out
    assert "strided_copy_repeat for sm_90a: expected ('256, 1024', '41'" in said
    assert "sm_80" not in said
    assert path.read_text(encoding="utf-8") == text
    assert resource_usage.main([str(path)]) == 0
    assert "| sm_80 | 256, 512 | 40 |" in path.read_text(encoding="utf-8")


def test_a_row_that_is_gone_or_of_no_kernel_is_a_difference(small, capsys):
    path, _ = small
    assert resource_usage.main([str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if "contiguous" not in line]
    path.write_text("\n".join(lines).replace("_repeat", "_twice") + "\n", encoding="utf-8")
    assert resource_usage.main([str(path), "--check"]) == 1
    said = capsys.readouterr().out
    assert "strided_copy_contiguous for sm_80: expected ('256, 512'" in said
    assert "strided_copy_twice for sm_80: expected None" in said


def test_kernels_that_are_not_asked_for_stay_as_the_page_has_them(small, capsys):
    path, registers = small
    with pytest.raises(ConfigurationError, match=r"--only: .* finds .'strided_copy_repeat'. too"):
        resource_usage.main([str(path), "--only", "contiguous"])
    assert "registers" not in capsys.readouterr().err
    assert resource_usage.main([str(path)]) == 0
    registers.update(sm_80=50, sm_90a=50)
    assert resource_usage.main([str(path), "--only", "contig", "--check"]) == 1
    assert resource_usage.main([str(path), "--only", "contig"]) == 0
    found = {name: cells[1] for (name, _), cells in read_table(path.read_text()).items()}
    assert found == {"strided_copy_contiguous": "50", "strided_copy_repeat": "40"}
    assert resource_usage.main([str(path), "--only", "contig", "--check"]) == 0
    assert resource_usage.main([str(path), "--check"]) == 1


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{END}{END}"])
def test_a_document_without_its_markers_is_refused_before_anything_is_compiled(tmp_path, text):
    path = tmp_path / "page.md"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match="expected <!-- kernel-resources:begin -->"):
        resource_usage.main([str(path)])
    assert path.read_text(encoding="utf-8") == text


def test_a_row_that_is_said_twice_is_refused():
    row = "| `it` | sm_80 | 256 | 40 | 0 | 0 | 0 | 0 / 0 | 6 |\n"
    with pytest.raises(ConfigurationError, match=r"expected one row of .*'it', 'sm_80'.* got two"):
        read_table(f"{BEGIN}\n{row}{row}{END}")


def test_the_plan_of_a_launch_is_one_block_of_a_word_a_warp():
    (entry,) = [each for each in catalogue("sm_80") if each.group == "stage_plan"]
    assert LaunchConfig((1, 1, 1), (entry.threads[0], 1, 1), entry.dynamic_bytes) == (
        _catalogue.STAGE_CONFIG
    )
