"""Numbers that a model's forward makes into tensors: filled on the device while it is captured.

``torch.tensor(0.5, device=device)``, or ``torch.tensor(1e-5)`` moved there, is a copy from host
memory that is not pinned, which a capture does not allow. The number comes from the model's code or
its config, as that of ``x * 0.5`` does, which a capture keeps too; so a kernel of the graph fills
it in, at each replay anew. A host tensor that came from elsewhere or was written since may be
another at the next replay: it is left alone, and the capture refuses its copy.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def numbers_filled(model: Any) -> AbstractContextManager[object]:
    """Around the capture of ``model``'s forward; does nothing where no code of its makes tensors.

    Nor where torch has compiled a part of it: compiled code would be compiled anew in the capture.
    """
    if not isinstance(model, torch.nn.Module):
        return nullcontext()
    if any(_is_compiled(module) for module in model.modules()):
        return nullcontext()
    kinds = {type(module) for module in model.modules()}
    return NumbersFilled() if any(map(_makes_tensors, kinds)) else nullcontext()


class NumbersFilled(TorchFunctionMode):
    """Inside, tensors of one number come to another device than the host by being filled there."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[torch.Tensor, int | None]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.tensor and _is_number(given.get("data", args[0] if args else None)):
            return self._tensor(*args, **given)
        if func in (torch.Tensor.to, torch.Tensor.cuda) and self._is_ours(args[0]):
            return self._moved(func, args, given)
        return func(*args, **given)

    def _tensor(self, data: complex, **options: Any) -> torch.Tensor:
        device = torch.device(options.get("device") or torch.get_default_device())
        if device.type != "cpu" and not options.get("requires_grad"):
            return torch.full((), data, dtype=options.get("dtype"), device=device)
        made = torch.tensor(data, **options)
        self._made.append((made, _version(made)))
        return made

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        return any(tensor is made and _version(made) == version for made, version in self._made)

    def _moved(
        self, func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        number, *where = args
        device, dtype = options.get("device"), options.get("dtype")
        if func is torch.Tensor.cuda and device is None:
            device = "cuda"
        for each in where:
            if isinstance(each, torch.dtype):
                dtype = each
            elif isinstance(each, torch.Tensor):
                device, dtype = each.device, each.dtype
            elif not isinstance(each, bool):  # whether to wait, or to copy
                device = each
        if device is None or torch.device(device).type == "cpu":
            return func(*args, **options)
        return torch.full((), number.item(), dtype=dtype or number.dtype, device=device)


def _version(tensor: torch.Tensor) -> int | None:
    """How often it was written; None where torch does not count."""
    return None if tensor.is_inference() else tensor._version


def _is_number(data: object) -> bool:
    return isinstance(data, (bool, int, float))


def _is_compiled(module: torch.nn.Module) -> bool:
    # private to torch: what is compiled in place, a compiled forward, a compiled module
    return (
        module._compiled_call_impl is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        or hasattr(module, "_orig_mod")
    )


def _makes_tensors(kind: type) -> bool:
    """Whether a method of ``kind``, or of its bases in the same file, may call torch.tensor."""
    return any(
        "tensor" in names
        for base in kind.__mro__
        if base.__module__ == kind.__module__ and not base.__module__.startswith("torch.")
        for name, member in vars(base).items()
        if name != "__init__"  # buffers are made there
        for names in _names_in(member)
    )


def _names_in(member: object) -> Iterator[tuple[str, ...]]:
    function = inspect.unwrap(member) if callable(member) else None
    if isinstance(function, types.FunctionType):
        yield function.__code__.co_names
