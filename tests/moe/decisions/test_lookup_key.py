"""What a variant is found by: every field tells variants apart, and what does not."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from helpers.moe_cases import CERTIFICATE

from graphcore import ConfigurationError
from graphcore.moe.decisions.lookup_key import LookupKey
from graphcore.moe.manifests.names import Namespace, Phase, RowSemantics
from graphcore.reuse import check_key

EXTENTS = [(4, 16), (4, 24), (4, 16)]


def key(**more: Any) -> LookupKey:
    arguments: dict[str, Any] = {
        "graph": "decode",
        "extents": EXTENTS,
        "certificate": CERTIFICATE,
        "capabilities": ("bfloat16", 90),
        **more,
    }
    return LookupKey.of(**arguments)


def test_the_same_graph_has_the_same_key_and_a_cache_takes_it() -> None:
    assert key() == key()
    assert check_key(key()) == key()
    assert key().differences(key()) == ()


OTHERS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "another graph": ({"graph": "verify"}, {"graph"}),
    "another number of nodes": ({"extents": [*EXTENTS, (4, 16)]}, {"nodes"}),
    "a first node of other extents": ({"extents": [(5, 16), *EXTENTS[1:]]}, {"first"}),
    "a last node of other extents": ({"extents": [*EXTENTS[:-1], (5, 16)]}, {"last"}),
    "a prompt": ({"phase": Phase.PROMPT}, {"phase"}),
    "other capabilities": ({"capabilities": ("bfloat16", 80)}, {"capabilities"}),
    "another namespace": (
        {"certificate": replace(CERTIFICATE, namespace=Namespace.DRAFT)},
        {"namespace", "semantics"},
    ),
    "other row semantics": (
        {"certificate": replace(CERTIFICATE, row_semantics=RowSemantics.SEQUENTIAL)},
        {"row_semantics", "semantics"},
    ),
    "other rows": (
        {"certificate": replace(CERTIFICATE, rows=5, sequences=5)}, {"rows", "semantics"},
    ),
    "other sequences": (
        {"certificate": replace(CERTIFICATE, row_semantics=RowSemantics.SEQUENTIAL, sequences=2)},
        {"row_semantics", "semantics"},
    ),
    "another owner": ({"certificate": replace(CERTIFICATE, owner=9)}, {"semantics"}),
    "another device": ({"certificate": replace(CERTIFICATE, device=1)}, {"device", "semantics"}),
    "another rank": (
        {"certificate": replace(CERTIFICATE, rank=1, ranks=2)}, {"rank", "ranks", "semantics"},
    ),
    "more ranks": ({"certificate": replace(CERTIFICATE, ranks=2)}, {"ranks", "semantics"}),
    "no certificate": (
        {"certificate": None}, {"namespace", "row_semantics", "rows", "semantics"},
    ),
    "a malformed certificate": (
        {"certificate": replace(CERTIFICATE, rows=0)},
        {"namespace", "row_semantics", "rows", "semantics"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "differing"), OTHERS.values(), ids=OTHERS)
def test_a_variant_of_its_own_is(change: dict[str, Any], differing: set[str]) -> None:
    other = key(**change)
    assert other != key()
    assert {each.partition(":")[0] for each in key().differences(other)} == differing


def test_every_field_tells_variants_apart() -> None:
    seen = set().union(*(differing for _, differing in OTHERS.values()))
    assert seen == {field.name for field in fields(LookupKey)}


SAME = {
    "an inner node of other extents": {"extents": [EXTENTS[0], (9, 9), EXTENTS[2]]},
    "the uids of a certificate": {"certificate": replace(CERTIFICATE, source_uid=5, graph_uid=6)},
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_no_variant_of_its_own_is(change: dict[str, Any]) -> None:
    assert key(**change) == key()


def test_without_a_certificate_device_and_rank_are_those_that_were_said() -> None:
    bare = key(certificate=None, device=3, rank=2, ranks=4)
    assert (bare.device, bare.rank, bare.ranks) == (3, 2, 4)


def test_a_graph_without_nodes_has_no_key() -> None:
    with pytest.raises(ConfigurationError, match="extents: expected"):
        key(extents=[])
