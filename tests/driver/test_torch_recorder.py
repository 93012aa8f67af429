"""What a capture of torch work on CPU tensors records, and what it leaves alone."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.torch_capture import bits, capture, memory_of, recording

from graphcore.driver.emulated import EmulatedDriver


@pytest.fixture
def driver() -> EmulatedDriver:
    return EmulatedDriver()


def test_every_call_becomes_one_node_in_program_order(driver: EmulatedDriver) -> None:
    x, w = torch.randn(2, 3), torch.randn(3, 4)
    taken = capture(driver, lambda: torch.relu(x @ w) + 1)
    assert taken.names == ["mm.default", "relu.default", "add.Tensor"]
    edges = driver.edges(taken.graph)
    nodes = driver.nodes(taken.graph)
    assert [(edge.source, edge.target) for edge in edges] == list(itertools.pairwise(nodes))


def test_nothing_is_computed_and_outputs_are_poisoned_until_a_replay(
    driver: EmulatedDriver,
) -> None:
    x = torch.randn(3)
    before = memory_of([x])
    taken = capture(driver, lambda: (x + 1, x > 0, x.to(torch.float16), x.argmax(), x.mul_(2)))
    total, positive, half, largest, _ = taken.result
    assert memory_of([x]) == before
    assert total.isnan().all()
    assert half.isnan().all()
    assert positive.all()
    assert largest.item() < -(2**60)
    old = x.clone()
    taken.replay()
    assert torch.equal(total, old + 1)
    assert torch.equal(positive, old > 0)
    assert torch.equal(half, old.half())
    assert largest == old.argmax()
    assert torch.equal(x, old * 2)


def test_outputs_keep_their_address_over_replays_and_follow_the_inputs(
    driver: EmulatedDriver,
) -> None:
    x = torch.ones(4)
    taken = capture(driver, lambda: x * 3)
    address = taken.result.data_ptr()
    for value in (1.0, 2.0, 5.0):
        x.fill_(value)
        assert taken.replay().tolist() == [3 * value] * 4
    assert taken.result.data_ptr() == address


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: x.view(3, 2), id="view"),
        pytest.param(lambda x: x.transpose(0, 1), id="transpose"),
        pytest.param(lambda x: x[:, 1:], id="slice"),
        pytest.param(lambda x: x.reshape(-1), id="reshape that needs no copy"),
        pytest.param(lambda x: x.unsqueeze(0).expand(5, 2, 3), id="expand"),
        pytest.param(lambda x: x.split(1)[1], id="split"),
        pytest.param(lambda x: x.unsafe_chunk(2)[1], id="unsafe_chunk"),
        pytest.param(lambda x: x.detach(), id="detach"),
        pytest.param(lambda x: x.view(torch.int32), id="view as another dtype"),
        pytest.param(lambda x: torch.ops.aten._unsafe_view(x, [6]), id="_unsafe_view"),
        pytest.param(lambda x: x.contiguous(), id="contiguous of a contiguous tensor"),
        pytest.param(lambda x: x.to(torch.float32), id="to the dtype it has"),
        pytest.param(lambda x: x.to(x.device), id="to the device it is on"),
    ],
)
def test_views_run_at_once_and_make_no_node(
    driver: EmulatedDriver, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = torch.randn(2, 3)
    taken = capture(driver, lambda: view(x))
    assert taken.names == []
    assert taken.result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert bits(taken.result) == bits(view(x))


def test_memory_that_nobody_fills_is_no_node_but_poisoned(driver: EmulatedDriver) -> None:
    x = torch.randn(3)
    taken = capture(driver, lambda: (torch.empty(2), torch.empty_like(x), x.new_empty(2, 2)))
    assert taken.names == []
    assert all(each.isnan().all() for each in taken.result)


def test_in_place_calls_return_what_they_were_given_and_write_on_replay(
    driver: EmulatedDriver,
) -> None:
    x = torch.zeros(3)
    taken = capture(driver, lambda: x.add_(1).mul_(2))
    assert taken.result is x
    assert x.tolist() == [0, 0, 0]
    taken.replay()
    taken.replay()
    assert x.tolist() == [6, 6, 6]


def test_out_calls_write_into_the_given_tensor_on_replay(driver: EmulatedDriver) -> None:
    x, out = torch.randn(3), torch.zeros(3)
    taken = capture(driver, lambda: torch.add(x, 1, out=out))
    assert taken.result is out
    assert not out.any()
    taken.replay()
    assert torch.equal(out, x + 1)


def test_an_empty_out_tensor_gets_its_shape_in_the_capture(driver: EmulatedDriver) -> None:
    x, out = torch.randn(2, 3), torch.empty(0)
    taken = capture(driver, lambda: torch.mul(x, 2, out=out))
    assert out.shape == (2, 3)
    assert out.isnan().all()
    taken.replay()
    assert torch.equal(out, x * 2)


def test_a_shrinking_resize_is_a_change_of_metadata(driver: EmulatedDriver) -> None:
    x = torch.randn(6)
    address = x.data_ptr()
    taken = capture(driver, lambda: x.resize_(2, 2) * 1)
    assert taken.names == ["mul.Tensor"]
    assert x.data_ptr() == address
    assert torch.equal(taken.replay(), x)


def test_several_outputs_lists_and_mixed_returns_are_filled(driver: EmulatedDriver) -> None:
    x = torch.randn(4, 5)
    mean, variance = torch.zeros(5), torch.ones(5)
    expected_mean, expected_variance = mean.clone(), variance.clone()

    def work(running_mean: torch.Tensor, running_variance: torch.Tensor) -> Any:
        normal = torch.nn.functional.batch_norm(x, running_mean, running_variance, training=True)
        return x.topk(2), torch._foreach_mul([x, mean], 2.0), normal

    taken = capture(driver, lambda: work(mean, variance))
    (values, indices), doubled, normal = taken.replay()
    wanted_top, wanted_doubled, wanted_normal = work(expected_mean, expected_variance)
    assert bits(values) == bits(wanted_top.values)
    assert torch.equal(indices, wanted_top.indices)
    assert torch.equal(doubled[0], wanted_doubled[0])
    assert bits(normal) == bits(wanted_normal)
    assert bits(mean) == bits(expected_mean)
    assert bits(variance) == bits(expected_variance)


def test_a_constant_made_from_python_values_is_copied_anew_on_every_replay(
    driver: EmulatedDriver,
) -> None:
    x = torch.ones(2)

    def step() -> torch.Tensor:
        counter = torch.tensor([10.0, 20.0])
        counter += x
        return counter + x.new_tensor([0.5, 0.5])

    taken = capture(driver, step)
    assert taken.names[0] == "lift_fresh.default"
    for _ in range(3):
        assert taken.replay().tolist() == [11.5, 21.5]


def test_memory_shared_with_an_array_stays_shared(driver: EmulatedDriver) -> None:
    import numpy

    array = numpy.ones(3, numpy.float32)
    taken = capture(driver, lambda: torch.as_tensor(array).mul_(2))
    taken.replay()
    assert array.tolist() == [2, 2, 2]


def test_no_autograd_history_is_kept_and_data_swaps_do_not_reach_the_graph(
    driver: EmulatedDriver,
) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    old = weight.data
    taken = capture(driver, lambda: weight * 2)
    assert taken.result.requires_grad
    weight.data = torch.full((3,), 50.0)
    old.fill_(4.0)
    assert taken.replay().tolist() == [8, 8, 8]


def test_a_tensor_that_gets_other_memory_within_the_capture_is_seen_anew(
    driver: EmulatedDriver,
) -> None:
    x, other = torch.ones(3), torch.full((3,), 7.0)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        first = x * 2
        x.data = other
        return first, x * 2

    first, second = capture(driver, step).replay()
    assert first.tolist() == [2, 2, 2]
    assert second.tolist() == [14, 14, 14]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes_all_record_the_same_computation(
    driver: EmulatedDriver, mode: Callable[[], Any]
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    x = torch.randn(2, 3, 4)
    with mode():
        taken = capture(driver, lambda: model(x))
        assert "linear.default" not in taken.names
        x.normal_()
        expected = model(x)
        assert bits(taken.replay()) == bits(expected)
    x.normal_()  # and replays work outside the mode
    expected = model(x)
    assert bits(taken.replay()) == bits(expected)


def test_a_backward_pass_is_recorded_too(driver: EmulatedDriver) -> None:
    x, w = torch.randn(3, 4), torch.randn(4, 2, requires_grad=True)

    def step(weight: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((x @ weight).pow(2).sum(), weight)[0]

    taken = capture(driver, lambda: step(w))
    assert taken.result.isnan().all()
    x.normal_()
    assert bits(taken.replay()) == bits(step(w))


def test_autocast_is_recorded_as_it_was_and_ignored_on_replay(driver: EmulatedDriver) -> None:
    x, w = torch.randn(3, 4), torch.randn(4, 2)
    exact = x @ w
    plain = capture(driver, lambda: x @ w)
    with torch.autocast("cpu", torch.bfloat16):
        cast = capture(driver, lambda: x @ w)
        rounded = x @ w
        assert bits(plain.replay()) == bits(exact)
    assert cast.names == ["_to_copy.default", "_to_copy.default", "mm.default"]
    assert bits(cast.replay()) == bits(rounded)
    assert rounded.dtype is torch.bfloat16


def test_another_thread_computes_as_usual_while_this_one_records(driver: EmulatedDriver) -> None:
    seen: dict[str, Any] = {}

    def elsewhere() -> None:
        seen["sum"] = (torch.ones(3) + 1).sum().item()
        try:
            seen["capturing"] = torch.cuda.is_current_stream_capturing()
        except RuntimeError:  # torch without CUDA
            seen["capturing"] = False

    box: dict[str, Any] = {}
    with recording(driver, box):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        here = torch.cuda.is_current_stream_capturing()
    assert seen == {"sum": 6.0, "capturing": False}
    assert here is True
    assert driver.nodes(box["graph"]) == []


def test_torch_answers_about_captures_as_before_once_the_recording_is_over(
    driver: EmulatedDriver,
) -> None:
    original = torch.cuda.is_current_stream_capturing
    with recording(driver, {}):
        assert torch.cuda.is_current_stream_capturing is not original
    assert torch.cuda.is_current_stream_capturing is original


def test_work_outside_a_capture_runs_at_once_under_a_recorder(driver: EmulatedDriver) -> None:
    stream = driver.create_stream(blocking=False)
    x = torch.arange(4.0)
    with driver.recording(stream):
        total = x.add(1).sum()
        assert total.item() == 10.0
        assert total.tolist() == 10.0
        assert torch.rand(3).min() >= 0
        assert torch.nonzero(x > 1).tolist() == [[2], [3]]
        assert torch.tensor([1.0, 2.0]).tolist() == [1.0, 2.0]


def test_a_nested_recorder_sends_its_block_to_the_other_stream(driver: EmulatedDriver) -> None:
    x = torch.ones(3)
    main, side = (driver.create_stream(blocking=False) for _ in range(2))
    fork, join = (driver.create_event(timing=False) for _ in range(2))
    driver.begin_capture(main, "thread_local")
    with driver.recording(main):
        first = x + 1
        driver.record_event(fork, main)
        driver.wait_event(side, fork)
        with driver.recording(side):
            aside = first * 2
        ahead = first * 3
        driver.record_event(join, side)
        driver.wait_event(main, join)
        total = aside + ahead
    graph = driver.end_capture(main)
    nodes = driver.nodes(graph)
    edges = {(nodes.index(e.source), nodes.index(e.target)) for e in driver.edges(graph)}
    assert edges == {(0, 1), (0, 2), (1, 3), (2, 3)}
    driver.launch_graph(driver.instantiate(graph), main)
    assert total.tolist() == [10, 10, 10]


def test_modes_of_the_caller_do_not_see_a_replay(driver: EmulatedDriver) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(3)
    taken = capture(driver, lambda: x.add(1).clone())
    with Watch():
        taken.replay()
    assert calls == []
    assert taken.result.tolist() == [2, 2, 2]


def test_a_replay_inside_another_capture_is_not_recorded(driver: EmulatedDriver) -> None:
    x = torch.ones(3)
    taken = capture(driver, lambda: x + 1)
    box: dict[str, Any] = {}
    with recording(driver, box):
        taken.replay()
    assert driver.nodes(box["graph"]) == []
    assert taken.result.tolist() == [2, 2, 2]


def test_compiled_functions_are_recorded_as_the_eager_function_behind_them(
    driver: EmulatedDriver,
) -> None:
    compiled = torch.compile(lambda x: torch.relu(x * x) + 1, backend="eager")
    x = torch.randn(3)
    compiled(x)
    taken = capture(driver, lambda: compiled(x))
    assert taken.names == ["mul.Tensor", "relu.default", "add.Tensor"]
    assert bits(taken.replay()) == bits(torch.relu(x * x) + 1)


def test_a_deep_copy_inside_the_capture_is_a_copy_node(driver: EmulatedDriver) -> None:
    import copy

    x = torch.ones(3)
    taken = capture(driver, lambda: copy.deepcopy(x))
    assert taken.names == ["copy_.default"]
    x.fill_(5)
    assert taken.replay().tolist() == [5, 5, 5]


def test_meta_tensors_pass_through(driver: EmulatedDriver) -> None:
    taken = capture(driver, lambda: torch.empty(2, 3, device="meta") @ torch.ones(3, 1).to("meta"))
    assert taken.result.shape == (2, 1)
    assert taken.result.device.type == "meta"


def test_questions_about_metadata_are_answered(driver: EmulatedDriver) -> None:
    x = torch.ones(3)

    def ask() -> tuple[Any, ...]:
        return x.shape, x.is_pinned(), torch._fused_sdp_choice(*[x.view(1, 1, 1, 3)] * 3), len(x)

    taken = capture(driver, ask)
    assert taken.result == ask()
    assert taken.names == []


def test_wrapper_tensors_are_recorded_by_what_they_hold(driver: EmulatedDriver) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    x, y = torch.ones(3), torch.full((3,), 2.0)
    taken = capture(driver, lambda: TwoTensor(x, y) + 1)
    assert taken.names == ["add.Tensor", "add.Tensor"]
    taken.replay()
    assert taken.result.a.tolist() == [2, 2, 2]
    assert taken.result.b.tolist() == [3, 3, 3]
