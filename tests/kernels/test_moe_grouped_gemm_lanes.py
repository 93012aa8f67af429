"""Tiles of F32 in F32 arithmetic, by their own source: however many tokens and stages there are."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy
import pytest
from graphcore_kernels import Fault, GemmFault, GroupedGemmPlan, moe_grouped_gemm, read_fault
from graphcore_kernels._gemm_forms import Form, Layout, forms_of, product_kernel
from helpers.gemm_problems import CASES, Case, placed, poison
from helpers.host_gemm import HostGemm

from graphcore.driver import Kernel, open_driver
from graphcore.driver.records import DeviceInfo

ROOMY, TIGHT = (9, 0), (8, 6)
TILES = ("tile128", "tile64")
_REACH = 2**36  # bytes


@dataclass(frozen=True)
class Variant:
    """A layout on a device; ``is_alone``: of operands that reach too far for two blocks."""

    layout: Layout
    capability: tuple[int, int]
    is_alone: bool = False

    def form(self, name: str) -> Form:
        form = forms_of("ieee", self.layout)[name].on(self.capability)
        return form.alone if self.is_alone else form

    def kernel(self, name: str) -> Kernel:
        return product_kernel("ieee", self.layout, self.form(name), self.capability)

    def stage_depth(self, name: str) -> int:
        return 32 // self.form(name).blocks


TWO_BLOCKS, ALONE = Variant("nk", ROOMY), Variant("nk", ROOMY, is_alone=True)
VARIANTS = {
    "two blocks": TWO_BLOCKS,
    "alone, large ring": ALONE,
    "alone, small ring": Variant("nk", TIGHT),
    "kn, large ring": Variant("kn", ROOMY),
    "kn, small ring": Variant("kn", TIGHT),
}
KINDS = [
    pytest.param(variant, form, id=f"{name}-{form}")
    for name, variant in VARIANTS.items()
    for form in TILES
]


def built(folder, kernels: list[Kernel]) -> HostGemm:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: neither g++ nor clang++ is on the path")
    return HostGemm(compiler, folder, kernels)


@pytest.fixture(scope="module")
def host_of(tmp_path_factory) -> Callable[[Variant], HostGemm]:
    """What runs the kernels of a variant, compiled when they are first asked for."""
    made: dict[Variant, HostGemm] = {}

    def get(variant: Variant) -> HostGemm:
        if variant not in made:
            folder = tmp_path_factory.mktemp("host_lanes")
            made[variant] = built(folder, [variant.kernel(form) for form in TILES])
        return made[variant]

    return get


def run(host: HostGemm, operands, grid: int, variant: Variant, kernel: Kernel | None = None):
    """The plan's launch as a variant has it, by the source, on as many blocks."""
    x, weights = operands.refs["x"], operands.refs["weights"]
    host.allow_reads((x.address, x.nbytes), (weights.address, weights.nbytes))
    name = operands.problem.case.form
    launch_on(host, operands.plan(), grid, variant, kernel or variant.kernel(name))
    assert host.wrong_copies == 0


def launch_on(host: HostGemm, plan: GroupedGemmPlan, grid: int, variant: Variant, kernel: Kernel):
    (launch,) = plan.launches
    device = DeviceInfo(0, "", variant.capability, 0, 132, (0, 0))
    sizes = plan.sizes
    form = variant.form(plan.form.name)
    config = form.config(sizes.rows, sizes.experts, sizes.columns, device)
    values = [getattr(value, "address", value) for value in launch.kernel.unpack(launch.arguments)]
    host.run(kernel, grid, config, values)


def of(case: Case, variant: Variant, form: str) -> Case:
    return replace(case, dtype="float32", precision="ieee", layout=variant.layout, form=form)


