"""Memory that a recording makes is the graph's own: it counts by order, never by address."""

from __future__ import annotations

import pytest
import torch
from helpers.torch_capture import capture

import graphcore
from graphcore import Graph
from graphcore.driver.emulated import EmulatedDriver
from graphcore.resources.fingerprint import Fingerprint


@pytest.fixture
def driver() -> EmulatedDriver:
    return EmulatedDriver()


def step(
    x: torch.Tensor, y: torch.Tensor, *, scalar: float = 2.0, rows: int = 4, last: float = 4.0
) -> torch.Tensor:
    """Temporaries of every kind: results, views, empty ones, out= ones, constants."""
    hidden = torch.empty(rows, 4)
    torch.mul(x[:rows], scalar, out=hidden)
    grown = torch.empty(0)
    torch.add(hidden, 1.0, out=grown)
    total = hidden.softmax(-1).view(-1)[:4] + torch.tensor([1.0, 2.0, 3.0, last])
    return y[:rows].copy_(grown + total)


class Steps:
    """Captures of a step over the same two named tensors."""

    def __init__(self, driver: EmulatedDriver) -> None:
        self.driver = driver
        self.x, self.y = torch.randn(4, 4), torch.zeros(4, 4)
        self.names = {"x": self.x, "y": self.y}

    def graph(self, **changes: float) -> Graph:
        with graphcore.capture(driver=self.driver) as taken:
            step(self.x, self.y, **changes)  # type: ignore[arg-type]
        return taken.graph

    def fingerprint(self, **changes: float) -> Fingerprint:
        return self.graph(**changes).fingerprint(self.names)


def test_two_captures_of_one_step_have_one_fingerprint(driver: EmulatedDriver) -> None:
    steps = Steps(driver)
    first, second = steps.graph(), steps.graph()
    assert first.fingerprint(steps.names).compare(second.fingerprint(steps.names)) == []
    assert first.fingerprint(steps.names) == second.fingerprint(steps.names)
    assert graphcore.fingerprint(first, steps.names) == first.fingerprint(steps.names)
    assert first.clone().fingerprint(steps.names) == first.fingerprint(steps.names)
    mine, theirs = first.private_memory(), second.private_memory()
    assert not {address for address, _ in mine} & {address for address, _ in theirs}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scalar": 3.0}, "node 0 (kernel aten::mul.out): argument"),
        ({"rows": 1}, "node 0"),
        ({"last": 5.0}, "(kernel aten::lift_fresh.default): argument 2 was"),
    ],
    ids=["scalar", "shape", "constant"],
)
def test_a_changed_step_has_another_fingerprint(
    driver: EmulatedDriver, changes: dict[str, float], words: str
) -> None:
    steps = Steps(driver)
    before, after = steps.fingerprint(), steps.fingerprint(**changes)
    assert before != after
    if "rows" not in changes:
        (line,) = before.compare(after)
        assert words in line


def test_without_names_only_the_memory_that_was_there_before_counts_by_address(
    driver: EmulatedDriver,
) -> None:
    steps, others = Steps(driver), Steps(driver)
    assert steps.graph().fingerprint() == steps.graph().fingerprint()
    assert steps.graph().fingerprint() != others.graph().fingerprint()
    assert steps.fingerprint() == others.fingerprint()


def test_private_memory_lists_what_the_capture_made_once_in_order_of_its_nodes(
    driver: EmulatedDriver,
) -> None:
    x, out = torch.randn(8), torch.empty(8)
    made: list[torch.Tensor] = []

    def work() -> None:
        unused, late = torch.empty(2), torch.empty(16)
        made.extend([x + 1, late])
        made.append(torch.add(made[0].view(2, 4)[1], 1.0))
        torch.mul(made[0], 2.0, out=out)
        late.copy_(torch.cat([made[0], x]))
        assert unused.shape == (2,)

    taken = capture(driver, work)
    pieces = driver.private_memory(taken.graph)
    assert pieces[:2] == [(made[0].data_ptr(), 32), (made[2].data_ptr(), 16)]
    assert len(pieces) == 4  # and the result of cat, and the late one
    assert pieces[3] == (made[1].data_ptr(), 64)
    assert driver.private_memory(driver.clone_graph(taken.graph)) == pieces


def test_memory_of_an_earlier_capture_is_not_a_later_ones_own(driver: EmulatedDriver) -> None:
    x = torch.randn(4)
    first = capture(driver, lambda: x + 1)
    second = capture(driver, lambda: first.result.mul_(2))
    third = capture(driver, lambda: first.result * 2)
    assert driver.private_memory(second.graph) == []
    assert driver.private_memory(third.graph) == [(third.result.data_ptr(), 16)]


def test_work_on_a_second_stream_of_the_capture_knows_the_memory_of_the_first(
    driver: EmulatedDriver,
) -> None:
    x = torch.randn(4)
    main, side = driver.create_stream(blocking=False), driver.create_stream(blocking=False)
    fork, join = driver.create_event(timing=False), driver.create_event(timing=False)
    driver.begin_capture(main, "thread_local")
    with driver.recording(main):
        room = torch.empty(4)
        driver.record_event(fork, main)
        driver.wait_event(side, fork)
        with driver.recording(side):
            torch.mul(x, 2.0, out=room)
        driver.record_event(join, side)
        driver.wait_event(main, join)
    graph = driver.end_capture(main)
    assert driver.private_memory(graph) == [(room.data_ptr(), 16)]


def test_an_update_to_a_graph_with_another_constant_takes_the_other_constant(
    driver: EmulatedDriver,
) -> None:
    out = torch.zeros(2)

    def graph_of(*values: float) -> Graph:
        with graphcore.capture(driver=driver) as taken:
            out.copy_(torch.tensor(list(values)))
        return taken.graph

    first, second = graph_of(1.0, 2.0), graph_of(3.0, 4.0)
    assert "argument 2" in str(graphcore.diff(first, second))
    executable = first.instantiate()
    executable.launch()
    assert out.tolist() == [1.0, 2.0]
    assert executable.update(second).status.name == "UPDATED"
    executable.launch()
    assert out.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("changed", [False, True], ids=["same", "a longer cache"])
def test_runners_over_one_model_have_one_fingerprint(changed: bool) -> None:
    transformers = pytest.importorskip("transformers")
    from graphcore.decode import CUDAGraphAR

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()

    def taken(length: int) -> Fingerprint:
        runner = CUDAGraphAR(model, max_seq_len=length, batch_size=1)
        runner.capture(torch.tensor([[1, 2, 3]]))
        return runner.fingerprint()

    first, second = taken(32), taken(48 if changed else 32)
    assert (first == second) is not changed
    assert bool(first.compare(second)) is changed
