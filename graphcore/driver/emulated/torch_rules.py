"""What a capture does not allow of an aten call, decided before anything is recorded.

Pure questions about a call (does it read the host, does it draw random numbers), and the refusals
that need no capture state; raising for the rest is the recorder's.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch._ops import OpOverload

from graphcore.driver.emulated.torch_arguments import Call
from graphcore.driver.emulated.torch_memory import check_room
from graphcore.driver.emulated.torch_schema import OperatorFacts, argument
from graphcore.errors import CaptureError

RANDOM_REFUSAL = (
    "random numbers in this capture would repeat or shift, because torch's generator is not in "
    "capture mode (on a device torch says 'Attempt to increase offset for a CUDA generator not in "
    "capture mode'). Draw them before the capture into a tensor that the graph reads, and anew "
    "before each replay, or compute them in the graph from a seed tensor; dropout needs "
    "model.eval()"
)
HOST_READ_HINT = (
    "it reads a tensor's values from the host, which a replay cannot repeat: keep the value in a "
    "tensor (torch.where, masked_fill, index_select, nonzero_static), or read it before or after "
    "the capture"
)


def is_elsewhere(call: Call) -> bool:
    """Whether the call works on meta tensors only: no device memory is involved."""
    return bool(call.tensors) and all(each.device.type == "meta" for each in call.tensors)


def check_tensors(name: str, call: Call) -> None:
    """Refuses tensors that are no device memory of the emulated driver.

    Raises:
        CaptureError: Another device, a sparse layout, a quantized dtype.
    """
    for tensor in call.tensors:
        if tensor.device.type != "cpu":
            raise CaptureError(
                f"{name}: expected CPU tensors, which are the emulated driver's device memory, got "
                f"one on {tensor.device}"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else tensor.layout
            raise CaptureError(f"{name}: expected strided tensors, got a {kind} one")


def check_resize(facts: OperatorFacts, func: OpOverload, call: Call) -> None:
    """Refuses ``resize_`` and ``resize_as_`` that would move memory (CaptureError)."""
    wanted = argument(func, call.args, call.kwargs, "size")
    if wanted is None:
        wanted = call.tensors[1].shape
    check_room(facts.name, call.tensors[0], math.prod(wanted))


def asks_metadata(facts: OperatorFacts, func: OpOverload, call: Call) -> bool:
    """Whether the call only answers a question, or touches no tensor at all."""
    if facts.returns_tensors or facts.written:
        return False
    return bool(func._schema.returns) or not call.tensors


def depends_on_values(facts: OperatorFacts, func: OpOverload, call: Call) -> bool:
    """Whether the host must read values, for the result or its shape, with these arguments."""
    special = _DEPENDS_BY_ARGUMENTS.get(func._schema.name)
    if special is not None:
        return special(facts, call)
    return facts.reads_host or facts.has_dynamic_shape


def draws_random_numbers(facts: OperatorFacts, func: OpOverload, call: Call) -> bool:
    """Whether the generator advances, with these arguments (dropout may be off)."""
    if not facts.is_random or argument(func, call.args, call.kwargs, "dropout_p", 1.0) == 0.0:
        return False
    switches = ("train", "training")
    return all(argument(func, call.args, call.kwargs, name, True) for name in switches)


def _masks_of(call: Call) -> bool:
    return any(
        each is not None and each.dtype in (torch.bool, torch.uint8) for each in call.args[1]
    )


def _index_depends(_: OperatorFacts, call: Call) -> bool:
    return _masks_of(call)


def _index_put_depends(_: OperatorFacts, call: Call) -> bool:
    # one value under a mask is a masked fill, on a device too
    accumulates = len(call.args) > 3 and bool(call.args[3])
    return _masks_of(call) and (accumulates or call.args[2].numel() != 1)


def _repeat_depends(facts: OperatorFacts, call: Call) -> bool:
    return facts.has_dynamic_shape and call.kwargs.get("output_size") is None


_DEPENDS_BY_ARGUMENTS: dict[str, Callable[[OperatorFacts, Call], bool]] = {
    "aten::index": _index_depends,
    "aten::_unsafe_index": _index_depends,
    "aten::index_put": _index_put_depends,
    "aten::index_put_": _index_put_depends,
    "aten::_index_put_impl_": _index_put_depends,
    "aten::repeat_interleave": _repeat_depends,
}
