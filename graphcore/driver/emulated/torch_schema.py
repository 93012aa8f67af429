"""What an aten overload does, read once from its schema: views, writes, randomness, out= form.

Pure facts, cached per overload for the life of the process; nothing here looks at a tensor's data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

# share memory with their input although their schema does not say so
_UNDECLARED_VIEWS = frozenset(
    {"aten::_unsafe_view", "aten::unsafe_split", "aten::unsafe_split_with_sizes"}
)
# give memory and write nothing into it: no kernel on a device either
_ALLOCATIONS = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_permuted",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
    }
)
# checks of metadata, and marks that mean nothing without a stream of torch's
_NOTHING_TO_DO = frozenset({"aten::_assert_tensor_metadata", "aten::record_stream"})
# read the device from the host without a tag that says so
_UNTAGGED_HOST_READS = frozenset({"aten::_linalg_check_errors"})
_RESIZES = frozenset({"aten::resize_", "aten::resize_as_"})
_PLAIN_COPIES = frozenset({"aten::clone", "aten::_to_copy", "aten::lift_fresh"})
# Besides the pointwise ones, the operators whose out= form is the functional form without the
# allocation. Others' out= may compute in another way, or resize and so move the output.
_EXACT_OUT_FORMS = frozenset(
    {
        "aten::_log_softmax",
        "aten::_softmax",
        "aten::addmm",
        "aten::arange",
        "aten::argmax",
        "aten::argmin",
        "aten::baddbmm",
        "aten::bmm",
        "aten::cat",
        "aten::cumsum",
        "aten::full",
        "aten::gather",
        "aten::index_select",
        "aten::mean",
        "aten::mm",
        "aten::ones",
        "aten::sum",
        "aten::topk",
        "aten::tril",
        "aten::triu",
        "aten::zeros",
    }
)
# of factories; an out= form has them in its output
_FACTORY_KEYWORDS = frozenset({"dtype", "layout", "device", "pin_memory"})

Place = int | str
"""Where an argument stands in a call: its position, or its keyword."""


@dataclass(frozen=True, slots=True)
class OutForm:
    """An overload with ``out=`` that computes the same: ``names`` of its outputs, in order.

    ``keywords`` are those of the functional form that it takes too (not dtype, device ...).
    """

    call: Callable[..., Any]
    names: tuple[str, ...]
    keywords: frozenset[str]


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """What the recorder and the replay need to know of one overload.

    Args:
        name: ``"aten::mm.default"``.
        call: Runs it on real tensors; cheaper than the overload object where torch has such a form.
        written: Places of the arguments that the call writes.
        returned: Per return, the place of the written argument it is, or None (fresh, or no
            tensor).
        shares_memory: A view, or a change of metadata only: runs at once.
        out_form: See :class:`OutForm`; None where torch would only copy, which we can do too.
    """

    name: str
    call: Callable[..., Any]
    written: tuple[Place, ...]
    returned: tuple[Place | None, ...]
    shares_memory: bool
    resizes: bool
    allocates_only: bool
    does_nothing: bool
    returns_tensors: bool
    reads_host: bool
    has_dynamic_shape: bool
    is_random: bool
    is_plain_copy: bool
    is_lift: bool
    decomposes: bool
    out_form: OutForm | None


@functools.cache
def facts_of(func: OpOverload) -> OperatorFacts:
    """The facts of ``func``."""
    schema = func._schema
    tags = func.tags
    written = _written(schema)
    is_lift = schema.name == "aten::lift_fresh"
    metadata_only = torch.Tag.inplace_view in tags
    returns_tensors = any("Tensor" in str(each.type) for each in schema.returns)
    return OperatorFacts(
        name=f"{schema.name}.{schema.overload_name or 'default'}",
        call=getattr(func, "_op", func),
        written=tuple(written.values()),
        returned=tuple(_written_symbol(each, written) for each in schema.returns),
        shares_memory=(
            (func.is_view and not is_lift) or metadata_only or schema.name in _UNDECLARED_VIEWS
        ),
        resizes=schema.name in _RESIZES,
        allocates_only=schema.name in _ALLOCATIONS and not schema.is_mutable,
        does_nothing=schema.name in _NOTHING_TO_DO,
        returns_tensors=returns_tensors,
        reads_host=(torch.Tag.data_dependent_output in tags or schema.name in _UNTAGGED_HOST_READS),
        has_dynamic_shape=torch.Tag.dynamic_output_shape in tags,
        is_random=(
            torch.Tag.nondeterministic_seeded in tags and (returns_tensors or schema.is_mutable)
        ),
        is_plain_copy=schema.name in _PLAIN_COPIES and not schema.is_mutable,
        is_lift=is_lift,
        decomposes=_is_composite(func),
        out_form=None if schema.is_mutable else _find_out_form(func),
    )


def decompose(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs torch's own (C++) decomposition, whose parts are dispatched one by one."""
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _is_composite(func: OpOverload) -> bool:
    """Whether eager torch runs it as a composition; in inference mode modes see it whole."""
    name = func._schema.name + ("." + func._schema.overload_name).rstrip(".")

    def has_kernel(key: str) -> bool:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))

    return has_kernel("CompositeImplicitAutograd") and not has_kernel("CPU")


