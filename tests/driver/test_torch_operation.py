"""A recorded aten call as a kernel node: arguments, other addresses and scalars, lifetime."""

from __future__ import annotations

import dataclasses
import gc
import struct
import weakref
from collections.abc import Callable

import pytest
import torch
from helpers.torch_capture import TorchCapture, bits, capture

from graphcore.driver.emulated import EmulatedDriver, Operation
from graphcore.driver.emulated.torch_arguments import (
    Call,
    decode_value,
    encode_forms,
    encode_value,
)
from graphcore.driver.emulated.torch_operation import TorchOperation
from graphcore.driver.emulated.torch_schema import facts_of
from graphcore.driver.records import LaunchConfig, UpdateResult
from graphcore.errors import CudaError

ONE = LaunchConfig((1, 1, 1), (1, 1, 1))
aten = torch.ops.aten


@pytest.fixture
def driver() -> EmulatedDriver:
    return EmulatedDriver()


def address(tensor: torch.Tensor) -> bytes:
    return tensor.data_ptr().to_bytes(8, "little")


def set_arguments(taken: TorchCapture, index: int, arguments: tuple[bytes, ...]) -> None:
    node = taken.driver.nodes(taken.graph)[index]
    changed = dataclasses.replace(taken.params[index], arguments=arguments)
    taken.driver.set_exec_node_params(taken.executable, node, changed)


def test_a_node_shows_inputs_then_outputs_then_scalars_then_sizes(driver: EmulatedDriver) -> None:
    x, y = torch.ones(3), torch.ones(3)
    taken = capture(driver, lambda: torch.add(x, y, alpha=2.5))
    (params,) = taken.params
    sizes = b"(float32[3] float32[3] float32[3])"
    expected = (address(x), address(y), address(taken.result), struct.pack("<d", 2.5), sizes)
    assert params.arguments == expected
    info = driver.function_info(params.function)
    assert info.name == "aten::add.Tensor"
    assert info.layout == ((0, 8), (8, 8), (16, 8), (24, 8), (32, len(sizes)))


def test_lists_and_missing_tensors_show_in_the_arguments(driver: EmulatedDriver) -> None:
    x, rows = torch.ones(2, 3), torch.tensor([0, 1])
    both = capture(driver, lambda: torch.cat([x, x], 1))
    assert both.params[0].arguments[:3] == (address(x), address(x), address(both.result))
    columns = capture(driver, lambda: x[:, rows])
    first = capture(driver, lambda: x[rows])
    assert columns.params[0].arguments[:2] == first.params[0].arguments[:2]
    assert columns.params[0].arguments[3:-1] == (b"\x01\x00",)
    assert first.params[0].arguments[3:-1] == ()


