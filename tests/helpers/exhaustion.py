"""Memory of a device that runs out for real: what takes it, what is counted, what must hold.

On a device nearly everything is taken by plain allocations. On the emulated driver the device is
small, and torch's CPU tensors take its memory as torch's on a device do.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from helpers.every_fault import handles
from helpers.torch_capture import tensors_in
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from graphcore.driver import Driver, active, open_driver
from graphcore.driver.emulated import EmulatedDriver, torch_recorder
from graphcore.driver.emulated.calls import Refused
from graphcore.driver.emulated.torch_memory import allocate
from graphcore.driver.emulated.torch_shapes import TensorMeta
from graphcore.errors import CudaError
from graphcore.executable.graph_exec import GraphExec
from graphcore.executable.handles import ExecResource, GraphResource
from graphcore.executable.retired import release_finished
from graphcore.interop.pool_uses import pool_uses
from graphcore.interop.torch import MemoryPool
from graphcore.resources.buffer import Buffer

MIB = 1 << 20
EMULATED_MEMORY = 256 * MIB
# what a device may give and take by itself: it hands memory out in steps
SLACK = 6 * MIB
COUNTED = (GraphResource, ExecResource, GraphExec, MemoryPool, Buffer)


def unit_of(driver: Driver) -> int:
    """The bytes that sizes are multiples of: on a device enough that its steps do not matter."""
    return MIB if driver.is_emulated else 16 * MIB


# ---- who takes memory ---------------------------------------------------------------------------


class TorchMemory(TorchDispatchMode):
    """Tensors that torch makes in the block take the memory of an emulated device."""

    def __init__(self, driver: EmulatedDriver) -> None:
        super().__init__()
        self._memory, self._device = driver._machine.memory, driver.device
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # the signature of torch
        kwargs = kwargs or {}
        given = {key for key, _ in _storages((args, kwargs))}
        result = func(*args, **kwargs)
        for key, storage in _storages(result):
            if key not in given:
                self._take(key, storage)
        return result

    def sweep(self) -> None:
        """Gives back what nobody has any more."""
        for key, (reference, size) in list(self._live.items()):
            if reference.expired():
                del self._live[key]
                self._memory.discharge(self._device, size)

    def _take(self, key: int, storage: torch.UntypedStorage) -> None:
        self.sweep()
        size = storage.nbytes()
        if key in self._live or not size:
            return
        try:
            self._memory.charge(self._device, size)
        except Refused as refused:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes: {refused.reason}"
            ) from None
        self._live[key] = StorageWeakRef(storage), size

    def __enter__(self) -> Any:
        # a recorder makes what it records with no mode around it
        torch_recorder.allocate = self._allocated  # type: ignore[assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch_recorder.allocate = allocate
        gc.collect()
        self.sweep()

    def _allocated(self, meta: TensorMeta) -> torch.Tensor:
        tensor = allocate(meta)
        for key, storage in _storages(tensor):
            self._take(key, storage)
        return tensor


def _storages(value: Any) -> Iterator[tuple[int, torch.UntypedStorage]]:
    for tensor in tensors_in(value):
        if tensor.device.type == "cpu" and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            yield storage._cdata, storage


def torch_memory(driver: Driver) -> AbstractContextManager[object]:
    """A block in which torch's tensors are in the device's memory, as on a device they always are.

    An emulated driver has the mode as ``torch_memory`` meanwhile.
    """
    if not isinstance(driver, EmulatedDriver):
        return nullcontext()
    mode = TorchMemory(driver)
    driver.torch_memory = mode  # type: ignore[attr-defined]
    return mode


@contextmanager
def only(driver: Driver, left: int) -> Iterator[None]:
    """For the block, at most ``left`` bytes of the device are free; 0: no small pieces either."""
    settle(driver)
    taken: list[int] = []
    least = 1 if driver.is_emulated else (2 * MIB if left else 512)
    size = max(driver.memory_info()[0] - left, 0)
    try:
        while size >= least:
            try:
                taken.append(driver.alloc(size))
            except CudaError:
                size //= 2  # in pieces, and what nothing larger fits into
            else:
                if left:
                    size = min(size, driver.memory_info()[0] - left)
        yield
    finally:
        for address in taken:
            driver.free(address)


# ---- what is counted ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What is held of a device: driver handles, objects that own some, and free bytes.

    ``told`` is not compared: where bytes differ, it says whose they are.
    """

    handles: tuple[int, ...]
    objects: Counter[str]
    free: int
    told: str = field(default="", compare=False)

    @classmethod
    def of(cls, driver: Driver) -> Held:
        settle(driver)
        kinds = Counter(type(each).__name__ for each in gc.get_objects() if type(each) in COUNTED)
        counts = (len(driver.own_streams()) - driver.capture_streams.idle,)
        if isinstance(driver, EmulatedDriver):
            counts = handles(driver)[:-1]
        lent = driver.capture_streams
        told = f"streams lent {lent.lent}, idle {lent.idle}; pools waiting {pool_uses.waiting}"
        if not driver.is_emulated:
            reserved, used = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
            told += f"; torch has {reserved} bytes, {used} of them used"
        return cls(counts, kinds, driver.memory_info()[0], told)

    def is_like(self, other: Held, slack: int | None) -> bool:
        """Whether as much is held, and no more bytes than ``slack`` were kept (None: any)."""
        same = (self.handles, self.objects) == (other.handles, other.objects)
        return same and (slack is None or abs(self.free - other.free) <= slack)


