"""The example of experts that lie on the host decodes the same tokens with a quarter of them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from graphcore.driver import Driver

EXAMPLE = Path(__file__).parents[2] / "examples" / "moe_offload.py"
LINE = re.compile(r"(\d+)% of the experts resident: +([\d.]+) MiB of slots, .* 1 capture, (\d+)%")


def test_the_example_decodes_the_same_tokens_from_a_quarter_of_the_slots(
    graphcore_driver: Driver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRAPHCORE_DRIVER", graphcore_driver.name)
    names = runpy.run_path(str(EXAMPLE))
    assert names["driver"].name == graphcore_driver.name
    tokens = names["results"]
    assert tokens[1.0] == tokens[0.25]
    assert len(set(tokens[1.0])) > 2, "a model that repeats itself would prove little"
    said = capsys.readouterr().out
    (all_of_them, quarter) = LINE.findall(said)
    assert (all_of_them[0], quarter[0]) == ("100", "25")
    assert float(quarter[1]) < 0.3 * float(all_of_them[1])
    assert int(quarter[2]) < int(all_of_them[2])
    assert f"The same tokens: {tokens[0.25]}" in said
