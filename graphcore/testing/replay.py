"""assert_replay_equals_eager: a captured step does what the step does.

Outputs and padded tails are poisoned before every replay and inputs are fresh each time, so that a
graph that does nothing, keeps old values, or reads past its rows fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from graphcore.executable import capture_function
from graphcore.interop import choose_driver

if TYPE_CHECKING:
    import torch

_POISON_BYTE = 0xFF  # NaN in every float type, -1 in signed integers


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
        rounds: How many fresh inputs are tried.
        valid_rows: Rows (dimension 0) that count. The rest of every floating-point input is
            poisoned and the rest of every output is not looked at; the eager call gets the valid
            rows alone.
        tolerance: Largest difference allowed, absolute and relative; 0 asks for equal values.

    Raises:
        AssertionError: A replay differs; names round and output.
    """
    import torch

    driver = choose_driver(*inputs)
    originals = [tensor.clone() for tensor in inputs]
    graph = capture_function(step, *inputs, driver=driver)
    with graph, graph.instantiate() as executable:
        outputs = _as_tensors(graph.outputs)
        _check_outputs(outputs, inputs)
        for number in range(rounds):
            given = fresh(number) if fresh else [_drawn(tensor, number) for tensor in originals]
            with torch.no_grad():
                valid = [tensor[:valid_rows] for tensor in given]
                expected = [tensor.clone() for tensor in _as_tensors(step(*valid))]
                for static, new in zip(inputs, given, strict=True):
                    static.copy_(new)
                    if valid_rows is not None and static.is_floating_point():
                        _poison(static[valid_rows:])
                for output in outputs:
                    _poison(output)
            driver.synchronize()
            executable.launch()
            driver.synchronize()
            for index, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
                _compare(output[:valid_rows], wanted, tolerance, f"round {number}, output {index}")


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


def _poison(tensor: torch.Tensor) -> None:
    import torch

    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.logical_not_()
    else:
        tensor.fill_(-1 if tensor.dtype.is_signed else _POISON_BYTE)


def _compare(output: torch.Tensor, wanted: torch.Tensor, tolerance: float, where: str) -> None:
    import torch

    if output.shape != wanted.shape:
        raise AssertionError(
            f"{where}: expected shape {tuple(wanted.shape)}, got {tuple(output.shape)}"
        )
    equal = (
        torch.equal(output, wanted)
        if tolerance == 0
        else torch.allclose(output, wanted, rtol=tolerance, atol=tolerance)
    )
    if not equal:
        wrong = int((output != wanted).sum())
        raise AssertionError(
            f"{where}: replay differs from eager in {wrong} of {wanted.numel()} elements "
            "(poisoned outputs stay poisoned where the graph wrote nothing)"
        )
