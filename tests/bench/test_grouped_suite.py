"""Suite grouped: stable names, bytes and flops by hand, wrong products found out by float64."""

import json
from dataclasses import replace

import pytest
import torch

from graphcore.bench import main
from graphcore.bench.suites import BY_CASE, Request, grouped, grouped_layers, grouped_ways
from graphcore.bench.suites.grouped_cases import (
    DENSE,
    READ,
    GroupedCase,
    Routing,
    Shape,
    cases,
    draw,
)
from graphcore.bench.suites.grouped_layers import LayerOperands, layer_cases
from graphcore.bench.suites.grouped_operands import Banks, GroupedOperands, tiles_of
from graphcore.bench.suites.grouped_ways import Product
from graphcore.bench.targets import Target
from graphcore.driver import open_driver
from graphcore.errors import ConfigurationError, GraphcoreError

CASES = {case.name: case for case in cases()}
SMALL = {case.name: case for case in cases(small=True)}
SHAPE = Shape("it", 6, 2, 16, 24)


@pytest.fixture(scope="module")
def driver():
    return open_driver("emulated")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "grouped.json"
    only = ["mixtral-up T=8", "mixtral-up T=8 zipf", "qwen3-up T=5 tf32x3", "qwen3-layer T=5"]
    asked = [part for name in only for part in ("--only", name)]
    assert main(["grouped", "--driver", "emulated", *asked, "--out", str(path)]) == 0
    return json.loads(path.read_text())


def operands_of(case, device="cpu"):
    return GroupedOperands(case, Banks(device), device, 0)


def run_all(products):
    for product in products:
        product(None)


# ---- rows ----------------------------------------------------------------------------------------


def test_suite_grouped_gives_rows_of_stable_names_with_the_error_beside_the_speed(report):
    rows = {row["case"]: row for row in report["rows"]}
    assert list(rows) == [
        "mixtral-up T=8",
        "mixtral-up T=8 zipf",
        "qwen3-up T=5 tf32x3",
        "qwen3-layer T=5",
    ]
    for row in rows.values():
        assert row["unit"] == "us"
        assert row["ours"] > 0
        assert row["floor"] > 0
        assert 0 < row["error"] < 1e-2
    assert rows["qwen3-up T=5 tf32x3"]["error"] < 2e-6
    assert rows["mixtral-up T=8"]["peers"].keys() == grouped_ways.EMULATED_PEERS.keys()
    assert rows["qwen3-layer T=5"]["peers"].keys() == grouped_layers.LAYER_PEERS.keys()


def test_rates_errors_of_all_arms_and_the_skew_are_notes(report):
    notes = {note["case"]: note for note in report["notes"] if "case" in note}
    assert notes["mixtral-up T=8: ours"]["unit"] == "TB/s"
    assert notes["qwen3-up T=5 tf32x3: ours"]["unit"] == "TFLOP/s"
    assert notes["mixtral-up T=8 zipf: of uniform, target 0.92"]["ours"] > 0
    assert notes["streaming read"]["unit"] == "TB/s"
    told = [note["about"] for note in report["notes"] if "about" in note]
    assert "mixtral-up T=8: the floor is streaming read" in told
    assert "qwen3-up T=5 tf32x3: the floor is dense product" in told
    assert any("qwen3-layer T=5: errors against float64: ours" in each for each in told)
    assert not [note for note in report["notes"] if "left out" in note]


def test_the_table_has_its_cases_uniform_and_skewed_and_float32_in_both_precisions():
    assert {"mixtral-up T=64", "qwen3-down T=512 zipf", "deepseek-up T=16384"} <= CASES.keys()
    assert {"qwen3-up T=4096 ieee", "qwen3-up T=4096 tf32x3"} <= CASES.keys()
    skewed = {name.removesuffix(" zipf") for name in CASES if name.endswith(" zipf")}
    assert skewed == {name for name, case in CASES.items() if case.precision == "bf16"} - {
        f"{name} zipf" for name in skewed
    }
    assert len(skewed) == 18
    assert [case.name for case in layer_cases()] == [
        "qwen3-layer T=1", "qwen3-layer T=64", "qwen3-layer T=4096"
    ]  # fmt: skip


