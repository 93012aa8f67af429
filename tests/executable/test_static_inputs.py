"""StaticInputs: every call leaves every element defined, or writes nothing at all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from helpers.spinning import MILLISECOND, spin
from helpers.tensors import device_of, filled, replay

import graphcore
from graphcore import (
    Buffer,
    CacheTypeError,
    CapacityError,
    ConfigurationError,
    GraphcoreError,
    StaleGraphError,
    StaticInputs,
)
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import LaunchConfig
from graphcore.interop import current_stream

SHAPE = (4, 3, 5)


def static(driver: Driver, *shape: int, dtype: Any = torch.int64, value: float = 77) -> Any:
    return torch.full(shape, value, dtype=dtype, device=device_of(driver))


def host(tensor: Any) -> Any:
    torch.cuda.synchronize() if tensor.is_cuda else None
    return tensor.cpu()


# ---- what is written ----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", range(5))
def test_real_rows_come_first_and_the_fill_value_after_them(
    graphcore_driver: Driver, rows: int
) -> None:
    ids = static(graphcore_driver, 4, 3)
    inputs = StaticInputs({"ids": ids}, fill={"ids": -1}, driver=graphcore_driver)
    real = torch.arange(rows * 3, device=ids.device).reshape(rows, 3)
    inputs.copy_(ids=real)
    expected = [*real.tolist(), *[[-1] * 3] * (4 - rows)]
    assert host(ids).tolist() == expected


@pytest.mark.parametrize(
    "real",
    list(itertools.product((0, 1, 3, 4), (1, 3), (2, 5))),
    ids=lambda s: "x".join(map(str, s)),
)
def test_any_axis_may_be_shorter(graphcore_driver: Driver, real: tuple[int, ...]) -> None:
    target = static(graphcore_driver, *SHAPE, dtype=torch.float32)
    inputs = StaticInputs({"x": target}, fill={"x": 0.5}, driver=graphcore_driver)
    source = torch.rand(real, device=target.device)
    inputs.copy_({"x": source})
    expected = torch.full(SHAPE, 0.5)
    expected[: real[0], : real[1], : real[2]] = source.cpu()
    assert torch.equal(host(target), expected)


FILLS: dict[str, tuple[Any, Any]] = {
    "bool": (torch.bool, True),
    "uint8": (torch.uint8, 200),
    "int16": (torch.int16, -3),
    "float16": (torch.float16, 1.5),
    "bfloat16": (torch.bfloat16, -2.5),
    "bfloat16 rounded": (torch.bfloat16, 0.1),
    "bfloat16 nan": (torch.bfloat16, float("nan")),
    "bfloat16 infinite": (torch.bfloat16, float("-inf")),
    "float8": (torch.float8_e4m3fn, 1.5),
    "float8 zero": (torch.float8_e5m2, 0),
    "int32": (torch.int32, -1),
    "float32 nan": (torch.float32, float("nan")),
    "int64 one word": (torch.int64, -1),
    "int64 two words": (torch.int64, 50256),
    "float64": (torch.float64, 0.1),
    "complex64": (torch.complex64, 1 + 2j),
    "complex128": (torch.complex128, 0.1 - 2j),
}


@pytest.mark.parametrize("case", FILLS)
def test_a_fill_value_of_every_element_type_is_written_exactly(
    graphcore_driver: Driver, case: str
) -> None:
    dtype, value = FILLS[case]
    target = torch.zeros(5, 3, device=device_of(graphcore_driver)).to(dtype)
    inputs = StaticInputs({"x": target}, fill={"x": value}, driver=graphcore_driver)
    inputs.copy_(x=target[:1].clone())
    wide = torch.complex128 if isinstance(value, complex) else torch.float64
    wanted = torch.full((5, 3), value, dtype=wide).to(dtype)
    wanted[:1] = 0
    got = host(target)
    if value != value:  # a NaN has many bits
        assert got[1:].isnan().all()
        got, wanted = got[:1], wanted[:1]
    assert got.view(torch.uint8).tolist() == wanted.view(torch.uint8).tolist()


def _numpy(tensor: torch.Tensor, driver: Driver) -> Any:
    return tensor.cpu().numpy()


def _list(tensor: torch.Tensor, driver: Driver) -> Any:
    return tensor.tolist()


def _buffer(tensor: torch.Tensor, driver: Driver) -> Any:
    buffer = Buffer.allocate(tuple(tensor.shape), "int64", driver=driver)
    buffer.write(tensor.cpu().numpy())
    return buffer


def _strided(tensor: torch.Tensor, driver: Driver) -> Any:
    return tensor.to(device_of(driver)).t().contiguous().t()


def _strided_array(tensor: torch.Tensor, driver: Driver) -> Any:
    return numpy.asfortranarray(tensor.cpu().numpy())


SOURCES = {
    "torch on the host": lambda tensor, driver: tensor,
    "torch on the device": lambda tensor, driver: tensor.to(device_of(driver)),
    "strided": _strided,
    "numpy": _numpy,
    "strided numpy": _strided_array,
    "numbers": _list,
    "buffer": _buffer,
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("into", ["torch", "buffer"])
def test_values_of_any_library_are_taken(graphcore_driver: Driver, source: str, into: str) -> None:
    driver = graphcore_driver
    real = torch.tensor([[1, 2, 3], [4, 5, 6]])
    target: Any = static(driver, 3, 3)
    if into == "buffer":
        target = _buffer(target, driver)
    inputs = StaticInputs({"x": target}, fill={"x": 9}, driver=driver)
    inputs.copy_(x=SOURCES[source](real, driver))
    driver.synchronize()
    got = target.read() if into == "buffer" else host(target)
    assert got.tolist() == [[1, 2, 3], [4, 5, 6], [9, 9, 9]]


def test_numpy_memory_is_device_memory_of_the_emulated_driver() -> None:
    target = numpy.full((3, 2), 7.0)
    inputs = StaticInputs({"x": target}, fill={"x": 0})
    assert inputs.driver.is_emulated
    inputs.copy_(x=[[1, 2]])
    assert target.tolist() == [[1, 2], [0, 0], [0, 0]]


@pytest.mark.gpu
def test_cupy_memory_is_written_from_any_library(graphcore_driver: Driver) -> None:
    if graphcore_driver.is_emulated:
        pytest.skip("CuPy has no memory on the emulated driver")
    cupy = pytest.importorskip("cupy")
    target = cupy.full((4, 2), 7, "int64")
    inputs = StaticInputs({"x": target}, fill={"x": -5})
    for source in (cupy.arange(4).reshape(2, 2), torch.arange(4).reshape(2, 2).cuda()):
        target[:] = 7
        inputs.copy_(x=source)
        graphcore_driver.synchronize()
        assert target.get().tolist() == [[0, 1], [2, 3], [-5, -5], [-5, -5]]


def test_a_scalar_input_needs_no_fill_value(graphcore_driver: Driver) -> None:
    position = static(graphcore_driver)
    inputs = StaticInputs({"position": position}, driver=graphcore_driver)
    inputs.copy_(position=12)
    assert host(position).item() == 12


def test_a_static_tensor_given_to_itself_stays_and_a_view_of_it_is_moved(
    graphcore_driver: Driver,
) -> None:
    target = static(graphcore_driver, 4, dtype=torch.float32)
    target.copy_(torch.arange(4.0))
    inputs = StaticInputs({"x": target}, fill={"x": 0}, driver=graphcore_driver)
    inputs.copy_(x=target)
    assert host(target).tolist() == [0, 1, 2, 3]
    inputs.copy_(x=target[1:])
    assert host(target).tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize("real", [0, 1, 4])
def test_the_first_elements_of_a_static_tensor_given_to_it_are_followed_by_the_fill_value(
    real: int,
) -> None:
    target = numpy.arange(1.0, 5.0)  # an empty part of it has its address, which torch's has not
    inputs = StaticInputs({"x": target}, fill={"x": -1}, driver=EmulatedDriver())
    inputs.copy_(x=target[:real])
    inputs.driver.synchronize()
    assert target.tolist() == [1, 2, 3, 4][:real] + [-1] * (4 - real)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        pytest.param(lambda t: t["b"], lambda t: t["a"], id="swapped"),
        pytest.param(lambda t: t["b"][:2], lambda t: t["a"][2:], id="parts"),
        pytest.param(lambda t: t["b"].flip(0), lambda t: t["a"], id="one of them computed"),
        pytest.param(lambda t: t["both"][3:5], lambda t: t["both"][2:6], id="across both"),
        pytest.param(lambda t: t["both"][::2], lambda t: t["both"][1::2], id="strided"),
    ],
)
def test_inputs_given_to_each_other_are_read_before_any_is_written(
    graphcore_driver: Driver, left: Callable[[Any], Any], right: Callable[[Any], Any]
) -> None:
    both = static(graphcore_driver, 8)
    both.copy_(torch.arange(8))
    tensors = {"a": both[:4], "b": both[4:], "both": both}
    given = {"a": left(tensors), "b": right(tensors)}
    wanted = {name: [*value.tolist(), -1, -1, -1, -1][:4] for name, value in given.items()}
    inputs = StaticInputs(
        {name: tensors[name] for name in given},
        fill=dict.fromkeys(given, -1),
        driver=graphcore_driver,
    )
    graphcore_driver.synchronize()
    inputs.copy_(given)
    graphcore_driver.synchronize()
    assert {name: host(tensors[name]).tolist() for name in given} == wanted


def test_a_strided_source_is_made_dense_on_the_stream_of_the_writes(
    graphcore_driver: Driver,
) -> None:
    """Where torch's own stream is busy, what it made dense there would not be there yet."""
    size = 1 << 16
    target = static(graphcore_driver, size)
    source = static(graphcore_driver, size, 2)
    source[:, 1] = torch.arange(size)
    busy = static(graphcore_driver, 1, dtype=torch.float32)
    inputs = StaticInputs({"x": target}, driver=graphcore_driver)
    graphcore_driver.synchronize()
    with graphcore_driver.stream() as stream:
        graphcore_driver.launch(
            graphcore_driver.function(spin),
            LaunchConfig((1, 1, 1), (1, 1, 1)),
            spin.pack(busy.data_ptr(), 1.0, 200 * MILLISECOND),
            current_stream(graphcore_driver),
        )
        inputs.copy_(x=source[:, 1], stream=stream)
    graphcore_driver.synchronize()
    assert host(target)[-3:].tolist() == [size - 3, size - 2, size - 1]


