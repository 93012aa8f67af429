"""``expert_gather``: the launcher of the kernel that copies missing experts into their slots.

It reads the list that ``route_plan`` wrote, on the device, and moves a row of each bank of the
group; on the same stream, so that the grouped product that follows finds them there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from graphcore.driver import Driver, kernel
from graphcore.driver.records import LaunchConfig, MemoryKind
from graphcore.errors import ConfigurationError
from graphcore.resources.tensors import TensorRef, contiguous_strides, describe
from graphcore_kernels._drivers import Operand, choose_driver, device_facts
from graphcore_kernels._module import load, load_through_cupy, read_source
from graphcore_kernels._planned import OneKernel
from graphcore_kernels.expert_gather_reference import BANK, run

MOST_BANKS = 12
"""Three base roles, and a scale, a bias and another auxiliary of each."""
THREADS = 256
# blocks a multiprocessor: enough reads in flight to fill the way to the host
_BLOCKS = 2

expert_gather_kernel = kernel(
    "expert_gather",
    f"bytes:{MOST_BANKS * BANK.size} banks, const i32* miss_expert, const i32* miss_slot, "
    "const i32* miss_count, u32 bank_count, u32 experts, u32 slots",
    read_source("expert_gather.cu"),
    run,
    loader=load_through_cupy,
)


@dataclass(frozen=True, slots=True)
class GatherPlan(OneKernel):
    """The copy of one group's missing experts; launch it after each ``route_plan``.

    Its operands are slots[0] and so on, source[0] and so on (the experts' own memory, which a
    capture keeps alive too), and the tables of the miss list; its config is of the device's size
    only. The addresses of banks are in its values as they are, which no
    :class:`graphcore.GraphPlan` can see: tell it that the slots are written, ``writes=[...]``.
    """

    name: ClassVar[str] = "expert_gather"


class ExpertGatherer:
    """The callable behind :data:`expert_gather`; it holds nothing."""

    def __call__(
        self,
        banks: Sequence[tuple[Any, Any]],
        tables: Mapping[str, Any],
        stream: Any = None,
    ) -> None:
        """Copies the experts of the miss list into their slots, bit for bit, in one kernel.

        Args:
            banks: (source [experts, ...], slots [slots, ...]) of one to twelve banks, of one
                element type each; a row is contiguous, rows may lie further apart. Sources lie in
                pinned host memory (anything that describes it: a pinned torch tensor, a TensorRef
                over PinnedMemory) or on the device of the slots, and must stay as they are until
                the copy has run.
            tables: Tables with ``miss_expert``, ``miss_slot`` and ``miss_count`` at least.
            stream: Anything that is a stream. None: the capture under way on this thread, else
                torch's or CuPy's current stream where the tensors are theirs, else the legacy one.

        Raises:
            CacheTypeError: An operand is no tensor, or ``stream`` no stream.
            ConfigurationError: No bank or too many; types, shapes, strides or devices do not fit;
                a source in memory that the device cannot read.
            CudaError: The driver refused the launch.
        """
        self.plan(banks, tables).launch(stream)

    def plan(self, banks: Sequence[tuple[Any, Any]], tables: Mapping[str, Any]) -> GatherPlan:
        """Checks now, and loads the kernel, so that a capture only launches.

        Args and errors as for the call itself.
        """
        if not 1 <= len(banks) <= MOST_BANKS:
            raise ConfigurationError(f"banks: expected 1 to {MOST_BANKS}, got {len(banks)}")
        pairs = [_pair(index, *bank) for index, bank in enumerate(banks)]
        operands = {f"slots[{index}]": slots for index, (_, slots) in enumerate(pairs)}
        experts, slots = pairs[0][0].ref.shape[0], pairs[0][1].ref.shape[0]
        lists = _lists(tables, slots)
        driver = choose_driver((*operands.values(), *lists.values()))
        for index, (source, rows) in enumerate(pairs):
            _check_counts(index, source.ref, rows.ref, experts, slots)
            _check_device(f"banks[{index}] slots", rows.ref, operands["slots[0]"].ref)
            _check_readable(f"banks[{index}] source", source.ref, rows.ref, driver)
        operands |= {f"source[{index}]": source for index, (source, _) in enumerate(pairs)}
        operands |= lists
        packed = b"".join(BANK.pack(*_bank(source.ref, rows.ref)) for source, rows in pairs)
        arguments = expert_gather_kernel.pack(
            packed.ljust(MOST_BANKS * BANK.size, b"\0"),
            *(each.ref.address for each in lists.values()),
            len(pairs),
            experts,
            slots,
        )
        load(driver, expert_gather_kernel)
        blocks = _BLOCKS * device_facts(driver).multiprocessors
        config = LaunchConfig((blocks, 1, 1), (THREADS, 1, 1))
        return GatherPlan(operands, expert_gather_kernel, config, arguments)

    def __repr__(self) -> str:
        return "expert_gather(banks, tables, stream=None)"


expert_gather = ExpertGatherer()


def _pair(index: int, source: Any, slots: Any) -> tuple[Operand, Operand]:
    name = f"banks[{index}]"
    read = describe(source, name=f"{name} source")
    written = describe(slots, writable=True, name=f"{name} slots")
    for what, ref in (("source", read), ("slots", written)):
        row = ref.shape[1:]
        is_row = all(
            size == 1 or step == dense
            for size, step, dense in zip(row, ref.strides[1:], contiguous_strides(row), strict=True)
        )
        if not ref.shape or not ref.size or not is_row or ref.strides[0] < _row_elements(ref):
            raise ConfigurationError(
                f"{name} {what}: expected rows [n, ...], each contiguous and apart from the next, "
                f"got shape {ref.shape}, strides {ref.strides}"
            )
    if (read.dtype, read.shape[1:]) != (written.dtype, written.shape[1:]):
        raise ConfigurationError(
            f"{name} slots: expected rows of {read.dtype} {read.shape[1:]} as the source, got "
            f"{written.dtype} {written.shape[1:]}"
        )
    return Operand(source, read), Operand(slots, written)


def _row_elements(ref: TensorRef) -> int:
    # where there is one row its stride says nothing
    return ref.size // ref.shape[0] if ref.shape[0] > 1 else 0


def _bank(source: TensorRef, slots: TensorRef) -> tuple[int, ...]:
    row = source.nbytes // source.shape[0]
    return (
        source.address,
        slots.address,
        source.strides[0] * source.itemsize,
        slots.strides[0] * slots.itemsize,
        row,
    )


def _lists(tables: Mapping[str, Any], slots: int) -> dict[str, Operand]:
    found = {}
    for name, length in (("miss_expert", slots), ("miss_slot", slots), ("miss_count", 1)):
        if name not in tables:
            raise ConfigurationError(f"tables: expected {name!r}, got {sorted(tables)}")
        ref = describe(tables[name], name=f"tables[{name!r}]")
        if (ref.dtype, ref.shape, ref.is_contiguous) != ("int32", (length,), True):
            raise ConfigurationError(
                f"tables[{name!r}]: expected contiguous int32 ({length},), got {ref.dtype} "
                f"{ref.shape}, strides {ref.strides}"
            )
        found[name] = Operand(tables[name], ref)
    return found


def _check_counts(index: int, source: TensorRef, rows: TensorRef, experts: int, slots: int) -> None:
    if (source.shape[0], rows.shape[0]) != (experts, slots):
        raise ConfigurationError(
            f"banks[{index}]: expected {experts} experts and {slots} slots as of the first bank, "
            f"got {source.shape[0]} and {rows.shape[0]}"
        )


def _check_device(name: str, ref: TensorRef, home: TensorRef) -> None:
    if (ref.device_kind, ref.device) != (home.device_kind, home.device):
        raise ConfigurationError(
            f"{name}: expected device {home.device_kind}:{home.device} as the first slots, got "
            f"{ref.device_kind}:{ref.device}"
        )


def _check_readable(name: str, source: TensorRef, slots: TensorRef, driver: Driver) -> None:
    """Refuses memory that the device cannot read where it lies."""
    if driver.is_emulated or source.device_kind == "cuda":
        _check_device(name, source, slots)
        return
    found = driver.allocation_of(source.address)
    last = source.address + (source.shape[0] - 1) * source.strides[0] * source.itemsize
    end = last + source.nbytes // source.shape[0]
    if found is None or found.memory is MemoryKind.DEVICE or found.base + found.size < end:
        raise ConfigurationError(
            f"{name}: expected pinned host memory, which the device can read, got pageable memory "
            f"at {source.address:#x}"
        )
