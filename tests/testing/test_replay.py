"""assert_replay_equals_eager passes a right step and fails every kind of wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.tensors import device_of

from graphcore.driver import Driver, active
from graphcore.errors import ConfigurationError
from graphcore.testing import assert_replay_equals_eager


def inputs(driver: Driver, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 5, generator=generator).to(device_of(driver))
    picks = torch.arange(rows, device=device_of(driver)) % 5
    return x, picks


def right(x: torch.Tensor, picks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2 + 1, x[torch.arange(x.shape[0], device=x.device), picks]


def test_a_right_step_passes(graphcore_driver: Driver) -> None:
    assert_replay_equals_eager(right, inputs(graphcore_driver))


def test_a_single_output_and_given_inputs_pass(graphcore_driver: Driver) -> None:
    device = device_of(graphcore_driver)
    x = torch.ones(3, 2, device=device)
    seen: list[int] = []

    def fresh(number: int) -> list[torch.Tensor]:
        seen.append(number)
        return [torch.full((3, 2), float(number), device=device)]

    assert_replay_equals_eager(lambda t: t.sum(0), [x], fresh=fresh, rounds=2)
    assert seen == [0, 1]


def test_a_bare_tensor_is_refused_before_it_is_taken_for_its_rows() -> None:
    with pytest.raises(ConfigurationError, match="inputs: expected a sequence of tensors"):
        assert_replay_equals_eager(lambda t: t * 2, torch.ones(3, 2))  # type: ignore[arg-type]


def test_whole_numbers_and_flags_are_poisoned_too(graphcore_driver: Driver) -> None:
    _, picks = inputs(graphcore_driver)
    assert_replay_equals_eager(lambda p: (p + 1, p > 2, p.to(torch.uint8)), [picks])


def _does_nothing() -> Callable[..., Any]:
    kept: list[torch.Tensor] = []

    def step(x: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
        # from the second call on the result of the first: the graph has nothing to do with x
        if not kept:
            kept.append(x * 2)
        return kept[0]

    return step


def _counts_in_python() -> Callable[..., Any]:
    calls: list[int] = []

    def step(x: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
        calls.append(1)  # Python's side of a step does not replay
        return x + len(calls)

    return step


@pytest.mark.parametrize("make", [_does_nothing, _counts_in_python], ids=["nothing", "frozen"])
def test_a_graph_that_does_not_do_the_work_fails(
    graphcore_driver: Driver, make: Callable[[], Callable[..., Any]]
) -> None:
    with pytest.raises(AssertionError):
        assert_replay_equals_eager(make(), inputs(graphcore_driver))


def test_a_step_that_reads_the_padded_tail_fails(graphcore_driver: Driver) -> None:
    x, _ = inputs(graphcore_driver)
    assert_replay_equals_eager(lambda t: t * 2, [x], valid_rows=4)
    with pytest.raises(AssertionError, match="differs from eager in 20 of 20 elements"):
        assert_replay_equals_eager(lambda t: t - t.mean(0), [x], valid_rows=4)


def test_a_tolerance_allows_rounding_and_no_more(graphcore_driver: Driver) -> None:
    calls: list[int] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * (1.0 if len(calls) <= 4 else 1.0 + 1e-4)  # captured once, eager after

    x, _ = inputs(graphcore_driver)
    assert_replay_equals_eager(step, [x], tolerance=1e-3)
    calls.clear()
    with pytest.raises(AssertionError, match="round 0, output 0"):
        assert_replay_equals_eager(step, [x], tolerance=1e-6)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda x: (), "expected a step with outputs"),
        (lambda x: None, "expected a step that returns a tensor or .*, got NoneType"),
        (lambda x: x.view(-1), "shares an input's memory"),
    ],
    ids=["no outputs", "nothing", "aliases"],
)
def test_steps_that_cannot_be_checked_are_refused(
    graphcore_driver: Driver, step: Callable[..., Any], said: str
) -> None:
    x, _ = inputs(graphcore_driver)
    with pytest.raises(AssertionError, match=said):
        assert_replay_equals_eager(step, [x])


def test_an_output_of_another_shape_fails(graphcore_driver: Driver) -> None:
    x, _ = inputs(graphcore_driver)
    with pytest.raises(AssertionError, match=r"expected shape \(4, 5\), got"):
        assert_replay_equals_eager(
            lambda t: t[:2] * 1 if t.shape[0] == 6 else t * 1, [x.clone()], valid_rows=4
        )


def _writes_nothing(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Right when called eagerly; captured, it returns memory that the graph never writes."""

    def step(x: torch.Tensor) -> torch.Tensor:
        out = make(x)
        if active.current() is not None:
            return torch.empty_like(out)
        return out

    return step


VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float": lambda x: x * 2,
    "minus one": lambda x: torch.full_like(x, -1, dtype=torch.int64),
    "byte 255": lambda x: torch.full_like(x, 255, dtype=torch.uint8),
    "true": lambda x: torch.ones_like(x, dtype=torch.bool),
    "false": lambda x: torch.zeros_like(x, dtype=torch.bool),
    "complex minus one": lambda x: torch.full_like(x, -1, dtype=torch.complex64),
    "no dimensions": lambda x: x.sum(),
}


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("value", VALUES)
def test_an_output_that_is_never_written_fails_whatever_its_value(
    graphcore_driver: Driver, value: str, rounds: int
) -> None:
    x, _ = inputs(graphcore_driver)
    assert_replay_equals_eager(VALUES[value], [x], rounds=rounds)  # control: written, it passes
    with pytest.raises(AssertionError, match="replay differs from eager"):
        assert_replay_equals_eager(_writes_nothing(VALUES[value]), [x], rounds=rounds)


def test_whole_numbers_are_equal_whatever_the_tolerance(graphcore_driver: Driver) -> None:
    x, _ = inputs(graphcore_driver)
    step = _writes_nothing(lambda t: torch.zeros_like(t, dtype=torch.int32))
    with pytest.raises(AssertionError, match="replay differs from eager"):
        assert_replay_equals_eager(step, [x], tolerance=2.0)


def test_inputs_without_dimensions_are_replayed(graphcore_driver: Driver) -> None:
    scalar = torch.tensor(3.0, device=device_of(graphcore_driver))
    assert_replay_equals_eager(lambda t: t * 2, [scalar])
    with pytest.raises(AssertionError, match="replay differs from eager"):
        assert_replay_equals_eager(_writes_nothing(lambda t: t * 2), [scalar])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rounds", 0),
        ("valid_rows", 0),
        ("valid_rows", 7),
        ("tolerance", -1.0),
        ("tolerance", float("inf")),
        ("tolerance", float("nan")),
    ],
)
def test_a_check_that_could_not_fail_is_refused(
    graphcore_driver: Driver, field: str, value: float
) -> None:
    x, _ = inputs(graphcore_driver)
    with pytest.raises(ConfigurationError, match=f"{field}: expected .*, got {value}"):
        assert_replay_equals_eager(lambda t: t * 2, [x], **{field: value})


def test_outputs_without_elements_prove_nothing_and_fail(graphcore_driver: Driver) -> None:
    x, _ = inputs(graphcore_driver)
    with pytest.raises(AssertionError, match="output 0: expected elements to compare, got none"):
        assert_replay_equals_eager(lambda t: t[:0] * 2, [x])


def test_a_step_that_changes_its_inputs_fails(graphcore_driver: Driver) -> None:
    x = torch.ones(4, device=device_of(graphcore_driver))
    with pytest.raises(AssertionError, match=r"round 0: .* changes input 0"):
        assert_replay_equals_eager(lambda t: t.add_(1) * 2, [x])


def test_inputs_that_hold_nan_are_inputs(graphcore_driver: Driver) -> None:
    device = device_of(graphcore_driver)
    x = torch.ones(4, device=device)
    holes = torch.tensor([1.0, float("nan"), 2.0, 3.0], device=device)
    assert_replay_equals_eager(torch.nan_to_num, [x], fresh=lambda _: [holes])


@pytest.mark.parametrize(
    "wrong", [[torch.ones(1)], [torch.ones(4).double()], [], [torch.ones(4)] * 2], ids=str
)
def test_fresh_inputs_that_a_copy_would_bend_are_refused(
    graphcore_driver: Driver, wrong: list[torch.Tensor]
) -> None:
    device = device_of(graphcore_driver)
    given = [tensor.to(device) for tensor in wrong]
    with pytest.raises(ConfigurationError, match="fresh: round 0: expected inputs of"):
        assert_replay_equals_eager(
            lambda t: t * 2, [torch.ones(4, device=device)], fresh=lambda _: given
        )
