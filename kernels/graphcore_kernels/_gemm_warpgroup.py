"""The forms of the grouped product by warpgroups of sm_90a: what they take, their launch.

Pure, but for the tensor maps, which the driver encodes. Weights, and rows of x that are not
gathered, are copied in boxes; a box of weights lays eight gates before their eight ups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from graphcore.driver import Kernel, kernel
from graphcore.driver.records import DeviceInfo, LaunchConfig
from graphcore.driver.tensor_map import TENSOR_MAP_BYTES, TENSOR_MAP_TYPE, TensorMap
from graphcore_kernels._module import load_through_cupy, read_source

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from graphcore.driver import Driver
    from graphcore.resources.tensors import TensorRef
    from graphcore_kernels._gemm_operands import Sizes

_CAPABILITY = (9, 0)
_PRECISIONS = {"bf16": 0, "f16": 1, "tf32x3": 3, "tf32": 4}
"""By number, as the source has them."""
_THREADS, _WARPS = 384, 12
_GROUP = 8
"""Gates before their ups."""
_ROW_BYTES = 128
"""Of the depth, of a box: 64 elements, or 32 of F32."""
_TURNED_BYTES = 4 * 4096
_BARRIER_BYTES = 256
_CONCAT = 1


@dataclass(frozen=True, slots=True)
class WarpgroupShape:
    """What a task takes, and how far copies run ahead.

    Args:
        columns: Of the weights, of a block of threads: 128 or 256.
        tokens: The most rows.
        grain: Rows that are added at once to what a task takes: an eighth of ``tokens`` and a
            multiple of 8.
        stages: Of the ring, 128 bytes of the depth each.
        itemsize: Of the elements, in bytes.
        is_split: Whether the ring also has what rounding tokens took.
        cluster: Blocks of threads that do a task together, each with columns of its own; they copy
            tokens for each other.
        grains_of_box: How many grains a copy of rows of x brings at once; divides eight.
    """

    columns: int
    tokens: int
    grain: int
    stages: int
    itemsize: int = 2
    is_split: bool = False
    cluster: int = 1
    grains_of_box: int = 1

    @property
    def box(self) -> int:
        """Rows of x that a copy brings at once."""
        return self.grain * self.grains_of_box

    def shared_bytes(self, experts: int) -> int:
        """The ring, elements of 16 bits on their way out, factors, barriers, and tables."""
        ring = self.stages * (self.columns + (1 + self.is_split) * self.tokens) * _ROW_BYTES
        turned = _TURNED_BYTES if self.grain == 32 and self.itemsize == 2 else 0
        # whole chunks: the compiler reads four words where one is asked for
        tables = 16 * (experts + -(-(_WARPS + experts + 1) // 4))
        return ring + turned + 2 * 4 * self.tokens + _BARRIER_BYTES + tables

    def config(self, tasks: int, experts: int, device: DeviceInfo) -> LaunchConfig:
        """The launch shape: a block for each multiprocessor, fewer where there is less to do.

        ``tasks`` are those of clusters; the device has room for one, see :meth:`why_not`.
        """
        blocks = min(device.multiprocessors // self.cluster, tasks) * self.cluster
        return LaunchConfig((blocks, 1, 1), (_THREADS, 1, 1), self.shared_bytes(experts))

    def why_not(self, device: DeviceInfo) -> str | None:
        """Why no cluster has room there, in words; None where one has."""
        if device.multiprocessors >= self.cluster:
            return None
        return f"a device of {self.cluster} multiprocessors or more, got {device.multiprocessors}"


@cache
def warpgroup_kernel(
    name: str,
    arithmetic: str,
    shape: WarpgroupShape,
    signature: str,
    reference: Callable[..., Callable[..., None]],
    *,
    has_pairs: bool,
    is_combined: bool,
) -> Kernel:
    """The kernel of one element type, with or without an activation, and of F32 products or not."""
    name += "_pairs" * has_pairs + "_products" * is_combined
    chosen = {
        "THREADS": _THREADS,
        "GEMM_NAME": name,
        "GEMM_PRECISION": _PRECISIONS[arithmetic],
        "GEMM_WIDTH": shape.columns,
        "GEMM_TOKENS": shape.tokens,
        "GEMM_GRAIN": shape.grain,
        "GEMM_STAGES": shape.stages,
        "GEMM_PAIRS": int(has_pairs),
        "GEMM_COMBINED": int(is_combined),
        "GEMM_CLUSTER": shape.cluster,
        "GEMM_BOX": shape.box,
    }
    own = "gemm_warpgroup" if shape.itemsize == 2 else "gemm_warpgroup_f32"
    parts = ("tensor_cores", "warpgroups", "grouped_rows", "warpgroup_tasks", own,
             "warpgroup_launch")  # fmt: skip
    product = reference(arithmetic, is_kn=False)

    def without_maps(config: LaunchConfig, *arguments: Any) -> None:
        product(config, *arguments[2:])

    return kernel(
        name,
        f"{TENSOR_MAP_TYPE} weights_map, {TENSOR_MAP_TYPE} x_map, {signature}",
        "".join(f"#define {key} {value}\n" for key, value in chosen.items())
        + "\n".join(read_source(f"{part}.cu") for part in parts),
        without_maps,
        options=("-arch=sm_90a",),
        loader=load_through_cupy,
    )  # fmt: skip


def has_warpgroups(arithmetic: str, layout: str, capability: tuple[int, int]) -> bool:
    """Whether products of this kind have these forms at all, on devices of this capability."""
    return capability == _CAPABILITY and layout == "nk" and arithmetic in _PRECISIONS


def why_not_warpgroups(
    refs: Mapping[str, TensorRef], sizes: Sizes, capability: tuple[int, int]
) -> str | None:
    """What these forms cannot do, in words: the device, or an operand; None where they can.

    Args:
        refs: The operands, checked.
        sizes: Of the product.
        capability: Of the device.
    """
    if not has_warpgroups(sizes.arithmetic, sizes.layout, capability):
        found = f"{sizes.arithmetic} in layout {sizes.layout!r} on one of {capability}"
        known = f"{', '.join([*_PRECISIONS][:-1])} or {[*_PRECISIONS][-1]}"
        return f"{known} in layout 'nk' on a device of {_CAPABILITY}, got {found}"
    if sizes.activation and sizes.out_columns % _GROUP:
        return f"N / 2 a multiple of {_GROUP} with an activation, got {sizes.out_columns}"
    for name in ("weights", "x") if _has_boxes_of_x(refs) else ("weights",):
        ref = refs[name]
        steps = zip(ref.strides[:-1], ref.shape[:-1], strict=True)
        if any(size > 1 and step < ref.shape[-1] for step, size in steps):
            return f"rows of {name} that share no memory, got strides {ref.strides}"
    return None


def _has_boxes_of_x(refs: Mapping[str, TensorRef]) -> bool:
    """Whether rows of x are copied in boxes: not where they are gathered, nor from none."""
    return "gather" not in refs and refs["x"].shape[0] > 0


def encoded_maps(
    driver: Driver, refs: Mapping[str, TensorRef], sizes: Sizes, shape: WarpgroupShape
) -> tuple[bytes, bytes]:
    """The maps (of the weights, of x) as the kernel takes them; zeros where nothing needs one."""
    x = bytes(TENSOR_MAP_BYTES)
    if _has_boxes_of_x(refs):
        x = driver.encode_tensor_map(_map_of_rows(refs["x"], shape.box))
    weights = _map_of_weights(refs["weights"], sizes, shape.columns)
    return driver.encode_tensor_map(weights), x


def _map_of_weights(weights: TensorRef, sizes: Sizes, width: int) -> TensorMap:
    """Axes depth, column, gate or up, group of eight columns, slot; one of both without pairs."""
    row = _step(weights, 1)
    if sizes.activation:
        is_concat = sizes.activation == _CONCAT
        column = row if is_concat else 2 * row
        up = sizes.out_columns * row if is_concat else row
        groups, half = sizes.out_columns // _GROUP, width // 2 // _GROUP
        axes = [(_GROUP, column, _GROUP), (2, up, 2), (groups, _GROUP * column, half)]
    else:
        axes = [(sizes.columns, row, width), (1, row, 1), (1, row, 1)]
    axes.append((sizes.n_slots, _step(weights, 0), 1))
    axis_sizes, steps, box = zip(*axes, strict=True)
    inner = _ROW_BYTES // weights.itemsize
    shape = (sizes.depth, *axis_sizes)
    return TensorMap(weights.address, weights.itemsize, shape, steps, (inner, *box))


def _map_of_rows(x: TensorRef, rows: int) -> TensorMap:
    box = (_ROW_BYTES // x.itemsize, rows)
    return TensorMap(x.address, x.itemsize, x.shape[::-1], (_step(x, 0),), box)


def _step(ref: TensorRef, axis: int) -> int:
    """Bytes from one index to the next; of an axis of one index, any that a map takes."""
    return ref.itemsize * (ref.strides[axis] if ref.shape[axis] > 1 else max(8, ref.shape[-1]))