def test_host_values_may_change_as_soon_as_the_call_returns(graphcore_driver: Driver) -> None:
    target = static(graphcore_driver, 1 << 16)
    inputs = StaticInputs({"x": target}, driver=graphcore_driver)
    source = numpy.arange(1 << 16)
    graphcore_driver.synchronize()  # the target's first values come on another stream
    with graphcore_driver.stream() as stream:
        inputs.copy_(x=source, stream=stream)
        source[:] = -1
        stream.synchronize()
    assert host(target)[-3:].tolist() == [65533, 65534, 65535]


# ---- before a replay ----------------------------------------------------------------------------


def test_nothing_of_the_step_before_is_left_before_a_replay(graphcore_driver: Driver) -> None:
    driver = graphcore_driver
    table = torch.tensor([10.0, 20.0, 30.0, 40.0], device=device_of(driver))
    ids = static(driver, 4, value=0)
    bias, out = filled(driver, 0.0), filled(driver, float("nan"))
    inputs = StaticInputs(
        {"ids": ids, "bias": bias}, fill={"ids": 0, "bias": 0.0}, optional=["bias"], driver=driver
    )

    def step() -> None:
        out.copy_(table[ids] + bias)

    step()
    graph = graphcore.capture_function(step, driver=driver)
    with graph.instantiate() as executable, driver.stream() as stream:

        def run(**given: Any) -> Any:
            driver.synchronize()
            inputs.copy_(given, stream=stream)  # and no wait between the two
            executable.launch(stream)
            driver.synchronize()
            return out.tolist()

        assert run(ids=[3, 3, 3, 3], bias=[1.0] * 4) == [41.0] * 4
        assert run(ids=[1, 2]) == [20.0, 30.0, 10.0, 10.0]
        assert run(ids=[1, 2, 3], bias=[5.0]) == [25.0, 30.0, 40.0, 10.0]


