"""``stage_plan``: the launcher of the kernel that lists a step's experts in chunks.

For steps whose experts pass through a few rows of scratch memory, chunk by chunk: after
``route_plan`` it says, on the device, which experts each chunk copies and which rows they have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from graphcore.driver import kernel
from graphcore.driver.records import LaunchConfig
from graphcore.errors import ConfigurationError
from graphcore.resources.tensors import describe
from graphcore_kernels._drivers import Operand, choose_driver
from graphcore_kernels._module import load, load_through_cupy, read_source
from graphcore_kernels._planned import OneKernel
from graphcore_kernels.route_layout import Shapes
from graphcore_kernels.stage_plan_reference import run

_THREADS = 256
_WARP = 32
CONFIG = LaunchConfig((1, 1, 1), (_THREADS, 1, 1), 4 * (_THREADS // _WARP))
"""The launch shape: one block, a word for each warp."""
_WRITTEN = ("experts", "starts", "counts")

stage_plan_kernel = kernel(
    "stage_plan",
    "const i32* offsets, i32* experts, i32* starts, i32* counts, u32 expert_count, u32 room, "
    "u32 chunks",
    read_source("stage_plan.cu"),
    run,
    loader=load_through_cupy,
)


def stage_shapes(chunks: int, chunk: int) -> Shapes:
    """What ``stage_plan`` writes for ``chunks`` chunks of ``chunk`` experts.

    * ``experts``: those that have rows, ascending; -1 behind them.
    * ``starts``: where the rows of each begin; behind them, where all rows end. So the offsets of
      the product of chunk c are ``starts[c * chunk : (c + 1) * chunk + 1]``.
    * ``counts``: how many experts each chunk has.
    """
    room = chunks * chunk
    return {
        "experts": ("int32", (room,)),
        "starts": ("int32", (room + 1,)),
        "counts": ("int32", (chunks,)),
    }


@dataclass(frozen=True, slots=True)
class StagePlan(OneKernel):
    """The lists of steps of one shape; launch it after each ``route_plan``.

    Its operands are named as the kernel's parameters are; its config is one block.
    """

    name: ClassVar[str] = "stage_plan"


class StagePlanner:
    """The callable behind :data:`stage_plan`; it holds nothing."""

    def __call__(
        self, offsets: Any, experts: Any, starts: Any, counts: Any, stream: Any = None
    ) -> None:
        """Lists the experts that have rows, for chunks of them, in one kernel of one block.

        Args:
            offsets: int32 [E + 1], ascending: ``outputs["offsets"]`` of ``route_plan``.
            experts: int32 [room], written. The room is for the most experts that can have rows,
                min(routes, E), made up to whole chunks.
            starts: int32 [room + 1], written.
            counts: int32 [chunks], written; ``room`` is a multiple of their number. What stands
                in the three afterwards: :func:`stage_shapes`.
            stream: Anything that is a stream. None: the capture under way on this thread, else
                torch's or CuPy's current stream where the tensors are theirs, else the legacy one.

        Raises:
            CacheTypeError: An operand is no tensor, or ``stream`` no stream.
            ConfigurationError: Types, shapes, strides or devices do not fit; two share memory.
            CudaError: The driver refused the launch.
        """
        self.plan(offsets, experts, starts, counts).launch(stream)

    def plan(self, offsets: Any, experts: Any, starts: Any, counts: Any) -> StagePlan:
        """Checks now, and loads the kernel, so that a capture only launches.

        Args and errors as for the call itself.
        """
        given = {"offsets": offsets, "experts": experts, "starts": starts, "counts": counts}
        operands = {
            name: Operand(obj, describe(obj, writable=name in _WRITTEN, name=name))
            for name, obj in given.items()
        }
        for name, operand in operands.items():
            _check_list(name, operand, operands["offsets"])
        _check_apart(operands)
        lengths = {name: operand.ref.shape[0] for name, operand in operands.items()}
        room, chunks = lengths["experts"], lengths["counts"]
        if lengths["offsets"] < 2 or not chunks or not room or room % chunks:
            raise ConfigurationError(
                "experts: expected a room that is a multiple of the length of counts, and offsets "
                f"of at least one expert, got a room of {room}, {chunks} counts, "
                f"{lengths['offsets']} offsets"
            )
        if lengths["starts"] != room + 1:
            raise ConfigurationError(
                f"starts: expected {room + 1} elements, one more than experts, got "
                f"{lengths['starts']}"
            )
        addresses = (operand.ref.address for operand in operands.values())
        arguments = stage_plan_kernel.pack(*addresses, lengths["offsets"] - 1, room, chunks)
        load(choose_driver(tuple(operands.values())), stage_plan_kernel)
        return StagePlan(operands, stage_plan_kernel, CONFIG, arguments)

    def __repr__(self) -> str:
        return "stage_plan(offsets, experts, starts, counts, stream=None)"


stage_plan = StagePlanner()


def _check_list(name: str, operand: Operand, home: Operand) -> None:
    ref = operand.ref
    if ref.dtype != "int32" or len(ref.shape) != 1 or not ref.is_contiguous:
        raise ConfigurationError(
            f"{name}: expected contiguous int32 of one axis, got {ref.dtype} {ref.shape}, strides "
            f"{ref.strides}"
        )
    if (ref.device_kind, ref.device) != (home.ref.device_kind, home.ref.device):
        raise ConfigurationError(
            f"{name}.device: expected {home.ref.device_kind}:{home.ref.device} as offsets, got "
            f"{ref.device_kind}:{ref.device}"
        )


def _check_apart(operands: Mapping[str, Operand]) -> None:
    spans = sorted((each.ref.address, each.ref.nbytes, name) for name, each in operands.items())
    for (start, size, name), (after, _, other) in pairwise(spans):
        if start + size > after:
            raise ConfigurationError(
                f"{other}: expected memory of its own, got memory that shares bytes with {name}"
            )
