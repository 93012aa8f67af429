"""``graphcore moe``: a mixture of experts in slots, decoded through reused graphs.

Decodes with random weights, by graphs and then without any, compares the tokens, and reports what
was captured, replayed, updated and declined, and why. Exit status 1 means that the tokens differ.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphcore.cli.demo import BANNER
from graphcore.cli.model import INSTALL_DEMO
from graphcore.cli.pages import check_page, say, write_page
from graphcore.driver import Driver, open_driver
from graphcore.errors import ConfigurationError, DriverUnavailable
from graphcore.moe.decisions.options import resolve_options

if TYPE_CHECKING:
    from graphcore.cli.moe_model import RandomDecoder
    from graphcore.moe import StepTrace

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "qwen3-moe": {
        "layers": 4, "hidden": 2048, "heads": 32, "experts": 128, "top_k": 8,
        "expert_width": 768, "vocabulary": 32000, "positions": 4096, "bucket": 256,
        "dtype": "bfloat16",
    },
    "mixtral": {
        "layers": 2, "hidden": 4096, "heads": 32, "experts": 8, "top_k": 2,
        "expert_width": 14336, "vocabulary": 32000, "positions": 4096, "bucket": 256,
        "dtype": "bfloat16",
    },
}  # fmt: skip
"""Sizes of the models; where they are those of a real one, of some of its layers."""
SIZES = ("layers", "hidden", "heads", "experts", "top_k", "expert_width", "rows", "bucket")
"""Sizes that can be given one by one."""


@dataclass(frozen=True)
class MoEOptions:
    """What ``graphcore moe`` was asked for; names as on the command line.

    ``slots`` is a number, or a share of the experts as ``"25%"``; None: half of them, or what a
    step needs where that is more.
    """

    model: str = "tiny"
    driver: str | None = None
    slots: str | None = None
    tokens: int = 64
    requests: int | None = None
    decode_boundary_overlap: str | None = None
    decode_overlap: str | None = None
    report: Path | None = None
    trace: Path | None = None
    dtype: str | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    experts: int | None = None
    top_k: int | None = None
    expert_width: int | None = None
    rows: int | None = None
    bucket: int | None = None


@dataclass(frozen=True)
class Run:
    """Tokens of each request, and the seconds that all took."""

    tokens: dict[int, list[int]]
    seconds: float

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens.values()))


def moe(options: MoEOptions) -> int:
    """Decodes, compares, prints the report, and writes what was asked for.

    Returns:
        0 where the tokens are those of the same steps without graphs, else 1.

    Raises:
        DriverUnavailable: ``--driver cuda`` without a usable device, or a missing package.
        ConfigurationError: Sizes, slots, switches or files that cannot be.
        CudaError: Out of memory, or the driver refused.
    """
    check_page(options.report, "--report")
    check_page(options.trace, "--trace")
    switches = {
        name: getattr(options, name) for name in ("decode_boundary_overlap", "decode_overlap")
    }
    resolve_options(command_line=switches)  # refuses before anything is made
    driver = open_driver(options.driver)
    if driver.is_emulated:
        say(f"*** {BANNER}")
    try:
        from graphcore.cli.moe_model import DecoderShape, RandomDecoder
    except ImportError as error:
        raise DriverUnavailable(f"the model needs {error.name}: {INSTALL_DEMO}") from error
    from graphcore.moe import GraphReuse, OverlappedDecode, StepTrace

    shape = DecoderShape(**_sizes(options))
    if options.tokens > shape.positions:
        shape = replace(shape, positions=options.tokens)
    slots = parse_slots(options.slots, shape.experts, shape.rows * shape.top_k)
    say(f"making {shape}; {slots} slots a layer ...")
    model = RandomDecoder(shape, slots, driver)
    requests = options.requests or shape.rows
    with GraphReuse(
        driver=driver, pool=model.pool, manifests=model.manifests, command_line=switches
    ) as reuse:
        trace = None if options.trace is None else StepTrace(driver).attach(reuse)
        stream = driver.stream(blocking=True)  # behind what torch has on its own
        decode = OverlappedDecode(reuse, model, stream=stream, watch=trace)
        say(f"decoding {requests} requests of {options.tokens} tokens through graphs ...")
        ours = _decode(decode, requests, options.tokens, driver)
        report = reuse.report(decode=decode, trace=trace, staged=model.staged_totals())
    plain = _without_graphs(model, requests, options.tokens, driver)
    if options.report is not None:
        write_page(options.report, report.to_html_page(), "--report")
        say(f"the report as a page: {options.report}")
    if options.trace is not None:
        assert trace is not None
        _write_trace(options.trace, trace)
    _say_figures(ours, plain, driver)
    print(report)
    return 0 if ours.tokens == plain.tokens else 1


def parse_slots(text: str | None, experts: int, routes: int) -> int:
    """Slots of a layer.

    Args:
        text: A number, a share as ``"25%"``, or None for the default.
        experts: Of a layer.
        routes: Of a step.

    Raises:
        ConfigurationError: Neither, or a number that no layer can have.
    """
    if text is None:
        return min(max(-(-experts // 2), routes), experts)
    try:
        is_share = text.endswith("%")
        slots = round(experts * float(text[:-1]) / 100) if is_share else int(text)
    except (ValueError, OverflowError):
        slots = 0
    if not 1 <= slots <= experts:
        raise ConfigurationError(
            f"--slots: expected 1 to {experts}, or a share such as 25%, got {text!r}"
        )
    return slots


def _sizes(options: MoEOptions) -> dict[str, Any]:
    given = {name: getattr(options, name) for name in (*SIZES, "dtype")}
    return MODELS[options.model] | {
        name: value for name, value in given.items() if value is not None
    }


def _decode(decode: Any, count: int, tokens: int, driver: Driver) -> Run:
    from graphcore.moe import DecodeLoop, DecodeRequest

    # tokens of a small vocabulary too
    requests = [DecodeRequest(number, number % 97, tokens) for number in range(1, count + 1)]
    made: dict[int, list[int]] = {}
    driver.synchronize()
    start = time.perf_counter()
    for step in DecodeLoop(decode).run(requests):
        for number, token in step.tokens.items():
            made.setdefault(number, []).append(token)
    driver.synchronize()
    return Run(made, time.perf_counter() - start)


def _without_graphs(model: RandomDecoder, count: int, tokens: int, driver: Driver) -> Run:
    """The same requests, each step run directly."""
    from graphcore.moe import GraphReuse, OverlappedDecode

    say("decoding the same without graphs ...")
    model.step.obstacle = "asked to run without graphs"
    with GraphReuse(
        driver=driver,
        pool=model.pool,
        manifests=model.manifests,
        decode_boundary_overlap=0,
        decode_overlap=0,
    ) as reuse:
        return _decode(OverlappedDecode(reuse, model), count, tokens, driver)


def _say_figures(ours: Run, plain: Run, driver: Driver) -> None:
    different = [number for number, made in ours.tokens.items() if made != plain.tokens[number]]
    if different:
        say(f"DIFFERENT: the tokens of requests {different} are not those without graphs")
    else:
        say(f"equal: all {ours.count} tokens are those of the same steps without graphs")
    unsure = " (means nothing: emulated)" if driver.is_emulated else ""
    for name, run in (("through graphs", ours), ("without", plain)):
        say(f"  {name:<14}  {run.count / run.seconds:.1f} tokens/s, captures included{unsure}")


def _write_trace(path: Path, trace: StepTrace) -> None:
    write_page(path, trace.to_json(), "--trace")
    say(f"the trace, for ui.perfetto.dev or chrome://tracing: {path}")
