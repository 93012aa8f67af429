"""Records what torch does with CPU tensors into a capture of the emulated driver.

Inside a :class:`Recorder` every aten call on CPU tensors becomes one kernel node. Nothing is
computed and no memory that existed before changes; the outputs have real storage of their own,
poisoned (NaN, or a conspicuous integer) until a replay fills it. As on a device:

* views run at once and make no node; so do allocations (``empty``) and changes of metadata;
* in-place and ``out=`` calls are recorded, and return what they were given;
* composite operators are recorded as they decompose; a custom operator is one node;
* tensors made from Python values (``torch.tensor``) are copied from a constant on every replay;
* what needs values on the host (``.item()``, ``bool(tensor)``, ``nonzero``, boolean indexing,
  ``.cpu()``, ``.tolist()``, ``.numpy()``, ``repr``) raises CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
  and invalidates the capture;
* random operators raise CaptureError, as torch does in a capture that is not its own;
* collectives of torch.distributed are sent by each replay, of communicators that worked before;
* ``torch.cuda.is_current_stream_capturing()`` is true on this thread.

Where the stream does not capture (any more), calls run at once. Other threads are not affected.
A nested recorder sends the work of its block to another stream of the capture.

Every output keeps its memory as long as the graph lives; nothing is reused within a capture.

CPU tensors are device memory here, also those that beside a device would be host data: read them
before the capture. ``.to(torch.device("cpu"))`` and ``.to(other.device)`` mean the device, the text
``"cpu"`` means the host. What slips through, because torch does not tell: DLPack and
``__array_interface__`` exports; NumPy arrays that shared memory with a tensor before;
``torch.save`` and pickling (they read the poison); ``torch.cpu.synchronize()``; the constructor
``torch.Tensor([...])`` (one constant for all replays); storages resized behind their tensors;
Python code that acts on shapes, counts or prints (it does not replay on a device either); settings
that torch reads when an operator runs (number of threads, deterministic mode), which a device would
have baked in.

Code of ``torch.compile`` does not run under a dispatch mode: torch runs the function behind it
eagerly, and that is what is recorded; higher-order operators are refused with their name. Composite
operators that ask whether a mode is active may decompose in another way than outside (``svdvals``,
``eigvalsh``, the gradient of ``prod``): equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any, NoReturn, Protocol

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from graphcore.driver import active, collectives
from graphcore.driver.codes import cuda_error
from graphcore.driver.emulated import torch_rules as rules
from graphcore.driver.emulated.operation import Operation
from graphcore.driver.emulated.torch_arguments import Call
from graphcore.driver.emulated.torch_host_reads import HostReads, capture_answer
from graphcore.driver.emulated.torch_memory import (
    Aliases,
    MadeMemory,
    allocate,
    resize_written,
)
from graphcore.driver.emulated.torch_operation import TorchOperation, flatten
from graphcore.driver.emulated.torch_schema import OperatorFacts, decompose, facts_of
from graphcore.driver.emulated.torch_shapes import (
    NeedsData,
    ShapeInference,
    TensorMeta,
    map_tensors,
)
from graphcore.driver.records import CaptureState, CaptureStatus, StreamHandle
from graphcore.errors import CaptureError

_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


class RecordingDriver(Protocol):
    """What a recorder asks of the emulated driver."""

    def launch_operation(
        self, operation: Operation, arguments: Sequence[bytes], stream: StreamHandle
    ) -> None:
        """Runs the operation, or adds a node where ``stream`` captures."""

    def invalidate_capture(self, stream: StreamHandle) -> None:
        """Makes the capture of ``stream`` fail from now on."""

    def capture_status(self, stream: StreamHandle) -> CaptureStatus:
        """Whether ``stream`` captures."""


class Recorder:
    """Context manager: torch's work on CPU tensors goes to ``stream`` as operations.

    Enter it once, on the thread whose work is recorded.
    """

    def __init__(self, driver: RecordingDriver, stream: StreamHandle) -> None:
        self._driver = driver
        self._stream = stream
        self._shapes = ShapeInference()
        self._aliases = Aliases()
        self._made = MadeMemory()
        self._calls = _AtenCalls(self)
        self._modes = ExitStack()
        self.making_constant = False

    def __enter__(self) -> None:
        self._made = self._made_around() or self._made
        self._modes.enter_context(capture_answer.for_this_thread())
        self._modes.enter_context(HostReads(self))
        self._modes.enter_context(self._calls)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._modes.close()
        # let go of the tensors; operations keep what they need
        self._aliases, self._made = Aliases(), MadeMemory()

    def _made_around(self) -> MadeMemory | None:
        """The memory of a recorder around this one that records into the same capture."""
        for index in reversed(range(torch._C._len_torch_dispatch_stack())):
            mode = torch._C._get_dispatch_stack_at(index)
            if isinstance(mode, _AtenCalls) and mode.recorder._shares_capture(self):
                return mode.recorder._made
        return None

    def _shares_capture(self, other: Recorder) -> bool:
        if self._driver is not other._driver:
            return False
        sequences = {each._driver.capture_status(each._stream).sequence for each in (self, other)}
        return len(sequences) == 1 and 0 not in sequences

    def is_capturing(self) -> bool:
        """Whether the stream captures, or did until its capture was invalidated."""
        return self._driver.capture_status(self._stream).state is not CaptureState.NONE

    def refuse_host_read(self, name: str, hint: str = rules.HOST_READ_HINT) -> NoReturn:
        """Invalidates the capture and raises what a device would answer."""
        self._driver.invalidate_capture(self._stream)
        raise active.note_error(
            cuda_error("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", name, hint=hint)
        )

    def handle(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Does, refuses or records one call."""
        if collectives.is_collective(func):
            return self._handle_collective(func, args, kwargs)
        facts = facts_of(func)
        if facts.decomposes:
            with self._calls:
                return decompose(func, args, kwargs)
        call = Call(args, kwargs)
        with _alone():
            if facts.does_nothing or rules.is_elsewhere(call):
                return func(*args, **kwargs)
            rules.check_tensors(facts.name, call)
            if facts.resizes:
                rules.check_resize(facts, func, call)
            if facts.shares_memory or self._is_refused(facts, func, call):
                return func(*args, **kwargs)
            if facts.is_lift and not self.making_constant:
                return args[0]  # memory of the caller's, which must stay shared
            return self._record(facts, func, call)

    def _is_refused(self, facts: OperatorFacts, func: OpOverload, call: Call) -> bool:
        """Raises for what a capture forbids; True where the call is to run at once instead."""
        if rules.depends_on_values(facts, func, call):
            self._check_host_read(facts.name)
            return True
        if rules.draws_random_numbers(facts, func, call):
            if self.is_capturing():
                raise CaptureError(f"{facts.name}: {rules.RANDOM_REFUSAL}")
            return True
        return rules.asks_metadata(facts, func, call)

    def _check_host_read(self, name: str) -> None:
        if self.is_capturing():
            self.refuse_host_read(name)

    def _handle_collective(
        self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        from graphcore.driver.emulated import torch_collectives as recorded

        with _alone():
            if not self.is_capturing():
                return func(*args, **kwargs)
            if not collectives.does_work(func):
                return args[0]  # what a replay sends, it has waited for
            name = func._schema.name
            if recorded.waits_for_host(func):
                self.refuse_host_read(name, "it makes the host wait, which a replay cannot repeat")
            group = collectives.group_of(args, kwargs)
            collectives.check_has_worked(name, group)
            active.keep(group, collectives.label_of(group))
            if func.namespace != "c10d":
                return self._record(recorded.facts_of_functional(func), func, Call(args, kwargs))
            operation = recorded.collective_operation(func, args, kwargs, group, self._aliases)
            self._driver.launch_operation(operation, operation.arguments, self._stream)
            return recorded.promised(func, args)

    def _record(self, facts: OperatorFacts, func: OpOverload, call: Call) -> Any:
        try:
            inferred = self._shapes.infer(func, call)
        except NeedsData:
            self._check_host_read(facts.name)
            return func(*call.args, **call.kwargs)
        if inferred.device is not None and inferred.device.type == "meta":
            return func(*call.args, **call.kwargs)
        if inferred.device is not None and inferred.device.type != "cpu":
            raise CaptureError(
                f"{facts.name}: expected a result in CPU memory, which is the emulated driver's "
                f"device memory, got one on {inferred.device}"
            )
        resize_written(facts.name, call.tensors, inferred.tensors)
        results = [
            map_tensors(self._allocate, each) if place is None else call.at(place)
            for place, each in zip(facts.returned, inferred.results, strict=True)
        ]
        if not facts.allocates_only:
            self._launch(facts, call, results)
        if len(results) == 1:
            return results[0]
        return tuple(results) if results else None

    def _allocate(self, meta: TensorMeta) -> torch.Tensor:
        return self._made.add(allocate(meta))

    def _launch(self, facts: OperatorFacts, call: Call, results: list[Any]) -> None:
        if facts.is_lift:
            self._made.add(call.tensors[0])  # just made of Python values
        outputs = [
            self._aliases.of(part) if place is None and isinstance(part, torch.Tensor) else None
            for place, each in zip(facts.returned, results, strict=True)
            for part in flatten(each)
        ]
        own = call.with_tensors([self._aliases.of(tensor) for tensor in call.tensors])
        fresh = [each for each in outputs if each is not None]
        made = self._made.among([*own.tensors, *fresh])
        operation = TorchOperation(facts, own, outputs, made)
        self._driver.launch_operation(operation, operation.arguments, self._stream)


class _AtenCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every aten call to the recorder."""

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not isinstance(func, OpOverload):
            raise CaptureError(
                f"{func}: expected an operator that is one kernel, got a higher-order one; call it "
                "outside the capture"
            )
        if any(each not in _PLAIN_TENSORS for each in types):
            return NotImplemented  # a wrapper: it calls again with what it holds
        with torch._C.DisableTorchFunction():
            return self.recorder.handle(func, args, kwargs or {})


def _alone() -> AbstractContextManager[Any]:
    """No mode below ours sees what we run ourselves."""
    if torch._C._len_torch_dispatch_stack():
        return _disable_current_modes()
    return nullcontext()
