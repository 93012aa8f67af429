"""Rebind on nodes of torch, cuBLAS, Triton, CuPy and cuda.core: the new buffer gets the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.contract import copy_1d
from helpers.tensors import cuda_driver, filled, replay

import graphcore
from graphcore import Graph, GraphExec
from graphcore.driver import Driver, stream_handle
from graphcore.driver.records import KernelParams, NodeKind
from graphcore.resources.attribution import attribute

pytestmark = pytest.mark.gpu

NAN = float("nan")


def captured(driver: Driver, step: Callable[[], object], **kept: Any) -> tuple[Graph, Any]:
    capturing = graphcore.capture(driver=driver)
    capturing.warm_up(step, 3)
    with capturing:
        for name, tensor in kept.items():
            capturing.keep(tensor, name)
        step()
    return capturing.graph, capturing.stream


def exchange_and_compare(
    graph: Graph,
    stream: Any,
    function: Callable[..., torch.Tensor],
    inputs: dict[str, torch.Tensor],
    out: torch.Tensor,
) -> GraphExec:
    """Replays on the captured buffers, then on new ones, and compares both with ``function``."""
    names: dict[str, Any] = {**inputs, "out": out}
    places = attribute(graph.snapshot(), names)
    assert {name for found in places for name, _ in found.place.matches} == set(names)
    executable = graph.instantiate()
    out.fill_(NAN)
    replay(executable, stream)
    torch.testing.assert_close(out, function(**inputs))
    # other contents, so that a pointer left behind shows
    new = {name: torch.randn_like(tensor) for name, tensor in inputs.items()}
    result = torch.full_like(out, NAN)
    before = [tensor.clone() for tensor in (*inputs.values(), out)]
    outcome = executable.rebind({**new, "out": result}, names=names)
    assert all(count >= 1 for count in outcome.words.values())
    replay(executable, stream)
    torch.testing.assert_close(result, function(**new))
    for tensor, was in zip((*inputs.values(), out), before, strict=True):
        assert torch.equal(tensor, was)
    return executable


def on_device(driver: Driver, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    filled(driver, 0.0)  # torch's kernels are loaded before a capture
    return torch.randn(shape, device=f"cuda:{driver.device}", dtype=dtype)


# ---- torch and cuBLAS ---------------------------------------------------------------------------


TORCH: dict[str, tuple[Callable[..., torch.Tensor], dict[str, tuple[int, ...]]]] = {
    "elementwise": (lambda x, y: (x + y) * 3, {"x": (1000,), "y": (1000,)}),
    "broadcast and strided": (lambda x, y: x.T + y, {"x": (64, 32), "y": (64,)}),
    "reduction": (lambda x: x.sum(-1), {"x": (128, 256)}),
    "softmax": (lambda x: torch.softmax(x, -1), {"x": (16, 512)}),
    "cat": (lambda x, y: torch.cat([x, y], 1), {"x": (8, 16), "y": (8, 32)}),
    "gather": (lambda x: x.sort(-1).values, {"x": (8, 64)}),
    "attention": (
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v) + 1,
        {"q": (1, 4, 64, 64), "k": (1, 4, 64, 64), "v": (1, 4, 64, 64)},
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_nodes_that_torch_captured_work_on_new_buffers(name: str) -> None:
    driver = cuda_driver()
    function, shapes = TORCH[name]
    inputs = {key: on_device(driver, *shape) for key, shape in shapes.items()}
    out = torch.empty_like(function(**inputs))
    graph, stream = captured(driver, lambda: out.copy_(function(**inputs)))
    exchange_and_compare(graph, stream, function, inputs, out).close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [(1, 256, 256), (512, 512, 512), (2048, 1024, 512)],
    ids=lambda s: "x".join(map(str, s)),
)
def test_matrix_products_of_cublas_work_on_new_buffers(
    dtype: torch.dtype, sizes: Sequence[int]
) -> None:
    """Large products of half precision may go through tensor maps, which hold addresses too."""
    driver = cuda_driver()
    rows, inner, columns = sizes
    inputs = {
        "x": on_device(driver, rows, inner, dtype=dtype),
        "weight": on_device(driver, inner, columns, dtype=dtype),
    }
    out = torch.empty(rows, columns, device=inputs["x"].device, dtype=dtype)

    def step() -> None:
        torch.matmul(inputs["x"], inputs["weight"], out=out)

    graph, stream = captured(driver, step)
    assert any(isinstance(node.params, KernelParams) for node in graph.snapshot().nodes)
    exchange_and_compare(graph, stream, lambda x, weight: x @ weight, inputs, out).close()


# ---- Triton and CuPy ----------------------------------------------------------------------------


def test_a_triton_kernel_works_on_new_buffers() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from helpers.triton_kernels import scaled_sum

    driver = cuda_driver()
    inputs = {"x": on_device(driver, 1000), "y": on_device(driver, 1000)}
    out = torch.empty_like(inputs["x"])
    graph, stream = captured(driver, lambda: scaled_sum(inputs["x"], inputs["y"], out, 2.5))
    exchange_and_compare(graph, stream, lambda x, y: (x + y) * 2.5, inputs, out).close()


def test_kernels_of_cupy_work_on_new_buffers() -> None:
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    driver = cuda_driver()
    raw = cupy.RawKernel(
        'extern "C" __global__ void triple(const float* x, float* y, int n) '
        "{ int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) y[i] = 3 * x[i]; }",
        "triple",
    )
    with cupy.cuda.Device(driver.device):
        x, middle, out = (cupy.full(256, value, "float32") for value in (1.0, 0.0, 0.0))

        def step() -> None:
            raw((2,), (128,), (x, middle, cupy.int32(256)))
            cupy.add(middle, x, out=out)

        graph, stream = captured(driver, step, x=x, middle=middle, out=out)
        executable = graph.instantiate()
        replay(executable, stream)
        assert set(out.tolist()) == {4.0}
        new_x, new_middle, new_out = (cupy.full(256, v, "float32") for v in (2.0, NAN, NAN))
        outcome = executable.rebind({"x": new_x, "middle": new_middle, "out": new_out})
        assert set(outcome.words) == {"x", "middle", "out"}
        assert outcome.nodes == 2
        out.fill(-1)
        middle.fill(-1)
        replay(executable, stream)
        assert set(new_out.tolist()) == {8.0}
        assert set(new_middle.tolist()) == {6.0}
        assert set(out.tolist()) == set(middle.tolist()) == {-1.0}
        assert any(owner.object is new_out for owner in executable.owners)
        assert not any(owner.object is out for owner in executable.owners)
        executable.close()


# ---- adopted graphs -----------------------------------------------------------------------------


def test_a_graph_that_torch_itself_captured_is_adopted_and_re_pointed() -> None:
    driver = cuda_driver()
    x, weight = on_device(driver, 64, 64), on_device(driver, 64, 64)
    out = torch.empty_like(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            out.copy_(torch.relu(x @ weight))
    torch.cuda.synchronize()
    theirs = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(theirs):
        out.copy_(torch.relu(x @ weight))
    executable = Graph.adopt(theirs).instantiate()
    before = theirs.raw_cuda_graph()
    new_x, new_out = torch.randn_like(x), torch.full_like(out, NAN)
    executable.rebind([(x, new_x), (out, new_out)])
    out.fill_(-1.0)
    replay(executable)
    torch.testing.assert_close(new_out, torch.relu(new_x @ weight))
    assert set(out.flatten().tolist()) == {-1.0}
    # torch's own graph is as it was
    assert theirs.raw_cuda_graph() == before
    theirs.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, torch.relu(x @ weight))
    executable.close()


def test_a_definition_of_cuda_core_is_adopted_and_re_pointed() -> None:
    core = pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    if not hasattr(core.graph, "GraphDefinition"):
        pytest.skip("this cuda.core has no GraphDefinition")
    driver = cuda_driver()
    core.Device(driver.device).set_current()
    x, out = filled(driver, 3.0), filled(driver, 0.0)
    definition = core.graph.GraphDefinition()
    definition.memcpy(out.data_ptr(), x.data_ptr(), 16)
    executable = Graph.adopt(definition, driver=driver).instantiate()
    assert [node.kind for node in executable.snapshot().nodes] == [NodeKind.MEMCPY]
    new_x, new_out = filled(driver, 7.0), filled(driver, NAN)
    executable.rebind([(x, new_x), (out, new_out)])
    replay(executable)
    assert new_out.tolist() == [7.0] * 4
    assert out.tolist() == [0.0] * 4
    executable.close()


def test_a_graph_that_cuda_core_captured_is_adopted_and_re_pointed() -> None:
    core = pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    driver = cuda_driver()
    device = core.Device(driver.device)
    device.set_current()
    x, out = filled(driver, 3.0), filled(driver, 0.0)
    torch.cuda.synchronize()
    builder = device.create_graph_builder().begin_building()
    driver.copy(copy_1d(out.data_ptr(), x.data_ptr(), 16), stream_handle(builder))
    builder.end_building()
    executable = Graph.adopt(builder, driver=driver).instantiate()
    new_x, new_out = filled(driver, 7.0), filled(driver, NAN)
    executable.rebind([(x, new_x), (out, new_out)])
    replay(executable)
    assert new_out.tolist() == [7.0] * 4
    assert out.tolist() == [0.0] * 4
    executable.close()
