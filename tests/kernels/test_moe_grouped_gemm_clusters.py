"""Clusters of the grouped product, by its own source: two blocks copy tokens for each other."""

from __future__ import annotations

import re
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy
import pytest
from graphcore_kernels import Fault, GemmFault, read_fault
from graphcore_kernels._gemm_forms import combine_kernel, warpgroup_product, warpgroups_of
from helpers.gemm_problems import Case, decode, placed
from helpers.host_gemm import HostGemm

from graphcore.driver import Kernel, open_driver

FORM = warpgroups_of("bf16")["warpgroup256"]
THREADS = 384  # of a block: the first 128 copy, the others multiply
ROUNDS = 30
HELD_UP = {
    "nobody": range(0),
    "the first block": range(THREADS),
    "the second block": range(THREADS, 2 * THREADS),
    "what the second block copies": range(THREADS, THREADS + 128),
    "what half of the second block multiplies": range(THREADS + 256, 2 * THREADS),
}

# when copies, and when products, are made
TIMES = {
    "at once": (False, False),
    "late": (True, True),
    "products late": (False, True),
}


def product(*, has_pairs: bool = False, is_combined: bool = False):
    return warpgroup_product("bf16", FORM, has_pairs=has_pairs, is_combined=is_combined)


def built(folder, kernels) -> HostGemm:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: neither g++ nor clang++ is on the path")
    return HostGemm(compiler, folder, kernels)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    choices = [(pairs, combined) for pairs in (False, True) for combined in (False, True)]
    products = [product(has_pairs=pairs, is_combined=combined) for pairs, combined in choices]
    return built(tmp_path_factory.mktemp("clusters"), [*products, combine_kernel("bf16")])


@contextmanager
def taking_turns(host: HostGemm, held_up: str, time: str = "at once", rounds: int = ROUNDS):
    copies, products = TIMES[time]
    host.hold_up(HELD_UP[held_up], rounds)
    host.copy_late(copies, products=products)
    try:
        yield
    finally:
        host.hold_up(HELD_UP["nobody"])
        host.copy_late(False)


def run(host: HostGemm, operands, clusters: int, changed=None) -> None:
    """The plan's launches by the source, or by a changed one, on so many clusters."""
    ranges = []
    for name in ("x", "weights"):
        ref = operands.refs[name]
        ranges.append((ref.address, ref.shape[0] * ref.strides[0] * ref.itemsize))
    host.allow_reads(*ranges)
    for each in operands.plan().launches:
        values = [getattr(value, "address", value) for value in each.kernel.unpack(each.arguments)]
        host.run(changed or each.kernel, clusters, each.config, values)


def of(case: Case) -> Case:
    return replace(case, form=FORM.name)


CASES = {
    "one tile of two": Case((40, 70), columns=72, depth=136),
    "three tiles": Case((40, 0, 70), columns=300, depth=200, has_scale=True, pitch=8),
    "more than one block of tokens": Case((270, 0, 3), columns=256, depth=72),
    "gathered": Case((40, 0, 70), columns=300, depth=200, has_gather=True, has_scale=True),
    "pairs, three tiles": Case((33, 5), columns=336, depth=264, activation="swiglu"),
    "pairs in turn, one tile": Case(
        (33, 5), columns=96, depth=72, activation="swiglu", gate_up="interleaved"
    ),
    "combined": Case((40, 0, 32), columns=136, depth=200, choices=2, has_scale=True),
    "pairs, gathered and combined": Case(
        (40, 0, 32), columns=336, depth=200, activation="swiglu", choices=2, has_gather=True,
        pitch=8,
    ),
    "no rows": Case((0, 0, 0), columns=136, slack=3),
}  # fmt: skip


# turns and times of the others differ only with the text that these three have between them
MANY_TURNS = ("three tiles", "gathered", "pairs, gathered and combined")


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("held_up", HELD_UP)
@pytest.mark.parametrize("name", MANY_TURNS)
def test_a_cluster_is_right_whoever_is_held_up(host, name, held_up, time):
    with (
        taking_turns(host, held_up, time),
        placed(open_driver("emulated"), of(CASES[name])) as operands,
    ):
        run(host, operands, 1)
        assert host.wrong_copies == 0
        operands.check()


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_clusters_gives_the_same_bits(host, name):
    seen = set()
    for clusters in (1, 2, 3, 16):
        with placed(open_driver("emulated"), of(CASES[name])) as operands:
            run(host, operands, clusters)
            assert host.wrong_copies == 0
            operands.check()
            seen.add(operands.read("out").tobytes())
    assert len(seen) == 1


@pytest.mark.parametrize("held_up", ["nobody", "the second block"])
@pytest.mark.parametrize("has_gather", [False, True], ids=["boxes", "gathered"])
def test_bad_offsets_are_told_and_every_row_becomes_zero(host, has_gather, held_up):
    case = of(Case((3, 20, 4, 30), columns=300, depth=72, has_gather=has_gather))
    bad = numpy.array([0, 3, 2, 9, 57], numpy.int32)
    with placed(open_driver("emulated"), case, offsets=bad) as operands:
        with taking_turns(host, held_up):
            run(host, operands, 2)
        assert host.wrong_copies == 0
        assert read_fault(int(operands.read("error")[0])) == GemmFault(Fault.BAD_OFFSETS, 1)
        assert not decode(operands.read("out"), "bfloat16").any()


