"""moe_grouped_gemm against float64 on both drivers, between guards, over poison."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
from graphcore_kernels import Fault, GemmFault, moe_grouped_gemm, read_fault
from graphcore_kernels._catalogue import CAPABILITIES
from graphcore_kernels._gemm_forms import (
    ARITHMETIC,
    MOST_EXPERTS,
    choose_form,
    forms_of,
    warpgroups_of,
)
from helpers.gemm_problems import CASES, Case, Placed, decode, every_type, placed, poison

from graphcore.driver import Driver
from graphcore.driver.records import DeviceInfo


def run(driver: Driver, operands: Placed, **others):
    plan = operands.plan(**others)
    with driver.stream() as stream:
        plan.launch(stream)
        stream.synchronize()
    return plan


def check(driver: Driver, case: Case) -> None:
    with placed(driver, case) as operands:
        run(driver, operands)
        operands.check()


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("name", CASES)
def test_every_case_is_what_float64_says(graphcore_driver, name, layout):
    check(graphcore_driver, replace(CASES[name], layout=layout))


ALL_AT_ONCE = Case(
    (3, 0, 40, 1, 4), activation="swiglu", columns=144, choices=3, has_gather=True, has_scale=True
)


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("gate_up", ["concat", "interleaved"])
@pytest.mark.parametrize("kind", every_type(ALL_AT_ONCE))
def test_every_type_does_everything_at_once(graphcore_driver, kind, gate_up, layout):
    case = replace(every_type(ALL_AT_ONCE)[kind], gate_up=gate_up, layout=layout)
    check(graphcore_driver, case)


FORMS = [
    pytest.param(arithmetic, layout, form, id=f"{arithmetic}-{layout}-{form}")
    for arithmetic in ARITHMETIC
    for layout in ("nk", "kn")
    for form in [
        *forms_of(arithmetic, layout),
        *(warpgroups_of(arithmetic) if layout == "nk" else []),
    ]
]
KINDS = {"bf16": "bfloat16", "f16": "float16"}


@pytest.mark.parametrize(("arithmetic", "layout", "form"), FORMS)
def test_every_form_does_any_number_of_rows(graphcore_driver, arithmetic, layout, form):
    capability = graphcore_driver.device_info().capability
    if form.startswith("warpgroup") and capability != (9, 0):
        pytest.skip(f"the device has no warpgroups of sm_90a: it is one of {capability}")
    case = Case((1, 0, 150, 9, 17), columns=136, depth=200, layout=layout, form=form)
    check(graphcore_driver, every_type(case)[KINDS.get(arithmetic, arithmetic)])


def test_tables_alone_decide_where_an_expert_lies(graphcore_driver):
    case = Case((4, 3, 0, 9), choices=2, has_scale=True)
    results = []
    for seed in (1, 2):
        with placed(graphcore_driver, case) as operands:
            arrays = operands.problem.arrays
            order = numpy.random.default_rng(seed).permutation(len(arrays["weights"]))
            moved = numpy.empty_like(arrays["weights"])
            moved[order] = arrays["weights"]
            operands.change("weights", moved)
            operands.change("slots", order[arrays["slots"]].astype(numpy.int32))
            run(graphcore_driver, operands)
            operands.check()
            results.append(operands.read("out").tobytes())
    assert results[0] == results[1]


MANY_TASKS = [("bfloat16", "warpgroup256"), ("tf32x3", "warpgroup128"), ("tf32", "warpgroup64")]


@pytest.mark.parametrize(("kind", "form"), MANY_TASKS)
@pytest.mark.parametrize("depth", [768, 1984])
def test_many_tasks_of_many_steps_pass_the_ring_of_copies(graphcore_driver, kind, form, depth):
    """More tasks than multiprocessors; each passes the ring of copies more than once."""
    if graphcore_driver.device_info().capability != (9, 0):
        pytest.skip("only devices of capability 9.0 have warpgroups")
    case = Case((300, 40, 0, 700, 16), columns=2048, depth=depth, form=form)
    check(graphcore_driver, every_type(case)[kind])


@pytest.mark.parametrize("form", [None, "direct", "flow", "tile64", "tile128"])
def test_the_same_inputs_give_the_same_bits(graphcore_driver, form):
    case = Case((4, 30, 0, 90), choices=2, has_scale=True, columns=264, depth=512, form=form)
    with placed(graphcore_driver, case) as operands:
        first = None
        for _ in range(5):
            operands.change("out", poison(operands.problem.arrays["out"].shape, case.dtype))
            run(graphcore_driver, operands)
            first = first or operands.read("out").tobytes()
            assert operands.read("out").tobytes() == first
        operands.check()


def test_a_rows_bits_do_not_depend_on_its_neighbours(graphcore_driver):
    case = Case((40,), has_slots=False, depth=256, form="direct")
    with placed(graphcore_driver, case) as operands:
        run(graphcore_driver, operands)
        whole = operands.read("out")
        operands.change("offsets", numpy.array([0, 3], numpy.int32))
        operands.change("out", poison(whole.shape, case.dtype))
        run(graphcore_driver, operands)
        assert (operands.read("out")[:3] == whole[:3]).all()


FAULTS = [
    pytest.param({"offsets": [0, 3, 2, 9, 12]}, Fault.BAD_OFFSETS, 1, id="not ascending"),
    pytest.param({"offsets": [0, 3, 5, 9, 13]}, Fault.BAD_OFFSETS, 3, id="past the rows"),
    pytest.param({"offsets": [-1, 3, 5, 9, 12]}, Fault.BAD_OFFSETS, 0, id="below zero"),
    pytest.param({"offsets": [0, 3, 2**31 - 1, 9, 12]}, Fault.BAD_OFFSETS, 2, id="far beyond"),
    pytest.param({"slots": [0, 1, -1, 3]}, Fault.NO_SLOT, 2, id="no slot"),
    pytest.param({"slots": [0, -(2**31), 1, 3]}, Fault.NO_SLOT, 1, id="far below zero"),
    pytest.param({"slots": [6, 1, 2, 3]}, Fault.SLOT_OUT_OF_RANGE, 0, id="slot beyond the bank"),
    pytest.param({"slots": [0, 1, 2, 2**31 - 1]}, Fault.SLOT_OUT_OF_RANGE, 3, id="slot far beyond"),
    pytest.param({"slots": [9, -1, 2, 3]}, Fault.NO_SLOT, 1, id="two faults: the last expert's"),
    pytest.param({"gather": [0, 1, 2, 3, 4, 5, 6, 6, 5, 4, 3, 2]}, Fault.BAD_GATHER, 2,
                 id="gather beyond x"),
    pytest.param({"gather": [0, -1, 2, 3, 4, 5, 5, 5, 5, 4, 3, 2]}, Fault.BAD_GATHER, 0,
                 id="gather below zero"),
]  # fmt: skip
FAULTY = Case((3, 2, 4, 3), has_gather=True, has_scale=True)


@pytest.mark.parametrize("form", ["direct", "flow", "tile64"])
@pytest.mark.parametrize("choices", [0, 2], ids=["rows", "combined"])
@pytest.mark.parametrize(("tables", "fault", "expert"), FAULTS)
def test_bad_tables_set_the_error_word_and_what_cannot_be_computed_is_zero(
    graphcore_driver, tables, fault, expert, choices, form
):
    case = replace(FAULTY, choices=choices, form=form)
    arrays = {name: numpy.array(values, numpy.int32) for name, values in tables.items()}
    with placed(graphcore_driver, case, **arrays) as operands:
        plan = run(graphcore_driver, operands)
        assert plan.read_fault() == GemmFault(fault, expert)
        check_zeros(operands, fault)


@pytest.mark.parametrize(
    ("scatter", "expert", "lacking"),
    [
        pytest.param([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12], 3, 11, id="beyond the tokens"),
        pytest.param([0, 1, 2, 3, 4, 5, -1, 7, 8, 9, 10, 11], 2, 6, id="below zero"),
        pytest.param([0, 1, 2, 3, 4, 5, 2**31 - 1, 7, 8, 9, 10, 11], 2, 6, id="far beyond"),
        pytest.param([0, 1, 2, 3, 3, 5, 6, 7, 8, 9, 10, 11], 1, 4, id="twice"),
    ],
)
def test_a_bad_route_sets_the_error_word_and_its_row_adds_nothing(
    graphcore_driver, scatter, expert, lacking
):
    case = replace(FAULTY, choices=2)
    scatter = numpy.array(scatter, numpy.int32)
    with placed(graphcore_driver, case, scatter=scatter) as operands:
        assert run(graphcore_driver, operands).read_fault() == GemmFault(Fault.BAD_SCATTER, expert)
        out = decode(operands.read("out"), case.dtype)
        products = operands.problem.products()
        products[lacking] = 0  # row n has route n, but for the bad one
        expected = products.reshape(-1, 2, case.out_columns).sum(1)
        # of two rows with one route either counts
        is_sure = numpy.arange(len(out)) != (1 if scatter[4] == 3 else -1)
        error = numpy.linalg.norm((out - expected)[is_sure], axis=1)
        assert (error <= 4e-3 * numpy.linalg.norm(expected[is_sure], axis=1)).all()
        assert not numpy.isnan(out).any()


def check_zeros(operands: Placed, fault: Fault) -> None:
    problem = operands.problem
    out = decode(operands.read("out"), problem.case.dtype)
    assert not numpy.isnan(out).any()
    if fault is Fault.BAD_OFFSETS:
        assert not out.any()
        return
    if fault is Fault.BAD_GATHER and not problem.case.choices:
        gather, x_rows = problem.arrays["gather"], len(problem.arrays["x"])
        is_bad = (gather < 0) | (gather >= x_rows)
        assert is_bad.any()
        assert (~out.any(1) == is_bad).all()
        return
    assert out.any()
    if fault in {Fault.NO_SLOT, Fault.SLOT_OUT_OF_RANGE}:
        problem.check(operands.read("out"))


def test_the_error_word_keeps_the_greatest_until_it_is_cleared(graphcore_driver):
    arrays = {"slots": numpy.array([0, 1, -1, 3], numpy.int32)}
    with placed(graphcore_driver, FAULTY, **arrays) as operands:
        assert run(graphcore_driver, operands).read_fault() == GemmFault(Fault.NO_SLOT, 2)
        operands.change("slots", numpy.array([-1, 1, 2, 3], numpy.int32))
        operands.driver.write(operands.refs["error"].address, (258 * 2).to_bytes(4, "little"))
        run(graphcore_driver, operands)
        assert operands.read("error")[0] == 258 * 2
        operands.change("error", numpy.zeros(1, numpy.int32))
        assert run(graphcore_driver, operands).read_fault() == GemmFault(Fault.NO_SLOT, 0)


@pytest.mark.parametrize("fault", Fault)
def test_an_error_word_is_read_back_in_words(fault):
    told = read_fault(fault | 300 << 8)
    assert told == GemmFault(fault, 300)
    assert str(told).startswith("expert 300: ")
    assert read_fault(0) is None


def test_a_fault_of_an_expert_without_rows_is_none(graphcore_driver):
    case = Case((3, 0, 4))
    slots = numpy.array([1, -1, 0], numpy.int32)
    with placed(graphcore_driver, case, slots=slots) as operands:
        run(graphcore_driver, operands)
        operands.check()


def test_what_is_not_given_is_allocated(graphcore_driver):
    case = Case((4, 3, 5), choices=2, has_gather=True, has_scale=True)
    with placed(graphcore_driver, case) as operands:
        for name in ("workspace", "error"):
            operands.refs.pop(name)
        plan = run(graphcore_driver, operands)
        assert plan.read_fault() is None
        operands.problem.check(operands.read("out"))
        del operands.refs["out"]
        with graphcore_driver.stream() as stream:
            x, weights, offsets = (operands.refs.pop(n) for n in ("x", "weights", "offsets"))
            out = moe_grouped_gemm(
                x, weights, offsets, stream=stream, driver=graphcore_driver, **operands.refs
            )
            stream.synchronize()
        assert out.shape == (case.rows // 2, case.columns)
        operands.problem.check(out.read())


def test_no_rows_means_no_launch(graphcore_driver):
    case = Case((0, 0), has_slots=False)
    with placed(graphcore_driver, case) as operands:
        assert run(graphcore_driver, operands).launches == ()


# forms in order, and the rows an expert up to which they are chosen
ANY = float("inf")
TILES = {"tile64": 96, "tile128": ANY}
OF_16_BITS = {"direct": 4, "flow": 64, **TILES}
CHOSEN = {
    ("bf16", "nk"): OF_16_BITS,
    ("f16", "nk"): OF_16_BITS,
    ("ieee", "nk"): {"direct": 3, "wide": 32, **TILES},
    ("tf32x3", "nk"): {"direct": 3, "wide": 32, "tile64": ANY},
    ("tf32", "nk"): {"direct": 3, "wide": 32, **TILES},
    ("bf16", "kn"): {"wide": 32, **TILES},
    ("f16", "kn"): {"wide": 32, **TILES},
    ("ieee", "kn"): {"wide": 32, **TILES},
    ("tf32x3", "kn"): {"wide": 32, "tile64": ANY},
    ("tf32", "kn"): {"wide": 32, **TILES},
}
WARPGROUPS_OF_16_BITS = {"direct": 3, "warpgroup64": 40, "warpgroup256": ANY}
CHOSEN_WITH_WARPGROUPS = {
    ("bf16", "nk"): WARPGROUPS_OF_16_BITS,
    ("f16", "nk"): WARPGROUPS_OF_16_BITS,
    ("tf32x3", "nk"): {"direct": 3, "wide": 4, "warpgroup64": 60, "warpgroup128": ANY},
    ("tf32", "nk"): {"direct": 3, "wide": 4, "warpgroup64": ANY},
}


@pytest.mark.parametrize("architecture", CAPABILITIES)
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_the_form_follows_the_rows_that_an_expert_can_have(arithmetic, layout, architecture):
    capability, kind = CAPABILITIES[architecture], (arithmetic, layout)
    expected = CHOSEN[kind]
    if architecture == "sm_90a":
        expected = CHOSEN_WITH_WARPGROUPS.get(kind, expected)

    def name_of(rows: int) -> str:
        return choose_form(rows, 128, arithmetic, layout, capability).name

    names = list(expected)
    assert name_of(1) == name_of(128) == names[0]
    for name, most, following in zip(names, expected.values(), names[1:], strict=False):
        assert name_of(most * 128) == name
        assert name_of(most * 128 + 1) == following
    assert name_of(10**6) == names[-1]


def test_every_form_is_chosen_somewhere():
    chosen = {
        (kind, name)
        for table in (CHOSEN, CHOSEN_WITH_WARPGROUPS)
        for kind, forms in table.items()
        for name in forms
    }
    there = {
        ((arithmetic, layout), name)
        for arithmetic in ARITHMETIC
        for layout in ("nk", "kn")
        for name in [*forms_of(arithmetic, layout),
                     *(warpgroups_of(arithmetic) if layout == "nk" else [])]
    }  # fmt: skip
    assert there == chosen


# of a block at most, by compute capability (CUDA C++ programming guide)
SHARED_KIB = {
    (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227, (12, 0): 99,
}  # fmt: skip


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_the_shared_memory_of_most_experts_fits_every_listed_device(arithmetic, layout):
    for capability, most in SHARED_KIB.items():
        device = DeviceInfo(0, "any", capability, 0, 132, (13, 0))
        for form in forms_of(arithmetic, layout).values():
            config = form.config(100_000, MOST_EXPERTS, 28672, device)
            held = 2 if form.name == "direct" and most < 200 else form.on(capability).blocks
            # a KiB of each block is the system's, where several share a multiprocessor
            assert held * (config.shared_bytes + 1024) <= max(most + 1, 200) * 1024
            assert config.shared_bytes <= most * 1024
            assert config.grid == (held * 132, 1, 1)
            assert form.config(1, 1, 8, device).grid == (1, 1, 1)


def test_the_launch_shape_depends_on_capacities_only(graphcore_driver):
    shapes = set()
    for counts in ((12, 0, 0), (4, 4, 4), (0, 0, 1)):
        case = Case(counts, slack=12 - sum(counts))
        with placed(graphcore_driver, case) as operands:
            plan = operands.plan()
            shapes.add(tuple((each.kernel.name, each.config) for each in plan.launches))
    assert len(shapes) == 1
