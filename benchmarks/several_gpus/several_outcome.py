"""What a run came to: lines for people, figures for a file, and what was wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import graphcore
from graphcore.bench import provenance

_RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass
class Outcome:
    """Of one rank; ``problems`` are written and printed before they fail the run."""

    lines: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def expect(self, holds: bool, problem: str) -> None:
        """Notes ``problem`` where something does not hold."""
        if not holds:
            self.problems.append(problem)


def notes_of(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The speeds among ``figures``, as the tables of ``graphcore.bench`` show them."""
    notes = []
    for name, figure in figures.items():
        if isinstance(figure, Mapping):
            notes += [
                {"case": name, "unit": unit.replace("_per_", "/").replace("_", " "), "ours": value}
                for unit, value in figure.items()
                if "_per_" in unit
            ]
        elif name == "us_a_step":
            notes.append({"case": "a step, looked at one by one", "unit": "us", "ours": figure})
    return notes


def write(what: str, ranks: Any, outcome: Outcome, problems: list[list[str]], small: bool) -> Path:
    """Writes the figures to $OUT, or to benchmarks/results: where, which rank 0 prints."""
    is_gpu = ranks.device.type == "cuda"
    driver = graphcore.open_driver(
        "cuda" if is_gpu else "emulated", device=ranks.device.index if is_gpu else None
    )
    found = {
        "suite": f"several_gpus {what}",
        "device": torch.cuda.get_device_name(ranks.device) if is_gpu else "cpu",
        "driver": driver.name,
        "ranks": ranks.size,
        "backend": torch.distributed.get_backend(),
        "versions": provenance.versions(driver),
        "commit": provenance.commit(),
        "date": provenance.today(),
        "figures": outcome.figures,
        "agreeing_us_by_rank": outcome.figures.pop("agreeing_us_by_rank"),
        "problems_by_rank": problems,
        "rows": [],
        "notes": notes_of(outcome.figures),
    }
    driver.close()
    if small or not is_gpu:
        found["meaningless"] = "tiny shapes or no GPU: these times say nothing about several GPUs"
    folder = Path(os.environ.get("OUT") or _RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"several_gpus_{what}_{ranks.size}.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return path
