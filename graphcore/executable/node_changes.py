"""What one node is to become: new parameters from what a caller gives, and why CUDA refuses some.

Pure: nothing here changes an executable. Kernel arguments are typed by the signature where it is
known; without one, an argument is the bytes themselves, or a tensor where it has 8 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from graphcore.driver import Driver
from graphcore.driver.kernel import Parameter
from graphcore.driver.records import (
    CopyOperand,
    KernelParams,
    LaunchConfig,
    MemcpyParams,
    MemoryKind,
    MemsetParams,
    NodeKind,
    NodeParams,
)
from graphcore.errors import ConfigurationError, CudaError, UpdateRefused
from graphcore.executable.placement import placed
from graphcore.graph.nodes import Argument, NodeRecord
from graphcore.resources.lifetime import Owner
from graphcore.resources.tensors import TensorRef, is_tensor

CHANGEABLE = (NodeKind.KERNEL, NodeKind.MEMCPY, NodeKind.MEMSET)
_FIXED_IN_A_NODE = ("cluster", "cooperative", "priority", "programmatic")
_REFUSALS = {
    "CUDA_ERROR_INVALID_VALUE",
    "CUDA_ERROR_NOT_SUPPORTED",
    "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE",
}
_RULES = {
    NodeKind.KERNEL: "a kernel node keeps its context; arguments and launch shape may change",
    NodeKind.MEMCPY: "only a 1-D copy can be changed, and it keeps its kinds of memory",
    NodeKind.MEMSET: "a fill keeps its height, and one of several rows all but address and value",
}


class NodeChange:
    """New parameters of one node, and what must live as long as they do."""

    __slots__ = ("owners", "params", "record")

    def __init__(self, record: NodeRecord, params: NodeParams, owners: Iterable[Owner]) -> None:
        self.record = record
        self.params = params
        self.owners = tuple(owners)


def check_changeable(record: NodeRecord, what: str) -> None:
    """Refuses nodes of kinds that are not changed one by one."""
    if record.kind not in CHANGEABLE:
        raise ConfigurationError(
            f"{what}: expected a kernel, memcpy or memset node, got {record}; "
            "GraphExec.update takes a graph with the other node"
        )


def change_of(
    record: NodeRecord,
    driver: Driver,
    arguments: Sequence[Any] | Mapping[str | int, Any] | None,
    config: LaunchConfig | None,
    operands: Mapping[str, Any],
) -> NodeChange:
    """The change that a call of ``GraphExec.set_params`` asks for; raises as that does."""
    check_changeable(record, "set_params")
    params = record.params
    if isinstance(params, KernelParams):
        if operands:
            raise _unknown(record, operands, ("arguments", "config"))
        return _kernel_change(record, params, driver, arguments, config)
    if arguments is not None or config is not None:
        raise ConfigurationError(
            f"{record}: expected operands by name, got arguments of a kernel: {_names(params)}"
        )
    if not operands:
        raise ConfigurationError(f"{record}: expected something to change, of {_names(params)}")
    if isinstance(params, MemcpyParams):
        return _memcpy_change(record, params, driver, operands)
    assert isinstance(params, MemsetParams)
    return _memset_change(record, params, driver, operands)


def explain(error: CudaError, change: NodeChange) -> Exception:
    """What a caller is told of the driver's refusal of one node; other failures as they are."""
    if error.code not in _REFUSALS:
        return error
    before, after = change.record.params, change.params
    differing = [
        f"{field.name}: {getattr(before, field.name)} -> {getattr(after, field.name)}"
        for field in fields(before)
        if getattr(before, field.name) != getattr(after, field.name)
        and field.name not in ("arguments", "dst", "src")
    ]
    what = ", ".join(differing) or "its operands"
    return UpdateRefused(
        f"{change.record}: the driver refuses to change {what} of this node alone "
        f"({_RULES[change.record.kind]}); GraphExec.update with a graph that has the change builds "
        f"a new executable where it must. Driver: {error}"
    )


# ---- kernels ----------------------------------------------------------------------------------


