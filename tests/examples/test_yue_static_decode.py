"""The published example runs as it stands, and replays the tokens of eager decoding.

Verbatim it needs a device. The emulated copy differs in its device strings only, ".cuda()" among
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from graphcore.decode import CUDAGraphAR, StaticKVCache, generate
from graphcore.driver import Driver

EXAMPLE = Path(__file__).parents[2] / "examples" / "yue_static_decode.py"


def source_for(driver: Driver) -> str:
    text = EXAMPLE.read_text(encoding="utf-8")
    if not driver.is_emulated:
        return text
    emulated = text.replace('device="cuda"', 'device="cpu"').replace(".cuda()", ".cpu()")
    assert emulated.count("cpu") == text.count('"cuda"') + text.count(".cuda()") == 3
    return emulated


def run(source: str) -> dict[str, Any]:
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, str(EXAMPLE), "exec"), names)
    return names


def test_the_example_prints_bos_and_the_twenty_tokens_of_eager_decoding(
    graphcore_driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run(source_for(graphcore_driver))
    generated: list[int] = names["generated"]
    assert capsys.readouterr().out == f"Generated token IDs: {generated}\n"
    runner: CUDAGraphAR = names["graph_ar"]
    cache: StaticKVCache = names["cache"]
    assert (runner.captures, runner.execution, runner.model.training) == (1, "graph", True)
    assert cache.dtype == torch.float16
    assert cache.seen_tokens == int(cache.position) == 21
    runner.close()
    eager = generate(
        names["model"], names["input_ids"], 20, cache=cache, eos_token_id=(), capture=False
    )
    assert generated == eager.ids[0].tolist()
    assert len(set(generated)) > 5
