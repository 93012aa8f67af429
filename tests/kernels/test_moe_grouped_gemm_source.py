"""The grouped product's own source, run on the host: every fragment, copy and bound of it."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy
import pytest
from graphcore_kernels import Fault, GemmFault, read_fault
from graphcore_kernels._gemm_forms import (
    ARITHMETIC,
    combine_kernel,
    forms_of,
    product_kernel,
    warpgroup_product,
    warpgroups_of,
)
from helpers.gemm_problems import CASES, Case, decode, every_type, placed, poison
from helpers.host_gemm import HostGemm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphcore.driver import Kernel, open_driver

# one of each way that fragments are read and made; the rest are the slow test's
FAST = [
    ("bf16", "nk", "direct"), ("bf16", "nk", "flow"), ("bf16", "kn", "wide"),
    ("bf16", "nk", "tile64"), ("bf16", "kn", "tile128"), ("ieee", "nk", "wide"),
    ("ieee", "kn", "wide"), ("ieee", "kn", "tile64"), ("tf32x3", "nk", "wide"),
    ("ieee", "nk", "tile128"),
    ("tf32x3", "kn", "tile64"), ("ieee", "nk", "direct"), ("tf32x3", "nk", "direct"),
    ("tf32", "nk", "direct"), ("bf16", "nk", "warpgroup64"), ("f16", "nk", "warpgroup256"),
    ("tf32x3", "nk", "warpgroup64"), ("tf32x3", "nk", "warpgroup128"),
    ("tf32", "nk", "warpgroup64"),
]  # fmt: skip
BY_WARPGROUPS = [kind for kind in FAST if kind[2].startswith("warpgroup")]
# those that find their tasks in other ways
TASKS = [*FAST[:4], ("ieee", "nk", "tile128"), *BY_WARPGROUPS]
EVERY = [
    (arithmetic, layout, form)
    for arithmetic in ARITHMETIC
    for layout in ("nk", "kn")
    for form in forms_of(arithmetic, layout)
]
DTYPES = {"bf16": "bfloat16", "f16": "float16"}


ROOMY, TIGHT = (9, 0), (8, 6)


def products_of(arithmetic, layout, form, capability) -> list[Kernel]:
    if form in warpgroups_of(arithmetic):
        shape = warpgroups_of(arithmetic)[form]
        made = [
            warpgroup_product(arithmetic, shape, has_pairs=pairs, is_combined=combined)
            for pairs in (False, True)
            for combined in (False, True)
        ]
        return list(dict.fromkeys(made))  # of F32 two are one
    return [product_kernel(arithmetic, layout, forms_of(arithmetic, layout)[form], capability)]


def build(folder, chosen, capability=ROOMY) -> HostGemm:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: neither g++ nor clang++ is on the path")
    products = [each for kind in chosen for each in products_of(*kind, capability)]
    combines = {combine_kernel(arithmetic) for arithmetic, _, _ in chosen}
    return HostGemm(compiler, folder, [*products, *combines])


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return build(tmp_path_factory.mktemp("host_gemm"), FAST)


def run(host: HostGemm, operands, grid: int) -> None:
    """What the plan would launch, by the source; on as many blocks as ``grid``."""
    ranges = []
    for name in ("x", "weights"):
        ref = operands.refs[name]
        pitched = ref.shape[0] * ref.strides[0] * ref.itemsize if ref.shape[0] else 0
        ranges.append((ref.address, pitched))
    host.allow_reads(*ranges)
    for each in operands.plan().launches:
        values = [getattr(value, "address", value) for value in each.kernel.unpack(each.arguments)]
        host.run(each.kernel, grid, each.config, values)
    assert host.wrong_copies == 0


def check(host: HostGemm, case: Case, grid: int = 3, **arrays) -> None:
    with placed(open_driver("emulated"), case, **arrays) as operands:
        run(host, operands, grid)
        operands.check()


def of(case: Case, arithmetic: str, layout: str, form: str) -> Case:
    typed = every_type(case)[DTYPES.get(arithmetic, arithmetic)]
    return replace(typed, layout=layout, form=form)


def names(chosen):
    return [pytest.param(each, id="-".join(each)) for each in chosen]


# the scheduling is the same for all: three of them do every case here, the others what is theirs
ALL_CASES = FAST[:3]
OWN_CASES = ("empty experts", "short depth", "swiglu, everything", "many rows")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, id="-".join((*kind, name)))
        for kind in FAST
        for name in (CASES if kind in ALL_CASES else OWN_CASES)
    ],
)
def test_the_source_does_every_case(host, kind, name):
    check(host, of(CASES[name], *kind))


@pytest.mark.parametrize("kind", names(FAST))
def test_the_source_does_more_than_one_tile_of_everything(host, kind):
    gate_up = "interleaved" if kind[1] == "kn" else "concat"  # the cases have the others
    case = Case(
        (1, 0, 150, 9, 17, 3), columns=272, depth=200, activation="swiglu", gate_up=gate_up,
        choices=3, has_gather=True, has_scale=True, pitch=8,
    )  # fmt: skip
    check(host, of(case, *kind), grid=7)


@pytest.mark.parametrize("kind", names(TASKS))
def test_any_number_of_blocks_gives_the_same_bits(host, kind):
    case = of(Case((5, 0, 70, 2), columns=136, choices=1, has_scale=True), *kind)
    seen = set()
    for grid in (1, 5, 40):
        with placed(open_driver("emulated"), case) as operands:
            run(host, operands, grid)
            operands.check()
            seen.add(operands.read("out").tobytes())
    assert len(seen) == 1


@pytest.mark.parametrize("kind", names(FAST))
def test_a_rows_bits_do_not_depend_on_its_neighbours(host, kind):
    case = of(Case((37,), has_slots=False, columns=40), *kind)
    with placed(open_driver("emulated"), case) as operands:
        run(host, operands, 2)
        whole = operands.read("out")
        for count in (1, 9, 17):
            operands.change("offsets", numpy.array([0, count], numpy.int32))
            operands.change("out", poison(whole.shape, case.dtype))
            run(host, operands, 2)
            assert operands.read("out")[:count].tobytes() == whole[:count].tobytes()


@pytest.mark.parametrize("name", ["rows before and after", "long depth", "swiglu, everything"])
@pytest.mark.parametrize("kind", names([*FAST[:2], ("ieee", "nk", "direct")]))
def test_copies_that_come_as_late_as_they_may_change_nothing(host, kind, name):
    host.copy_late(True)
    try:
        check(host, of(CASES[name], *kind))
        case = Case((1, 0, 150, 9, 17, 3), columns=272, depth=200, has_gather=True)
        check(host, of(case, *kind), grid=2)
    finally:
        host.copy_late(False)


BAD_TABLES = {
    "not ascending": ({"offsets": [0, 3, 2, 9, 12]}, GemmFault(Fault.BAD_OFFSETS, 1)),
    "past the rows": ({"offsets": [0, 3, 5, 9, 13]}, GemmFault(Fault.BAD_OFFSETS, 3)),
    "far beyond": ({"offsets": [0, 3, 2**31 - 1, 9, 12]}, GemmFault(Fault.BAD_OFFSETS, 2)),
    "far below": ({"offsets": [-(2**31), 3, 5, 9, 12]}, GemmFault(Fault.BAD_OFFSETS, 0)),
    "no slot": ({"slots": [0, -(2**31), 1, 3]}, GemmFault(Fault.NO_SLOT, 1)),
    "slot beyond": ({"slots": [0, 1, 2, 2**31 - 1]}, GemmFault(Fault.SLOT_OUT_OF_RANGE, 3)),
    "gather beyond": (
        {"gather": [0, 1, 2, 3, 4, 5, 6, 2**31 - 1, 5, 4, 3, 2]}, GemmFault(Fault.BAD_GATHER, 2),
    ),
    "gather below": (
        {"gather": [-(2**31), 1, 2, 3, 4, 5, 5, 5, 5, 4, 3, 2]}, GemmFault(Fault.BAD_GATHER, 0),
    ),
    "route beyond": (
        {"scatter": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 2**31 - 1]},
        GemmFault(Fault.BAD_SCATTER, 3),
    ),
    "route twice": (
        {"scatter": [0, 1, 2, 3, 3, 5, 6, 7, 8, 9, 10, 11]}, GemmFault(Fault.BAD_SCATTER, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", names(TASKS))
@pytest.mark.parametrize("name", BAD_TABLES)
def test_bad_tables_read_and_write_nothing_outside(host, kind, name):
    tables, told = BAD_TABLES[name]
    arrays = {field: numpy.array(values, numpy.int32) for field, values in tables.items()}
    case = Case((3, 2, 4, 3), choices=2, has_gather=True, has_scale=True, pitch=8)
    with placed(open_driver("emulated"), of(case, *kind), **arrays) as operands:
        run(host, operands, 3)
        for field in operands.refs:
            operands.read(field)  # its guards are whole
        assert read_fault(int(operands.read("error")[0])) == told
        out = decode(operands.read("out"), operands.problem.case.dtype)
        assert not numpy.isnan(out).any()
        assert out.any() == (told.fault is not Fault.BAD_OFFSETS)


WORDS = st.one_of(
    st.integers(-2, 14),
    st.sampled_from([-(2**31), 2**31 - 1, 2**30, -(2**30)]),
)


@st.composite
def tables(draw: st.DrawFn) -> dict[str, numpy.ndarray]:
    """Tables of four experts and twelve rows, now and then with anything in them."""
    ends = sorted(draw(st.lists(st.integers(0, 12), min_size=5, max_size=5)))
    made = {
        "offsets": ends,
        "slots": draw(st.permutations(range(6)))[:4],
        "gather": draw(st.lists(st.integers(0, 5), min_size=12, max_size=12)),
        "scatter": draw(st.permutations(range(12))),
    }
    for values in made.values():
        if draw(st.integers(0, 2)) == 0:
            values[draw(st.integers(0, len(values) - 1))] = draw(WORDS)
    # which of two rows with one route counts is not said
    routes = [n if made["scatter"].index(n) == at else -1 for at, n in enumerate(made["scatter"])]
    made["scatter"] = routes
    return {name: numpy.array(values, numpy.int32) for name, values in made.items()}


@pytest.mark.parametrize("kind", names(TASKS))
@given(tables=tables(), choices=st.sampled_from([0, 2, 3]))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_the_tables_hold_source_and_reference_agree(host, kind, tables, choices):
    case = Case(
        (3, 2, 4, 3), choices=choices, has_gather=True, has_scale=True, columns=40, depth=32
    )
    driver = open_driver("emulated")
    with placed(driver, of(case, *kind), **tables) as operands:
        for launch in operands.plan().launches:
            launch.kernel.run_reference(launch.config, launch.arguments)
        expected, told = operands.read("out"), operands.read("error")[0]
        for name in ("out", "error"):
            operands.change(name, operands.problem.arrays[name])
        run(host, operands, 3)
        for name in operands.refs:
            operands.read(name)  # its guards are whole
        assert operands.read("error")[0] == told
        got = decode(operands.read("out"), operands.problem.case.dtype)
        wanted = decode(expected, operands.problem.case.dtype)
        assert numpy.allclose(got, wanted, rtol=2e-2, atol=2e-2, equal_nan=True)


BLOCKS = {
    "of every size": Case(tuple(range(1, 290, 36)), columns=40, depth=72),
    "of panels": Case((2100, 0, 40), columns=136, depth=8),
    "of pairs, gathered and scaled": Case(
        (300, 0, 33, 64, 2, 31), columns=272, depth=72, activation="swiglu", has_gather=True,
        has_scale=True,
    ),
    "of pairs in turn": Case((70, 3), columns=160, depth=136, activation="swiglu",
                             gate_up="interleaved"),
    "combined": Case(
        (260, 0, 33, 3), columns=136, depth=200, choices=2, has_gather=True, has_scale=True,
        pitch=8,
    ),
    "of odd columns": Case((40, 70), columns=77, depth=72),
}  # fmt: skip


@pytest.mark.parametrize("kind", names(BY_WARPGROUPS))
@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_warpgroups_are_right_whenever_copies_and_products_are_done(
    host, name, is_late, kind
):
    host.copy_late(is_late)
    try:
        check(host, of(BLOCKS[name], *kind), grid=5)
    finally:
        host.copy_late(False)


@pytest.mark.parametrize("kind", names(BY_WARPGROUPS))
def test_a_rows_bits_do_not_depend_on_the_size_of_its_block(host, kind):
    case = of(Case((270,), has_slots=False, columns=40, depth=136), *kind)
    with placed(open_driver("emulated"), case) as operands:
        run(host, operands, 2)
        whole = operands.read("out")
        for count in (20, 70, 110, 140, 256):
            operands.change("offsets", numpy.array([0, count], numpy.int32))
            operands.change("out", poison(whole.shape, case.dtype))
            run(host, operands, 2)
            assert operands.read("out")[:count].tobytes() == whole[:count].tobytes()


def test_three_products_are_exact_over_a_long_depth_though_tensor_cores_cut_off(host):
    case = of(Case((3,), columns=16, depth=6144), "tf32x3", "nk", "warpgroup64")
    check(host, case)  # 2e-6 of a row's norm
    with placed(open_driver("emulated"), case) as operands:
        arrays = operands.problem.arrays
        x, weights = (arrays[name].astype(numpy.float64) for name in ("x", "weights"))
        parts = numpy.einsum("rpk,cpk->prc", x.reshape(3, -1, 8),
                             weights[arrays["slots"][0]].reshape(16, -1, 8))  # fmt: skip
        total = numpy.zeros((3, 16), numpy.float32)
        for part in parts:  # the control: one sum, cut off as often as the tensor cores add
            near = (total + part).astype(numpy.float32)
            is_past = abs(near.astype(numpy.float64)) > abs(total + part)
            total = numpy.where(is_past, numpy.nextafter(near, numpy.float32(0)), near)
        expected = operands.problem.products()
        error = numpy.linalg.norm(total - expected, axis=1) / numpy.linalg.norm(expected, axis=1)
        assert (error > case.tolerance).all()


NOT_A_NUMBER, NEAR_GREATEST, TOO_GREAT = "not a number", "near the greatest", "too great"
SPECIAL = {
    0x7FFFFFFF: NOT_A_NUMBER, 0xFFFFFFFF: NOT_A_NUMBER, 0x7FC00000: NOT_A_NUMBER,
    0x7F800001: NOT_A_NUMBER, 0xFF801FFF: NOT_A_NUMBER,  # nothing is left of these once cut off
    0x7F800000: NOT_A_NUMBER, 0xFF800000: NOT_A_NUMBER,  # infinities, as documented
    0x7F7FFFFF: TOO_GREAT, 0xFF7FFFFE: TOO_GREAT, 0x7F7FFFFD: NEAR_GREATEST,
    0xFF7FF000: NEAR_GREATEST, 0x00000000: "", 0x80000000: "", 0x00000001: "", 0x807FFFFF: "",
    0x00800000: "", 0x3F801FFE: "", 0xBFFFFFFF: "",
}  # fmt: skip
BY_WARPGROUPS_IN_THREE = [kind for kind in BY_WARPGROUPS if kind[0] == "tf32x3"]


@pytest.mark.parametrize("kind", names(BY_WARPGROUPS_IN_THREE))
@pytest.mark.parametrize("name", ["x", "weights"])
def test_three_products_of_words_that_are_no_usual_numbers(host, kind, name):
    """A word of each kind in a row of its own; rows of others are as exact as ever."""
    count = len(SPECIAL)
    case = of(Case((count,), has_slots=False, columns=count, depth=40), *kind)
    with placed(open_driver("emulated"), case) as operands:
        changed = operands.problem.arrays[name].copy()
        changed /= 8  # a product with the greatest is finite
        changed.reshape(count, -1)[:, 7] = numpy.array([*SPECIAL], numpy.uint32).view("float32")
        operands.change(name, changed)
        other = "weights" if name == "x" else "x"
        operands.change(other, operands.problem.arrays[other] / 8)
        run(host, operands, 1)
        with numpy.errstate(all="ignore"):
            expected = operands.problem.products()
        got = operands.read("out").astype(numpy.float64)
    if name == "weights":
        expected, got = expected.T, got.T
    for kind_of_word, of_it, truth in zip(SPECIAL.values(), got, expected, strict=True):
        if kind_of_word == NOT_A_NUMBER:
            assert numpy.isnan(of_it).all()
        elif kind_of_word == TOO_GREAT:
            assert not numpy.isfinite(of_it).any()
        else:
            assert abs(truth).max() > 1e35 or not kind_of_word
            size = numpy.linalg.norm(truth)
            assert numpy.linalg.norm(of_it - truth) <= case.tolerance * size


@pytest.mark.parametrize(
    ("word", "changed", "most"),
    [
        pytest.param("word + 2", "word + 2", 5e-8, id="as it is"),
        pytest.param("word + 2", "word", None, id="nothing makes up for what is cut off"),
        pytest.param("? low_part(own_word)", "? 0", None, id="no low parts of tokens"),
    ],
)
def test_what_three_products_lack_has_no_sign(tmp_path, word, changed, most):
    """Both parts are cut off towards zero, which alone would be 3e-7 of every result."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: neither g++ nor clang++ is on the path")
    (kernel, _) = products_of("tf32x3", "nk", "warpgroup64", ROOMY)
    assert kernel.source.count(word) == 1
    source = kernel.source.replace(word, changed)
    host = HostGemm(compiler, tmp_path, [replace(kernel, source=source)])
    case = of(Case((12,), columns=128, depth=256), "tf32x3", "nk", "warpgroup64")
    with placed(open_driver("emulated"), case) as operands:
        run(host, operands, 1)
        got, expected = operands.read("out"), operands.problem.products()
    lack = abs(((got - expected) * expected).sum()) / (expected**2).sum()
    assert lack <= most if most else lack > 2e-7


