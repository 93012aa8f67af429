"""Arguments, and which subcommand answers them."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import graphcore
from graphcore.errors import ConfigurationError, GraphcoreError

_INTERRUPTED = 130
_REFUSED = 2
_READER_GONE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: Arguments after the program's name; None takes the process's.

    Returns:
        The exit status: 0, 1 where the subcommand says no (unequal tokens, something missing, a
        plan with a race that was to be checked), 2 for an error of ours or of the arguments, 130
        after Ctrl-C, 141 where the reader of the output has gone.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format="graphcore: %(message)s", level=logging.WARNING)
    try:
        status = _answer(arguments)
        sys.stdout.flush()  # here, where a reader that has gone is told
        return status
    except BrokenPipeError:  # ``| head``, which has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE
    except SystemExit as leaving:  # argparse, which has said why
        return leaving.code if isinstance(leaving.code, int) else _REFUSED
    except GraphcoreError as error:
        if "--debug" in arguments:
            raise
        print(f"graphcore {arguments[0]}: {error}", file=sys.stderr)
        return _REFUSED
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return _INTERRUPTED


def _answer(arguments: list[str]) -> int:
    if arguments[:1] == ["bench"]:
        from graphcore.bench import main as bench

        return bench(arguments[1:])
    return _run(_parser().parse_args(arguments))


def _run(options: argparse.Namespace) -> int:
    if options.command == "doctor":
        from graphcore.cli.doctor import doctor

        return doctor(options.driver)
    if options.command == "inspect":
        from graphcore.cli.inspect import InspectOptions, inspect

        return inspect(
            InspectOptions(
                subject=options.subject,
                output=options.output,
                diff=options.diff,
                check=options.check,
                text=options.text,
                full=options.full,
                open=options.open,
                driver=options.driver,
                warmup=options.warmup,
            )
        )
    if options.command == "moe":
        from graphcore.cli.moe import MoEOptions, moe

        names = [field.name for field in fields(MoEOptions)]
        return moe(MoEOptions(**{name: getattr(options, name) for name in names}))
    if options.parallel is not None:
        return _run_parallel(options)
    from graphcore.cli.demo import DemoOptions, demo

    return demo(
        DemoOptions(
            prompt=options.prompt,
            driver=options.driver,
            model=options.model,
            max_new_tokens=options.max_new_tokens,
            dtype=options.dtype,
            html=options.html,
        )
    )


def _run_parallel(options: argparse.Namespace) -> int:
    from graphcore.cli.parallel_demo import ParallelDemoOptions, parallel_demo

    alone = {"--model": options.model, "--html": options.html}
    given = [name for name, value in alone.items() if value is not None]
    if given:
        raise ConfigurationError(f"{given[0]}: expected none with --parallel")
    return parallel_demo(
        ParallelDemoOptions(
            parallel=options.parallel,
            driver=options.driver,
            max_new_tokens=options.max_new_tokens,
            timeout=options.timeout,
        )
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="graphcore",
        description="Build, capture, read, check, change and reuse CUDA graphs.",
    )
    parser.add_argument("--version", action="version", version=graphcore.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="decode a language model through a captured graph")
    demo.add_argument("--prompt", default="What is a CUDA graph?", help="what to ask the model")
    demo.add_argument("--driver", choices=("cuda", "emulated"), help="default: what there is")
    demo.add_argument("--model", type=Path, help="a GGUF file; default: the installed SmolLM2")
    demo.add_argument("--max-new-tokens", type=_positive, default=64, metavar="N")
    demo.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32",
        help="of weights and cache; float32 tokens equal eager ones exactly",
    )  # fmt: skip
    demo.add_argument("--html", type=Path, help="write the captured graph as one HTML page")
    demo.add_argument(
        "--parallel", choices=("tensor", "expert"),
        help="a model of random weights over the ranks that torchrun has started",
    )  # fmt: skip
    demo.add_argument(
        "--timeout", type=_positive, default=60, metavar="S",
        help="with --parallel: seconds that another rank is waited for",
    )  # fmt: skip
    inspect = commands.add_parser(
        "inspect",
        help="a graph, plan or comparison as one HTML page",
        description="Draws FILE (a snapshot or plan as JSON) or what module:function returns (a "
        "graph, snapshot, plan or comparison) or launches (captured after a warm-up).",
    )
    _add_inspect_arguments(inspect)
    doctor = commands.add_parser("doctor", help="driver, devices, versions, and what is missing")
    doctor.add_argument(
        "--driver", choices=("cuda", "emulated"), help="which must work; default: any"
    )
    moe = commands.add_parser(
        "moe",
        help="decode a mixture of experts in slots through reused graphs",
        description="Decodes requests by a model of random weights whose experts lie in slots, "
        "through graphs and without, compares the tokens, and prints what was captured, replayed, "
        "updated and declined, and why.",
    )
    _add_moe_arguments(moe)
    commands.add_parser("bench", help="measure against floors and peers", add_help=False)
    for command in (demo, doctor, inspect, moe):
        command.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _add_inspect_arguments(inspect: argparse.ArgumentParser) -> None:
    add = inspect.add_argument
    add("subject", metavar="FILE|module:function", help="what to look at")
    add("-o", "--output", type=Path, metavar="PAGE", help="default: named after the subject")
    add("--diff", metavar="OTHER", help="compare two graphs or snapshots; exit status 1: different")
    add(
        "--check", action="store_true",
        help="print what keeps a plan from being built (races); exit status 1: something does; no "
        "page without -o",
    )  # fmt: skip
    add("--text", action="store_true", help="print a table; no page without -o")
    add("--full", action="store_true", help="show every node, not folded past 200")
    add("--open", action="store_true", help="open the page in a browser")
    add("--driver", choices=("cuda", "emulated"), help="where to capture; default: what there is")
    add("--warmup", type=_positive, default=3, metavar="N", help="runs before the capture")


def _add_moe_arguments(moe: argparse.ArgumentParser) -> None:
    add = moe.add_argument
    add("--model", choices=("tiny", "qwen3-moe", "mixtral"), default="tiny", help="whose sizes")
    add("--driver", choices=("cuda", "emulated"), help="default: what there is")
    add("--slots", metavar="N|P%", help="experts of a layer that can be resident; default: half")
    add("--tokens", type=_positive, default=64, metavar="N", help="of each request")
    add("--requests", type=_positive, metavar="N", help="default: as many as rows")
    for option, what in (
        ("boundary-overlap", "1: a changed decode graph updates the executable"),
        ("overlap", "1: the next step is prepared and queued while one runs"),
    ):
        add(f"--decode-{option}", metavar="0|1", help=f"{what}; default: 0, or the environment's")
    add("--report", type=Path, metavar="PAGE", help="write the report as one HTML page")
    add("--trace", type=Path, metavar="FILE", help="write a trace that Perfetto opens")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the model's")
    sizes = moe.add_argument_group("sizes", "other ones than the model's")
    for name in ("layers", "hidden", "heads", "experts", "top-k", "expert-width", "rows"):
        sizes.add_argument(f"--{name}", type=_positive, metavar="N")
    sizes.add_argument(
        "--bucket", type=_positive, metavar="N", help="positions after which the graph is another"
    )


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return number