def test_the_tensors_are_kept_by_a_graph_under_their_names(graphcore_driver: Driver) -> None:
    inputs = StaticInputs({"x": filled(graphcore_driver, 1.0)}, driver=graphcore_driver)
    graph = graphcore.capture_function(
        lambda given: given["x"].add_(1), inputs, driver=graphcore_driver
    )
    assert "argument 0['x']" in graph.owners.labels()
    assert (list(inputs), len(inputs)) == (["x"], 1)
    assert repr(inputs) == "<StaticInputs x float32[4]>"
    with graph.instantiate() as executable:
        inputs.copy_(x=[1.0, 2.0, 3.0, 4.0])
        replay(executable)
    assert inputs["x"].tolist() == [2.0, 3.0, 4.0, 5.0]


def test_a_reset_writes_every_fill_value(graphcore_driver: Driver) -> None:
    x, y = static(graphcore_driver, 3), static(graphcore_driver, 2)
    inputs = StaticInputs({"x": x, "y": y}, fill={"x": 4}, driver=graphcore_driver)
    inputs.reset()
    assert (host(x).tolist(), host(y).tolist()) == ([4] * 3, [77] * 2)


# ---- refusals -----------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], type[GraphcoreError], str]] = {
    "too many rows": ({"y": [[1.0]] * 5}, CapacityError, r"y: expected at most \(4, 2\)"),
    "too wide": ({"y": numpy.zeros((1, 3), "f4")}, CapacityError, "got .1, 3."),
    "shorter without a fill value": ({"x": [1]}, ConfigurationError, "x: expected the whole shape"),
    "another element type": (
        {"y": torch.ones(4, 2, dtype=torch.float64)},
        ConfigurationError,
        "y: expected float32, got float64",
    ),
    "another rank": ({"y": [1.0]}, ConfigurationError, "y: expected 2 axes"),
    "not numbers": ({"y": [["a"]]}, ConfigurationError, "expected numbers"),
    "a number that does not fit": ({"x": [2**70, 0, 0]}, ConfigurationError, "expected numbers"),
    "unknown": ({"z": [1]}, ConfigurationError, r"expected names among x, y, o; got 'z'"),
    "sparse": ({"y": torch.eye(2).to_sparse()}, CacheTypeError, "plain strided memory"),
}


