"""assert_replay_equals_eager: a captured step does what the step does.

Inputs are fresh for every replay, padded tails are poisoned, and each output is filled with what
differs from the expected result in every element: a graph that does nothing, keeps old values, or
reads past its rows fails, whatever the right values are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from graphcore.errors import ConfigurationError
from graphcore.executable import capture_function
from graphcore.interop import choose_driver

if TYPE_CHECKING:
    import torch


def assert_replay_equals_eager(
    step: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    *,
    fresh: Callable[[int], Sequence[torch.Tensor]] | None = None,
    rounds: int = 3,
    valid_rows: int | None = None,
    tolerance: float = 0.0,
) -> None:
    """Captures ``step(*inputs)`` once and compares replays with eager calls.

    Args:
        step: Takes the inputs, returns a tensor or a sequence of tensors; must not change inputs.
        inputs: Static input tensors on one device; overwritten by this check.
        fresh: ``fresh(round)`` gives inputs of the same shapes; None draws random ones (integers
            are shuffled copies of ``inputs``, so that they stay valid).
        rounds: How many fresh inputs are tried, at least 1.
        valid_rows: Rows (dimension 0) that count, at least 1. The rest of every floating-point
            input is poisoned and the rest of every output is not looked at; the eager call gets
            the valid rows alone.
        tolerance: Largest difference allowed, absolute and relative, in floating-point outputs; 0
            asks for equal values. Whole numbers and flags are always compared for equality.

    Raises:
        AssertionError: A replay differs, an output has no elements, or the step changes its inputs;
            names round and output.
        ConfigurationError: A number with which the check could not fail (nothing was run), or
            fresh inputs of another count, shape or dtype.
    """
    import torch

    _check_numbers(inputs, rounds, valid_rows, tolerance)
    driver = choose_driver(*inputs)
    originals = [tensor.clone() for tensor in inputs]
    graph = capture_function(step, *inputs, driver=driver)
    with graph, graph.instantiate() as executable:
        outputs = _as_tensors(graph.outputs)
        _check_outputs(outputs, inputs)
        for number in range(rounds):
            given = fresh(number) if fresh else [_drawn(tensor, number) for tensor in originals]
            _check_given(given, inputs, f"round {number}")
            kept = [tensor.clone() for tensor in given]
            with torch.no_grad():
                valid = [_rows(tensor, valid_rows) for tensor in given]
                expected = [tensor.clone() for tensor in _as_tensors(step(*valid))]
                _check_unchanged(given, kept, f"round {number}")
                for static, new in zip(inputs, given, strict=True):
                    static.copy_(new)
                    if valid_rows is not None and static.dim() and not _is_exact(static):
                        static[valid_rows:].fill_(float("nan"))
                pairs = [
                    (_rows(output, valid_rows), wanted)
                    for output, wanted in zip(outputs, expected, strict=True)
                ]
                for index, (output, wanted) in enumerate(pairs):
                    _check_comparable(output, wanted, f"round {number}, output {index}")
                    _poison(output, wanted)
            driver.synchronize()
            executable.launch()
            driver.synchronize()
            for index, (output, wanted) in enumerate(pairs):
                _compare(output, wanted, tolerance, f"round {number}, output {index}")


def _check_numbers(
    inputs: Sequence[torch.Tensor], rounds: int, valid_rows: int | None, tolerance: float
) -> None:
    if rounds < 1:
        raise ConfigurationError(f"rounds: expected at least 1, got {rounds}")
    if not 0 <= tolerance < float("inf"):
        raise ConfigurationError(f"tolerance: expected a finite number >= 0, got {tolerance}")
    if hasattr(inputs, "shape"):
        raise ConfigurationError(
            "inputs: expected a sequence of tensors, got one; put it in a list"
        )
    rows = min((tensor.shape[0] for tensor in inputs if tensor.dim()), default=0)
    if valid_rows is not None and not 1 <= valid_rows <= rows:
        raise ConfigurationError(f"valid_rows: expected 1 to {rows} rows, got {valid_rows}")


def _check_given(given: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], where: str) -> None:
    """Refuses fresh inputs that a copy would broadcast, convert or leave out."""
    wanted = [(tuple(tensor.shape), tensor.dtype) for tensor in inputs]
    got = [(tuple(tensor.shape), tensor.dtype) for tensor in given]
    if wanted != got:
        raise ConfigurationError(f"fresh: {where}: expected inputs of {wanted}, got {got}")


def _check_unchanged(
    given: Sequence[torch.Tensor], kept: Sequence[torch.Tensor], where: str
) -> None:
    import torch

    for index, (now, before) in enumerate(zip(given, kept, strict=True)):
        same = torch.equal(now, before) or (
            not _is_exact(now) and torch.allclose(now, before, rtol=0, atol=0, equal_nan=True)
        )
        if not same:
            raise AssertionError(
                f"{where}: expected a step that leaves its inputs as they are, got one that "
                f"changes input {index}: give it a copy"
            )


def _rows(tensor: torch.Tensor, count: int | None) -> torch.Tensor:
    """The first ``count`` rows; all of it for None, or where it has no dimensions."""
    return tensor if count is None or not tensor.dim() else tensor[:count]


def _as_tensors(result: Any) -> list[torch.Tensor]:
    import torch

    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (list, tuple)) and all(isinstance(t, torch.Tensor) for t in result):
        return list(result)
    raise AssertionError(
        "expected a step that returns a tensor or a sequence of tensors, got "
        f"{type(result).__name__}"
    )


def _check_outputs(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    if not outputs:
        raise AssertionError("expected a step with outputs, got one that returns none")
    starts = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    if any(output.untyped_storage().data_ptr() in starts for output in outputs):
        raise AssertionError("expected outputs of their own, got one that shares an input's memory")


def _drawn(like: torch.Tensor, seed: int) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(seed)
    if like.is_floating_point():
        values = torch.randn(like.shape, generator=generator, dtype=torch.float32)
        return values.to(device=like.device, dtype=like.dtype)
    order = torch.randperm(like.numel(), generator=generator).to(like.device)
    return like.flatten()[order].reshape(like.shape)


def _is_exact(tensor: torch.Tensor) -> bool:
    """Whole numbers and flags: without a NaN, and without rounding."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def _poison(output: torch.Tensor, wanted: torch.Tensor) -> None:
    """Fills ``output`` with what differs from ``wanted`` in every element."""
    if _is_exact(output):
        output.copy_(wanted.bitwise_not())
    else:
        output.fill_(float("nan"))


def _check_comparable(output: torch.Tensor, wanted: torch.Tensor, where: str) -> None:
    if output.shape != wanted.shape:
        raise AssertionError(
            f"{where}: expected shape {tuple(wanted.shape)}, got {tuple(output.shape)}"
        )
    if output.dtype != wanted.dtype:
        raise AssertionError(f"{where}: expected {wanted.dtype}, got {output.dtype}")
    if not wanted.numel():
        raise AssertionError(f"{where}: expected elements to compare, got none")


def _compare(output: torch.Tensor, wanted: torch.Tensor, tolerance: float, where: str) -> None:
    import torch

    equal = (
        torch.equal(output, wanted)
        if tolerance == 0 or _is_exact(wanted)
        else torch.allclose(output, wanted, rtol=tolerance, atol=tolerance)
    )
    if not equal:
        wrong = int((output != wanted).sum())
        raise AssertionError(
            f"{where}: replay differs from eager in {wrong} of {wanted.numel()} elements "
            "(poisoned outputs stay poisoned where the graph wrote nothing)"
        )
