"""What a step may claim to be: every rule of a certificate broken alone, and what its key holds."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest

from graphcore.moe import Certificate, CertificateFlag, Namespace, RowSemantics

MAIN, DRAFT, MTP = Namespace
INDEPENDENT, SEQUENTIAL, SPECULATIVE = RowSemantics
REQUIRED = CertificateFlag.REQUIRED

DECODE = Certificate(
    MAIN, INDEPENDENT, rows=4, sequences=4, owner=1, owner_generation=1, source_uid=7, graph_uid=8
)
VERIFY = replace(DECODE, row_semantics=SPECULATIVE, rows=8, sequences=2, flags=REQUIRED)


def test_a_decode_step_and_a_required_verification_have_no_flaw() -> None:
    assert DECODE.flaws() == DECODE.flaws(8) == ()
    assert VERIFY.flaws() == VERIFY.flaws(8) == ()
    assert (DECODE.is_required, VERIFY.is_required) == (False, True)


FLAWS: dict[str, tuple[Certificate, dict[str, Any], str]] = {
    "namespace is no Namespace": (DECODE, {"namespace": "main"}, "namespace"),
    "row semantics are no RowSemantics": (DECODE, {"row_semantics": 1}, "row_semantics"),
    "no row": (DECODE, {"rows": 0}, "rows"),
    "rows are no int": (DECODE, {"rows": 4.0}, "rows"),
    "rows are a bool": (DECODE, {"rows": True}, "rows"),
    "rows below zero": (DECODE, {"rows": -1}, "rows"),
    "no sequence": (DECODE, {"sequences": 0}, "sequences"),
    "independent rows, fewer sequences": (DECODE, {"sequences": 3}, "sequences"),
    "independent rows, more sequences": (DECODE, {"sequences": 5}, "sequences"),
    "sequential rows, more sequences": (
        DECODE, {"row_semantics": SEQUENTIAL, "sequences": 5}, "sequences",
    ),
    "rows to verify, as many sequences": (
        DECODE, {"row_semantics": SPECULATIVE}, "sequences",
    ),
    "rows to verify, more sequences": (VERIFY, {"sequences": 9}, "sequences"),
    "an unknown flag": (DECODE, {"flags": 2}, "flags"),
    "an unknown flag beside the required one": (VERIFY, {"flags": 3}, "flags"),
    "flags are None": (DECODE, {"flags": None}, "flags"),
    "an unknown version": (DECODE, {"version": 2}, "version"),
    "reserved is set": (DECODE, {"reserved": 1}, "reserved"),
    "an owner of 65 bits": (DECODE, {"owner": 2**64}, "owner"),
    "a device below zero": (DECODE, {"device": -1}, "device"),
    "a rank that is None": (DECODE, {"rank": None}, "rank"),
    "required: owner is 0": (VERIFY, {"owner": 0}, "owner"),
    "required: owner generation is 0": (VERIFY, {"owner_generation": 0}, "owner_generation"),
    "required: source uid is 0": (VERIFY, {"source_uid": 0}, "source_uid"),
    "required: graph uid is 0": (VERIFY, {"graph_uid": 0}, "graph_uid"),
    "required: one uid for both": (VERIFY, {"graph_uid": 7}, "graph_uid"),
}  # fmt: skip


@pytest.mark.parametrize(("valid", "change", "field"), FLAWS.values(), ids=FLAWS)
def test_a_flaw_names_its_field_and_leaves_no_key(
    valid: Certificate, change: dict[str, Any], field: str
) -> None:
    broken = replace(valid, **change)
    (flaw,) = broken.flaws()
    assert flaw.field == field
    assert str(flaw).startswith(f"{field}: expected ")
    assert broken.semantic_key() == 0


@pytest.mark.parametrize("change", [{"graph_uid": 9}, {"graph_uid": 7}], ids=["other", "source"])
def test_required_work_is_of_the_graph_that_runs(change: dict[str, int]) -> None:
    broken = replace(VERIFY, **change).flaws(8)
    assert {flaw.field for flaw in broken} == {"graph_uid"}
    # ordinary work may be of any
    assert replace(DECODE, **change).flaws(8) == ()


@pytest.mark.parametrize("field", ["owner", "owner_generation", "source_uid", "graph_uid"])
def test_ordinary_work_needs_no(field: str) -> None:
    assert replace(DECODE, **{field: 0}).flaws() == ()


# (namespace, semantics, sequences of 4 rows) that required work may be
ALLOWED = {
    *((namespace, INDEPENDENT, 4) for namespace in (DRAFT, MTP)),
    *(
        (namespace, SEQUENTIAL, sequences)
        for namespace in (DRAFT, MTP)
        for sequences in (1, 2, 3, 4)
    ),
    *((MAIN, SPECULATIVE, sequences) for sequences in (1, 2, 3)),
}


@pytest.mark.parametrize(
    ("namespace", "semantics", "sequences"),
    list(product(Namespace, RowSemantics, range(6))),
    ids=lambda value: value if isinstance(value, int) else value.name,
)
def test_required_work_is_a_draft_along_its_rows_or_a_verification(
    namespace: Namespace, semantics: RowSemantics, sequences: int
) -> None:
    claim = replace(VERIFY, namespace=namespace, row_semantics=semantics, rows=4)
    claim = replace(claim, sequences=sequences)
    assert (not claim.flaws()) is ((namespace, semantics, sequences) in ALLOWED)
    # without the flag the namespace does not matter
    fits = {INDEPENDENT: sequences == 4, SEQUENTIAL: sequences <= 4, SPECULATIVE: sequences < 4}
    assert (not replace(claim, flags=0).flaws()) is (sequences > 0 and fits[semantics])


CHANGES: dict[str, dict[str, Any]] = {
    "namespace": {"namespace": DRAFT},
    "row_semantics": {"row_semantics": SEQUENTIAL},
    "rows": {"rows": 5},
    "sequences": {"sequences": 2},
    "owner": {"owner": 2},
    "owner_generation": {"owner_generation": 2},
    "device": {"device": 1},
    "rank": {"rank": 1},
    "ranks": {"ranks": 3},
    "flags": {"flags": REQUIRED},
}
KEYED = replace(DECODE, namespace=DRAFT, row_semantics=SEQUENTIAL, ranks=2)
TURNED = {"namespace": {"namespace": MTP}, "row_semantics": {"row_semantics": INDEPENDENT}}


@pytest.mark.parametrize("field", CHANGES)
def test_the_key_holds(field: str) -> None:
    other = replace(KEYED, **TURNED.get(field, CHANGES[field]))
    assert other.flaws() == ()
    assert other.semantic_key() not in (0, KEYED.semantic_key())


@pytest.mark.parametrize("field", ["source_uid", "graph_uid"])
def test_the_key_does_not_hold(field: str) -> None:
    assert replace(KEYED, **{field: 99}).semantic_key() == KEYED.semantic_key() != 0


def test_every_field_is_in_the_key_or_left_out_on_purpose() -> None:
    fixed = {"version", "reserved"}  # one value each in a valid certificate
    named = set(CHANGES) | fixed | {"source_uid", "graph_uid"}
    assert {field.name for field in fields(Certificate)} == named


def test_a_rank_beyond_the_ranks_is_malformed() -> None:
    assert [each.field for each in replace(DECODE, rank=2, ranks=2).flaws()] == ["rank"]


def test_a_flag_and_its_number_have_one_key() -> None:
    assert replace(VERIFY, flags=1).semantic_key() == VERIFY.semantic_key() != 0


def test_the_key_is_the_same_in_another_process() -> None:
    script = (
        "from graphcore.moe import *\n"
        "print(Certificate(Namespace.MAIN, RowSemantics.INDEPENDENT, 4, 4, 1, 1, 7, 8)"
        ".semantic_key())"
    )
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert int(found) == DECODE.semantic_key()


def test_a_malformed_certificate_still_says_that_it_was_required() -> None:
    assert replace(VERIFY, rows=0).is_required
    assert replace(VERIFY, flags=3).is_required
    assert not replace(VERIFY, flags="required").is_required
