"""Kernel arguments of a plan, held to the kernel's signature before anything exists.

Pointers take views of the plan's buffers, never addresses or tensors; scalars must have the width
of the parameter; a condition goes into a u64. What a launch reads and writes follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from graphcore.driver.kernel import Kernel, Parameter
from graphcore.driver.records import LaunchConfig
from graphcore.errors import ConfigurationError
from graphcore.plan.integers import items_of
from graphcore.plan.records import Condition, PlanBuffer, View
from graphcore.plan.views import as_view
from graphcore.resources.tensors import is_tensor

# what a pointer of a signature may point at; other pointees are named like their element type
_DTYPES: dict[str, tuple[str, ...]] = {
    "i8": ("int8",),
    "i16": ("int16",),
    "u16": ("uint16", "bfloat16", "float16"),
    "i32": ("int32",),
    "u32": ("uint32",),
    "i64": ("int64",),
    "u64": ("uint64",),
    "bool": ("bool",),
    "f16": ("float16",),
    "bf16": ("bfloat16",),
    "f32": ("float32",),
    "f64": ("float64",),
}
# what every compute capability takes (CUDA C++ programming guide, "Compute Capabilities")
_MOST = {
    "grid": (2**31 - 1, 65535, 65535),
    "block": (1024, 1024, 64),
    "cluster": (16, 16, 16),
}
_MOST_THREADS = 1024
# a pointer to bytes takes any buffer
_BYTES = frozenset({"void", "u8"})


def check_arguments(kernel: Kernel, values: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments as the plan keeps them: views, conditions, plain scalars and bytes.

    Raises:
        ConfigurationError: A wrong count, or an argument of another kind, width or element type
            than its parameter; names the kernel and the argument's index.
    """
    if not isinstance(kernel, Kernel):
        raise ConfigurationError(
            f"kernel: expected a graphcore.Kernel, got {type(kernel).__name__}; what other "
            "libraries launch goes through plan.call"
        )
    parameters = kernel.parameters
    if len(values) != len(parameters):
        known = ", ".join(f"{p.name}: {p.type}" for p in parameters)
        raise ConfigurationError(
            f"kernel {kernel.name}: expected {len(parameters)} arguments ({known}), "
            f"got {len(values)}"
        )
    return tuple(
        _checked(kernel, index, parameter, value)
        for index, (parameter, value) in enumerate(zip(parameters, values, strict=True))
    )


def check_config(config: Any) -> LaunchConfig:
    """The launch shape, held to what every device of CUDA takes.

    Raises:
        ConfigurationError: No launch shape, a size below 1 or beyond CUDA's limits, more than 1024
            threads in a block, or a grid that its clusters do not divide.
    """
    if not isinstance(config, LaunchConfig):
        raise ConfigurationError(
            f"config: expected a graphcore.LaunchConfig, got {type(config).__name__}"
        )
    for name, most in _MOST.items():
        sizes = getattr(config, name)
        if (
            not isinstance(sizes, (tuple, list))
            or len(sizes) != 3
            or any(
                not isinstance(n, int) or not 1 <= n <= limit
                for n, limit in zip(sizes, most, strict=False)
            )
        ):
            raise ConfigurationError(
                f"config.{name}: expected three sizes from 1 to {most}, got {sizes}"
            )
    threads = math.prod(config.block)
    if threads > _MOST_THREADS:
        raise ConfigurationError(
            f"config.block: expected at most {_MOST_THREADS} threads, got {config.block} = "
            f"{threads}"
        )
    if any(n % step for n, step in zip(config.grid, config.cluster, strict=True)):
        raise ConfigurationError(
            f"config.grid: expected multiples of the cluster {config.cluster}, got {config.grid}"
        )
    return config


def derive_accesses(
    kernel: Kernel, arguments: Sequence[Any]
) -> tuple[tuple[View, ...], tuple[View, ...]]:
    """(reads, writes) by the signature: ``const T*`` is read, ``T*`` is read and written."""
    reads, writes = [], []
    for parameter, value in zip(kernel.parameters, arguments, strict=True):
        if isinstance(value, View):
            reads.append(value)
            if not parameter.is_read_only:
                writes.append(value)
    return tuple(reads), tuple(writes)


def as_views(operands: Any, name: str) -> tuple[View, ...]:
    """One operand, or a sequence of them, as views."""
    if isinstance(operands, (PlanBuffer, View)):
        operands = (operands,)
    if isinstance(operands, (str, bytes)) or is_tensor(operands) or items_of(operands) is None:
        raise ConfigurationError(
            f"{name}: expected buffers or views, got {type(operands).__name__} {operands!r:.40}"
        )
    return tuple(as_view(item, f"{name}[{index}]") for index, item in enumerate(operands))


def _checked(kernel: Kernel, index: int, parameter: Parameter, value: Any) -> Any:
    where = f"kernel {kernel.name}: argument {index} ({parameter.name}: {parameter.type})"
    if parameter.is_pointer:
        return _pointer(where, parameter, value)
    if isinstance(value, Condition):
        if parameter.type != "u64":
            raise ConfigurationError(f"{where}: a condition's handle needs a u64 parameter")
        return value
    if isinstance(value, (View, PlanBuffer)) or is_tensor(value):
        raise ConfigurationError(f"{where}: expected a scalar, got {type(value).__name__}")
    try:
        # as the kernel will get it: NumPy scalars become plain ones
        return parameter.unpack(parameter.pack(index, value))
    except ConfigurationError as error:
        raise ConfigurationError(f"kernel {kernel.name}: {error}") from None


def _pointer(where: str, parameter: Parameter, value: Any) -> Any:
    if value is None:
        return 0
    if isinstance(value, int):
        raise ConfigurationError(
            f"{where}: expected a buffer of the plan or a view of one, or None for a null pointer; "
            f"got the number {value}"
        )
    view = as_view(value, where)
    allowed = _DTYPES.get(parameter.pointee, ())
    if parameter.pointee not in _BYTES and view.dtype not in allowed:
        raise ConfigurationError(
            f"{where}: expected a view of {' or '.join(allowed)}, got {view.dtype} "
            f"(view of {view.buffer.name}); .view(dtype) reads its bytes as another type"
        )
    return view
