"""A decode step compiled by torch's inductor: what is captured has fewer and larger kernels.

The whole step is one compiled region (choice, forward, logits), so that its small operations end in
the model's kernels. Inductor's own graphs are off: the captured one is the only one. Products of
one row with a matrix, which is what decoding one row does, become reductions that inductor fuses
with what surrounds them (also with the gathering of experts' weights) instead of library calls.
"""

from __future__ import annotations

import logging
import time
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from graphcore.decode.step import DecodeStep
from graphcore.driver import Driver
from graphcore.errors import CaptureError, ConfigurationError

_log = logging.getLogger("graphcore")

Compile = bool | Mapping[str, Any]
"""True, or options of inductor as ``torch.compile(options=...)`` takes them; False: no compiling.

With options, products stay what inductor makes of them.
"""

_no_graphs = {"triton.cudagraphs": False}


def check_compile(how: object, driver: Driver, *, capture: bool = True) -> None:
    """Raises ConfigurationError unless ``how`` is a :data:`Compile` that ``driver`` allows.

    ``capture``: whether a step is captured at all; an eager one is not compiled.
    """
    if not isinstance(how, (bool, Mapping)):
        raise ConfigurationError(
            f"compile: expected a bool or a mapping of inductor's options, got {how!r}"
        )
    if how is False:
        return
    if driver.is_emulated:
        raise ConfigurationError(
            "compile: expected the cuda driver, got the emulated one, which records torch's "
            "operations one by one and sees none of inductor's kernels"
        )
    if not capture:
        raise ConfigurationError(
            "compile: expected capture=True: what is compiled is the step of a graph"
        )
    if isinstance(how, Mapping):
        _check_options(how)


def _check_options(options: Mapping[str, Any]) -> None:
    if options.get("triton.cudagraphs"):
        raise ConfigurationError(
            "compile: expected triton.cudagraphs to be off, got True: the captured graph cannot "
            "hold another one's replay"
        )
    try:
        torch.compile(_nothing, options={**options, **_no_graphs})  # looks at the options only
    except RuntimeError as error:
        raise ConfigurationError(f"compile: {error}") from error


def _nothing() -> None:
    """What is never called."""


class CompiledCode:
    """What inductor made: its constants are read by the graph's kernels, so the graph keeps it."""

    def __init__(self) -> None:
        self._made: list[Any] = []

    def add(self, made: Any) -> Any:
        """``made``, which is kept."""
        self._made.append(made)
        return made


class CompiledStep:
    """``step.run`` as one compiled function. The first call compiles, which takes seconds.

    Args:
        step: What is compiled.
        how: True or options.

    Attributes:
        code: Of all that was compiled; it does not keep the step or its cache.
    """

    def __init__(self, step: DecodeStep, how: Compile = True) -> None:
        self.code = code = CompiledCode()
        make = _fusing_inductor
        if isinstance(how, Mapping):
            make = partial(_inductor, {**how, **_no_graphs})

        def backend(graph: Any, inputs: Sequence[Any], **_: Any) -> Any:
            return code.add(make(graph, inputs))

        self._compiled = torch.compile(
            _with_code_of_its_own(step.run), fullgraph=True, dynamic=False, backend=backend
        )
        self._is_compiled = False

    def run(self) -> None:
        """One step.

        Raises:
            CaptureError: It cannot be compiled; the cause hangs on it.
        """
        start = time.perf_counter()
        try:
            self._compiled()
        except torch._dynamo.exc.TorchDynamoException as error:
            raise CaptureError(
                f"compile: the step could not be compiled: {_reason(error)}"
            ) from error
        if not self._is_compiled:
            self._is_compiled = True
            _log.info("compiled the decode step in %.1f s", time.perf_counter() - start)


def _reason(error: Exception) -> str:
    cause = getattr(error, "inner_exception", error)  # what a backend raised
    first_line = str(cause).strip().partition("\n")[0]
    return f"{type(cause).__name__}: {first_line}"


def _with_code_of_its_own(run: Callable[[], None]) -> Callable[[], None]:
    """A function that calls ``run``. Its code is an object of its own.

    torch counts compilations by code object and refuses the ninth, though each is of another
    runner's step.
    """

    def compiled_step() -> None:
        run()

    return types.FunctionType(
        compiled_step.__code__.replace(),
        compiled_step.__globals__,
        closure=compiled_step.__closure__,
    )


# ---- inductor, with products of one row as reductions --------------------------------------------


def _inductor(options: Mapping[str, Any], graph: Any, inputs: Sequence[Any]) -> Any:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs, config_patches=dict(options))


def _fusing_inductor(graph: Any, inputs: Sequence[Any]) -> Any:
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    # that cache does not know the decompositions: it would give code that was made with others
    with functorch_config.patch({"enable_autograd_cache": False}):
        return compile_fx(
            graph, inputs, config_patches=_no_graphs, decompositions=_decompositions()
        )


def _decompositions() -> dict[Any, Any]:
    from torch._inductor.decomposition import select_decomp_table

    table = dict(select_decomp_table())
    aten = torch.ops.aten
    for operation, product in (
        (aten.mm.default, _mm),
        (aten.addmm.default, _addmm),
        (aten.bmm.default, _bmm),
    ):
        table[operation] = _first_of(product, table.get(operation))
    return table


def _first_of(product: Callable[..., Any], other: Callable[..., Any] | None) -> Any:
    """``product``, and where it declines, what stood in the table before."""

    def decomposed(*tensors: torch.Tensor, **options: Any) -> Any:
        found = NotImplemented if options else product(*tensors)
        if found is NotImplemented and other is not None:
            found = other(*tensors, **options)
        return found

    return decomposed


def _mm(left: torch.Tensor, right: torch.Tensor) -> Any:
    if left.shape[0] != 1 and right.shape[1] != 1:
        return NotImplemented
    return (left.unsqueeze(2) * right.unsqueeze(0)).sum(dim=1)


def _addmm(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> Any:
    product = _mm(left, right)
    return product if product is NotImplemented else product + bias


def _bmm(left: torch.Tensor, right: torch.Tensor) -> Any:
    if left.shape[1] != 1 and right.shape[2] != 1:
        return NotImplemented
    return (left.unsqueeze(-1) * right.unsqueeze(1)).sum(dim=2)
