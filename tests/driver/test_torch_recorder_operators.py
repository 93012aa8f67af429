"""Recorded and replayed equals eager, bit for bit: a catalogue of operators, and random chains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from helpers.torch_capture import assert_replay_equals_eager, bits, capture, fresh, memory_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphcore.driver.emulated import EmulatedDriver

Work = Callable[..., Any]


@pytest.fixture
def driver() -> EmulatedDriver:
    return EmulatedDriver()


def floats(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(sizes).to(dtype)


def ids(*sizes: int, below: int = 5) -> torch.Tensor:
    return torch.arange(torch.Size(sizes).numel()).view(sizes) % below


def refill(arguments: Sequence[torch.Tensor]) -> None:
    """New values in the same memory: floats random, integers rotated (so indices stay in range)."""
    for each in arguments:
        if each.is_floating_point():
            each.copy_(torch.randn(each.shape))
        elif each.dtype is torch.bool:
            each.logical_not_()
        else:
            each.copy_(each.flatten().roll(1).view(each.shape))


def store(cache: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(0, index, rows)
    return cache * 1


def put(x: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    x[index, 1:] = value
    x[:, 0] = 7.0
    return x.clone()


# name -> (what runs, arguments); every case runs on old values, is captured, refilled, replayed
CASES: dict[str, tuple[Work, Callable[[], list[torch.Tensor]]]] = {
    "mm": (torch.mm, lambda: [floats(3, 4), floats(4, 5)]),
    "addmm": (torch.addmm, lambda: [floats(5), floats(3, 4), floats(4, 5)]),
    "bmm": (torch.bmm, lambda: [floats(2, 3, 4), floats(2, 4, 5)]),
    "matmul of transposed": (lambda x, y: x @ y.mT, lambda: [floats(2, 3, 4), floats(2, 5, 4)]),
    "linear": (functional.linear, lambda: [floats(2, 3, 4), floats(5, 4), floats(5)]),
    "einsum": (
        lambda x, y: torch.einsum("bij,bkj->bik", x, y),
        lambda: [floats(2, 3, 4), floats(2, 5, 4)],
    ),
    "conv2d": (functional.conv2d, lambda: [floats(1, 2, 5, 5), floats(3, 2, 3, 3), floats(3)]),
    "softmax": (lambda x: x.softmax(-1), lambda: [floats(3, 33)]),
    "softmax in float32": (
        lambda x: x.softmax(-1, dtype=torch.float32),
        lambda: [floats(3, 33, dtype=torch.bfloat16)],
    ),
    "layer_norm": (
        lambda x, w, b: functional.layer_norm(x, (8,), w, b),
        lambda: [floats(2, 3, 8), floats(8), floats(8)],
    ),
    "rms_norm": (lambda x, w: functional.rms_norm(x, (8,), w), lambda: [floats(2, 8), floats(8)]),
    "group_norm": (lambda x: functional.group_norm(x, 2), lambda: [floats(2, 4, 3)]),
    "batch_norm in eval": (
        lambda x, m, v: functional.batch_norm(x, m, v.abs()),
        lambda: [floats(2, 4, 3), floats(4), floats(4)],
    ),
    "embedding": (functional.embedding, lambda: [ids(2, 3), floats(5, 4)]),
    "embedding_bag": (
        lambda i, w: functional.embedding_bag(i, w, mode="sum"),
        lambda: [ids(2, 3), floats(5, 4)],
    ),
    "index_copy_": (store, lambda: [floats(6, 3), ids(2, below=6), floats(2, 3)]),
    "index assignment": (put, lambda: [floats(5, 4), ids(2), floats(2, 3)]),
    "index_put with accumulate": (
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        lambda: [floats(5), ids(4), floats(4)],
    ),
    "scatter": (
        lambda x, i, v: x.scatter(1, i, v),
        lambda: [floats(2, 5), ids(2, 3), floats(2, 3)],
    ),
    "scatter_add_": (
        lambda x, i, v: x.scatter_add_(1, i, v) + 0,
        lambda: [floats(2, 5), ids(2, 3), floats(2, 3)],
    ),
    "scatter_reduce": (
        lambda x, i, v: x.scatter_reduce(1, i, v, "amax"),
        lambda: [floats(2, 5), ids(2, 3), floats(2, 3)],
    ),
    "gather": (lambda x, i: x.gather(1, i), lambda: [floats(2, 5), ids(2, 3)]),
    "index_select": (lambda x, i: x.index_select(0, i), lambda: [floats(5, 2), ids(3)]),
    "masked_fill": (lambda x, m: x.masked_fill(m, -1e9), lambda: [floats(2, 3), ids(2, 3) > 1]),
    "where": (lambda m, x: torch.where(m, x, 0.5), lambda: [ids(2, 3) > 1, floats(2, 3)]),
    "one_hot": (lambda i: functional.one_hot(i, 7), lambda: [ids(2, 3)]),
    "cat": (lambda x, y: torch.cat([x, y, x], -1), lambda: [floats(2, 3), floats(2, 4)]),
    "cat with an empty tensor": (
        lambda x, y: torch.cat([x, y]),
        lambda: [torch.empty(0, 3), floats(2, 3)],
    ),
    "stack": (lambda x, y: torch.stack([x, y], 1), lambda: [floats(2, 3), floats(2, 3)]),
    "cumsum": (lambda x: x.cumsum(1), lambda: [floats(2, 5)]),
    "argmax": (lambda x: x.argmax(-1), lambda: [floats(4, 50)]),
    "topk": (lambda x: x.topk(3), lambda: [floats(2, 9)]),
    "sort": (lambda x: x.sort(descending=True), lambda: [floats(2, 9)]),
    "max over a dimension": (lambda x: x.max(1), lambda: [floats(2, 9)]),
    "sum in another dtype": (
        lambda x: x.sum(0, dtype=torch.float64),
        lambda: [floats(3, 4, dtype=torch.float16)],
    ),
    "mean": (lambda x: x.pow(2).mean(-1, keepdim=True), lambda: [floats(3, 17)]),
    "var_mean": (lambda x: torch.var_mean(x, -1), lambda: [floats(3, 17)]),
    "casts": (
        lambda x: (x.bfloat16(), x.half(), x.double(), (x * 10).int(), x.bool(), x.to(torch.int64)),
        lambda: [floats(3, 5)],
    ),
    "bfloat16 arithmetic": (
        lambda x, y: functional.silu(x) * y + 1,
        lambda: [floats(3, 33, dtype=torch.bfloat16), floats(3, 33, dtype=torch.bfloat16)],
    ),
    "float16 matmul": (
        torch.mm,
        lambda: [floats(3, 4, dtype=torch.float16), floats(4, 5, dtype=torch.float16)],
    ),
    "complex": (lambda x: torch.fft.fft(x).conj() * 2, lambda: [floats(8)]),
    "a rotary embedding by complex numbers": (
        lambda x, f: torch.view_as_real(torch.view_as_complex(x) * torch.polar(f.abs(), f)),
        lambda: [floats(3, 4, 2), floats(3, 4)],
    ),
    "integer arithmetic": (lambda i: (i * 3 - 1) // 2 % 4 ^ 1, lambda: [ids(2, 3)]),
    "factories with inputs": (
        lambda x: x + torch.arange(3) + torch.ones(3) * torch.full((3,), 2.0) - torch.eye(3)[0],
        lambda: [floats(3)],
    ),
    "a causal mask": (
        lambda p: (torch.arange(5) <= p[:, None]).float().log().tril(1),
        lambda: [ids(3)],
    ),
    "copy_": (lambda x, y: x.copy_(y) * 2, lambda: [floats(3), floats(3, dtype=torch.float64)]),
    "a scalar tensor": (lambda x: x * torch.tensor(2.5) + torch.tensor(1), lambda: [floats(3)]),
    "0-d tensors": (lambda x, y: x / y, lambda: [floats(), floats()]),
    "an expanded input": (lambda x: x.expand(4, 3) + x, lambda: [floats(1, 3)]),
    "zero-size results among others": (
        lambda x: (x[:0] * 2, x * 2),
        lambda: [floats(2, 3)],
    ),
    "non-contiguous in and out": (
        lambda x: torch.exp(x.t()).t().contiguous() + x.clone(),
        lambda: [floats(4, 6)],
    ),
    "channels last": (
        lambda x: x.contiguous(memory_format=torch.channels_last) * 2,
        lambda: [floats(2, 3, 4, 4)],
    ),
    "foreach": (lambda x, y: torch._foreach_add([x, y], 1.0), lambda: [floats(2), floats(3)]),
    "rolled and flipped": (lambda x: x.roll(1, 0).flip(1), lambda: [floats(3, 4)]),
    "interpolate": (
        lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda: [floats(1, 2, 3, 3)],
    ),
    "pooling": (lambda x: functional.max_pool2d(x, 2), lambda: [floats(1, 2, 4, 4)]),
    "cross_entropy": (functional.cross_entropy, lambda: [floats(4, 5), ids(4)]),
    "vmap": (torch.vmap(torch.dot), lambda: [floats(3, 4), floats(3, 4)]),
    "lstm": (torch.nn.LSTM(3, 4), lambda: [floats(2, 1, 3)]),
    "multi-head attention": (
        torch.nn.MultiheadAttention(8, 2).eval(),
        lambda: [floats(3, 1, 8), floats(3, 1, 8), floats(3, 1, 8)],
    ),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("work", "arguments"), CASES.values(), ids=CASES)
def test_an_operator_replays_to_the_bits_of_eager(
    driver: EmulatedDriver,
    work: Work,
    arguments: Callable[[], list[torch.Tensor]],
    mode: Callable[[], Any],
) -> None:
    torch.manual_seed(0)
    with mode():
        taken = assert_replay_equals_eager(driver, work, arguments(), refill)
    assert taken.names


def heads(count: int, length: int) -> torch.Tensor:
    return floats(2, count, length, 8)


ATTENTION: dict[str, tuple[Work, Callable[[], list[torch.Tensor]]]] = {
    "plain": (
        functional.scaled_dot_product_attention,
        lambda: [heads(4, 3), heads(4, 6), heads(4, 6)],
    ),
    "causal": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda: [heads(4, 6), heads(4, 6), heads(4, 6)],
    ),
    "boolean mask": (
        lambda q, k, v, m: functional.scaled_dot_product_attention(q, k, v, m > 0),
        lambda: [heads(4, 3), heads(4, 6), heads(4, 6), floats(2, 1, 3, 6)],
    ),
    "additive mask": (
        functional.scaled_dot_product_attention,
        lambda: [heads(4, 3), heads(4, 6), heads(4, 6), floats(2, 1, 3, 6)],
    ),
    "grouped heads": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        lambda: [heads(4, 3), heads(2, 6), heads(2, 6)],
    ),
}


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize(("work", "arguments"), ATTENTION.values(), ids=ATTENTION)
def test_attention_replays_in_both_forms_of_the_cpu(
    driver: EmulatedDriver,
    work: Work,
    arguments: Callable[[], list[torch.Tensor]],
    mode: Callable[[], Any],
    backend: SDPBackend,
) -> None:
    torch.manual_seed(0)
    with mode(), sdpa_kernel([backend, SDPBackend.MATH]):
        taken = assert_replay_equals_eager(driver, work, arguments(), refill)
    flash = "_scaled_dot_product_flash_attention_for_cpu.default" in taken.names
    assert flash == (backend is SDPBackend.FLASH_ATTENTION)


# ---- random chains: each step takes a 4 x 4 tensor of a list and a second one, and adds or writes

STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda x, y: x + y,
    "sub scaled": lambda x, y: torch.sub(x, y, alpha=0.5),
    "mul scalar": lambda x, y: x * 1.5,
    "tanh": lambda x, y: x.tanh(),
    "matmul": lambda x, y: x @ y * 0.1,
    "transpose": lambda x, y: x.t(),
    "row": lambda x, y: x[1:2].expand(4, 4),
    "copy": lambda x, y: x.clone(),
    "contiguous": lambda x, y: x.contiguous(),
    "sorted": lambda x, y: x.sort(1).values,
    "gather": lambda x, y: x.gather(1, y.argsort(1)),
    "where": lambda x, y: torch.where(x > y, x, y),
    "halves": lambda x, y: torch.cat([x[:2], y[2:]]),
    "softmax": lambda x, y: x.softmax(0),
    "through bfloat16": lambda x, y: x.bfloat16().float(),
    "cumsum": lambda x, y: x.cumsum(1) * 0.1,
    "in place": lambda x, y: x.contiguous().add_(y.clone()),
    "in place on a view": lambda x, y: x.contiguous().select(0, 2).mul_(0.5).expand(4, 4),
    "row assignment": lambda x, y: x.contiguous().index_copy_(
        0, torch.tensor([0, 3]), y[:2].clone()
    ),
}

chains = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 99), st.integers(0, 99)),
    min_size=1,
    max_size=12,
)


def run_chain(
    chain: Sequence[tuple[str, int, int]], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    tensors = list(inputs)
    for name, first, second in chain:
        step = STEPS[name]
        tensors.append(step(tensors[first % len(tensors)], tensors[second % len(tensors)]))
    return tensors[len(inputs) :]


@settings(max_examples=150, deadline=None)
@given(
    chain=chains, seed=st.integers(0, 2**20), mode=st.sampled_from(["no_grad", "inference_mode"])
)
def test_random_chains_replay_to_the_bits_of_eager(
    chain: list[tuple[str, int, int]], seed: int, mode: str
) -> None:
    driver = EmulatedDriver()
    torch.manual_seed(seed)
    inputs = [torch.randn(4, 4) for _ in range(3)]
    with getattr(torch, mode)():
        before = memory_of(inputs)
        taken = capture(driver, lambda: run_chain(chain, inputs))
        assert memory_of(inputs) == before
        for _ in range(2):
            for each in inputs:
                each.normal_()
            copied = fresh(inputs)
            expected = run_chain(chain, copied)
            replayed = taken.replay()
            assert [bits(each) for each in replayed] == [bits(each) for each in expected]
            assert [bits(each) for each in inputs] == [bits(each) for each in copied]


@settings(max_examples=30, deadline=None)
@given(chain=chains, seed=st.integers(0, 2**20))
def test_random_chains_do_not_depend_on_the_order_of_independent_nodes(
    chain: list[tuple[str, int, int]], seed: int
) -> None:
    driver = EmulatedDriver(order="adversarial", seed=seed)
    torch.manual_seed(seed)
    inputs = [torch.randn(4, 4) for _ in range(3)]
    taken = capture(driver, lambda: run_chain(chain, inputs))
    copied = fresh(inputs)
    expected = run_chain(chain, copied)
    assert [bits(each) for each in taken.replay()] == [bits(each) for each in expected]


def test_an_operator_whose_shape_function_refuses_what_the_kernel_takes_is_recorded(
    driver: EmulatedDriver, caplog: pytest.LogCaptureFixture
) -> None:
    ends = torch.tensor([2, 5, 8], dtype=torch.int32)  # rows of each group

    def grouped(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return functional.grouped_mm(rows, weights, offs=ends)

    with pytest.raises(RuntimeError, match="BF16"):  # the control: torch's own answer
        grouped(torch.empty(8, 16, device="meta"), torch.empty(3, 16, 32, device="meta"))
    taken = assert_replay_equals_eager(driver, grouped, [floats(8, 16), floats(3, 16, 32)], refill)
    assert "_grouped_mm.default" in taken.names
    assert ends.tolist() == [2, 5, 8]
    assert not caplog.records