def argument(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, default: Any = None
) -> Any:
    """The value that a call gives to the parameter ``name``, by the schema's own default too."""
    for position, each in enumerate(func._schema.arguments):
        if each.name == name:
            if position < len(args):
                return args[position]
            return kwargs.get(name, each.default_value)
    return default


def _written(schema: torch.FunctionSchema) -> dict[str, Place]:
    """Alias symbol (or argument name) -> place, of every argument the call writes."""
    places: dict[str, Place] = {}
    for position, each in enumerate(schema.arguments):
        if each.alias_info is not None and each.alias_info.is_write:
            symbols = sorted(each.alias_info.before_set) or [each.name]
            places[symbols[0]] = each.name if each.kwarg_only else position
    return places


def _written_symbol(returned: Any, written: dict[str, Place]) -> Place | None:
    if returned.alias_info is None or not returned.alias_info.is_write:
        return None
    return next((written[s] for s in returned.alias_info.before_set if s in written), None)


def _find_out_form(func: OpOverload) -> OutForm | None:
    """The hand-written out= overload with the same parameters, or None.

    Generated ones compute into a temporary and copy, so they are no better than doing that here.
    """
    packet = func._overloadpacket
    if func._schema.name not in _EXACT_OUT_FORMS and torch.Tag.pointwise not in func.tags:
        return None
    for name in _overload_names(packet):
        candidate = getattr(packet, name)
        form = _as_out_form(func._schema, candidate)
        if form is not None and torch.Tag.generated not in candidate.tags:
            return form
    return None


def _overload_names(packet: Any) -> list[str]:
    return list(packet.overloads())


def _as_out_form(schema: torch.FunctionSchema, candidate: OpOverload) -> OutForm | None:
    theirs = candidate._schema.arguments
    outputs = [each.name for each in theirs if each.alias_info and each.alias_info.is_write]
    if len(outputs) != len(schema.returns) or any(str(r.type) != "Tensor" for r in schema.returns):
        return None
    inputs = [each for each in theirs if each.name not in outputs]
    ours = [each for each in schema.arguments if not each.kwarg_only]
    positional = [each for each in inputs if not each.kwarg_only]
    if [(a.name, str(a.type)) for a in ours] != [(a.name, str(a.type)) for a in positional]:
        return None
    keywords = frozenset(each.name for each in inputs if each.kwarg_only)
    dropped = {each.name for each in schema.arguments if each.kwarg_only} ^ keywords
    if not dropped <= _FACTORY_KEYWORDS:
        return None
    return OutForm(getattr(candidate, "_op", candidate), tuple(outputs), keywords)