@pytest.mark.parametrize(("variant", "form"), KINDS)
def test_a_tile_of_any_number_of_tokens_is_right_and_has_the_same_bits(host_of, variant, form):
    host = host_of(variant)
    case = of(Case((200,), has_slots=False, columns=136, depth=72), variant, form)
    with placed(open_driver("emulated"), case) as operands:
        run(host, operands, 3, variant)
        operands.check()
        whole = operands.read("out")
        sizes = range(16, 200, 16)
        for count in sorted({1, *sizes, *(size + 1 for size in sizes), 127}):
            operands.change("offsets", numpy.array([0, count], numpy.int32))
            operands.change("out", poison(whole.shape, case.dtype))
            run(host, operands, 2, variant)
            got = operands.read("out")
            assert got[:count].tobytes() == whole[:count].tobytes()
            assert numpy.isnan(got[count:]).all()


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize(("variant", "form"), KINDS)
def test_any_number_of_stages_is_right_whenever_copies_are_made(host_of, variant, form, is_late):
    host = host_of(variant)
    host.copy_late(is_late)
    try:
        for stages in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13):
            whole = stages * variant.stage_depth(form)
            for depth in (whole, whole - 12):
                case = of(Case((3, 0, 70, 40), columns=40, depth=depth), variant, form)
                with placed(open_driver("emulated"), case) as operands:
                    run(host, operands, 2, variant)
                    operands.check()
    finally:
        host.copy_late(False)


@pytest.mark.parametrize(
    "name",
    ["more experts than threads", "as many experts as there may be", "gathered",
     "swiglu, interleaved"],
)  # fmt: skip
@pytest.mark.parametrize(("variant", "form"), KINDS)
def test_what_else_there_may_be_is_right(host_of, variant, form, name):
    with placed(open_driver("emulated"), of(CASES[name], variant, form)) as operands:
        run(host_of(variant), operands, 5, variant)
        operands.check()


@pytest.mark.parametrize("grid", [1, 4])
@pytest.mark.parametrize(("variant", "form"), KINDS)
def test_with_bad_offsets_every_row_is_zero(host_of, variant, form, grid):
    case = of(Case((150, 170), has_slots=False, columns=136, depth=32), variant, form)
    offsets = numpy.array([0, 150, 321], numpy.int32)
    with placed(open_driver("emulated"), case, offsets=offsets) as operands:
        run(host_of(variant), operands, grid, variant)
        assert not operands.read("out").any()
        assert read_fault(int(operands.read("error")[0])) == GemmFault(Fault.BAD_OFFSETS, 1)


@pytest.mark.parametrize("form", TILES)
def test_a_row_has_the_same_bits_on_every_device_and_wherever_its_operands_lie(host_of, form):
    seen = set()
    for variant in VARIANTS.values():
        if variant.layout == "nk":
            case = of(Case((150, 7), columns=136, depth=200), variant, form)
            with placed(open_driver("emulated"), case) as operands:
                run(host_of(variant), operands, 3, variant)
                operands.check()
                seen.add(operands.read("out").tobytes())
    assert len(seen) == 1


