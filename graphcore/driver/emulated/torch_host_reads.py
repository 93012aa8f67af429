"""What torch answers for CPU tensors without dispatch, answered as a device would in a capture.

``.cpu()``, ``.tolist()`` or ``.numpy()`` of a CPU tensor reach no aten operator, so only a torch
function mode sees them. It also gives the host reads that do dispatch their own names, takes
``one_hot`` the way CUDA does (the CPU form looks at the data), and tells the recorder when a tensor
is being made from Python values.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import torch
from torch.overrides import TorchFunctionMode


class HostReadRules(Protocol):
    """What the mode asks of the recorder."""

    making_constant: bool

    def refuse_host_read(self, name: str, hint: str = ...) -> NoReturn:
        """Raises the CudaError that a device's answer would become."""

    def is_capturing(self) -> bool:
        """Whether host reads are forbidden now."""


_READS: dict[Any, str] = {
    torch.Tensor.cpu: "torch.Tensor.cpu()",
    torch.Tensor.numpy: "torch.Tensor.numpy()",
    torch.Tensor.__array__: "numpy.asarray(tensor)",
    torch.Tensor.tolist: "torch.Tensor.tolist()",
    torch.Tensor.item: "torch.Tensor.item()",
    torch.Tensor.__bool__: "bool(tensor)",
    torch.Tensor.__int__: "int(tensor)",
    torch.Tensor.__float__: "float(tensor)",
    torch.Tensor.__complex__: "complex(tensor)",
    torch.Tensor.__index__: "tensor.__index__()",
    torch.Tensor.__repr__: "repr(tensor)",
    torch.Tensor.__format__: "format(tensor)",
    torch.Tensor.nonzero: "torch.Tensor.nonzero()",
    torch.Tensor.equal: "torch.Tensor.equal()",
    torch.equal: "torch.equal()",
    torch.nonzero: "torch.nonzero()",
}
_TO_HINT = (
    "as text, the host is meant; on the emulated driver tensor.to(other.device) or "
    "torch.device('cpu') is the device the tensors are on"
)
_CONSTANTS = frozenset({torch.tensor, torch.as_tensor, torch.Tensor.new_tensor})
_ONE_HOT = frozenset({torch.nn.functional.one_hot})


class HostReads(TorchFunctionMode):
    """Refuses what would read a device from the host; everything else passes."""

    def __init__(self, rules: HostReadRules) -> None:
        super().__init__()
        self._rules = rules

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = _READS.get(func)
        if name is not None and _is_on_cpu(args) and self._rules.is_capturing():
            self._rules.refuse_host_read(name)
        if func is torch.Tensor.to and _goes_to_host(args, kwargs) and self._rules.is_capturing():
            self._rules.refuse_host_read('torch.Tensor.to("cpu")', _TO_HINT)
        if func in _CONSTANTS:
            return self._make_constant(func, args, kwargs)
        if func in _ONE_HOT:
            return _one_hot(func, args, kwargs)
        return func(*args, **kwargs)

    def _make_constant(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        position = 1 if func is torch.Tensor.new_tensor else 0
        data = kwargs.get("data", args[position] if len(args) > position else None)
        if _holds_tensors(data) and self._rules.is_capturing():
            self._rules.refuse_host_read(f"torch.{func.__name__}() of a list of tensors")
        # as_tensor may share the memory of an array, and must go on doing so
        self._rules.making_constant = func is not torch.as_tensor or _is_python_value(data)
        try:
            return func(*args, **kwargs)
        finally:
            self._rules.making_constant = False


def _is_on_cpu(args: tuple[Any, ...]) -> bool:
    tensor = args[0] if args else None
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu"


def _goes_to_host(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``.to`` names the host as text; ``.to(other.device)`` means the device."""
    device = kwargs.get("device", args[1] if len(args) > 1 else None)
    return isinstance(device, str) and device.split(":")[0] == "cpu"


def _is_python_value(data: Any) -> bool:
    return isinstance(data, (list, tuple, int, float, complex))


def _holds_tensors(data: Any) -> bool:
    """Whether a list of Python values has tensors in it, whose values torch would read."""
    if not isinstance(data, (list, tuple)):
        return False
    return any(isinstance(each, torch.Tensor) or _holds_tensors(each) for each in data)


def _one_hot(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    tensor, classes = _one_hot_arguments(*args, **kwargs)
    if classes < 0:  # the number of classes is the largest value: a host read everywhere
        return func(*args, **kwargs)
    zeros = torch.zeros((*tensor.shape, classes), dtype=torch.int64, device=tensor.device)
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)


def _one_hot_arguments(tensor: torch.Tensor, num_classes: int = -1) -> tuple[torch.Tensor, int]:
    return tensor, num_classes


class CaptureAnswer:
    """Makes ``torch.cuda.is_current_stream_capturing()`` true on threads that record.

    Libraries ask it before they look at data from the host (transformers' masks do). The function
    is replaced while any recording is under way, and answers other threads as before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: Counter[int] = Counter()
        self._original: Callable[[], bool] = torch.cuda.is_current_stream_capturing

    @contextmanager
    def for_this_thread(self) -> Iterator[None]:
        """In force in the block; after the last one torch's own function is back."""
        thread = threading.get_ident()
        with self._lock:
            if not self._threads:
                self._original = torch.cuda.is_current_stream_capturing
                torch.cuda.is_current_stream_capturing = self._answer
            self._threads[thread] += 1
        try:
            yield
        finally:
            with self._lock:
                self._threads -= Counter([thread])  # drops the thread at zero
                if not self._threads:
                    torch.cuda.is_current_stream_capturing = self._original

    def _answer(self) -> bool:
        return threading.get_ident() in self._threads or self._original()


capture_answer = CaptureAnswer()
