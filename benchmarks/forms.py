"""Forms of the grouped product beside each other: ``python benchmarks/forms.py CASE ... --out F``.

CASE is one of suite grouped ("qwen3-up T=4096"), or "dense T=8192", a single expert. For each, the
forms (``--forms tile64,warpgroup128``; without it all that the precision has) are timed in the same
rounds as two floors: a dense product of torch, and a streaming read of the weights that are hit.
Every form is first compared with float64; one that is refused or wrong is left out by name. What is
found goes to ``--out`` after each case. Exit status 1: a case has no form that is right; 2: nothing
could be measured, or no more.

    python benchmarks/forms.py "qwen3-up T=4096" "dense T=8192" --precision tf32x3 --out x3.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from graphcore_kernels import moe_grouped_gemm
from graphcore_kernels._gemm_forms import ARITHMETIC, forms_of, warpgroups_of

from graphcore.bench import provenance
from graphcore.bench.harness import MIN_ROUNDS, Arm, measure
from graphcore.bench.replays import Replayed, cached_bytes, replayed, torch_device
from graphcore.bench.suites.grouped_cases import DENSE, READ, GroupedCase, Shape, cases
from graphcore.bench.suites.grouped_floors import Floors, effort_of
from graphcore.bench.suites.grouped_operands import BOUNDS, Banks, GroupedOperands
from graphcore.bench.suites.grouped_ways import Product, ours
from graphcore.bench.targets import Target
from graphcore.driver import Driver, Stream, open_driver
from graphcore.errors import ConfigurationError, GraphcoreError

_SIDE, _SMALL_SIDE = 8192, 48


def known_cases(*, small: bool) -> dict[str, GroupedCase]:
    """By name; ``small``: for the emulated driver."""
    side = _SMALL_SIDE if small else _SIDE
    dense = GroupedCase(Shape("dense", 1, 1, side, side), side, "uniform", "bf16", Target())
    return {case.name: case for case in [dense, *cases(small=small)]}


def forms_by_name(precision: str) -> list[str]:
    """Of the forms that a precision has for weights ``[experts, columns, depth]``."""
    return [*forms_of(precision, "nk"), *warpgroups_of(precision)]


class Comparison:
    """Cases one after the other, with what they share.

    Args:
        driver: Where.
        stream: A blocking stream of ours.
        rounds: Of A B B A.
    """

    def __init__(self, driver: Driver, stream: Stream, rounds: int) -> None:
        self._driver, self._stream, self._rounds = driver, stream, rounds
        self._device = torch_device(driver)
        self._banks = Banks(self._device)
        self.rates: dict[str, str] = {}
        self._floors = Floors(driver, stream, self._note)

    def _note(self, what: str, unit: str, value: float) -> None:
        self.rates[what] = f"{value:.4g} {unit}"

    def of(self, case: GroupedCase, names: Sequence[str]) -> dict[str, Any]:
        """What the forms of these names make of a case, and which are left out and why."""
        operands = GroupedOperands(case, self._banks, self._device, 3 * cached_bytes(self._driver))
        nbytes = case.weight_bytes(operands.experts_hit)
        floors = [self._floors.read(nbytes), self._floors.dense(case)]
        arms: list[Arm] = []
        errors: dict[str, float] = {}
        left_out: dict[str, str] = {}
        for name in names:
            try:
                made, errors[name] = self._checked(name, operands)
                arms.append(made.arm())
            except GraphcoreError as error:
                left_out[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                # told at once: after some errors a device does nothing more
                print(f"{case.name}: {name}: {left_out[name]}", file=sys.stderr, flush=True)
        greater = max(floors, key=lambda floor: floor.burst(1))
        effort = effort_of(self._driver, self._rounds, greater, len(operands.calls))
        timings = measure([*floors, *arms], effort, self._driver.synchronize)
        seconds = {arm.name: timings.seconds(arm.name).median for arm in [*floors, *arms]}
        floor = max((READ, DENSE), key=seconds.__getitem__)
        return {
            "case": case.name,
            "rows": operands.calls[0].routed.routing.rows,
            "experts_hit": round(operands.experts_hit, 2),
            "chosen": self._chosen(case),
            "floor": floor,
            "floors_us": {name: _rounded(seconds[name] * 1e6) for name in (READ, DENSE)},
            "forms": {
                arm.name: {
                    "us": _rounded(seconds[arm.name] * 1e6),
                    "TFLOP/s": _rounded(case.flops / seconds[arm.name] / 1e12),
                    "TB/s": _rounded(nbytes / seconds[arm.name] / 1e12),
                    "of_floor": _rounded(timings.speed(arm.name, floor).median),
                    "of_dense": _rounded(timings.speed(arm.name, DENSE).median),
                    "spread": {
                        "of_floor": timings.speed(arm.name, floor).bounds(),
                        "itself": timings.same_against_same(arm.name).bounds(),
                    },
                    "error": float(f"{errors[arm.name]:.3g}"),
                }
                for arm in arms
            },
            "left_out": left_out,
        }

    def _checked(self, name: str, operands: GroupedOperands) -> tuple[Replayed, float]:
        """(a form whose results are right, its error)."""
        way = partial(ours, form=name)
        products = way(self._driver, self._stream, operands.calls)
        made = replayed(name, self._driver, self._stream, products)
        outs = [product.out for product in products]
        error = operands.check(name, outs, lambda: self._run(made))
        _check_faults(products)
        return made, error

    def _run(self, made: Replayed) -> None:
        made.run()
        self._driver.synchronize()

    def _chosen(self, case: GroupedCase) -> str:
        """The form that is taken where none is named."""
        is_16_bits = case.precision == "bf16"
        return moe_grouped_gemm.choose_form(
            case.tokens * case.shape.top_k,
            case.shape.experts,
            "bfloat16" if is_16_bits else "float32",
            capability=self._driver.device_info().capability,
            precision="ieee" if is_16_bits else case.precision,
        )


def _check_faults(products: Sequence[Product]) -> None:
    for product in products:
        product.check()


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def lines_of(found: Mapping[str, Any]) -> list[str]:
    """One case for people."""
    floors = ", ".join(f"{name} {us:.1f}" for name, us in found["floors_us"].items())
    lines = [f"{found['case']}: {floors} us; {found['chosen']} is what is taken unasked"]
    lines += [
        f"  {name:<14}{form['us']:>11.1f} us{form['TFLOP/s']:>9.1f} TFLOP/s"
        f"{form['TB/s']:>8.2f} TB/s   {form['of_floor']:.2f} of the floor, "
        f"{form['of_dense']:.2f} of the dense product, error {form['error']:.1e}"
        for name, form in found["forms"].items()
    ]
    return lines + [f"  {name:<14}left out: {why}" for name, why in found["left_out"].items()]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what ``argv`` asks for; None takes the process's arguments."""
    options = _parser().parse_args(argv)
    try:
        return _run(options, open_driver(options.driver, device=options.device))
    except GraphcoreError as error:
        print(f"forms: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace, driver: Driver) -> int:
    chosen = _chosen_cases(options, small=driver.is_emulated)
    if options.rounds < MIN_ROUNDS and not driver.is_emulated:
        raise ConfigurationError(f"rounds: expected at least {MIN_ROUNDS}, got {options.rounds}")
    report: dict[str, Any] = {
        "suite": "grouped forms",
        "device": driver.device_info().name,
        "driver": driver.name,
        "versions": provenance.versions(driver),
        "commit": provenance.commit(),
        "date": provenance.today(),
        "cases": [],
    }
    if driver.is_emulated:
        report["meaningless"] = "emulated driver: these times say nothing about CUDA"
    torch.manual_seed(31)
    with driver.stream(blocking=True) as stream:
        comparison = Comparison(driver, stream, options.rounds)
        report["rates"] = comparison.rates
        for case in chosen:
            found = comparison.of(case, options.forms or forms_by_name(case.precision))
            report["cases"].append(found)
            print("\n".join(lines_of(found)), flush=True)
            if options.out is not None:  # a later case may end the run
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            if not driver.is_emulated:
                torch.cuda.empty_cache()  # what plans allocate is not torch's
    return int(not all(found["forms"] for found in report["cases"]))


def _chosen_cases(options: argparse.Namespace, *, small: bool) -> list[GroupedCase]:
    known = known_cases(small=small)
    unknown = [name for name in options.cases if name not in known]
    if unknown:
        raise ConfigurationError(f"cases: expected some of {sorted(known)}, got {unknown}")
    chosen = [known[name] for name in options.cases]
    if options.precision is None:
        return chosen
    return [replace(case, precision=options.precision) for case in chosen]


def _form_names(text: str) -> list[str]:
    known = {name for precision in ARITHMETIC for name in forms_by_name(precision)}
    names = text.split(",")
    unknown = sorted(set(names) - known)
    if unknown or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(
            f"expected names that differ of {', '.join(sorted(known))}, got {text!r}"
        )
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="+", metavar="CASE", help="of suite grouped, by name")
    parser.add_argument("--forms", type=_form_names, help="names with commas; default: all")
    parser.add_argument("--precision", choices=sorted(BOUNDS), help="default: the case's own")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help="of A B B A")
    parser.add_argument("--driver", choices=("cuda", "emulated"), help="default: what there is")
    parser.add_argument("--device", type=int, help="device ordinal")
    return parser


if __name__ == "__main__":
    sys.exit(main())
