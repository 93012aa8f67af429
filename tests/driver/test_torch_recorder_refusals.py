"""What a capture of torch work refuses, with which error, and what is left after it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from helpers.torch_capture import capture, memory_of, recording

from graphcore.driver.codes import find_code
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import CaptureError, CudaError

UNSUPPORTED = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"


@pytest.fixture
def driver() -> EmulatedDriver:
    return EmulatedDriver()


HOST_READS: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "item": ("torch.Tensor.item()", lambda x: x.sum().item()),
    "bool": ("bool(tensor)", lambda x: bool(x.any())),
    "if": ("bool(tensor)", lambda x: 1 if x.sum() > 0 else 2),
    "int": ("int(tensor)", lambda x: int(x[0])),
    "float": ("float(tensor)", lambda x: float(x[0])),
    "complex": ("complex(tensor)", lambda x: complex(x[0])),
    "index": ("tensor.__index__()", lambda x: [10, 20][x.long().argmax() * 0]),
    "tolist": ("torch.Tensor.tolist()", lambda x: x.tolist()),
    "numpy": ("torch.Tensor.numpy()", lambda x: x.numpy()),
    "numpy.asarray": ("numpy.asarray(tensor)", numpy.asarray),
    "cpu": ("torch.Tensor.cpu()", lambda x: x.cpu()),
    "to cpu as text": ('torch.Tensor.to("cpu")', lambda x: x.to("cpu")),
    "to cpu by keyword": ('torch.Tensor.to("cpu")', lambda x: x.to(device="cpu:0")),
    "repr": ("repr(tensor)", repr),
    "format": ("format(tensor)", lambda x: f"{x[0]:.2f}"),
    "equal": ("torch.equal()", lambda x: torch.equal(x, x)),
    "allclose": ("aten::allclose.default", lambda x: torch.allclose(x, x)),
    "is_nonzero": ("aten::_local_scalar_dense.default", lambda x: torch.is_nonzero(x[0])),
    "nonzero": ("torch.nonzero()", torch.nonzero),
    "where with one argument": ("aten::nonzero", lambda x: torch.where(x > 0)),
    "argwhere": ("aten::nonzero.default", torch.argwhere),
    "masked_select": ("aten::masked_select.default", lambda x: x.masked_select(x > 0)),
    "boolean indexing": ("aten::index.Tensor", lambda x: x[x > 0]),
    "boolean assignment": (
        "aten::index_put_.default",
        lambda x: x.__setitem__(x > 0, torch.ones(4)),
    ),
    "unique": ("aten::_unique2.default", torch.unique),
    "bincount": ("aten::bincount.default", lambda x: torch.bincount(x.long())),
    "repeat_interleave": (
        "aten::repeat_interleave.Tensor",
        lambda x: torch.repeat_interleave(x, torch.ones_like(x).long()),
    ),
    "inverse": ("aten::_linalg_check_errors.default", lambda x: torch.linalg.inv(x.diag())),
    "one_hot without a number of classes": (
        "aten::_local_scalar_dense.default",
        lambda x: torch.nn.functional.one_hot(x.long()),
    ),
    "a Python list from elements": ("torch.Tensor.item()", lambda x: torch.tensor([x[0].item()])),
    "a tensor of tensors": ("torch.tensor() of a list", lambda x: torch.tensor([[x[0]], [2.0]])),
    "a new tensor of tensors": ("torch.new_tensor() of a list", lambda x: x.new_tensor([x[0]])),
}


@pytest.mark.parametrize(("name", "read"), HOST_READS.values(), ids=HOST_READS)
def test_a_host_read_fails_as_on_a_device_and_invalidates_the_capture(
    driver: EmulatedDriver, name: str, read: Callable[[torch.Tensor], Any]
) -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    before = memory_of([x])
    stream = driver.create_stream(blocking=False)
    driver.begin_capture(stream, "thread_local")
    with driver.recording(stream):
        with pytest.raises(CudaError) as caught:
            read(x)
        with pytest.raises(CudaError) as later:
            x.add(1)
    assert caught.value.code == UNSUPPORTED
    assert caught.value.number == 900
    assert name in str(caught.value)
    assert find_code(str(caught.value)) == UNSUPPORTED
    assert later.value.code == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    with pytest.raises(CudaError, match="INVALIDATED"):
        driver.end_capture(stream)
    assert memory_of([x]) == before
    # nothing is left in force: the same read works, and so does the next capture
    read(x)
    assert capture(driver, lambda: x + 0).replay().tolist() == x.tolist()


DEVICE_READS_ARE_FINE: dict[str, Callable[[torch.Tensor], Any]] = {
    "data_ptr": lambda x: x.data_ptr() > 0,
    "to the tensor's own device": lambda x: x.to(x.device),
    "masked_fill": lambda x: x.masked_fill(x > 2, 0.0),
    "boolean assignment of one value": lambda x: x.clone().__setitem__(x > 2, 7.0),
    "where": lambda x: torch.where(x > 2, x, 0.0),
    "nonzero_static": lambda x: torch.nonzero_static(x > 2, size=4),
    "index by integers": lambda x: x[torch.tensor([0, 2])],
    "repeat_interleave with a size": lambda x: torch.repeat_interleave(
        x, torch.ones_like(x).long(), output_size=4
    ),
    "one_hot with a number of classes": lambda x: torch.nn.functional.one_hot(x.long(), 6),
    "dlpack": lambda x: torch.from_dlpack(x).data_ptr() == x.data_ptr(),
    "shape arithmetic": lambda x: [0] * x.shape[0],
}


@pytest.mark.parametrize("work", DEVICE_READS_ARE_FINE.values(), ids=DEVICE_READS_ARE_FINE)
def test_what_a_device_allows_is_allowed(
    driver: EmulatedDriver, work: Callable[[torch.Tensor], Any]
) -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    taken = capture(driver, lambda: work(x))
    replayed = taken.replay()
    expected = work(x)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(replayed, expected)
    else:
        assert replayed == expected


def test_what_slips_through_reads_the_poison_as_documented(driver: EmulatedDriver) -> None:
    x = torch.ones(3)
    box: dict[str, Any] = {}
    with recording(driver, box):
        saved = pickle.loads(pickle.dumps(x + 1))
    assert saved.isnan().all()


RANDOM: dict[str, Callable[[torch.Tensor], Any]] = {
    "rand": lambda x: torch.rand(3),
    "randn_like": torch.randn_like,
    "randperm": lambda x: torch.randperm(4),
    "normal_": lambda x: x.normal_(),
    "bernoulli": lambda x: x.bernoulli(),
    "multinomial": lambda x: x.multinomial(1),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5, training=True),
    "dropout module": torch.nn.Dropout(0.1),
    "rrelu": lambda x: torch.nn.functional.rrelu(x, training=True),
    "attention with dropout": lambda x: torch.nn.functional.scaled_dot_product_attention(
        *[x.view(1, 1, 1, 4)] * 3, dropout_p=0.5
    ),
    "a generator of one's own": lambda x: torch.rand(3, generator=torch.Generator()),
}


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("draw", RANDOM.values(), ids=RANDOM)
def test_random_operators_are_refused_with_the_remedy(
    driver: EmulatedDriver, draw: Callable[[torch.Tensor], Any], grad: Callable[[], Any]
) -> None:
    x = torch.full((4,), 0.5)
    state = torch.get_rng_state()
    box: dict[str, Any] = {}
    with grad(), recording(driver, box):
        with pytest.raises(CaptureError) as caught:
            draw(x)
        x.add_(1)
    message = str(caught.value)
    assert "Attempt to increase offset for a CUDA generator not in capture mode" in message
    assert "before the capture into a tensor that the graph reads" in message
    assert "torch.cuda" not in message, "there is no such capture without a device"
    assert torch.equal(torch.get_rng_state(), state)
    assert x.tolist() == [0.5] * 4
    # the refusal came before the launch: the capture itself is whole
    assert len(driver.nodes(box["graph"])) >= 1


DROPOUT_THAT_IS_OFF: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "eval": lambda x: torch.nn.functional.dropout(x, 0.5, training=False) + 0,
    "native_dropout without training": lambda x: torch.native_dropout(x, 0.5, False)[0],
    "attention without dropout": lambda x: torch.nn.functional.scaled_dot_product_attention(
        *[x.view(1, 1, 1, 4)] * 3
    ),
    "rrelu without training": torch.nn.functional.rrelu,
}


@pytest.mark.parametrize("work", DROPOUT_THAT_IS_OFF.values(), ids=DROPOUT_THAT_IS_OFF)
def test_dropout_that_is_off_is_not_random(
    driver: EmulatedDriver, work: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = torch.randn(4)
    taken = capture(driver, lambda: work(x))
    assert torch.equal(taken.replay(), work(x))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
def test_growing_a_tensor_that_has_memory_is_refused(driver: EmulatedDriver) -> None:
    x = torch.zeros(3)
    address = x.data_ptr()
    box: dict[str, Any] = {}
    with recording(driver, box):
        with pytest.raises(CaptureError, match=r"resize_.*holds the new size.*got 12 bytes"):
            x.resize_(100)
        with pytest.raises(CaptureError, match=r"aten::add.out.*24 bytes.*12 bytes"):
            torch.add(torch.ones(6), 1, out=x)
        with pytest.raises(CaptureError, match="resize_as_"):
            x.resize_as_(torch.ones(9))
    assert x.data_ptr() == address
    assert x.tolist() == [0, 0, 0]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_sparse_and_quantized_tensors_are_refused_by_name(driver: EmulatedDriver) -> None:
    x = torch.eye(3)
    sparse = x.to_sparse()
    quantized = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    with recording(driver, {}):
        with pytest.raises(CaptureError, match=r"aten::mul.*sparse_coo"):
            sparse * 2
        with pytest.raises(CaptureError, match=r"_to_sparse.*strided"):
            x.to_sparse()
        with pytest.raises(CaptureError, match="quantized"):
            quantized.dequantize()


def test_meta_and_device_memory_do_not_mix(driver: EmulatedDriver) -> None:
    meta = torch.ones(3, device="meta")
    with recording(driver, {}), pytest.raises(CaptureError, match=r"expected CPU tensors.*meta"):
        torch.ones(3).add(meta)


def test_higher_order_operators_are_refused_by_name(driver: EmulatedDriver) -> None:
    x = torch.ones(3)
    cond = torch.ops.higher_order.cond
    with recording(driver, {}), pytest.raises(CaptureError, match=r"cond.*higher-order"):
        cond(True, lambda y: y + 1, lambda y: y - 1, (x,))


@torch.library.custom_op("graphcore_tests::scale", mutates_args=())
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


@torch.library.custom_op("graphcore_tests::shift_", mutates_args=("x",))
def shift_(x: torch.Tensor, by: float) -> None:
    x += by


@torch.library.custom_op("graphcore_tests::shapeless", mutates_args=())
def shapeless(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("graphcore_tests::measure", mutates_args=())
def measure(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return x.abs(), x.shape[0]


@torch.library.custom_op("graphcore_tests::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


measure.register_fake(lambda x: (torch.empty_like(x), x.shape[0]))
positive.register_fake(lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()))
scale.register_fake(lambda x, factor: torch.empty_like(x))


def test_a_custom_operator_is_one_node(driver: EmulatedDriver) -> None:
    x = torch.ones(3)
    taken = capture(driver, lambda: (shift_(x, 2.0), scale(x, 3.0))[1])
    assert taken.names == ["graphcore_tests::shift_.default", "graphcore_tests::scale.default"]
    assert x.tolist() == [1, 1, 1]
    assert taken.replay().tolist() == [9, 9, 9]


def test_plain_results_of_a_custom_operator_are_known_in_the_capture(
    driver: EmulatedDriver,
) -> None:
    x = torch.full((3,), -2.0)
    taken = capture(driver, lambda: measure(x))
    assert taken.result[1] == 3
    assert taken.replay()[0].tolist() == [2, 2, 2]


def test_a_custom_operator_of_dynamic_size_is_a_host_read(driver: EmulatedDriver) -> None:
    x = torch.tensor([1.0, -1.0])
    with pytest.raises(CudaError, match=f"graphcore_tests::positive.default: {UNSUPPORTED}"):
        capture(driver, lambda: positive(x))
    with driver.recording(driver.create_stream(blocking=False)):  # which does not capture
        assert positive(x).tolist() == [1]


def test_results_on_a_real_device_are_refused(driver: EmulatedDriver) -> None:
    with recording(driver, {}), pytest.raises(CaptureError, match=r"CPU memory.*cuda"):
        torch.ops.aten.zeros.default([3], device=torch.device("cuda:0"))


def test_a_custom_operator_without_a_shape_function_is_refused_by_name(
    driver: EmulatedDriver,
) -> None:
    x = torch.ones(3)
    with recording(driver, {}), pytest.raises(CaptureError, match=r"shapeless.*register_fake"):
        shapeless(x)


def test_a_shape_error_is_raised_in_the_capture_and_adds_no_node(driver: EmulatedDriver) -> None:
    box: dict[str, Any] = {}
    with recording(driver, box), pytest.raises(RuntimeError):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert len(driver.nodes(box["graph"])) == 2  # the two ones


def test_the_block_that_raises_leaves_nothing_in_force(driver: EmulatedDriver) -> None:
    x = torch.ones(3)

    def step() -> None:
        x.add_(1)
        raise KeyError("half way")

    with pytest.raises(KeyError):
        capture(driver, step)
    assert x.tolist() == [1, 1, 1]
    assert (x + 1).tolist() == [2, 2, 2]
    assert copy.deepcopy(x).tolist() == [1, 1, 1]


# ---- operators whose shape function refuses or is missing ----------------------------------------


def test_an_operator_that_torch_itself_refuses_is_a_capture_error_that_names_it(
    driver: EmulatedDriver, caplog: pytest.LogCaptureFixture
) -> None:
    box: dict[str, Any] = {}
    with recording(driver, box), pytest.raises(CaptureError, match=r"aten\.mm.*\(2x3 and 2x3\)"):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not caplog.records


def test_a_custom_operators_own_shape_function_that_fails_is_a_capture_error_that_names_it(
    driver: EmulatedDriver, caplog: pytest.LogCaptureFixture
) -> None:
    with recording(driver, {}), pytest.raises(CaptureError, match=r"picky.*\(meta\).*no floats"):
        picky(torch.ones(3))
    assert not caplog.records


@torch.library.custom_op("graphcore_refusals::picky", mutates_args=())
def picky(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@picky.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no floats")