def test_tokens_that_are_rounded_but_not_shown_to_the_tensor_cores_are_seen(tmp_path):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: neither g++ nor clang++ is on the path")
    (kernel, _) = products_of("tf32", "nk", "warpgroup64", ROOMY)
    case = of(Case((9,), columns=16, depth=32), "tf32", "nk", "warpgroup64")
    shown = "show_tensor_cores();\n            __syncwarp();"
    assert kernel.source.count(shown) == 1
    changed = replace(kernel, source=kernel.source.replace(shown, "__syncwarp();"))
    host = HostGemm(compiler, tmp_path, [changed])
    with placed(open_driver("emulated"), case) as operands, pytest.raises(AssertionError):
        run(host, operands, 1)
    assert host.wrong_copies


def test_tokens_of_other_lanes_that_nobody_waited_for_are_seen(tmp_path):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: neither g++ nor clang++ is on the path")
    (kernel,) = products_of("ieee", "nk", "direct", ROOMY)
    case = of(Case((3, 8), columns=16, depth=256), "ieee", "nk", "direct")
    waited = "if (IS_IEEE) __syncwarp();"
    assert kernel.source.count(waited) == 1
    for text, is_right in ((waited, True), ("", False)):
        folder = tmp_path / str(is_right)
        folder.mkdir()
        host = HostGemm(
            compiler, folder, [replace(kernel, source=kernel.source.replace(waited, text))]
        )
        host.copy_late(True)
        with placed(open_driver("emulated"), case) as operands:
            run(host, operands, 1)
            if is_right:
                operands.check()
            else:
                with pytest.raises(AssertionError):
                    operands.check()


