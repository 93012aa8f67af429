"""What a recorded call returns, without computing it: shapes, strides and dtypes.

Uses torch's FakeTensor, and remembers the answer per call signature: the layers of a model repeat
the same few hundred. An operator of torch's without a shape function, or with one that refuses what
the CPU kernel takes, is run on zeros of its own (nothing that existed before is touched); a custom
operator without one is refused with its name.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from graphcore.driver.emulated.torch_arguments import Call
from graphcore.errors import CaptureError


class NeedsData(Exception):  # noqa: N818 - a question to the caller, not an error
    """The shapes depend on the tensors' values."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor without data."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Inferred:
    """What a call would do.

    Args:
        results: Per return a TensorMeta, a list of them, or the plain value.
        tensors: The call's own tensors after it (an out= tensor may have been resized).
        device: Where the results lie; None where no tensor is returned.
    """

    results: tuple[Any, ...]
    tensors: tuple[TensorMeta, ...]
    device: torch.device | None = None


class ShapeInference:
    """Infers and remembers; one per recording."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode()
        self._known: dict[Any, Inferred] = {}

    def infer(self, func: OpOverload, call: Call) -> Inferred:
        """What ``func`` would return.

        Raises:
            NeedsData: The shape depends on values.
            CaptureError: The operator has no shape function, or refuses such arguments.
        """
        key = (func, call.signature(), torch.get_default_dtype())
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._run(func, call)
        return known

    def _run(self, func: OpOverload, call: Call) -> Inferred:
        fakes = [self._fake(tensor) for tensor in call.tensors]
        fake_call = call.with_tensors(fakes)
        try:
            with _quiet(), self._mode:
                result = func(*fake_call.args, **fake_call.kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise NeedsData from error
        except Exception as error:
            if func.namespace != "aten":
                raise _refusal(func, error) from error
            return self._run_on_zeros(func, call)
        return _describe(func, result, fakes)

    def _run_on_zeros(self, func: OpOverload, call: Call) -> Inferred:
        """What torch itself returns for tensors of this form; what it refuses is refused here."""
        zeros = [_zeros_like(tensor) for tensor in call.tensors]
        own = call.with_tensors(zeros)
        try:
            result = func(*own.args, **own.kwargs)
        except RuntimeError as error:
            raise CaptureError(f"{func}: expected arguments it can run on, got: {error}") from error
        return _describe(func, result, zeros)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_conj() or tensor.is_neg():
            return self._mode.from_tensor(tensor)
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(self._mode, meta, tensor.device)


def _describe(func: OpOverload, result: Any, tensors: Sequence[torch.Tensor]) -> Inferred:
    """What a call on ``tensors`` returned, without the data."""
    returns = len(func._schema.returns)
    results = result if returns > 1 else (result,)[:returns]
    devices: list[torch.device] = []

    def describe(tensor: torch.Tensor) -> TensorMeta:
        if tensor.layout is not torch.strided:
            raise CaptureError(f"{func}: expected strided results, got {tensor.layout} ones")
        devices.append(tensor.device)
        return _meta(tensor)

    return Inferred(
        tuple(map_tensors(describe, each) for each in results),
        tuple(_meta(each) for each in tensors),
        devices[0] if devices else None,
    )


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros in memory of their own, with the sizes, strides and marks of ``tensor``."""
    zeros = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()
    if tensor.is_conj():
        zeros = zeros.conj()
    return torch._neg_view(zeros) if tensor.is_neg() else zeros


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps this thread's messages about failed shape functions out of torch's log."""
    thread = threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        return record.thread != thread

    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(passes)
    try:
        yield
    finally:
        log.removeFilter(passes)


def _refusal(func: OpOverload, error: Exception) -> Exception:
    """What to raise where the shape function of a custom operator failed."""
    missing = isinstance(error, (UnsupportedOperatorException, NotImplementedError))
    if missing or "no fake impl registered" in str(error):  # how torch.library says it
        return _no_shape_function(func)
    return CaptureError(
        f"{func}: expected a fake (meta) kernel that takes these arguments, got: {error}"
    )


def _no_shape_function(func: OpOverload) -> CaptureError:
    return CaptureError(
        f"{func}: expected an operator whose output shapes are known without running it, got one "
        "without a fake (meta) kernel; register one with torch.library.register_fake, or call it "
        "outside the capture"
    )


def map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to its tensors (or metas), one list deep."""
    if isinstance(value, (torch.Tensor, TensorMeta)):
        return function(value)
    if isinstance(value, (list, tuple)):
        return [map_tensors(function, each) for each in value]
    return value


def _meta(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), tensor.stride(), tensor.dtype)
