"""The forms of warpgroups: what they take, when they are chosen, and that maps follow memory."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from graphcore_kernels import moe_grouped_gemm
from graphcore_kernels._gemm_forms import ARITHMETIC, MOST_EXPERTS, warpgroups_of
from helpers.gemm_problems import Case, placed

import graphcore
from graphcore.driver import open_driver
from graphcore.driver.records import DeviceInfo, KernelParams
from graphcore.driver.tensor_map import TENSOR_MAP_BYTES, encoded_address
from graphcore.errors import ConfigurationError
from graphcore.resources.attribution import attribute
from graphcore.resources.tensors import TensorRef, contiguous_strides

MANY = Case((40, 0, 9, 23), columns=80, slack=4)


def at(place: int, *shape: int, dtype: str = "bfloat16", **others) -> TensorRef:
    """Memory of nobody: what is planned is never touched."""
    options = {"address": 2**40 + place * 2**32, "strides": contiguous_strides(shape), **others}
    itemsize = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4}[dtype]
    return TensorRef(shape=shape, dtype=dtype, itemsize=itemsize, device_kind="cpu", **options)


def form_of(driver=None, **others) -> str:
    """The form of a product of 96 rows, 3 experts, K 64, N 48."""
    given = {
        "x": at(0, 96, 64),
        "weights": at(1, 5, 48, 64),
        "offsets": at(2, 4, dtype="int32"),
        "slots": at(3, 3, dtype="int32"),
        "out": at(4, 96, 48),
        "error": at(5, 1, dtype="int32"),
        **others,
    }
    x, weights, offsets = (given.pop(name) for name in ("x", "weights", "offsets"))
    driver = driver or open_driver("emulated")
    return moe_grouped_gemm.plan(x, weights, offsets, driver=driver, **given).form.name


def of_capability(monkeypatch, capability):
    """An emulated driver of a device of another capability."""
    return of_device(monkeypatch, capability=capability)


def of_device(monkeypatch, **facts):
    """An emulated driver of a device of which these facts are others."""
    driver = open_driver("emulated")
    info = replace(driver.device_info(), **facts)
    monkeypatch.setattr(type(driver), "device_info", lambda self: info)
    return open_driver("emulated")


F32 = {
    "x": at(0, 96, 64, dtype="float32"), "weights": at(1, 5, 48, 64, dtype="float32"),
    "out": at(4, 96, 48, dtype="float32"),
}  # fmt: skip
UNSERVED = {
    "F32 of IEEE": (
        F32,
        "expected bf16, f16, tf32x3 or tf32 in layout 'nk' on a device of (9, 0), "
        "got ieee in layout 'nk' on one of (9, 0)", "wide",
    ),
    "the other layout": (
        {"weights": at(1, 5, 64, 48), "layout": "kn"},
        "expected bf16, f16, tf32x3 or tf32 in layout 'nk' on a device of (9, 0), "
        "got bf16 in layout 'kn' on one of (9, 0)", "wide",
    ),
    "columns of no whole groups": (
        {"weights": at(1, 5, 40, 64), "activation": "swiglu", "out": at(4, 96, 20)},
        "expected N / 2 a multiple of 8 with an activation, got 20", "flow",
    ),
    "columns of no whole groups, of F32": (
        {
            **F32, "weights": at(1, 5, 40, 64, dtype="float32"), "activation": "swiglu",
            "out": at(4, 96, 20, dtype="float32"), "precision": "tf32x3",
        },
        "expected N / 2 a multiple of 8 with an activation, got 20", "wide",
    ),
    "one row of x again and again": (
        {"x": at(0, 96, 64, strides=(0, 1))},
        "expected rows of x that share no memory, got strides (0, 1)", "flow",
    ),
    "one expert in every slot": (
        {"weights": at(1, 5, 48, 64, strides=(0, 64, 1))},
        "expected rows of weights that share no memory, got strides (0, 64, 1)", "flow",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSERVED)
def test_what_warpgroups_cannot_do_is_refused_by_name_and_done_otherwise_unasked(name):
    given, message, other = UNSERVED[name]
    with pytest.raises(ConfigurationError, match=re.escape(f"form: 'warpgroup64': {message}")):
        form_of(form="warpgroup64", **given)
    assert form_of(**given) == other


def test_warpgroups_are_chosen_where_the_device_has_them(monkeypatch):
    assert form_of() == "warpgroup64"
    driver = of_capability(monkeypatch, (10, 0))
    assert form_of(driver) == "flow"
    with pytest.raises(ConfigurationError, match=re.escape("on one of (10, 0)")):
        form_of(driver, form="warpgroup64")


MANY_ROWS = {
    "x": at(0, 512, 64, dtype="float32"), "out": at(4, 512, 48, dtype="float32"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "forms"),
    [("tf32x3", ["warpgroup64", "warpgroup128"]), ("tf32", ["warpgroup64", "warpgroup64"])],
)
def test_tf32_is_multiplied_by_warpgroups_where_the_device_has_them(monkeypatch, precision, forms):
    given = {"precision": precision, **F32}
    assert [form_of(**given), form_of(**{**given, **MANY_ROWS})] == forms
    for form in forms:
        assert form_of(form=form, **given) == form
    with pytest.raises(ConfigurationError, match=f"one of .*{forms[-1]} .*got 'warpgroup256'"):
        form_of(form="warpgroup256", **given)
    driver = of_capability(monkeypatch, (10, 0))
    assert form_of(driver, **given) == "wide"


def test_rows_that_are_gathered_may_share_memory():
    gathered = {"x": at(0, 96, 64, strides=(0, 1)), "gather": at(6, 96, dtype="int32")}
    assert form_of(**gathered) == "warpgroup64"


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("bfloat16", "ieee"), ("float32", "ieee"), ("float32", "tf32x3"), ("float32", "tf32")],
)
def test_the_public_choice_is_that_of_a_product(dtype, precision):
    for rows, experts in ((96, 3), (3, 3), (96, 96), (512, 3)):
        given = {
            "x": at(0, rows, 64, dtype=dtype), "out": at(4, rows, 48, dtype=dtype),
            "weights": at(1, experts, 48, 64, dtype=dtype),
            "offsets": at(2, experts + 1, dtype="int32"), "slots": None, "precision": precision,
        }  # fmt: skip
        chosen = moe_grouped_gemm.choose_form(
            rows, experts, dtype, capability=(9, 0), precision=precision
        )
        assert form_of(**given) == chosen
        assert form_of(**given, form=chosen) == chosen


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, id=f"{arithmetic}-{name}")
        for arithmetic in ARITHMETIC
        for name, form in warpgroups_of(arithmetic).items()
    ],
)
def test_the_shared_memory_of_most_experts_fits_the_device(form):
    device = DeviceInfo(0, "any", (9, 0), 0, 132, (13, 0))
    config = form.config(100_000, MOST_EXPERTS, 28672, device)
    assert config.shared_bytes <= 227 * 1024
    assert config.grid == (132, 1, 1)
    assert form.config(1, 1, 8, device).grid == (form.shape.cluster, 1, 1)


def device_of(multiprocessors: int) -> DeviceInfo:
    return DeviceInfo(0, "any", (9, 0), 0, multiprocessors, (13, 0))


@pytest.mark.parametrize("arithmetic", ["bf16", "f16"])
def test_clusters_of_two_share_a_task_and_no_block_waits_for_a_multiprocessor(arithmetic):
    form = warpgroups_of(arithmetic)["warpgroup256"]
    assert form.shape.cluster == 2
    # 128 columns a block: the last task of an odd number of tiles has one for the second
    for columns, tasks in ((8, 1), (128, 1), (129, 1), (256, 1), (257, 2), (640, 3)):
        assert form.tasks(1, 4, columns) == tasks
        assert form.tasks(40, 4, columns) == 4 * tasks
        assert form.tasks(600, 4, columns) == (4 + 2) * tasks
        for multiprocessors in range(2, 140):
            (blocks, *others) = form.config(600, 4, columns, device_of(multiprocessors)).grid
            assert blocks == 2 * min(multiprocessors // 2, 6 * tasks)
            assert others == [1, 1]


def test_forms_without_clusters_have_a_task_for_each_tile_and_block():
    for arithmetic in ARITHMETIC:
        for form in warpgroups_of(arithmetic).values():
            if form.name != "warpgroup256":
                assert form.shape.cluster == 1
                assert form.tasks(5, 4, 3 * form.columns) == 3 * 4
                assert form.config(5, 4, 3 * form.columns, device_of(7)).grid == (7, 1, 1)
                assert form.config(5, 4, 3 * form.columns, device_of(99)).grid == (12, 1, 1)


MANY_ROWS_OF_16_BITS = {"x": at(0, 512, 64), "out": at(4, 512, 48)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_device_without_room_for_a_cluster_takes_another_form(monkeypatch, dtype):
    given = {name: replace(ref, dtype=dtype) for name, ref in MANY_ROWS_OF_16_BITS.items()}
    given["weights"] = at(1, 5, 48, 64, dtype=dtype)
    assert form_of(**given) == form_of(**given, form="warpgroup256") == "warpgroup256"
    driver = of_device(monkeypatch, multiprocessors=1)
    assert form_of(driver, **given) == "tile128"
    assert form_of(driver, **given, form="warpgroup64") == "warpgroup64"
    told = "form: 'warpgroup256': expected a device of 2 multiprocessors or more, got 1"
    with pytest.raises(ConfigurationError, match=re.escape(told)):
        form_of(driver, **given, form="warpgroup256")
    driver = of_device(monkeypatch, multiprocessors=2)
    assert form_of(driver, **given) == "warpgroup256"


def maps_of(graph) -> list[int]:
    """The addresses in the maps of the product's node."""
    node = next(each for each in graph.snapshot().walk() if isinstance(each.params, KernelParams))
    arguments = node.params.arguments
    assert [len(each) for each in arguments[:2]] == [TENSOR_MAP_BYTES] * 2
    return [encoded_address(each) for each in arguments[:2]]


