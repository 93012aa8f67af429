"""One recorded aten call as an operation of a kernel node: what it touches and how it runs again.

Running it calls the same overload on the same memory and leaves the results in the storages that
the capture handed out: through the hand-written ``out=`` form where there is one, else by a copy.
The callable and its arguments are put together once; a run with the recorded argument bytes costs
one comparison and one call. Other bytes (an update re-pointed an address or changed a scalar) build
the call anew on raw memory, and are remembered.

The operation keeps the storages alive through tensors of its own, so that ``tensor.data = other``
later changes nothing here, just as a graph keeps the old address.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from graphcore.driver.emulated.functions import layout_of
from graphcore.driver.emulated.torch_arguments import (
    Call,
    encode_address,
    encode_forms,
    refuse_arguments,
    view_of_memory,
)
from graphcore.driver.emulated.torch_schema import OperatorFacts
from graphcore.driver.records import LaunchConfig

_REMEMBERED = 8  # calls on other arguments, per operation


class TorchOperation:
    """An aten call with the tensors it reads and writes.

    Args:
        facts: What is called.
        call: On which tensors (already our own aliases) and plain values.
        outputs: Per part of what the call returns, flattened: the tensor that receives it, or None
            where it is one of the arguments, or no tensor.
        made: The storages among these that the recording made.
    """

    def __init__(
        self,
        facts: OperatorFacts,
        call: Call,
        outputs: Sequence[torch.Tensor | None],
        made: Sequence[torch.UntypedStorage] = (),
    ) -> None:
        self.facts = facts
        self.name = facts.name
        self._call = call
        self._outputs = tuple(outputs)
        self._made = tuple(made)
        self.arguments: tuple[bytes, ...] = (
            *(encode_address(tensor) for tensor in self.tensors),
            *call.encode_values(),
            encode_forms(self.tensors, call.tensors[0] if facts.is_lift else None),
        )
        self.layout = layout_of([len(data) for data in self.arguments])
        self._bound = _bind(facts, call, self._outputs, may_use_out=True)
        self._others: dict[tuple[bytes, ...], Callable[[], object]] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What the first arguments address: inputs, then fresh outputs."""
        return [*self._call.tensors, *(each for each in self._outputs if each is not None)]

    @property
    def private_memory(self) -> tuple[tuple[int, int], ...]:
        """(address, bytes) of the memory that the recording made, in the order of arguments."""
        sizes = ((storage.data_ptr(), storage.nbytes()) for storage in self._made)
        return tuple((address, size) for address, size in sizes if size)

    def run(self, config: LaunchConfig, arguments: Sequence[bytes]) -> None:
        """Runs the call on the memory that ``arguments`` name; ``config`` means nothing here."""
        bound = self._bound
        if arguments != self.arguments:
            bound = self._bind_others(tuple(arguments))
        if _something_is_in_force():
            with _plain_torch():
                bound()
        else:
            bound()

    def _bind_others(self, arguments: tuple[bytes, ...]) -> Callable[[], object]:
        bound = self._others.get(arguments)
        if bound is None:
            bound = self._others[arguments] = self._rebind(arguments)
            if len(self._others) > _REMEMBERED:
                del self._others[next(iter(self._others))]
        return bound

    def _rebind(self, arguments: tuple[bytes, ...]) -> Callable[[], object]:
        if len(arguments) != len(self.arguments):
            raise refuse_arguments(
                f"{self.name}: expected {len(self.arguments)} arguments, got {len(arguments)}"
            )
        if arguments[-1] != self.arguments[-1]:
            raise refuse_arguments(
                f"{self.name}: the sizes of a recorded torch call cannot be changed: expected "
                f"{self.arguments[-1].decode()}, got {arguments[-1].decode(errors='replace')}"
            )
        with _plain_torch():
            tensors = [
                tensor if data == recorded else view_of_memory(_address(data), tensor)
                for tensor, data, recorded in zip(
                    self.tensors, arguments, self.arguments, strict=False
                )
            ]
            inputs = len(self._call.tensors)
            fresh = iter(tensors[inputs:])
            outputs = [None if each is None else next(fresh) for each in self._outputs]
            values = arguments[len(tensors) : -1]
            call = self._call.with_tensors(tensors[:inputs]).with_values(values)
            same_values = values == self.arguments[len(tensors) : -1]
            # a changed scalar may change the shape: then out= would resize, a copy complains
            return _bind(self.facts, call, outputs, may_use_out=same_values)

    def __repr__(self) -> str:
        return f"<TorchOperation {self.name} {len(self.arguments)} arguments>"


def _address(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _bind(
    facts: OperatorFacts,
    call: Call,
    outputs: Sequence[torch.Tensor | None],
    *,
    may_use_out: bool,
) -> Callable[[], object]:
    """A call without arguments that does the whole work."""
    if facts.is_plain_copy and outputs[0] is not None:
        return functools.partial(outputs[0].copy_, call.tensors[0])
    whole = functools.partial(facts.call, *call.args, **call.kwargs)
    if all(each is None for each in outputs):
        return whole
    form = facts.out_form
    if may_use_out and form is not None:
        kwargs = {k: v for k, v in call.kwargs.items() if k in form.keywords}
        named: dict[str, Any] = dict(zip(form.names, outputs, strict=True))
        return functools.partial(form.call, *call.args, **kwargs, **named)
    return functools.partial(_run_and_copy, whole, tuple(outputs))


def _run_and_copy(whole: Callable[[], object], outputs: tuple[torch.Tensor | None, ...]) -> None:
    for output, result in zip(outputs, flatten(whole()), strict=True):
        # torch's CPU kernels leave out some auxiliary results that its shape functions promise
        if output is None or result is None or not result.numel():
            continue
        if output.shape != result.shape:
            raise refuse_arguments(
                f"the call returned {tuple(result.shape)}, its output holds {tuple(output.shape)}"
            )
        output.copy_(result)


def flatten(value: Any) -> Iterator[Any]:
    """The parts of an operator's result, in order: tensors, None and plain values."""
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from flatten(each)
    else:
        yield value


def _something_is_in_force() -> bool:
    """Whether a mode of the caller would see or change what a replay calls."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch.is_autocast_enabled("cpu")
    )


def _plain_torch() -> ExitStack:
    """Straight to the kernels: no autograd, no modes, no autocast."""
    stack = ExitStack()
    stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(torch._C._ExcludeDispatchKeyGuard(_ABOVE_THE_KERNELS))
    return stack


def _keys_above_the_kernels() -> torch._C.DispatchKeySet:
    key = torch._C.DispatchKey
    keys = torch._C.DispatchKeySet(key.AutogradFunctionality)
    for each in (
        key.AutogradOther, key.AutogradCPU, key.ADInplaceOrView, key.AutocastCPU,
        key.Python, key.PythonTLSSnapshot, key.PythonDispatcher,
    ):  # fmt: skip
        keys = keys | torch._C.DispatchKeySet(each)
    return keys


_ABOVE_THE_KERNELS = _keys_above_the_kernels()