# ---- arithmetic ----------------------------------------------------------------------------------


def test_flops_and_bytes_of_a_case_are_those_of_the_experts_that_are_hit():
    case = CASES["mixtral-up T=64"]
    assert case.flops == 2 * 64 * 2 * 4096 * 28672
    assert case.weight_bytes(8) == 8 * 4096 * 28672 * 2
    assert case.weight_bytes(2.5) == 2.5 * 4096 * 28672 * 2
    assert CASES["qwen3-up T=4096 ieee"].weight_bytes(1) == 2048 * 1536 * 4
    layer = layer_cases()[0]
    assert layer.flops == 8 * 2 * 3 * 2048 * 768
    assert layer.weight_bytes(8) == 8 * 3 * 2048 * 768 * 2


def test_up_to_512_tokens_reading_is_the_floor_and_multiplying_beyond():
    for name, case in CASES.items():
        is_read = case.tokens <= 512 and case.precision == "bf16"
        assert case.bound == (READ if is_read else DENSE), name
    assert [case.bound for case in layer_cases()] == [READ, READ, DENSE]


def test_a_routing_counts_its_rows_and_the_experts_that_have_any():
    routing = Routing(torch.tensor([[3, 1], [3, 0]]), 5)
    assert routing.counts.tolist() == [1, 1, 0, 2, 0]
    assert routing.offsets.tolist() == [0, 1, 2, 2, 4, 4]
    assert routing.offsets.dtype == torch.int32
    assert (routing.rows, routing.hit) == (4, 3)


@pytest.mark.parametrize("skew", ["uniform", "zipf"])
def test_a_token_never_chooses_an_expert_twice(skew):
    case = GroupedCase(SHAPE, 200, skew, "bf16", Target())
    ids = draw(case, torch.Generator().manual_seed(1)).ids
    assert ids.shape == (200, 2)
    assert (ids[:, 0] != ids[:, 1]).all()
    assert ids.min() >= 0
    assert ids.max() < 6


def test_routings_of_zipf_s_law_are_skewed_and_uniform_ones_are_not():
    shape, largest = Shape("it", 16, 1, 16, 16), {}
    for skew in ("uniform", "zipf"):
        counts = draw(
            GroupedCase(shape, 8000, skew, "bf16", Target()), torch.Generator().manual_seed(2)
        ).counts
        largest[skew] = int(counts.max()) / 8000
    assert largest["uniform"] == pytest.approx(1 / 16, rel=0.2)
    harmonic = sum(1 / rank for rank in range(1, 17))
    assert largest["zipf"] == pytest.approx(1 / harmonic, rel=0.1)


def test_weights_are_read_again_only_after_more_than_the_caches_hold():
    case = GroupedCase(SHAPE, 1, "uniform", "bf16", Target())
    cached = 5 * case.weight_bytes(2) - 1
    operands = GroupedOperands(case, Banks("cpu"), "cpu", int(cached))
    assert len({call.weights.data_ptr() for call in operands.calls}) == 5
    assert operands.experts_hit == 2


def test_banks_are_kept_within_a_shape_and_let_go_after_it():
    banks = Banks("cpu")
    one = GroupedCase(SHAPE, 1, "uniform", "bf16", Target())
    first = banks.take(one, 2)
    again = banks.take(GroupedCase(SHAPE, 9, "zipf", "bf16", Target()), 3)
    assert [each is other for each, other in zip(first, again, strict=False)] == [True, True]
    other = banks.take(GroupedCase(SHAPE, 1, "uniform", "ieee", Target()), 1)
    assert other[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("starts", "tiles"),
    [
        ([0, 3, 3, 8], [(0, 0, 3), (2, 3, 8), (2, 7, 8)]),
        ([0, 0, 4], [(1, 0, 4)]),
        ([0, 0], []),
    ],
    ids=["an empty expert between", "a whole tile", "no rows"],
)
def test_tiles_cover_every_row_of_an_expert_once(starts, tiles):
    assert tiles_of(starts, 4) == tiles


