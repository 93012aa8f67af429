"""Collectives of torch.distributed in a capture of the emulated driver: sent by every replay.

As on a device nothing is sent while a capture records; each replay sends once, and the other ranks
must do the same. What a device does behind the host's back happens inside the launch here: it
returns when the collective is over, and raises what the backend (gloo) says of a rank that is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork, Work
from torch._ops import OpOverload

from graphcore.driver.collectives import label_of
from graphcore.driver.emulated.functions import layout_of
from graphcore.driver.emulated.torch_arguments import (
    encode_address,
    encode_forms,
    refuse_arguments,
    view_of_memory,
)
from graphcore.driver.emulated.torch_memory import Aliases
from graphcore.driver.emulated.torch_operation import flatten
from graphcore.driver.emulated.torch_schema import OperatorFacts, facts_of
from graphcore.driver.records import LaunchConfig

_BARRIER = "c10d::barrier"


class CollectiveOperation:
    """One collective that writes tensors it was given, and gives a work object back.

    Args:
        func: The operator.
        args: Its arguments, on aliases of our own.
        group: Whose ranks take part.
    """

    def __init__(self, func: OpOverload, args: Sequence[Any], group: Any) -> None:
        self.name = f"{func._schema.name}.{func._schema.overload_name or 'default'}"
        self._func = func
        self._args = tuple(args)
        self._tensors = [each for each in flatten(args) if isinstance(each, torch.Tensor)]
        told = f"{label_of(group)} {_told(args)} {encode_forms(self._tensors, None).decode()}"
        self.arguments: tuple[bytes, ...] = (
            *(encode_address(tensor) for tensor in self._tensors),
            told.encode(),
        )
        self.layout = layout_of([len(data) for data in self.arguments])

    def run(self, config: LaunchConfig, arguments: Sequence[bytes]) -> None:
        """Sends, and waits until all that was to come has come; ``config`` means nothing here."""
        args: Sequence[Any] = self._args
        if tuple(arguments) != self.arguments:
            args = self._elsewhere(arguments)
        result = self._func(*args)
        work = result[-1] if isinstance(result, tuple) else result
        Work.unbox(work).wait()

    def _elsewhere(self, arguments: Sequence[bytes]) -> Sequence[Any]:
        """The call on the memory that ``arguments`` name."""
        if len(arguments) != len(self.arguments) or arguments[-1] != self.arguments[-1]:
            raise refuse_arguments(f"{self.name}: only the memory of a collective can be changed")
        moved = iter(
            [
                tensor
                if data == recorded
                else view_of_memory(int.from_bytes(data, "little"), tensor)
                for tensor, data, recorded in zip(
                    self._tensors, arguments, self.arguments, strict=False
                )
            ]
        )
        return [_with_tensors(each, lambda _: next(moved)) for each in self._args]

    def __repr__(self) -> str:
        return f"<CollectiveOperation {self.name} on {len(self._tensors)} tensors>"


def collective_operation(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], group: Any, aliases: Aliases
) -> CollectiveOperation:
    """The operation of one call of a collective that writes what it is given."""
    given = [*args, *_by_position(func, args, kwargs)]
    return CollectiveOperation(func, [_with_tensors(each, aliases.of) for each in given], group)


def promised(func: OpOverload, args: Sequence[Any]) -> Any:
    """What such a call returns in a capture: the tensors it will write, and a work that is over."""
    work = FakeWork().boxed()
    return work if len(func._schema.returns) == 1 else (args[0], work)


def waits_for_host(func: OpOverload) -> bool:
    """Whether a collective is there to make the host wait, which a replay cannot do."""
    return bool(func._schema.name == _BARRIER)


def facts_of_functional(func: OpOverload) -> OperatorFacts:
    """The facts of a collective that returns new tensors: a run of it waits for them."""
    facts = facts_of(func)
    return replace(facts, call=_waited(facts.call), out_form=None, decomposes=False)


def _waited(call: Callable[..., Any]) -> Callable[..., Any]:
    wait = torch.ops._c10d_functional.wait_tensor

    def send(*args: Any, **kwargs: Any) -> Any:
        return _with_tensors(call(*args, **kwargs), wait)

    return send


def _by_position(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """What a call names by keyword, or leaves to the schema, in the schema's order."""
    rest = func._schema.arguments[len(args) :]
    return [kwargs.get(each.name, each.default_value) for each in rest]


def _with_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return [_with_tensors(each, function) for each in value]
    return value


def _told(args: Sequence[Any]) -> str:
    """The plain values of a call; objects of torch's without the address they lie at."""
    words = []
    for each in flatten(args):
        if isinstance(each, torch.ScriptObject):
            words.append(str(each._type()).rpartition(".")[2])
        elif not isinstance(each, torch.Tensor):
            words.append(str(each))
    return " ".join(words)
