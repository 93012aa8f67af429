"""Certified coverage: what makes it complete, each of the twelve reasons, and nodes that moved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.moe_manifests import fused, manifest

from graphcore import ConfigurationError
from graphcore.moe.decisions.coverage import (
    MOST_EPOCHS,
    Coverage,
    CoverageRecord,
    CoverageTable,
    ExpertProduct,
    NodeList,
    Uncertified,
    UncertifiedReason,
    cover,
    product_fingerprint,
)
from graphcore.moe.decisions.reverse_map import ReverseMap, WeightSource
from graphcore.moe.manifests.manifest import Manifest
from graphcore.moe.manifests.names import BankStatus, CoverageReason

GIVEN = manifest()
NODES = NodeList("decode", tuple(f"n{index}" for index in range(10)))


def products_of(given: Manifest, nodes: NodeList = NODES) -> list[ExpertProduct]:
    """A product for every bank, at every second node."""
    return [
        ExpertProduct(2 * index, nodes.nodes[2 * index], WeightSource.of(bank))
        for index, (_, bank) in enumerate(given.banks())
    ]


PRODUCTS = products_of(GIVEN)


def certified(
    table: CoverageTable, nodes: NodeList = NODES, *products: ExpertProduct
) -> CoverageRecord:
    record = table.certify(nodes, products or PRODUCTS)
    assert isinstance(record, CoverageRecord)
    return record


# ---- certifying and finding again ---------------------------------------------------------------


def test_a_record_says_which_products_were_certified_of_which_nodes() -> None:
    record = certified(CoverageTable())
    assert (record.identity, record.nodes) == ("decode", NODES.nodes)
    assert (record.epoch, record.products) == (1, 4)
    assert record.fingerprint == product_fingerprint(PRODUCTS) != 0


def test_a_record_is_found_again_by_its_nodes_and_epochs_go_on() -> None:
    table = CoverageTable()
    first = certified(table)
    assert table.recover(NODES) == first
    assert certified(table).epoch == 2
    assert len(table) == 1


def nodes_with(**changes: Any) -> NodeList:
    return replace(NODES, **changes)


SWAPPED = ("n0", "n2", "n1", *NODES.nodes[3:])
MOVED = {
    "another list": (nodes_with(identity="prompt"), "expected list 'decode', got 'prompt'"),
    "a node fewer": (nodes_with(nodes=NODES.nodes[:-1]), "expected 10 nodes, got 9"),
    "a node more": (nodes_with(nodes=(*NODES.nodes, "n10")), "expected 10 nodes, got 11"),
    "a node moved": (
        nodes_with(nodes=(*NODES.nodes[:4], "elsewhere", *NODES.nodes[5:])),
        "expected node 'n4' at 4, got 'elsewhere'",
    ),
    "two nodes in the other order": (
        nodes_with(nodes=SWAPPED),
        "expected node 'n1' at 1, got 'n2'",
    ),
}


@pytest.mark.parametrize(("nodes", "detail"), MOVED.values(), ids=MOVED)
def test_nodes_that_moved_are_not_certified_and_others_still_are(
    nodes: NodeList, detail: str
) -> None:
    table = CoverageTable()
    record = certified(table)
    assert table.recover(nodes) == Uncertified(UncertifiedReason.MOVED, detail)
    assert table.recover(NODES) == record


NOT_THERE = {
    "no node": (NodeList("decode", ()), UncertifiedReason.EMPTY),
    "another first node": (NodeList("decode", ("x", *NODES.nodes[1:])), UncertifiedReason.UNKNOWN),
}


@pytest.mark.parametrize(("nodes", "reason"), NOT_THERE.values(), ids=NOT_THERE)
def test_nothing_is_found_of(nodes: NodeList, reason: UncertifiedReason) -> None:
    table = CoverageTable()
    certified(table)
    assert table.recover(nodes) == Uncertified(reason)


@pytest.mark.parametrize(
    ("table", "nodes", "more", "reason"),
    [
        (CoverageTable(), NodeList("empty", ()), {}, UncertifiedReason.EMPTY),
        (CoverageTable(), NODES, {"is_open": False}, UncertifiedReason.DRAINING),
        (CoverageTable(last_epoch=MOST_EPOCHS), NODES, {}, UncertifiedReason.EXHAUSTED),
    ],
    ids=["empty", "draining", "exhausted"],
)
def test_nothing_is_certified_of(
    table: CoverageTable, nodes: NodeList, more: dict[str, bool], reason: UncertifiedReason
) -> None:
    assert table.certify(nodes, PRODUCTS if nodes.nodes else [], **more) == Uncertified(reason)
    assert len(table) == 0


def test_a_graph_that_lies_over_others_takes_their_place() -> None:
    table = CoverageTable()
    apart = NodeList("apart", ("x", "y"))
    certified(table, apart, ExpertProduct(0, "x", PRODUCTS[0].source))
    certified(table)
    over = NodeList("over", ("z", "n9", "z2"))
    certified(table, over, ExpertProduct(0, "z", PRODUCTS[0].source))
    assert table.recover(NODES) == Uncertified(UncertifiedReason.UNKNOWN)
    assert isinstance(table.recover(apart), CoverageRecord)
    assert isinstance(table.recover(over), CoverageRecord)


def test_the_table_is_bounded_and_the_oldest_record_goes() -> None:
    table = CoverageTable(limit=2)
    lists = [NodeList(name, (name,)) for name in "abc"]
    for nodes in (lists[0], lists[1], lists[0], lists[2]):  # a is certified again: younger than b
        certified(table, nodes, ExpertProduct(0, nodes.nodes[0], PRODUCTS[0].source))
    assert len(table) == 2
    assert [isinstance(table.recover(nodes), CoverageRecord) for nodes in lists] == [
        True,
        False,
        True,
    ]


def test_records_are_dropped_by_the_nodes_they_have() -> None:
    table = CoverageTable()
    certified(table)
    assert table.drop(["nobody"]) == 0
    assert table.drop(["n7", "nobody"]) == 1
    assert len(table) == 0


WRONG = {
    "an index beyond the nodes": [replace(PRODUCTS[0], index=10)],
    "an index below 0": [replace(PRODUCTS[0], index=-1)],
    "another node at the index": [replace(PRODUCTS[0], node="n1")],
    "two in the wrong order": [PRODUCTS[1], PRODUCTS[0]],
    "one twice": [PRODUCTS[0], PRODUCTS[0]],
}


@pytest.mark.parametrize("products", WRONG.values(), ids=WRONG)
def test_products_that_are_not_of_the_nodes_are_refused(products: list[ExpertProduct]) -> None:
    with pytest.raises(ConfigurationError, match="products: expected"):
        CoverageTable().certify(NODES, products)


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, None], ids=repr)
def test_a_table_that_can_hold_nothing_is_refused(limit: Any) -> None:
    with pytest.raises(ConfigurationError, match="limit: expected"):
        CoverageTable(limit)


FINGERPRINTS = {
    "index": [replace(PRODUCTS[0], index=1), *PRODUCTS[1:]],
    "node": [replace(PRODUCTS[0], node="other"), *PRODUCTS[1:]],
    "weights": [replace(PRODUCTS[0], source=PRODUCTS[1].source), *PRODUCTS[1:]],
    "address of weights": [
        replace(PRODUCTS[0], source=replace(PRODUCTS[0].source, address=1)), *PRODUCTS[1:],
    ],
    "count": PRODUCTS[:-1],
    "order": [PRODUCTS[1], PRODUCTS[0], *PRODUCTS[2:]],
    "none": [],
}  # fmt: skip


@pytest.mark.parametrize("products", FINGERPRINTS.values(), ids=FINGERPRINTS)
def test_the_fingerprint_of_products_holds(products: list[ExpertProduct]) -> None:
    assert product_fingerprint(products) not in (0, product_fingerprint(PRODUCTS))


# ---- the twelve reasons -------------------------------------------------------------------------


def with_status(status: BankStatus) -> Manifest:
    bank = GIVEN.groups[0].banks[0]
    return GIVEN.with_banks({bank.name: replace(bank, status=status)})


SOURCE = PRODUCTS[0].source
PLACES = {bank.name: (0, index) for index, bank in enumerate(GIVEN.groups[0].banks)}
REASONS: dict[str, tuple[ReverseMap, WeightSource, CoverageReason]] = {
    "registered": (ReverseMap(GIVEN), SOURCE, CoverageReason.REGISTERED),
    "unknown weights": (
        ReverseMap(GIVEN), replace(SOURCE, name="lm_head"), CoverageReason.NOT_IN_REVERSE_MAP,
    ),
    "weights of no manifest": (ReverseMap(Manifest()), SOURCE, CoverageReason.NOT_IN_REVERSE_MAP),
    "other address": (
        ReverseMap(GIVEN), replace(SOURCE, address=1), CoverageReason.SOURCE_CHANGED,
    ),
    "other shape": (
        ReverseMap(GIVEN), replace(SOURCE, shape=(8, 16, 48)), CoverageReason.SOURCE_CHANGED,
    ),
    "other element type": (
        ReverseMap(GIVEN), replace(SOURCE, dtype="float16"), CoverageReason.SOURCE_CHANGED,
    ),
    "map to a group that is not there": (
        ReverseMap(GIVEN, {SOURCE.name: (9, 0)}), SOURCE, CoverageReason.INVALID_REVERSE_MAP,
    ),
    "map to a group below 0": (
        ReverseMap(GIVEN, {SOURCE.name: (-2, 0)}), SOURCE, CoverageReason.INVALID_REVERSE_MAP,
    ),
    "map to a bank that is not there": (
        ReverseMap(GIVEN, {SOURCE.name: (0, 2)}), SOURCE, CoverageReason.INVALID_REVERSE_MAP,
    ),
    "map to another bank": (
        ReverseMap(GIVEN, {SOURCE.name: (0, 1)}), SOURCE, CoverageReason.INVALID_REVERSE_MAP,
    ),
    "a right map that was handed in": (
        ReverseMap(GIVEN, PLACES), SOURCE, CoverageReason.REGISTERED,
    ),
    **{
        f"bank {status.name.lower()}": (ReverseMap(with_status(status)), SOURCE, reason)
        for status, reason in [
            (BankStatus.DORMANT, CoverageReason.DORMANT_LAYOUT),
            (BankStatus.ADAPTED, CoverageReason.ACTIVE_LORA),
            (BankStatus.OVERRIDDEN, CoverageReason.TENSOR_OVERRIDE),
            (BankStatus.NOT_ROUTED, CoverageReason.NON_ROUTED_BASE),
            (BankStatus.EXCLUDED, CoverageReason.EXCLUDED),
            (BankStatus.UNCLASSIFIED, CoverageReason.UNCLASSIFIED),
            (BankStatus.UNSUPPORTED, CoverageReason.UNSUPPORTED_DESCRIPTOR),
        ]
    },
    "a group without slots": (
        ReverseMap(Manifest((fused(slots=0),))), SOURCE, CoverageReason.EXCLUDED,
    ),
    "another bank of the group is not served": (
        ReverseMap(GIVEN.adapted("lora", ["layers.0.experts.down"])), SOURCE,
        CoverageReason.INCOMPLETE,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("reverse_map", "source", "reason"), REASONS.values(), ids=REASONS)
def test_weights_stand_to_the_manifest_as(
    reverse_map: ReverseMap, source: WeightSource, reason: CoverageReason
) -> None:
    assert reverse_map.classify(source) is reason


def test_every_way_to_stand_to_the_manifest_is_tested() -> None:
    assert {reason for _, _, reason in REASONS.values()} == set(CoverageReason)


def test_another_group_is_not_touched_by_what_is_wrong_with_one() -> None:
    reverse_map = ReverseMap(GIVEN.adapted("lora", ["layers.0.experts.down"]))
    assert [reverse_map.classify(each.source) for each in PRODUCTS] == [
        CoverageReason.INCOMPLETE,
        CoverageReason.ACTIVE_LORA,
        CoverageReason.REGISTERED,
        CoverageReason.REGISTERED,
    ]


# ---- complete coverage --------------------------------------------------------------------------


def covered(**more: Any) -> Coverage:
    fields: dict[str, Any] = {
        "record": certified(CoverageTable()),
        "nodes": NODES,
        "products": PRODUCTS,
        "reverse_map": ReverseMap(GIVEN),
        **more,
    }
    return cover(**fields)


def test_coverage_is_complete_where_every_product_is_certified_and_registered() -> None:
    coverage = covered()
    assert coverage.is_complete
    assert coverage.shortfalls() == ()
    assert (coverage.found, coverage.registered, coverage.epoch) == (4, 4, 1)
    assert coverage.offenders == ()


def test_a_graph_without_expert_products_is_complete() -> None:
    record = CoverageTable().certify(NODES, [])
    assert covered(record=record, products=[]).is_complete


RECORD = certified(CoverageTable())
SHORT: dict[str, tuple[Coverage, str]] = {
    "no record": (
        covered(record=Uncertified(UncertifiedReason.UNKNOWN)), "not certified: it was never",
    ),
    "no epoch": (covered(record=replace(RECORD, epoch=0)), "epoch: expected another than 0"),
    "no fingerprint": (
        covered(record=replace(RECORD, fingerprint=0)), "fingerprint: expected another than 0",
    ),
    "another list": (
        covered(nodes=nodes_with(identity="other")), "nodes: expected list 'decode', got 'other'",
    ),
    "a product fewer": (
        covered(products=PRODUCTS[:-1]), "products: expected 4 as certified, got 3",
    ),
    "a node that moved": (
        covered(products=[*PRODUCTS[:-1], replace(PRODUCTS[-1], node="elsewhere")]),
        "products: others than were certified",
    ),
    "a bank that is not registered": (
        covered(reverse_map=ReverseMap(with_status(BankStatus.EXCLUDED))),
        "node 0, weights layers.0.experts.gate_up: its bank is excluded",
    ),
    "a product that nobody classified": (
        replace(covered(), standing=()), "registered: expected 4 products, got 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("coverage", "shortfall"), SHORT.values(), ids=SHORT)
def test_coverage_is_incomplete_for(coverage: Coverage, shortfall: str) -> None:
    assert not coverage.is_complete
    assert any(each.startswith(shortfall) for each in coverage.shortfalls())


def test_the_first_offender_of_each_reason_is_kept_with_their_count() -> None:
    reverse_map = ReverseMap(
        GIVEN.adapted("lora", ["layers.0.experts.down", "layers.1.experts.down"])
    )
    strange = ExpertProduct(9, "n9", WeightSource("lm_head", 1, (1,), "float32"))
    offenders = covered(products=[*PRODUCTS, strange], reverse_map=reverse_map).offenders
    assert [(each.reason, each.product.index, each.count) for each in offenders] == [
        (CoverageReason.NOT_IN_REVERSE_MAP, 9, 1),
        (CoverageReason.ACTIVE_LORA, 2, 2),
        (CoverageReason.INCOMPLETE, 0, 2),
    ]
    assert str(offenders[1]).endswith("a LoRA adapter is active on its bank (and 1 more)")


def test_a_node_that_moved_in_one_graph_leaves_another_certified() -> None:
    table = CoverageTable()
    prompt = NodeList("prompt", tuple(f"p{index}" for index in range(10)))
    certified(table)
    certified(table, prompt, *products_of(GIVEN, prompt))
    moved = replace(prompt, nodes=(*prompt.nodes[:4], "elsewhere", *prompt.nodes[5:]))
    assert not cover(
        table.recover(moved), moved, products_of(GIVEN, moved), ReverseMap(GIVEN)
    ).is_complete
    assert cover(table.recover(NODES), NODES, PRODUCTS, ReverseMap(GIVEN)).is_complete