# ---- wrong products ------------------------------------------------------------------------------


def swapped(call):
    """Two experts' weights exchanged."""
    order = list(range(call.case.shape.experts))
    order[0], order[1] = 1, 0
    return product_of(call, call.weights[order])


def shifted(call):
    """The last row of each expert is computed with the next one's weights."""
    out = product_of(call, call.weights)
    starts = call.routed.routing.offsets.tolist()
    for expert, end in enumerate(starts[1:-1]):
        if end > starts[expert]:
            out[end - 1] = call.routed.x[end - 1] @ call.weights[expert + 1].t()
    return out


def unfinished(call):
    """The last row is left as it was."""
    out = product_of(call, call.weights)
    out[-1] = float("nan")
    return out


def halved(call):
    """The last half of the depth is left out."""
    weights = call.weights.clone()
    weights[..., call.case.shape.depth // 2 :] = 0
    return product_of(call, weights)


def product_of(call, weights):
    out, starts = call.new_out(), call.routed.routing.offsets.tolist()
    for expert in range(call.case.shape.experts):
        rows = slice(starts[expert], starts[expert + 1])
        out[rows] = call.routed.x[rows] @ weights[expert].t()
    return out


@pytest.mark.parametrize("wrong", [swapped, shifted, unfinished, halved])
def test_a_wrong_product_is_found_out(wrong):
    operands = operands_of(GroupedCase(SHAPE, 20, "uniform", "ieee", Target()))
    for compute, is_right in ((lambda call: product_of(call, call.weights), True), (wrong, False)):
        products = [
            Product(lambda stream, call=call, compute=compute: compute(call))
            for call in operands.calls
        ]
        run_all(products)
        outs = [product.out for product in products]

        def run(products=products, outs=outs):
            run_all(products)
            outs[:] = [product.out for product in products]

        if is_right:
            assert operands.check("it", outs, run) < 1e-6
        else:
            with pytest.raises(GraphcoreError, match="arm it: expected an error of 1e-05"):
                operands.check("it", outs, run)


def test_results_of_an_earlier_run_do_not_count():
    operands = operands_of(GroupedCase(SHAPE, 4, "uniform", "ieee", Target()))
    outs = [product_of(call, call.weights) for call in operands.calls]
    with pytest.raises(GraphcoreError, match="got inf"):
        operands.check("idle", outs, lambda: None)


def test_a_fault_that_the_device_reports_is_an_error(driver):
    operands = operands_of(GroupedCase(SHAPE, 4, "uniform", "bf16", Target()))
    products = grouped_ways.ours(driver, None, operands.calls)
    with driver.stream() as stream:
        products[0](stream)
        stream.synchronize()
        products[0].check()
        operands.calls[0].routed.offsets[1] = 1000
        products[0](stream)
        stream.synchronize()
    with pytest.raises(GraphcoreError, match="bench grouped: it T=4"):
        products[0].check()


@pytest.mark.parametrize("part", ["scale", "ids", "down"])
def test_a_layer_of_other_weights_or_routes_is_found_out(driver, part):
    operands = LayerOperands(layer_cases(small=True)[0], "cpu", 0)
    products = grouped_layers.ours(driver, None, operands.calls)
    outs = [product.out for product in products]

    def run():
        with driver.stream() as stream:
            for product in products:
                product(stream)
            stream.synchronize()

    assert operands.check("it", outs, run) < 1e-2
    call = operands.calls[0]
    routing = Routing(call.routing.ids.clone(), call.routing.experts)
    kept = {name: getattr(call, name).clone() for name in ("scale", "down")}
    operands.calls[0] = replace(call, routing=routing, **kept)
    tensor = getattr(call, part)
    tensor.copy_(tensor.roll(1, dims=1 if part == "scale" else 0))
    with pytest.raises(GraphcoreError, match=r"arm it: expected an error of 0\.02"):
        operands.check("it", outs, run)


# ---- what is left out ----------------------------------------------------------------------------


def test_a_peer_that_is_wrong_or_broken_is_left_out_with_the_reason(driver, monkeypatch):
    def broken(driver, stream, calls):
        raise RuntimeError("no kernel\nfor this device")

    def wrong(driver, stream, calls):
        return [Product(lambda stream, call=call: swapped(call)) for call in calls]

    peers = {"broken": broken, "wrong": wrong, "fine": grouped_ways.loop}
    monkeypatch.setattr(grouped, "EMULATED_PEERS", peers)
    measured = grouped.run(driver, Request(7, only=frozenset({"mixtral-up T=8"})))
    assert measured.rows[0].peers.keys() == {"fine"}
    left_out = {note["left out"]: note["reason"] for note in measured.notes if "left out" in note}
    assert left_out["mixtral-up T=8 broken"] == "RuntimeError: no kernel"
    assert "against float64" in left_out["mixtral-up T=8 wrong"]


def test_our_product_that_is_wrong_costs_the_run(driver, monkeypatch):
    def wrong(driver, stream, calls):
        return [Product(lambda stream, call=call: swapped(call)) for call in calls]

    monkeypatch.setattr(grouped, "ours", wrong)
    with pytest.raises(GraphcoreError, match="mixtral-up T=8: arm ours"):
        grouped.run(driver, Request(7, only=frozenset({"mixtral-up T=8"})))


def test_weights_gathered_for_more_routes_than_memory_holds_are_refused():
    class Call:
        case = layer_cases()[2]
        ids = torch.empty(4096, 8, device="meta")

    way = grouped_layers.LAYER_PEERS[grouped_layers.BATCHED_EXPERTS]
    with pytest.raises(ConfigurationError, match="batched_mm: expected weights of 8 GiB at most"):
        way(None, None, [Call])


def test_an_unknown_case_or_peer_is_refused_with_the_known_ones(capsys):
    assert "grouped" in BY_CASE
    assert main(["grouped", "--driver", "emulated", "--only", "mixtral"]) == 2
    assert "'mixtral-up T=8'" in capsys.readouterr().err
    assert main(["grouped", "--driver", "emulated", "--without", "tensorflow"]) == 2
    assert "Triton" in capsys.readouterr().err


def test_torch_s_grouped_product_of_float32_is_called_and_not_captured():
    assert grouped_ways.can_be_captured(grouped_ways.GROUPED_MM, "bf16")
    assert not grouped_ways.can_be_captured(grouped_ways.GROUPED_MM, "ieee")
    assert grouped_ways.can_be_captured(grouped_ways.LOOP, "tf32x3")


@pytest.mark.lengthy
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "ieee", "tf32x3"])
def test_every_tiling_of_the_triton_peer_computes_the_product(precision):
    pytest.importorskip("triton", reason="triton is not installed")
    from graphcore.bench.suites import grouped_triton

    case = GroupedCase(Shape("it", 8, 2, 256, 512), 90, "zipf", precision, Target())
    operands = operands_of(case, "cuda:0")
    every = (*grouped_triton._FEW, *grouped_triton._SOME, *grouped_triton._MANY)
    for tiling in every if precision == "bf16" else grouped_triton._FLOATS:
        products = grouped_triton._products(operands.calls, tiling)

        def run(products=products):
            run_all(products)
            torch.cuda.synchronize()

        operands.check(str(tiling), [product.out for product in products], run)