def test_an_expert_without_a_slot_copies_nothing_and_the_others_are_done(host):
    case = of(Case((40, 70, 33), columns=300, depth=72))
    slots = numpy.array([2, -1, 0], numpy.int32)
    for held_up in HELD_UP:
        with placed(open_driver("emulated"), case, slots=slots) as operands:
            with taking_turns(host, held_up, "late"):
                run(host, operands, 1)
            assert host.wrong_copies == 0
            assert read_fault(int(operands.read("error")[0])) == GemmFault(Fault.NO_SLOT, 1)
            operands.problem.check(operands.read("out"))


@pytest.mark.parametrize(
    ("has_gather", "times"), [(False, 1), (True, 2)], ids=["boxes", "gathered"]
)
def test_boxes_of_tokens_are_copied_once_for_both_blocks(host, has_gather, times):
    rows, columns, chunks = 64, 256, 16
    case = Case((rows,), columns=columns, depth=chunks * 8, has_gather=has_gather)
    with placed(open_driver("emulated"), of(case)) as operands:
        run(host, operands, 1)
        assert host.wrong_copies == 0
        assert host.copies == (columns + times * rows) * chunks


OWN_ARRIVAL = "if (lane == 0) arrive(empty);\n        return;"
BOTH_ARRIVALS = "if (lane < GEMM_CLUSTER) arrive_at(lane, empty);\n        return;"
BOTH_COUNTED, OWN_COUNTED = "(gather ? 1 : GEMM_CLUSTER)", "1"
GIVEN_BACK = "if (last) give_back(p, last, worker.lane);\n        last = ring.empty();"
GIVEN_BACK_AT_ONCE = "last = ring.empty();\n        give_back(p, last, worker.lane);"
LAST_GIVEN_BACK = "    if (last) give_back(p, last, worker.lane);\n#pragma"
WAIT = "    if (GEMM_CLUSTER > 1) wait_for_cluster();\n"
FIRST_WAIT, LAST_WAIT = f"{WAIT}    if (threadIdx.x < WARPGROUP)", f"{WAIT}}}"


@dataclass(frozen=True)
class Planted:
    """A fault: (what is right, what stands there instead), and the turns in which it is seen."""

    changes: tuple[tuple[str, str], ...]
    held_up: str = "nobody"
    time: str = "at once"
    rounds: int = ROUNDS
    has_gather: bool = False


PLANTED = {
    "a stage is given back to the own block alone": Planted(
        ((BOTH_ARRIVALS, OWN_ARRIVAL), (BOTH_COUNTED, OWN_COUNTED)),
        "what half of the second block multiplies",
    ),
    "a stage is given back while it is multiplied": Planted(
        ((GIVEN_BACK, GIVEN_BACK_AT_ONCE), (LAST_GIVEN_BACK, "#pragma")), time="products late"
    ),
    "an arrival that nobody makes": Planted(((BOTH_ARRIVALS, OWN_ARRIVAL),)),
    "an arrival too many": Planted(
        ((BOTH_ARRIVALS, "if (lane < 3) arrive_at(lane % 2, empty);\n        return;"),)
    ),
    "twice as many arrivals": Planted(
        ((BOTH_ARRIVALS, "if (lane < 4) arrive_at(lane % 2, empty);\n        return;"),)
    ),
    "gathered rows are given back to both": Planted(
        (("if (!p.gather)", "if (true)"),), has_gather=True
    ),
    "every block copies all tokens for both": Planted(
        (
            ("row = own_rank() * GEMM_BOX", "row = 0"),
            ("row += GEMM_CLUSTER * GEMM_BOX", "row += GEMM_BOX"),
        )
    ),
    "a block's share of the tokens is only its own": Planted(
        (("copy_box_to_all(to", "copy_box(to"),)
    ),
    "both blocks have the same columns": Planted(
        (("* GEMM_CLUSTER + own_rank()", "* GEMM_CLUSTER"),)
    ),
    "a block does not wait for the other to begin": Planted(
        ((FIRST_WAIT, FIRST_WAIT.removeprefix(WAIT)),), "the second block", rounds=300
    ),
    "a block ends while the other gives back": Planted(
        ((LAST_WAIT, "}"),), "what half of the second block multiplies", rounds=300
    ),
}


def changed_product(number: int, planted: Planted) -> Kernel:
    """The product with these changes of its text, by another name.

    It is compiled for two sizes of a block of tokens, of which those that are changed need no more.
    """
    kernel = product()
    source = re.sub(r" case [13-7]: .*\n", "\n", kernel.source)
    for right, wrong in planted.changes:
        assert source.count(right) == 1, right
        source = source.replace(right, wrong)
    name = f"product_{number}"
    return replace(kernel, name=name, source=source.replace(f" {kernel.name}\n", f" {name}\n"))


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    every = {"": Planted(()), **PLANTED}
    kernels = {name: changed_product(n, each) for n, (name, each) in enumerate(every.items())}
    return built(tmp_path_factory.mktemp("faults"), kernels.values()), kernels


def is_right(host: HostGemm, kernel: Kernel, *, has_gather: bool) -> bool:
    # blocks of 64 and of 256 tokens
    case = of(Case((40, 200), columns=200, depth=328, has_gather=has_gather))
    with placed(open_driver("emulated"), case) as operands:
        run(host, operands, 1, kernel)
        try:
            operands.check()
        except AssertionError:
            return False
        return host.wrong_copies == 0


@pytest.mark.parametrize("fault", PLANTED)
def test_what_is_wrong_with_a_cluster_is_seen(faulty, fault):
    host, kernels = faulty
    planted = PLANTED[fault]
    with taking_turns(host, planted.held_up, planted.time, planted.rounds):
        assert is_right(host, kernels[""], has_gather=planted.has_gather)  # the control
        assert not is_right(host, kernels[fault], has_gather=planted.has_gather)