def _kernel_change(
    record: NodeRecord,
    params: KernelParams,
    driver: Driver,
    arguments: Sequence[Any] | Mapping[str | int, Any] | None,
    config: LaunchConfig | None,
) -> NodeChange:
    if arguments is None and config is None:
        raise ConfigurationError(f"{record}: expected something to change, of arguments, config")
    if config is not None:
        _check_config(record, params.config, config)
    values = _by_index(record, arguments)
    owners: list[Owner] = []
    packed = list(params.arguments)
    for argument in record.arguments:
        if argument.index in values:
            value = values[argument.index]
            packed[argument.index] = _pack(record, argument, value, driver, owners)
    new = replace(params, arguments=tuple(packed), config=config or params.config)
    return NodeChange(record, new, owners)


def _by_index(
    record: NodeRecord, arguments: Sequence[Any] | Mapping[str | int, Any] | None
) -> dict[int, Any]:
    listed = record.arguments
    if arguments is None:
        return {}
    if isinstance(arguments, Mapping):
        places: dict[Any, int] = {argument.index: argument.index for argument in listed}
        places.update({argument.name: argument.index for argument in listed if argument.name})
        unknown = [key for key in arguments if key not in places or isinstance(key, bool)]
        if unknown:
            known = ", ".join(str(each.name or each.index) for each in listed)
            raise ConfigurationError(
                f"{record}: arguments: expected some of {known}, got {unknown[0]!r}"
            )
        return {places[key]: value for key, value in arguments.items()}
    if isinstance(arguments, (str, bytes)) or not isinstance(arguments, Sequence):
        raise ConfigurationError(
            f"{record}: arguments: expected a sequence of all of them, or a mapping of some, got "
            f"{type(arguments).__name__}"
        )
    if len(arguments) != len(listed):
        names = ", ".join(each.name or f"{each.size} bytes" for each in listed)
        raise ConfigurationError(
            f"{record}: expected {len(listed)} arguments ({names}), got {len(arguments)}"
        )
    return dict(enumerate(arguments))


def _pack(
    record: NodeRecord, argument: Argument, value: Any, driver: Driver, owners: list[Owner]
) -> bytes:
    where = f"{record}: argument {argument.index}"
    if argument.name:
        where += f" ({argument.name})"
    typed = None if record.kernel is None else record.kernel.parameters[argument.index]
    if is_tensor(value) and (typed is None or typed.is_pointer):
        if typed is None and argument.size != 8:
            raise ConfigurationError(f"{where}: expected {argument.size} bytes, got a tensor")
        ref = placed(value, driver, where)
        if typed is not None:
            _check_pointee(typed, ref, where)
        owners.append(Owner(value, where))
        return ref.address.to_bytes(8, "little")
    if typed is not None:
        try:
            return typed.pack(argument.index, value)
        except ConfigurationError as error:
            raise ConfigurationError(f"{record}: {error}") from None
    if isinstance(value, (bytes, bytearray)) and len(value) == argument.size:
        return bytes(value)
    got = f"{len(value)} bytes" if isinstance(value, (bytes, bytearray)) else type(value).__name__
    raise ConfigurationError(
        f"{where}: expected {argument.size} bytes (the kernel's signature is not known, so that a "
        f"number has no width), got {got}"
    )


# what a typed pointer may point at besides itself: void and u8 take any bytes
_DTYPES = {
    "bool": "bool",
    "i8": "int8",
    "i16": "int16",
    "u16": "uint16",
    "i32": "int32",
    "u32": "uint32",
    "i64": "int64",
    "u64": "uint64",
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
}


def _check_pointee(parameter: Parameter, ref: TensorRef, where: str) -> None:
    if ref.read_only and not parameter.is_read_only:
        raise ConfigurationError(f"{where}: expected writable memory, got a read-only tensor")
    wanted = _DTYPES.get(parameter.pointee, ref.dtype)
    if ref.dtype != wanted:
        raise ConfigurationError(f"{where}: dtype: expected {wanted}, got {ref.dtype}")