def three(driver: Driver) -> tuple[StaticInputs, list[Any]]:
    x, y = static(driver, 3), static(driver, 4, 2, dtype=torch.float32)
    o = static(driver, 2)
    tensors = {"x": x, "y": y, "o": o}
    return StaticInputs(tensors, fill={"y": 0, "o": 1}, optional="o", driver=driver), [x, y, o]


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_written_is_refused_and_nothing_is_written(
    graphcore_driver: Driver, case: str
) -> None:
    inputs, tensors = three(graphcore_driver)
    given, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        inputs.copy_({"x": [1, 2, 3], "y": [[1.0, 2.0]], **given})
    assert all((host(tensor) == 77).all() for tensor in tensors)
    inputs.copy_(x=[1, 2, 3], y=[[1.0, 2.0]])
    assert not any((host(tensor) == 77).any() for tensor in tensors)


def test_an_input_left_out_or_given_twice_is_refused(graphcore_driver: Driver) -> None:
    inputs, tensors = three(graphcore_driver)
    with pytest.raises(ConfigurationError, match=r"missing: y\. What is left out would keep"):
        inputs.copy_(x=[1, 2, 3])
    with pytest.raises(ConfigurationError, match="x: expected it once, got it twice"):
        inputs.copy_({"x": [1, 2, 3]}, x=[1, 2, 3], y=[])
    with pytest.raises(ConfigurationError, match="inputs: expected a mapping"):
        inputs.copy_([1, 2])  # type: ignore[arg-type]
    assert all((host(tensor) == 77).all() for tensor in tensors)


