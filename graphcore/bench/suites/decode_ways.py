"""Ways of compiling a decode step against each other: ``compile=True``, and inductor's own.

No part of a whole run: each way takes minutes. Every figure is a note.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from graphcore.bench.suites.decode_checks import agreement
from graphcore.bench.suites.decode_models import subject_of
from graphcore.bench.suites.decode_ours import OurWay
from graphcore.bench.suites.decode_peers import eager_tokens
from graphcore.driver import Driver

Note = Mapping[str, Any]

SUFFIX = " compile"
"""Behind the name of a case."""

_WAYS: Mapping[str, Any] = {
    "no": False,
    "fused products": True,
    "library products": {},
    "coordinate descent": {"coordinate_descent_tuning": True},
}


def compile_notes(case: str, driver: Driver) -> list[Note]:
    """GPU time, nodes, seconds and error of each way of ``case``; printed as they come."""
    subject = subject_of(case.removesuffix(SUFFIX), driver)
    eager, end = eager_tokens(subject)
    notes: list[Note] = []
    for name, how in _WAYS.items():
        try:
            way = OurWay(name, subject, driver, end, compile=how)
            step = way.step_arm()
            step.burst(3)
            seconds = min(step.burst(subject.tokens) for _ in range(5)) / subject.tokens
            error = agreement(way.runner, subject, eager, end).error
        except Exception as failure:  # one way must not cost the others
            if not driver.is_emulated:
                traceback.print_exc()
            notes.append({"left out": f"{case} {name}", "reason": f"{failure!r}"})
        else:
            figures = (
                ("GPU time of a step", "us", seconds * 1e6),
                ("nodes", "nodes", way.nodes),
                ("first prompt", "ms", way.capture_seconds * 1e3),
                ("error of the logits", "", error),
            )
            notes += [
                {"case": f"{case}, {name}: {what}", "unit": unit, "ours": round(value, 4)}
                for what, unit, value in figures
            ]
            way.close()
        print(notes[-4:], flush=True)
    return notes