def test_operations_are_operations() -> None:
    x = torch.ones(1)
    operation = TorchOperation(facts_of(aten.neg.default), Call((x,), {}), [torch.empty(1)])
    assert isinstance(operation, Operation)
    assert "aten::neg.default" in repr(operation)


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "a slice with steps": lambda x: x[1:, ::2],
    "expanded": lambda x: x[:1].expand(5, 6),
    "one element": lambda x: x[2, 3],
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("view", STRIDED.values(), ids=STRIDED)
def test_an_input_can_be_pointed_at_other_memory(
    driver: EmulatedDriver, view: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    old = (torch.randn(4, 6) * 9).to(dtype)
    new = (torch.randn(4, 6) * 9).to(dtype)
    kept = old.clone()
    taken = capture(driver, lambda: view(old).repeat(2, *[1] * (view(old).dim() - 1)))
    index = len(taken.params) - 1
    arguments = list(taken.params[index].arguments)
    position = 1 if taken.names[index] == "copy_.default" else 0
    arguments[position] = address(view(new))
    set_arguments(taken, index, tuple(arguments))
    expected = view(new).repeat(2, *[1] * (view(new).dim() - 1))
    assert bits(taken.replay()) == bits(expected)
    assert torch.equal(old, kept)


def test_an_output_can_be_pointed_at_other_memory(driver: EmulatedDriver) -> None:
    x, other = torch.randn(3), torch.zeros(3)
    taken = capture(driver, lambda: x * 2)
    arguments = taken.params[0].arguments
    set_arguments(taken, 0, (arguments[0], address(other), *arguments[2:]))
    taken.replay()
    assert torch.equal(other, x * 2)
    assert taken.result.isnan().all()
    set_arguments(taken, 0, arguments)
    assert torch.equal(taken.replay(), x * 2)


def test_a_complex_conjugate_stays_one_on_other_memory(driver: EmulatedDriver) -> None:
    x, other = torch.randn(3, dtype=torch.complex64), torch.randn(3, dtype=torch.complex64)
    taken = capture(driver, lambda: (x.conj().clone(), x.conj().imag.clone()))
    for index in range(2):
        arguments = taken.params[index].arguments
        moved = address(other) if index == 0 else address(other.imag)
        set_arguments(taken, index, (moved, *arguments[1:]))
    copied, imaginary = taken.replay()
    assert torch.equal(copied, other.conj())
    assert torch.equal(imaginary, other.conj().imag)


SCALARS = {
    "float": (lambda x: x * 2.5, struct.pack("<d", 4.0), lambda x: x * 4.0),
    "int": (lambda x: x + 2, struct.pack("<q", 7), lambda x: x + 7),
    "bool": (
        lambda x: x.sort(0, descending=True).values,
        struct.pack("<?", False),
        lambda x: x.sort(0, descending=False).values,
    ),
    "list": (
        lambda x: x.view(2, 2).roll([1], [0]),
        struct.pack("<q", 1),
        lambda x: x.view(2, 2).roll([1], [1]),
    ),
}


@pytest.mark.parametrize(("work", "data", "changed"), SCALARS.values(), ids=SCALARS)
def test_a_scalar_can_be_changed_in_an_executable(
    driver: EmulatedDriver,
    work: Callable[[torch.Tensor], torch.Tensor],
    data: bytes,
    changed: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = torch.tensor([3.0, 1.0, 2.0, 5.0])
    taken = capture(driver, lambda: work(x))
    set_arguments(taken, 0, (*taken.params[0].arguments[:-2], data, taken.params[0].arguments[-1]))
    assert torch.equal(taken.replay(), changed(x))
    assert not torch.equal(work(x), changed(x))


def test_a_scalar_that_changes_the_shape_is_refused_when_it_runs(driver: EmulatedDriver) -> None:
    taken = capture(driver, lambda: torch.arange(4))
    assert taken.params[0].arguments[1] == struct.pack("<q", 4)
    address_before = taken.result.data_ptr()
    out, _, *rest = taken.params[0].arguments
    set_arguments(taken, 0, (out, struct.pack("<q", 9), *rest))
    with pytest.raises(CudaError, match=r"INVALID_VALUE.*\(9,\).*\(4,\)"):
        taken.replay()
    assert taken.result.data_ptr() == address_before
    assert taken.result.shape == (4,)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(lambda old: (*old[:-2], b"torch.bfloat16", old[-1]), id="another dtype"),
        pytest.param(lambda old: (*old[:-1], old[-1].replace(b"3", b"2")), id="other sizes"),
        pytest.param(lambda old: old[:-1], id="one argument less"),
    ],
)
def test_arguments_that_do_not_fit_the_call_are_refused(
    arguments: Callable[[tuple[bytes, ...]], tuple[bytes, ...]],
) -> None:
    x, out = torch.ones(3), torch.zeros(3, dtype=torch.float16)
    call = Call((x,), {"dtype": torch.float16})
    operation = TorchOperation(facts_of(aten._to_copy.default), call, [out])
    with pytest.raises(CudaError, match=r"cuLaunchKernel: CUDA_ERROR_INVALID_VALUE"):
        operation.run(ONE, arguments(operation.arguments))
    assert out.tolist() == [0, 0, 0]