def test_a_static_tensor_that_moved_is_refused_by_name(graphcore_driver: Driver) -> None:
    inputs, (x, y, _) = three(graphcore_driver)
    x.data = x.detach().clone()
    for call in (lambda: inputs.copy_(x=[1, 2, 3], y=[]), inputs.reset):
        with pytest.raises(StaleGraphError, match=r"x: expected .* graphs read the old memory"):
            call()
    assert (host(y) == 77).all()


def _read_only() -> Any:
    array = numpy.zeros(3)
    array.flags.writeable = False
    return array


_ARRAY = numpy.zeros(8)
CONSTRUCTIONS: dict[str, tuple[Callable[[], Any], type[GraphcoreError], str]] = {
    "no mapping": (lambda: StaticInputs([1]), ConfigurationError, "tensors: expected a mapping"),
    "keys": (lambda: StaticInputs({1: _ARRAY}), ConfigurationError, "tensors: expected a mapping"),
    "no tensor": (lambda: StaticInputs({"x": 3}), CacheTypeError, "x: expected a torch"),
    "read-only": (
        lambda: StaticInputs({"x": _read_only()}),
        ConfigurationError,
        "x: expected writable memory",
    ),
    "strided": (
        lambda: StaticInputs({"x": _ARRAY[::2]}),
        ConfigurationError,
        "x: expected contiguous memory",
    ),
    "overlap": (
        lambda: StaticInputs({"x": _ARRAY[:5], "y": _ARRAY[4:]}),
        ConfigurationError,
        "y: expected memory of its own, got some of x's",
    ),
    "fill of an unknown name": (
        lambda: StaticInputs({"x": _ARRAY}, fill={"y": 0}),
        ConfigurationError,
        "fill: expected names among x; got 'y'",
    ),
    "fill that does not fit": (
        lambda: StaticInputs({"x": numpy.zeros(2, "u1")}, fill={"x": 256}),
        ConfigurationError,
        r"fill\['x'\]: values: expected numbers that uint8 holds",
    ),
    "fill that is no number": (
        lambda: StaticInputs({"x": _ARRAY}, fill={"x": [0]}),
        ConfigurationError,
        r"fill\['x'\]: expected one number",
    ),
    "bfloat16 fill that is no number": (
        lambda: StaticInputs({"x": torch.ones(2, dtype=torch.bfloat16)}, fill={"x": "a"}),
        ConfigurationError,
        r"fill\['x'\]: expected a bfloat16",
    ),
    "optional without a fill value": (
        lambda: StaticInputs({"x": _ARRAY}, optional=["x"]),
        ConfigurationError,
        "optional: expected a fill value for 'x'",
    ),
    "optional unknown": (
        lambda: StaticInputs({"x": _ARRAY}, optional="y"),
        ConfigurationError,
        "optional: expected names among x; got 'y'",
    ),
    "driver": (
        lambda: StaticInputs({"x": _ARRAY}, driver="emulated"),
        ConfigurationError,
        "driver: expected an open driver",
    ),
}


@pytest.mark.parametrize("case", CONSTRUCTIONS)
def test_what_cannot_be_a_static_input_is_refused(case: str) -> None:
    make, error, words = CONSTRUCTIONS[case]
    with pytest.raises(error, match=words):
        make()


@pytest.mark.gpu
def test_memory_of_the_host_is_no_static_input_on_a_device(graphcore_driver: Driver) -> None:
    if graphcore_driver.is_emulated:
        pytest.skip("host memory is the emulated driver's device memory")
    with pytest.raises(ConfigurationError, match="x: expected memory of driver cuda"):
        StaticInputs({"x": torch.zeros(2)}, driver=graphcore_driver)


def test_a_copy_that_is_captured_keeps_its_source() -> None:
    driver = EmulatedDriver()
    target = numpy.zeros(4)
    inputs = StaticInputs({"x": target}, driver=driver)
    source = numpy.full(4, 3.0)
    with graphcore.capture(driver=driver) as capture:
        inputs.copy_(x=source)
    assert source in [owner.object for owner in capture.graph.owners if owner.object is source]
    with capture.graph.instantiate() as executable:
        replay(executable)
    assert target.tolist() == [3.0] * 4