def captured(driver, operands, **options):
    with graphcore.capture(driver=driver) as capture:
        for name in ("x", "weights"):
            capture.keep(operands.refs[name], name)
        operands.plan(form="warpgroup64", **options).launch()
    return capture.graph


def test_maps_follow_what_a_graph_is_rebound_to():
    driver = open_driver("emulated")
    with (
        placed(driver, MANY) as operands,
        placed(driver, MANY, seed=1) as others,
        captured(driver, operands) as graph,
        graph.instantiate() as made,
        driver.stream() as stream,
    ):
        refs = operands.refs
        assert maps_of(graph) == [refs["weights"].address, refs["x"].address]
        outcome = made.rebind({name: others.refs[name] for name in ("x", "weights")})
        assert outcome.words == {"x": 2, "weights": 2}
        assert maps_of(made) == [others.refs["weights"].address, others.refs["x"].address]
        for name in ("offsets", "slots"):
            operands.change(name, others.problem.arrays[name])
        made.launch(stream)
        stream.synchronize()
        others.problem.check(operands.read("out"))


def test_a_map_is_told_as_an_operand_of_its_node():
    driver = open_driver("emulated")
    with placed(driver, MANY) as operands, captured(driver, operands) as graph:
        names = {name: operands.refs[name] for name in ("x", "weights")}
        found = {
            (each.operand, str(each.place)): each.byte_offset
            for each in attribute(graph.snapshot(), names)
        }
        assert found[("weights_map", "weights")] == found[("x_map", "x")] == 0
        assert ("weights", "weights") in found
        assert ("x", "x") in found


def test_a_captured_graph_is_the_same_after_json():
    driver = open_driver("emulated")
    with placed(driver, MANY) as operands, captured(driver, operands) as graph:
        snapshot = graph.snapshot()
        read = graphcore.GraphSnapshot.from_json(snapshot.to_json())
        assert not graphcore.diff(snapshot, read)
        assert maps_of(graph)[0] == encoded_address(next(iter(read.walk())).params.arguments[0])


def test_nothing_is_encoded_for_rows_that_no_box_copies():
    driver = open_driver("emulated")
    with placed(driver, replace(MANY, has_gather=True)) as operands:
        for rows in (operands.refs["x"], replace(operands.refs["x"], shape=(0, MANY.depth))):
            plan = operands.plan(form="warpgroup64", x=rows)
            weights, x = plan.launches[0].arguments[:2]
            assert encoded_address(weights) == operands.refs["weights"].address
            assert x == bytes(TENSOR_MAP_BYTES)