@pytest.mark.parametrize("value", [True, 3, -1, 2.5, [1, 2, 3], [0.5, 1.5], [True, False]])
def test_values_survive_the_way_into_bytes_and_back(value: object) -> None:
    assert decode_value(encode_value(value), value) == value


@pytest.mark.parametrize("value", ["", "floor", torch.float16, 2**70, 1 + 2j])
def test_other_values_are_shown_as_text_and_cannot_be_changed(value: object) -> None:
    data = encode_value(value)
    assert data
    with pytest.raises(CudaError, match="cannot be changed"):
        decode_value(data + b"x", value)


def test_calls_on_other_memory_are_remembered_but_not_without_end() -> None:
    x, out = torch.ones(2), torch.zeros(2)
    operation = TorchOperation(facts_of(aten.neg.default), Call((x,), {}), [out])
    others = [torch.full((2,), float(i)) for i in range(30)]
    for other in others + others:
        operation.run(ONE, (address(other), *operation.arguments[1:]))
        assert torch.equal(out, -other)
    assert len(operation._others) <= 8


def test_a_whole_graph_update_takes_new_inputs_and_new_scalars(driver: EmulatedDriver) -> None:
    x, y = torch.ones(3), torch.full((3,), 5.0)
    first = capture(driver, lambda: x * 2)
    second = capture(driver, lambda: y * 3)
    assert driver.update_exec(first.executable, second.graph).result is UpdateResult.SUCCESS
    first.replay()
    assert second.result.tolist() == [15, 15, 15]
    assert first.result.isnan().all()


def test_a_graph_keeps_what_it_touches_alive_and_lets_go_in_the_end(
    driver: EmulatedDriver,
) -> None:
    def take() -> tuple[TorchCapture, torch.Tensor]:
        x = torch.randn(1000)
        return capture(driver, lambda: x * 2 + 1), x * 2 + 1

    taken, expected = take()
    gc.collect()
    torch.randn(1000)  # would get the memory of x
    assert torch.equal(taken.replay(), expected)
    function = driver._machine.functions.find(taken.params[0].function)
    watched = weakref.ref(function.operation.tensors[0])
    del function
    driver.destroy_exec(taken.executable)
    driver.destroy_graph(taken.graph)
    gc.collect()
    assert watched() is None


def test_an_error_while_replaying_names_the_operation(driver: EmulatedDriver) -> None:
    table, index = torch.randn(4, 2), torch.tensor([1])
    taken = capture(driver, lambda: torch.nn.functional.embedding(index, table))
    index.fill_(99)
    with pytest.raises(IndexError) as caught:
        taken.replay()
    assert "aten::embedding.default" in caught.value.__notes__[0]


def test_hand_written_out_forms_are_used_only_where_they_compute_the_same() -> None:
    assert facts_of(aten.mm.default).out_form is not None
    assert facts_of(aten.add.Tensor).out_form is not None
    # div.out has no rounding mode; svd's out= takes another path; BCE's resizes its output
    rounded = facts_of(aten.div.Tensor_mode).out_form
    assert rounded is not None
    assert rounded.keywords == {"rounding_mode"}
    assert facts_of(aten.binary_cross_entropy.default).out_form is None
    assert facts_of(aten._linalg_svd.default).out_form is None
    assert facts_of(aten.scatter.reduce).out_form is None


def test_sizes_tell_strides_and_marks_where_they_matter() -> None:
    plain, complex_ = torch.ones(2, 3), torch.ones(2, dtype=torch.complex64)
    tensors = [plain, plain.t(), complex_.conj(), complex_.conj().imag, torch.tensor(1)]
    assert encode_forms(tensors, None) == (
        b"(float32[2,3] float32[3,2/1,3] conj complex64[2] neg float32[2/2] int64[])"
    )
    one, other = torch.tensor([1.0]), torch.tensor([2.0])
    assert encode_forms([one], one) == encode_forms([one], one.clone())
    assert encode_forms([one], one) != encode_forms([one], other)
