"""Fitting: real tensors for the buffers of a plan, checked before anything is built or launched."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphcore.driver import Driver
from graphcore.driver.records import MemoryKind
from graphcore.errors import LifecycleError, PlanError
from graphcore.interop.drivers import choose_driver, same_driver
from graphcore.plan.binding import Binding, Place
from graphcore.plan.records import Allocate, Launch, Memcpy, PlanBuffer, PlanNode, View
from graphcore.plan.walking import every_node
from graphcore.resources.driver_argument import checked_driver
from graphcore.resources.overlap import overlap, span
from graphcore.resources.tensors import TensorRef, describe, is_tensor

if TYPE_CHECKING:
    from graphcore.plan.plan import GraphPlan


def bind(plan: GraphPlan, buffers: Mapping[str, Any], driver: Driver | None) -> Binding:
    """Checks ``buffers`` against the argument buffers of ``plan``.

    Args:
        plan: The plan.
        buffers: Name -> anything :func:`graphcore.resources.tensors.describe` takes.
        driver: None is the driver that the buffers belong to.

    Raises:
        PlanError: Missing or extra names, another shape, element type or strides, memory of another
            device or driver, host memory where device memory is needed, read-only memory that the
            plan writes, memory that ends before its last element, or two buffers that share bytes
            of which one is written.
        CacheTypeError: A buffer that is no tensor.
        LifecycleError: A closed :class:`graphcore.Buffer`.
    """
    wanted = {name: each for name, each in plan.buffers.items() if each.origin == "argument"}
    _check_names(wanted, buffers)
    chosen = checked_driver(driver) if driver is not None else _driver_of(buffers)
    use = _Use(plan)
    places = {name: _place(buffer, buffers[name], chosen, use) for name, buffer in wanted.items()}
    _check_apart(places, use)
    return Binding(chosen, places)


class _Use:
    """What the nodes of a plan do with its buffers, by name."""

    def __init__(self, plan: GraphPlan) -> None:
        self.written: set[str] = set()
        self.on_device: set[str] = set()
        for node, in_body in every_node(plan):
            self.written.update(view.buffer.name for view in node.writes)
            if in_body or not isinstance(node.work, Memcpy):
                self.on_device.update(view.buffer.name for view in _views_of(node))


def _views_of(node: PlanNode) -> Iterator[View]:
    yield from node.reads
    yield from node.writes
    if isinstance(node.work, Launch):
        yield from (each for each in node.work.arguments if isinstance(each, View))
    if isinstance(node.work, Allocate):
        yield node.work.buffer.whole


def _check_names(wanted: Mapping[str, PlanBuffer], buffers: Any) -> None:
    if not isinstance(buffers, Mapping):
        raise PlanError(
            f"buffers: expected a mapping of buffer name -> tensor, got {type(buffers).__name__}"
        )
    missing = [name for name in wanted if name not in buffers]
    extra = [name for name in buffers if name not in wanted]
    if missing or extra:
        words = [f"{names} {kind}" for names, kind in ((missing, "missing"), (extra, "unknown"))
                 if names]  # fmt: skip
        raise PlanError(
            f"buffers: expected the plan's argument buffers {list(wanted)}, got "
            f"{' and '.join(words)}"
        )


def _driver_of(buffers: Mapping[str, Any]) -> Driver:
    """The driver of a buffer of ours, else of a device tensor, else of host tensors.

    Every buffer is then checked against it by name: a mixture is told as what does not fit.
    """
    for obj in buffers.values():
        if isinstance(getattr(obj, "driver", None), Driver):
            return choose_driver(obj)
    refs = [_described(name, obj) for name, obj in buffers.items() if is_tensor(obj)]
    on_device = [ref for ref in refs if ref.device_kind == "cuda"]
    return choose_driver(*(on_device or refs)[:1])


def _described(name: str, obj: Any) -> TensorRef:
    try:
        return describe(obj, name=f"buffers[{name!r}]")
    except LifecycleError as error:
        raise LifecycleError(f"buffers[{name!r}]: {error}") from error


def _place(buffer: PlanBuffer, obj: Any, driver: Driver, use: _Use) -> Place:
    name = f"buffers[{buffer.name!r}]"
    ref = _described(buffer.name, obj)
    if buffer.name in use.written and ref.read_only:
        raise PlanError(
            f"{name}: expected writable memory for a buffer that the plan writes, got a read-only "
            f"{type(obj).__name__}"
        )
    memory = _memory(name, obj, ref, driver, buffer.name in use.on_device)
    _check_layout(name, buffer, ref)
    _check_room(name, buffer, ref, driver)
    ref = replace(ref, strides=buffer.strides, owner=obj)
    return Place(ref, obj, memory, _library_of(obj))


def _library_of(obj: Any) -> str:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        return "torch"
    return "cupy" if type(obj).__module__.partition(".")[0] == "cupy" else ""


def _memory(name: str, obj: Any, ref: TensorRef, driver: Driver, on_device: bool) -> MemoryKind:
    home = f"driver {driver.name}:{driver.device}"
    other = getattr(obj, "driver", None)
    if isinstance(other, Driver) and not same_driver(other, driver):
        raise PlanError(
            f"{name}: expected memory of {home}, got a buffer of driver {other.name}:"
            f"{other.device}; where both read alike, two open_driver() calls made two drivers: "
            "pass the same driver= everywhere"
        )
    if ref.device_kind == "cpu":
        if driver.is_emulated:
            return MemoryKind.DEVICE
        if not on_device:
            return MemoryKind.HOST
        raise PlanError(
            f"{name}: expected device memory of {home}, got host memory ({type(obj).__name__}); "
            "only copies outside conditional bodies take it"
        )
    if driver.is_emulated or ref.device != driver.device:
        raise PlanError(f"{name}: expected memory of {home}, got memory of cuda:{ref.device}")
    return MemoryKind.DEVICE


def _check_layout(name: str, buffer: PlanBuffer, ref: TensorRef) -> None:
    if ref.shape != buffer.shape:
        small = " (it is too small)" if ref.size < buffer.whole.size else ""
        raise PlanError(f"{name}.shape: expected {buffer.shape}, got {ref.shape}{small}")
    if ref.dtype != buffer.dtype:
        raise PlanError(f"{name}.dtype: expected {buffer.dtype}, got {ref.dtype}")
    steps = zip(ref.shape, ref.strides, buffer.strides, strict=True)
    # the step of an axis with one element leads nowhere
    if ref.size and any(count > 1 and step != want for count, step, want in steps):
        raise PlanError(f"{name}.strides: expected {buffer.strides}, got {ref.strides}")


def _check_room(name: str, buffer: PlanBuffer, ref: TensorRef, driver: Driver) -> None:
    if not ref.size:
        return
    low, high = buffer.whole.extent
    found = driver.allocation_of(ref.address)
    if found is not None and not (
        found.base <= ref.address + low and ref.address + high <= found.base + found.size
    ):
        raise PlanError(
            f"{name}: expected memory from {ref.address + low:#x} to {ref.address + high:#x}, got "
            f"an allocation of {found.size} bytes at {found.base:#x}: too small"
        )


def _check_apart(places: Mapping[str, Place], use: _Use) -> None:
    """Two names over the same bytes would hide races from the plan."""
    ranges = []
    for name, place in places.items():
        ref = place.ref
        if ref.size:
            low, high = span(_sides(ref))
            ranges.append((ref.address + low, ref.address + high + ref.itemsize, name, ref))
    ranges.sort(key=lambda each: each[:3])
    for index, (_, end, name, ref) in enumerate(ranges):
        for start, _, other, other_ref in ranges[index + 1 :]:
            if start >= end:
                break
            distance = other_ref.address - ref.address
            if not use.written.isdisjoint((name, other)) and overlap(
                _sides(ref), _sides(other_ref), distance, ref.itemsize, other_ref.itemsize
            ):
                raise PlanError(
                    f"buffers[{name!r}] and buffers[{other!r}]: expected memory of their own, as "
                    f"the plan writes one of them; got {name!r} at {ref.address:#x} and {other!r} "
                    f"at {other_ref.address:#x}, which share bytes: two names for the same bytes "
                    "would hide races. Give the plan one buffer and take views of it"
                )


def _sides(ref: TensorRef) -> tuple[tuple[int, int], ...]:
    """(size, stride in bytes) of each axis."""
    return tuple(
        (count, step * ref.itemsize) for count, step in zip(ref.shape, ref.strides, strict=True)
    )