def test_a_weight_is_read_once_where_rows_are_few(host):
    case = of(Case((8, 0, 8), columns=64, depth=256), "bf16", "kn", "wide")
    with placed(open_driver("emulated"), case) as operands:
        run(host, operands, 2)
        chunks = 2 * 64 * 256 // 8
        assert host.copies == chunks + 16 * 256 // 8


def test_a_copy_outside_the_operands_is_seen(host):
    case = of(Case((3, 4)), "bf16", "nk", "flow")
    with placed(open_driver("emulated"), case) as operands:
        (launch,) = operands.plan().launches
        values = [getattr(value, "address", value)
                  for value in launch.kernel.unpack(launch.arguments)]  # fmt: skip
        x, weights = operands.refs["x"], operands.refs["weights"]
        host.allow_reads((x.address, x.nbytes), (weights.address, weights.nbytes // 2))
        host.run(launch.kernel, 2, launch.config, values)
        assert host.wrong_copies


@pytest.mark.slow
@pytest.mark.parametrize("capability", [ROOMY, TIGHT], ids=["large ring", "small ring"])
def test_every_form_of_the_source_does_every_case(tmp_path, capability, monkeypatch):
    host = build(tmp_path, EVERY, capability)
    driver = type(open_driver("emulated"))
    info = replace(open_driver("emulated").device_info(), capability=capability)
    monkeypatch.setattr(driver, "device_info", lambda self: info)
    for kind in EVERY:
        for case in CASES.values():
            check(host, of(case, *kind))


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
def test_every_form_of_warpgroups_does_every_case(tmp_path, is_late):
    kinds = [(arithmetic, "nk", form) for arithmetic in ARITHMETIC
             for form in warpgroups_of(arithmetic)]  # fmt: skip
    host = build(tmp_path, kinds)
    host.copy_late(is_late)
    for kind in kinds:
        for case in CASES.values():
            check(host, of(case, *kind))
