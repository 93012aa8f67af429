"""Tables of a document: made from result files, between two markers, with device and date."""

import json

import pytest

from graphcore.bench import tables
from graphcore.bench.results import Report, Row
from graphcore.errors import ConfigurationError

DOCUMENT = f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n"


def row(case="n=16", **changes):
    fields = {
        "case": case,
        "unit": "us",
        "ours": 1.31,
        "floor": 1.14,
        "peers": {"torch": 4.21, "CuPy": 1234.5},
        "of_floor": 0.87,
        "vs_best_peer": 3.2,
        "spread": {"of_floor": [0.8, 0.9], "vs_best_peer": [3.1, 3.3]},
    }
    return Row(**fields | changes)


def write(folder, name="launch", rows=None, **changes):
    fields = {
        "suite": name,
        "device": "NVIDIA H200",
        "driver": "cuda",
        "versions": {"python": "3.12.3", "torch": "2.11.0"},
        "commit": "0123456789abcdef0123",
        "date": "2026-01-31",
        "rows": [row()] if rows is None else rows,
        "notes": [
            {"case": "instantiate n=16", "unit": "us", "ours": 33.0},
            {"left out": "cuda.core", "reason": "not installed"},
        ],
    }
    Report(**fields | changes).write(folder / "h200" / f"{name}.json")


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(DOCUMENT, encoding="utf-8")
    return path


def generate(document, *arguments):
    status = tables.main([str(document), str(document.parent / "results"), *arguments])
    return status, document.read_text(encoding="utf-8")


def test_figures_compared_with_nothing_can_be_left_out(document, tmp_path):
    write(tmp_path / "results")
    write(tmp_path / "results", "inspect", rows=[])
    _, whole = generate(document)
    assert "instantiate n=16" in whole
    assert "### inspect" in whole
    _, short = generate(document, "--rows-only")
    assert "| n=16 |" in short
    assert "cuda.core" in short  # what was left out is told all the same
    assert "instantiate n=16" not in short
    assert "### inspect" not in short


def test_a_table_carries_device_date_figures_and_where_they_come_from(document, tmp_path):
    write(tmp_path / "results")
    status, text = generate(document)
    assert status == 0
    assert "### launch: NVIDIA H200, 2026-01-31" in text
    assert (
        "| case | unit | ours | floor | torch | CuPy | of floor | vs best peer |\n"
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| n=16 | us | **1.31** | 1.14 | 4.21 | 1,234 | 0.87 (0.80 to 0.90) |"
        " 3.20 (3.10 to 3.30) |"
    ) in text
    assert "| instantiate n=16 | us | 33.00 |" in text
    assert "Left out: cuda.core (not installed)." in text
    assert "Commit 0123456789ab; python 3.12.3, torch 2.11.0." in text


def test_only_what_is_between_the_markers_changes_and_twice_is_as_once(document, tmp_path):
    write(tmp_path / "results")
    _, once = generate(document)
    _, twice = generate(document)
    assert once == twice
    assert once.startswith(f"before\n{tables.BEGIN}\n")
    assert once.endswith(f"\n{tables.END}\nafter\n")
    assert "old" not in once


@pytest.mark.parametrize("meaningless", [False, True], ids=["no file", "emulated only"])
def test_without_figures_the_text_says_so(document, tmp_path, meaningless):
    if meaningless:
        write(tmp_path / "results", driver="emulated", is_meaningless=True)
    _, text = generate(document)
    assert f"{tables.BEGIN}\nNo figures have been recorded yet.\n{tables.END}" in text


def test_a_peer_that_one_row_lacks_is_a_dash_there(document, tmp_path):
    write(tmp_path / "results", rows=[row(), row("n=1024", peers={"torch": 7.9})])
    _, text = generate(document)
    assert "| n=1024 | us | **1.31** | 1.14 | 7.90 | - | 0.87" in text


def test_a_suite_of_notes_only_has_no_table_of_comparisons(document, tmp_path):
    write(tmp_path / "results", rows=[])
    _, text = generate(document)
    assert "of floor |" not in text
    assert "| instantiate n=16 |" in text


def test_suites_come_in_the_order_of_their_files(document, tmp_path):
    for name in ("update", "launch"):
        write(tmp_path / "results", name)
    _, text = generate(document)
    assert text.index("### launch") < text.index("### update")


def test_a_check_tells_and_writes_nothing(document, tmp_path):
    write(tmp_path / "results")
    assert generate(document, "--check") == (1, DOCUMENT)
    _, fresh = generate(document)
    assert generate(document, "--check") == (0, fresh)


@pytest.mark.parametrize(
    "text",
    [
        "no markers",
        tables.BEGIN,
        f"{tables.END}{tables.BEGIN}",
        f"{DOCUMENT}{tables.BEGIN}",
        f"{DOCUMENT}{tables.END}",
    ],
    ids=["none", "no end", "turned round", "two beginnings", "two ends"],
)
def test_a_document_without_its_markers_is_refused_and_left_alone(document, text):
    document.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match="bench-tables:begin"):
        generate(document)
    assert document.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected JSON"),
        ("[]", "without"),
        (json.dumps({"suite": "launch"}), "without .*'device'"),
    ],
    ids=["not JSON", "no object", "fields missing"],
)
def test_a_file_that_is_no_result_is_refused_by_name(document, tmp_path, content, message):
    path = tmp_path / "results" / "odd.json"
    path.parent.mkdir()
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=rf"odd\.json: .*{message}"):
        generate(document)


def test_the_summary_of_a_test_run_is_no_result(document, tmp_path):
    write(tmp_path / "results")
    _, without = generate(document)
    for name in ("tests.json", "tests-decode.json", "sanitizer.json", "soak.json"):
        (tmp_path / "results" / name).write_text('{"passed": 3}', encoding="utf-8")
    _, beside = generate(document)
    assert beside == without