def settle(driver: Driver) -> None:
    """Everything that may go has gone: garbage, what waited for launches, unused blocks."""
    driver.synchronize()
    for _ in range(3):  # what goes lets go of more
        release_finished()
        gc.collect()
    if isinstance(driver, EmulatedDriver):
        driver.torch_memory.sweep()  # type: ignore[attr-defined]
    else:
        let_go_of_what_is_kept(driver)


def let_go_of_what_is_kept(driver: Driver) -> None:
    """Has torch and CUDA give back the memory that they keep and nobody uses.

    CUDA keeps some of destroyed executables, does not count it as free, and gives it back to an
    allocation that finds no other: a failure would leave more free than there was before it.
    """
    torch.cuda.empty_cache()
    with pytest.raises(CudaError):
        driver.alloc(driver.memory_info()[1])


# ---- what must hold -----------------------------------------------------------------------------


class Case:
    """An operation that needs memory, and what stood before it.

    ``shares``: of what it takes, how much is left free; a share below 1 cannot be enough.
    """

    errors: ClassVar[tuple[type[BaseException], ...]] = (CudaError,)
    says: ClassVar[tuple[str, ...]] = (
        "CUDA_ERROR_OUT_OF_MEMORY (2): the device has not enough free memory: ",
        "are free",
        "Hint: close graphs, executables and buffers that are not needed",
    )
    shares: ClassVar[tuple[float, ...]] = (0.5,)
    device_shares: ClassVar[tuple[float, ...]] = (0.3, 0.6)
    # bytes that a device may keep of an operation that failed; None: nobody knows
    device_slack: ClassVar[int | None] = SLACK
    # whether what is there makes something for life where it fails for the first time; on a device
    keeps_for_life: ClassVar[bool] = False
    device_keeps_for_life: ClassVar[bool] = False
    # whether it holds memory when it has gone well; None: that cannot be seen
    holds_memory: bool | None = True

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.unit = unit_of(driver)

    def operate(self) -> Any:
        """The operation; what it gives holds its memory."""
        raise NotImplementedError

    def check(self, made: Any) -> None:
        """What the operation gave is right."""
        raise NotImplementedError

    def still_right(self) -> None:
        """What stood before is right."""
        raise NotImplementedError

    def lefts(self, took: int) -> list[int]:
        """How many bytes are left free, each time."""
        shares = self.shares if self.driver.is_emulated else self.device_shares
        return [int(took * share) for share in shares]


def took_by(make: type[Case], driver: Driver) -> int:
    """Bytes that the operation holds when it has gone well; what it makes is right, and goes."""
    case = make(driver)
    before = Held.of(driver)
    made = case.operate()
    during = Held.of(driver)
    case.check(made)
    case.still_right()
    if case.holds_memory is not None:
        takes = during.free < before.free
        assert takes == case.holds_memory, "the control: what it takes is not what is counted"
    return before.free - during.free


@contextmanager
def watching_new_objects() -> Iterator[None]:
    """In the block, collections look at what was made in it only: they cost next to nothing."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run_out(make: type[Case], driver: Driver) -> None:
    """The operation fails for want of memory, leaves all as it was, and then goes well."""
    with watching_new_objects(), torch_memory(driver):
        settle(driver)
        slack: int | None = 0 if driver.is_emulated else make.device_slack
        keeps = make.keeps_for_life or (make.device_keeps_for_life and not driver.is_emulated)
        # what a driver keeps of a first time would be enough for the next one
        took = 0 if slack is None else took_by(make, driver)
        case = make(driver)
        case.still_right()
        for left in case.lefts(took):
            with only(driver, left):
                before = Held.of(driver)
                assert slack is None or before.free <= left + slack, (before, left)
                for attempt in range(2 + keeps):
                    text = why_it_failed(case)
                    for words in case.says:
                        assert words in text, text
                    after = Held.of(driver)
                    if keeps and not attempt:
                        before = after
                    assert after.is_like(before, slack), (left, before, after, text)
                    assert active.current() is None
                    assert gc.isenabled()
                    case.still_right()
        case.check(case.operate())
        case.still_right()


def why_it_failed(case: Case) -> str:
    """The text of the operation's error, with its notes."""
    try:
        case.operate()
    except case.errors as error:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    raise AssertionError("there was memory enough")


def on_device(make: type[Case]) -> None:
    """As :func:`run_out`, on the CUDA driver of this process."""
    driver = open_driver("cuda")
    run_out(make, driver)
    driver.close()
