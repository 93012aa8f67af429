"""Predictions and the emulated driver, held to what an H200 answered to two thousand updates.

The pairs of graphs are made by ``helpers/update_pairs.py``; ``helpers/ask_update_pairs.py`` writes
the answers of a device.
"""

from __future__ import annotations

import datetime
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.tensors import cuda_driver
from helpers.update_pairs import Pair, ask, every_pair, families, predict
from helpers.update_specs import Workshop

from graphcore.driver.emulated import EmulatedDriver
from graphcore.graph import GraphDiff

DATA = json.loads(
    (Path(__file__).parent / "data" / "update_answers_h200.json").read_text(encoding="utf-8")
)
ANSWERS: dict[str, dict[str, Any]] = {row["id"]: row for row in DATA["answers"]}
COMPARED = ("stage", "error", "result", "node", "from_node")
ASKED_AGAIN = 20


@pytest.fixture
def workshop() -> Iterator[Workshop]:
    workshop = Workshop(EmulatedDriver())
    yield workshop
    workshop.close()


def of_family(family: str) -> list[Pair]:
    return [pair for pair in every_pair() if pair.family == family]


def differences(answer: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The fields in which two answers differ; whether it was applied only where both tell."""
    found = [field for field in COMPARED if answer.get(field) != expected.get(field)]
    applied = answer.get("applied"), expected.get("applied")
    if None not in applied and applied[0] != applied[1]:
        found.append("applied")
    return found


def predicted(found: GraphDiff) -> tuple[str, list[int] | None]:
    """The answer that a comparison predicts, and the node it says the driver names."""
    refusal = found.refusal
    if refusal is None:
        return "success", None
    return refusal.result.value, list(refusal.path) if refusal.named_by_driver else None


def test_every_pair_was_asked_about_and_the_answers_say_where_they_come_from() -> None:
    assert {pair.id for pair in every_pair()} == set(ANSWERS)
    assert DATA["device"] == "NVIDIA H200"
    assert datetime.date.fromisoformat(DATA["date"])
    assert DATA["commit"]
    assert {"cuda-driver", "cuda-bindings", "python"} <= set(DATA["versions"])
    assert not [row for row in ANSWERS.values() if row["stage"] == "crashed"]


def test_what_the_device_answered_differently_from_run_to_run_is_told_and_not_held_to() -> None:
    assert len(DATA["varied"]) <= 1
    for pair_id, words in DATA["varied"].items():
        assert ANSWERS[pair_id]["applied"] is None
        assert words


def test_the_answers_are_many_and_of_every_kind() -> None:
    about_nodes = [pair for pair in every_pair() if not pair.is_about_topology]
    assert len(about_nodes) >= 400
    results = Counter(ANSWERS[pair.id]["result"] for pair in about_nodes)
    assert min(
        results[name]
        for name in (
            "success", "error", "topology_changed", "node_type_changed", "parameters_changed",
            "not_supported", "attributes_changed",
        )
    ) >= 10  # fmt: skip
    assert Counter(row.get("applied") for row in ANSWERS.values())[False] >= 10


@pytest.mark.parametrize("family", families())
def test_the_emulated_driver_answers_as_the_h200(workshop: Workshop, family: str) -> None:
    wrong = {}
    for pair in of_family(family):
        answer, expected = ask(workshop, pair), ANSWERS[pair.id]
        fields = differences(answer, expected)
        if fields:
            wrong[pair.id] = [(field, answer.get(field), expected.get(field)) for field in fields]
    assert wrong == {}


@pytest.mark.parametrize("family", families())
def test_a_comparison_predicts_the_h200s_answer_and_the_node_it_names(
    workshop: Workshop, family: str
) -> None:
    wrong = {}
    for pair in of_family(family):
        expected = ANSWERS[pair.id]
        if expected["result"] is None:
            continue  # no executable, or the driver raised: two descriptions cannot tell
        found = predict(workshop, pair)
        answer = predicted(found)
        if answer != (expected["result"], expected["node"]):
            wrong[pair.id] = (answer, expected, str(found.refusal))
        elif expected.get("applied") is False and not found.traps:
            wrong[pair.id] = ("no trap", expected)
        elif found.update_possible and (answer[0] != "success" or found.traps):
            wrong[pair.id] = ("possible", expected)
    assert wrong == {}


def test_the_comparison_would_notice_other_answers(workshop: Workshop) -> None:
    """The control: each answer compared with another pair's."""
    pairs = [pair for family in ("several", "copy 2-D", "kind") for pair in of_family(family)]
    shifted = zip(pairs, [*pairs[1:], pairs[0]], strict=True)
    wrong = sum(bool(differences(ask(workshop, one), ANSWERS[other.id])) for one, other in shifted)
    assert wrong > len(pairs) // 4


@pytest.mark.gpu
def test_a_device_answers_some_of_them_as_before() -> None:
    """One of each family, other ones each day."""
    draw = random.Random(datetime.datetime.now(datetime.UTC).date().isoformat())
    chosen = [draw.choice(of_family(family)) for family in families()]
    assert len(chosen) >= ASKED_AGAIN
    workshop = Workshop(cuda_driver())
    wrong = {}
    for pair in chosen:
        answer = ask(workshop, pair)
        fields = differences(answer, ANSWERS[pair.id])
        if fields:
            wrong[pair.id] = (fields, answer, ANSWERS[pair.id])
    workshop.close()
    assert wrong == {}