def _check_config(record: NodeRecord, before: LaunchConfig, after: Any) -> None:
    if not isinstance(after, LaunchConfig):
        raise ConfigurationError(
            f"{record}: config: expected a LaunchConfig, got {type(after).__name__}"
        )
    for field in _FIXED_IN_A_NODE:
        was, now = getattr(before, field), getattr(after, field)
        if was != now and (field != "priority" or now is not None):
            raise UpdateRefused(
                f"{record}: config.{field}: expected {was}, got {now}: a change of one node keeps "
                "its launch attributes, and the driver does not say so; use GraphExec.update"
            )


# ---- copies and fills --------------------------------------------------------------------------


def _memcpy_change(
    record: NodeRecord, params: MemcpyParams, driver: Driver, operands: Mapping[str, Any]
) -> NodeChange:
    _check_names(record, params, operands)
    owners: list[Owner] = []
    sizes: dict[str, Any] = {
        name: _size(record, name, operands[name]) for name in operands if name not in _SIDES
    }
    new = replace(params, **sizes)
    for side in _SIDES:
        if side in operands:
            given = operands[side]
            if isinstance(given, CopyOperand):
                operand = given
            else:
                operand = getattr(params, side)
                reach = reach_of(new, operand)
                target = _Operand(record, side, reach, operand.memory, is_written=side == "dst")
                operand = replace(operand, address=target.address_of(given, driver, owners))
            changed: dict[str, Any] = {side: operand}
            new = replace(new, **changed)
    return NodeChange(record, new, owners)


_SIDES = ("dst", "src")


def reach_of(params: MemcpyParams, operand: CopyOperand) -> int:
    """Bytes from the first to past the last that one side of a copy touches."""
    rows = (params.height - 1) * operand.pitch
    return (params.depth - 1) * operand.rows * operand.pitch + rows + params.width


def _memset_change(
    record: NodeRecord, params: MemsetParams, driver: Driver, operands: Mapping[str, Any]
) -> NodeChange:
    _check_names(record, params, operands)
    owners: list[Owner] = []
    sizes: dict[str, Any] = {
        name: _size(record, name, operands[name]) for name in operands if name != "address"
    }
    new = replace(params, **sizes)
    if "address" in operands:
        reach = (new.height - 1) * new.pitch + new.width * new.element_size
        target = _Operand(record, "address", reach, MemoryKind.DEVICE, is_written=True)
        new = replace(new, address=target.address_of(operands["address"], driver, owners))
    return NodeChange(record, new, owners)


def _size(record: NodeRecord, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigurationError(f"{record}: {name}: expected an int of at least 0, got {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class _Operand:
    """One operand of a copy or fill that a caller gives: what it must hold."""

    record: NodeRecord
    name: str
    reach: int
    memory: MemoryKind
    is_written: bool

    def address_of(self, given: Any, driver: Driver, owners: list[Owner]) -> int:
        """The address of a tensor that fits, or a bare address."""
        where = f"{self.record}: {self.name}"
        if isinstance(given, int) and not isinstance(given, bool) and given > 0:
            return given
        ref = placed(given, driver, where, self.memory)
        if self.is_written and ref.read_only:
            raise ConfigurationError(f"{where}: expected writable memory, got a read-only tensor")
        if ref.nbytes < self.reach:
            raise ConfigurationError(
                f"{where}: expected at least {self.reach} bytes, which the node touches, got "
                f"{ref.nbytes}"
            )
        owners.append(Owner(given, where))
        return ref.address


def _check_names(record: NodeRecord, params: NodeParams, operands: Mapping[str, Any]) -> None:
    known = _names(params)
    if any(name not in known for name in operands):
        raise _unknown(record, operands, known)


def _names(params: NodeParams) -> tuple[str, ...]:
    return tuple(field.name for field in fields(params) if field.name != "kind")


def _unknown(
    record: NodeRecord, operands: Mapping[str, Any], known: tuple[str, ...]
) -> ConfigurationError:
    wrong = next(name for name in operands if name not in known)
    return ConfigurationError(f"{record}: expected some of {', '.join(known)}, got {wrong!r}")