FAULTS = {
    "of a stage nobody waited for": ("wait_for_copies<STAGES - 3>();", ""),
    "of other threads nobody waited for": (
        "wait_for_copies<STAGES - 3>();\n                __syncthreads();",
        "wait_for_copies<STAGES - 3>();",
    ),
    "into the stage that is read": (
        "copies.begin(copied++, two_before(next))", "copies.begin(copied++, stage)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", [TWO_BLOCKS, ALONE], ids=["two blocks", "alone"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_copy_is_seen(tmp_path, fault, variant):
    kernel = changed(variant.kernel("tile128"), *FAULTS[fault])
    depth = 12 * variant.stage_depth("tile128")
    case = of(Case((70, 128), columns=40, depth=depth), variant, "tile128")
    host = built(tmp_path, [kernel])
    is_seen = False
    for is_late in (False, True):
        host.copy_late(is_late)
        with placed(open_driver("emulated"), case) as operands:
            run(host, operands, 2, variant, kernel)
            try:
                operands.check()
            except AssertionError:
                is_seen = True
    assert is_seen


def changed(kernel: Kernel, right: str, wrong: str) -> Kernel:
    assert kernel.source.count(right) == 1
    return replace(kernel, source=kernel.source.replace(right, wrong))


# ---- the order of tasks -----------------------------------------------------------------------

# instead of doing a task: each row of it says, for each tile of columns, who has it and when
TOLD = """{
    const Task task = tasks.find(p, n - before);
    static int turn = 0;
    if (threadIdx.x == 0) {
        ++turn;
        for (int row = task.begin; row < task.end; ++row)
            static_cast<float*>(p.out)[row * p.out_stride + task.tile] = blockIdx.x + turn * 64;
    }
}"""


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> tuple[HostGemm, Kernel]:
    kernel = changed(TWO_BLOCKS.kernel("tile128"), "do_task(p, tasks.find(p, n - before));", TOLD)
    return built(tmp_path_factory.mktemp("host_order"), [kernel]), kernel


def tasks_of(told: tuple[HostGemm, Kernel], counts: tuple[int, ...], grid: int) -> list[list[int]]:
    """The rows of each task of three tiles of columns, by block, in order."""
    host, kernel = told
    case = of(Case(counts, has_slots=False, columns=384, depth=16), TWO_BLOCKS, "tile128")
    with placed(open_driver("emulated"), case) as operands:
        operands.change("out", poison((case.rows, case.columns), case.dtype))
        run(host, operands, grid, TWO_BLOCKS, kernel)
        said = operands.read("out")
    assert not numpy.isnan(said[:, :3]).any()
    assert numpy.isnan(said[:, 3:]).all()
    blocks: list[dict[int, int]] = [{} for _ in range(grid)]
    begin = 0
    for count in counts:
        for first in range(begin, begin + count, 128):
            for who in said[first : min(first + 128, begin + count), :3].T:
                assert len(set(who)) == 1
                turn, block = divmod(int(who[0]), 64)
                assert turn not in blocks[block]
                blocks[block][turn] = len(who)
        begin += count
    turns = sorted(turn for tasks in blocks for turn in tasks)
    assert turns == list(range(turns[0], turns[-1] + 1))  # none was done twice
    return [[tasks[turn] for turn in sorted(tasks)] for tasks in blocks]


def turns_of(rows: int) -> int:
    return -(-rows // 16)


@pytest.mark.parametrize("grid", [1, 5, 7, 40])
@pytest.mark.parametrize(
    "counts",
    [(256, 272, 250, 265, 240, 258, 7, 0, 129), (300, 1) * 6, (16, 17, 128, 127), (0, 0, 3)],
    ids=lambda counts: f"{len(counts)} experts",
)
def test_every_task_is_done_once_the_longest_first_and_blocks_end_together(told, counts, grid):
    blocks = tasks_of(told, counts, grid)
    sizes = [[turns_of(rows) for rows in tasks] for tasks in blocks]
    for tasks in sizes:
        assert tasks == sorted(tasks, reverse=True)
    rounds = [sizes[:: -1 if n % 2 else 1] for n in range(max(map(len, sizes)))]
    line = [tasks[n] for n, there in enumerate(rounds) for tasks in there if n < len(tasks)]
    assert line == sorted(line, reverse=True)
    sums = list(map(sum, sizes))
    assert max(sums) - min(sums) <= line[0]


def test_in_the_order_of_experts_blocks_would_not_end_together():
    tasks = [turns for _ in range(6) for turns in (8, 8, 3, 1) for _ in range(3)]
    line = sorted(tasks, reverse=True)
    apart, together = ([sum(each[n::12]) for n in range(12)] for each in (tasks, line))
    assert max(together) - min(together) <= 8 < max(apart) - min(apart)


# ---- operands that reach far ------------------------------------------------------------------


def far_operands(x: numpy.ndarray, weights: numpy.ndarray) -> dict[str, numpy.ndarray]:
    """One expert has all rows."""
    return {
        "offsets": numpy.array([0, len(x)], numpy.int32),
        "out": poison((len(x), weights.shape[1]), "float32"),
        "error": numpy.zeros(1, numpy.int32),
        "x": x,
        "weights": weights,
    }


def span(array: numpy.ndarray) -> tuple[int, int]:
    """(address, bytes) from the first element in memory to the last."""
    steps = [(count - 1) * step for count, step in zip(array.shape, array.strides, strict=True)]
    before = sum(min(step, 0) for step in steps)
    return array.ctypes.data + before, sum(map(abs, steps)) + array.itemsize


def ran(host_of, operands: dict[str, numpy.ndarray], variant: Variant | None) -> tuple[str, bool]:
    """(the kernel of the plan, whether it is right); ``variant`` runs instead of it."""
    given = dict(operands)
    x, weights, offsets = (given.pop(name) for name in ("x", "weights", "offsets"))
    plan = moe_grouped_gemm.plan(
        x, weights, offsets, driver=open_driver("emulated"), form="tile128", **given
    )
    chosen = variant or (TWO_BLOCKS if plan.form.is_paired else ALONE)
    host = host_of(chosen)
    host.allow_reads(span(x), span(weights))
    launch_on(host, plan, 2, chosen, chosen.kernel("tile128"))
    expected = x.astype(numpy.float64) @ weights[0].astype(numpy.float64).T
    is_right = host.wrong_copies == 0 and numpy.allclose(operands["out"], expected, rtol=1e-4)
    return plan.launches[0].kernel.name, is_right


@pytest.fixture(scope="module")
def far(tmp_path_factory) -> Callable[[int, int], numpy.ndarray]:
    """Two rows of so many elements, so many bytes apart; memory in between is none."""
    path = tmp_path_factory.mktemp("far") / "memory"
    with path.open("wb") as file:
        file.truncate(_REACH + 2**16)
    try:
        memory = numpy.memmap(path, numpy.float32, "r+")
    except (OSError, MemoryError) as error:
        pytest.skip(f"no address space of 64 GiB: {error}")

    def rows(distance: int, columns: int) -> numpy.ndarray:
        strides = (distance, 4)
        made = numpy.lib.stride_tricks.as_strided(memory, (2, columns), strides)
        made[...] = numpy.random.default_rng(distance).standard_normal((2, columns))
        return made

    return rows


@pytest.mark.parametrize("is_far", [False, True], ids=["within reach", "beyond"])
@pytest.mark.parametrize("name", ["x", "weights"])
def test_rows_64_gib_apart_are_read_by_a_block_that_reaches_them(host_of, far, name, is_far):
    rows = far(_REACH - 16 * 4 + 16 * is_far, 16)
    other = numpy.random.default_rng(1).standard_normal((3, 16)).astype(numpy.float32)
    pair = (rows, other[None]) if name == "x" else (other, rows[None])
    operands = far_operands(*pair)
    kernel, is_right = ran(host_of, operands, None)
    assert is_right
    assert kernel == "moe_grouped_gemm_ieee_nk_tile128" + "_two_blocks" * (not is_far)
    operands = far_operands(*pair)
    assert ran(host_of, operands, TWO_BLOCKS)[1] == (not is_far)


@pytest.mark.parametrize("name", ["x", "weights"])
def test_rows_that_go_backwards_are_read_by_a_block_that_reaches_them(host_of, name):
    random = numpy.random.default_rng(2)
    x = random.standard_normal((5, 16)).astype(numpy.float32)
    weights = random.standard_normal((1, 6, 16)).astype(numpy.float32)
    pair = (x[::-1], weights) if name == "x" else (x, weights[:, ::-1])
    kernel, is_right = ran(host_of, far_operands(*pair), None)
    assert is_right
    assert kernel == "moe_grouped_gemm_ieee_nk_tile128"
    assert not ran(host_of, far_operands(*pair), TWO_BLOCKS)[1]
    kernel, is_right = ran(host_of, far_operands(x, weights), None)
    assert is_right
    assert kernel == "moe_grouped_gemm_ieee_nk_tile128_two_blocks"
