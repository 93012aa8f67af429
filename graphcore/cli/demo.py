"""``graphcore demo``: a real language model decoded through a captured graph.

Decodes eagerly through transformers' own ``generate``, then by replay, compares the tokens, and
tells what the graph is. Exit status 1 means that the tokens differ.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphcore.cli.model import LanguageModel, find_model, load_model
from graphcore.cli.pages import check_page, say, write_page
from graphcore.cli.report import Facts, page, table
from graphcore.driver import Driver, open_driver
from graphcore.errors import CapacityError

_HOST_SAMPLES = 32
BANNER = (
    "no GPU is used: this is the emulated driver. Results are right; times mean nothing, and say "
    "nothing about a GPU."
)


@dataclass(frozen=True)
class DemoOptions:
    """What ``graphcore demo`` was asked for; names as on the command line."""

    prompt: str
    driver: str | None = None
    model: Path | None = None
    max_new_tokens: int = 64
    dtype: str = "float32"
    html: Path | None = None


@dataclass(frozen=True)
class Decoded:
    """New token ids, and the seconds they took."""

    ids: list[int]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return len(self.ids) / self.seconds if self.seconds else 0.0


def demo(options: DemoOptions) -> int:
    """Runs the demo; prints text, comparison and figures.

    Returns:
        0 where the replayed tokens equal the eager ones, else 1.

    Raises:
        DriverUnavailable: ``--driver cuda`` without a usable device, or a missing package.
        ConfigurationError: The model's file, or a page that cannot be written.
        CapacityError: More tokens than the model has positions.
    """
    check_page(options.html, "--html")
    driver = open_driver(options.driver)
    path = find_model(options.model)
    if driver.is_emulated:
        say(f"*** {BANNER}")
    say(f"loading {path.name} ...")
    device = "cpu" if driver.is_emulated else f"cuda:{driver.device}"
    language = load_model(path, device=device, dtype=options.dtype)
    ids = language.encode(options.prompt)
    _check_room(language.model, ids.shape[1], options.max_new_tokens)
    say(f"eager: {options.max_new_tokens} tokens through transformers' generate ...")
    eager = decode_eagerly(language.model, ids, options.max_new_tokens, driver)
    return _replay_and_report(options, driver, language, ids, eager)


def decode_eagerly(model: Any, ids: Any, max_new_tokens: int, driver: Driver) -> Decoded:
    """Greedy decoding by transformers itself, of ``ids`` int64 ``[1, tokens]``."""
    import torch

    driver.synchronize()
    start = time.perf_counter()
    with torch.no_grad():
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens,
            do_sample=False,
        )  # fmt: skip
    driver.synchronize()
    return Decoded(whole[0, ids.shape[1] :].tolist(), time.perf_counter() - start)


def _replay_and_report(
    options: DemoOptions, driver: Driver, language: LanguageModel, ids: Any, eager: Decoded
) -> int:
    from graphcore.decode import CUDAGraphAR

    room = ids.shape[1] + options.max_new_tokens
    free_before, _ = driver.memory_info()
    with CUDAGraphAR(language.model, max_seq_len=room, driver=driver) as runner:
        say("capturing one decode step ...")
        start = time.perf_counter()
        runner.capture(ids)
        capture_seconds = time.perf_counter() - start
        driver.synchronize()
        free_after, _ = driver.memory_info()
        replayed = stream_replayed(runner, language, ids, options.max_new_tokens)
        equal = replayed.ids == eager.ids
        facts = Facts(
            prompt=options.prompt,
            text=language.decode(replayed.ids),
            model=f"{language.name}, {options.dtype}",
            driver=driver,
            equal=equal,
            eager_tokens_per_second=eager.tokens_per_second,
            replay_tokens_per_second=replayed.tokens_per_second,
            host_us_per_token=host_us_per_token(runner, ids, driver, options.max_new_tokens),
            tokens=len(replayed.ids),
            capture_seconds=capture_seconds,
            cache_bytes=sum(t.numel() * t.element_size() for t in _cache_tensors(runner)),
            device_bytes=free_before - free_after,
        )
        say(table(facts, runner))
        if options.html is not None:
            write_page(options.html, page(facts, runner), "--html")
            say(f"the graph as a picture: {options.html}")
    if not equal:
        say(f"first difference: {_first_difference(eager.ids, replayed.ids)}")
    return 0 if equal else 1


def stream_replayed(runner: Any, language: LanguageModel, ids: Any, max_new_tokens: int) -> Decoded:
    """Decodes by replay and prints the text while it grows (standard output)."""
    new: list[int] = []
    shown = ""
    start = time.perf_counter()
    for token in runner.stream(ids, max_new_tokens):
        new.append(int(token))
        text = language.decode(new)
        # a character may take several tokens: hold back until it is whole
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(text[len(shown) :], end="", flush=True)
            shown = text
    seconds = time.perf_counter() - start
    print(flush=True)
    return Decoded(new, seconds)


def host_us_per_token(runner: Any, ids: Any, driver: Driver, max_new_tokens: int) -> float:
    """Median host time of one ``replay()`` call in microseconds, the device left to itself."""
    runner.cache.reset()
    runner.capture(ids)
    samples = []
    for _ in range(min(_HOST_SAMPLES, max_new_tokens)):
        driver.synchronize()  # an empty queue: the call is timed, not the waiting for a place
        start = time.perf_counter()
        runner.replay()
        samples.append(time.perf_counter() - start)
    driver.synchronize()
    return sorted(samples)[len(samples) // 2] * 1e6


def _cache_tensors(runner: Any) -> Sequence[Any]:
    return list(runner.cache.named_tensors().values())


def _check_room(model: Any, prompt: int, new: int) -> None:
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and prompt + new > limit:
        raise CapacityError(
            f"max_new_tokens: expected prompt and new tokens within {limit} positions of the "
            f"model, got {prompt} + {new}"
        )


def _first_difference(eager: list[int], replayed: list[int]) -> str:
    for index, (a, b) in enumerate(zip(eager, replayed, strict=False)):
        if a != b:
            return f"token {index}: eager {a}, replayed {b}"
    return f"eager made {len(eager)} tokens, replay {len(replayed)}"
