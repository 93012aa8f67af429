"""Hand-made snapshots and drawings, for tests that need no driver."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graphcore.drawing import Box, Drawing, Link
from graphcore.driver.records import (
    FunctionHandle,
    FunctionInfo,
    KernelParams,
    LaunchConfig,
    NodeHandle,
    NodeParams,
)
from graphcore.graph import GraphSnapshot, NodeRecord

VECTORIZED = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)
HOSTILE = (
    "</title><script>alert('\"1\"')</script>&\x1b[31m\x00\ud800\uffff<img src=x onerror=alert(2)>"
)


def kernel_node(
    index: int,
    name: str = "work",
    *,
    arguments: Sequence[bytes] = (),
    config: LaunchConfig | None = None,
    label: str = "",
    context: int = 0,
) -> NodeRecord:
    offsets = [sum(map(len, arguments[:at])) for at in range(len(arguments))]
    layout = tuple((at, len(data)) for at, data in zip(offsets, arguments, strict=True))
    return NodeRecord(
        index,
        NodeHandle(1000 + index),
        KernelParams(
            FunctionHandle(hash(name) & 0xFFFF),
            config or LaunchConfig((1, 1, 1), (32, 1, 1)),
            tuple(arguments),
        ),
        FunctionInfo(name, name, layout, context=context),
        None,
        label,
    )


def node(index: int, params: NodeParams, label: str = "", **inner: object) -> NodeRecord:
    return NodeRecord(index, NodeHandle(1000 + index), params, label=label, **inner)  # type: ignore[arg-type]


def snapshot(
    nodes: Iterable[NodeRecord], edges: Iterable[tuple[int, int]] = (), **more: object
) -> GraphSnapshot:
    return GraphSnapshot(tuple(nodes), tuple(edges), **more)  # type: ignore[arg-type]


def chain(count: int, labels: Sequence[str] = (), name: str = "work") -> GraphSnapshot:
    """A chain of kernels, as one stream's capture gives."""
    nodes = (
        kernel_node(index, name, label=labels[index] if labels else "") for index in range(count)
    )
    return snapshot(nodes, zip(range(count), range(1, count), strict=False))


def decode_step(layers: int = 30, per_layer: int = 13) -> GraphSnapshot:
    """A graph as a decode step has it: embedding, layers of attention and mlp, head."""
    labels = ["embed"] * 6
    for layer in range(layers):
        half = per_layer // 2
        labels += [f"layer {layer}/attention"] * half
        labels += [f"layer {layer}/mlp"] * (per_layer - half)
    return chain(len(labels) + 5, [*labels, *["head"] * 5], VECTORIZED)


def drawing(count: int, links: Iterable[tuple[int, int]] = (), **fields: object) -> Drawing:
    boxes = tuple(Box(f"box {index}", "kernel", **fields) for index in range(count))  # type: ignore[arg-type]
    return Drawing(boxes, tuple(Link(*pair) for pair in links))
