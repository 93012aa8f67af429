"""Plans from JSON: every field is held to its type, and the plan can be checked as any other.

What is read may be anybody's file: it is never trusted, and each error is one line.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence, Set
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from graphcore.driver.kernel import Kernel, Parameter
from graphcore.driver.records import LaunchConfig
from graphcore.errors import CacheTypeError, ConfigurationError
from graphcore.plan.arguments import check_arguments, check_config
from graphcore.plan.integers import check_sizes
from graphcore.plan.records import (
    Allocate,
    Condition,
    Conditional,
    Deallocate,
    Embed,
    Join,
    Launch,
    Memcpy,
    Memset,
    PlanBuffer,
    PlanEvent,
    PlanNode,
    RecordEvent,
    View,
    WaitEvent,
    Work,
)
from graphcore.plan.serial import FORMAT, VERSION
from graphcore.plan.views import check_reach
from graphcore.resources.dtypes import find_dtype

if TYPE_CHECKING:
    from graphcore.plan.plan import GraphPlan

_log = logging.getLogger("graphcore")
_BODIES = {"if": (1, 2), "while": (1, 1), "switch": (1, 1 << 31)}


def from_json(text: str, kernels: Sequence[Kernel], plan_type: type[GraphPlan]) -> GraphPlan:
    """The plan that :func:`graphcore.plan.serial.to_json` wrote.

    Raises:
        ConfigurationError: Not such a text, damaged, or of a version this library does not know;
            or ``kernels`` are none, or one has another signature than the saved one.
    """
    given = [*kernels] if isinstance(kernels, (Sequence, Set)) else [kernels]
    for kernel in given:
        if not isinstance(kernel, Kernel):
            raise ConfigurationError(
                f"kernels: expected graphcore.Kernel objects, got {type(kernel).__name__}"
            )
    try:
        data = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise _damaged(f"expected JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise _damaged(f"expected format {FORMAT!r}")
    if data.get("version") != VERSION or isinstance(data["version"], bool):
        raise _damaged(f"expected version {VERSION}, got {data.get('version')!r:.40}")
    try:
        reader = _Reader(_kernels(data, given), plan_type)
        for entry in _list(data, "plans"):
            reader.plans.append(reader.plan(entry))
        return reader.plans[_index(data, "plan", len(reader.plans))]
    except KeyError as error:
        raise _damaged(f"a field {error} is missing") from error
    except (CacheTypeError, RecursionError, ValueError, OverflowError) as error:
        raise _damaged(str(error)) from error


class _Reader:
    def __init__(self, kernels: list[Kernel], plan_type: type[GraphPlan]) -> None:
        self.plans: list[GraphPlan] = []
        self._kernels = kernels
        self._plan_type = plan_type

    def plan(self, entry: Any) -> GraphPlan:
        plan = self._plan_type(_text(entry, "name", empty=True))
        registry = plan._registry
        for item in _list(entry, "buffers"):
            buffer = _buffer(item)
            _unique(registry.buffers, buffer.name)[buffer.name] = buffer
        for name, external in _pairs(entry, "events"):
            _require(isinstance(external, bool), f"event {name!r}: external: expected a bool")
            _unique(registry.events, name)[name] = PlanEvent(name, external)
        for name, default in _pairs(entry, "conditions"):
            is_value = isinstance(default, int) and 0 <= default < 1 << 32
            _require(default is None or is_value, f"condition {name!r}: expected a default")
            _unique(registry.conditions, name)[name] = Condition(name, default)
        self._fill(plan, _list(entry, "nodes"))
        return plan

    def _fill(self, plan: GraphPlan, entries: list[Any]) -> None:
        """Appends the nodes as they were saved: a cycle, say, is for the validation to tell."""
        for index, entry in enumerate(entries):
            name = _text(entry, "name")
            found, awaited = _after(entry, len(entries))
            label = _text(entry, "label", empty=True) if "label" in entry else ""
            work = self._work(plan, entry, name)
            reads, writes = self._accesses(plan, entry, work)
            plan._nodes.append(PlanNode(index, name, work, reads, writes, found, label))
            plan._names[name] = index
            for missing in awaited:
                plan._awaited.setdefault(missing, []).append(index)
        plan._registry.revision += 1

    def _accesses(
        self, plan: GraphPlan, entry: Any, work: Work
    ) -> tuple[tuple[View, ...], tuple[View, ...]]:
        if isinstance(work, Embed):
            from graphcore.plan.accesses import memory_of

            return memory_of(work.plan, dict(work.bindings))
        if isinstance(work, Conditional):
            return (), ()
        reads, writes = (
            tuple(_view(plan, item) for item in _list(entry, field))
            for field in ("reads", "writes")
        )
        return reads, writes

    def _work(self, plan: GraphPlan, entry: Any, name: str) -> Work:
        kind = _text(entry, "work")
        registry = plan._registry
        if kind == "Launch":
            return self._launch(plan, entry)
        if kind == "Embed":
            inner = self.plans[_index(entry, "plan", len(self.plans))]
            plan._deepen(1 + inner._registry.height)
            registry.embed(inner, plan._depth)
            bindings = tuple((n, _view(plan, item)) for n, item in _pairs(entry, "bindings"))
            return Embed(inner, bindings)
        if kind == "Conditional":
            return self._conditional(plan, entry, name)
        if kind == "Join":
            return Join()
        if kind == "Memcpy":
            return Memcpy(_view(plan, entry["dst"]), _view(plan, entry["src"]))
        if kind == "Memset":
            return _memset(_view(plan, entry["dst"]), entry["value"])
        if kind in ("Allocate", "Deallocate"):
            buffer = _named(registry.buffers, entry, "buffer")
            return Allocate(buffer) if kind == "Allocate" else Deallocate(buffer)
        if kind in ("RecordEvent", "WaitEvent"):
            event = _named(registry.events, entry, "event")
            return RecordEvent(event) if kind == "RecordEvent" else WaitEvent(event)
        raise ConfigurationError(f"node {name!r}: unknown work {kind!r:.40}")

    def _launch(self, plan: GraphPlan, entry: Any) -> Launch:
        kernel = self._kernels[_index(entry, "kernel", len(self._kernels))]
        arguments = _list(entry, "arguments")
        _require(len(arguments) == len(kernel.parameters), f"arguments of {kernel.name!r}")
        values = [
            _argument(plan, parameter, item)
            for parameter, item in zip(kernel.parameters, arguments, strict=True)
        ]
        return Launch(kernel, _config(entry), check_arguments(kernel, values))

    def _conditional(self, plan: GraphPlan, entry: Any, name: str) -> Conditional:
        form, bodies = entry["form"], _list(entry, "bodies")
        least, most = _BODIES.get(form, (1, 0)) if isinstance(form, str) else (1, 0)
        _require(least <= len(bodies) <= most, f"node {name!r}: {form!r:.20} of {len(bodies)}")
        plan._deepen(1)
        made = []
        for number, nodes in enumerate(bodies):
            body = self._plan_type(f"{name}/body {number}", around=plan)
            _require(isinstance(nodes, list), "bodies: expected a list")
            self._fill(body, nodes)
            made.append(body)
        return Conditional(form, _named(plan._registry.conditions, entry, "condition"), tuple(made))


# ---- kernels --------------------------------------------------------------------------------


def _kernels(data: Any, given: Sequence[Kernel]) -> list[Kernel]:
    return [_kernel(entry, given) for entry in _list(data, "kernels")]


def _kernel(entry: Any, given: Sequence[Kernel]) -> Kernel:
    """The given kernel of the saved one's name and signature, else one made from its source."""
    name, source = _text(entry, "name"), _text(entry, "source", empty=True)
    pairs = _pairs(entry, "parameters")
    _require(all(isinstance(kind, str) for _, kind in pairs), "parameters: expected texts")
    parameters = tuple(Parameter(label, kind) for label, kind in pairs)
    options = _list(entry, "options")
    _require(all(isinstance(option, str) for option in options), "options: expected texts")
    named = [kernel for kernel in given if kernel.name == name]
    types = [parameter.type for parameter in parameters]
    fitting = [kernel for kernel in named if [p.type for p in kernel.parameters] == types]
    if named and not fitting:
        have = ", ".join(p.type for p in named[0].parameters)
        raise ConfigurationError(
            f"kernel {name!r} of kernels: expected the saved signature ({', '.join(types)}), got "
            f"({have})"
        )
    if fitting:
        found = next((kernel for kernel in fitting if kernel.source == source), fitting[0])
        if found.source != source:
            _log.info("plan: kernel %s: the given source differs from the saved one", name)
        return found
    if not source:
        raise ConfigurationError(f"kernel {name!r} has no source: give it in kernels=")
    return Kernel(name, parameters, source, None, tuple(options))


def _config(entry: Any) -> LaunchConfig:
    values = entry["config"]
    known = {field.name for field in fields(LaunchConfig)}
    _require(isinstance(values, dict) and set(values) == known, "config: expected a launch config")
    numbers = {"shared_bytes", *({"priority"} if values["priority"] is not None else ())}
    for name in numbers:
        check_sizes([values[name]], f"config.{name}", least=None)
    for name in ("cooperative", "programmatic"):
        _require(isinstance(values[name], bool), f"config.{name}: expected a bool")
    sizes: dict[str, Any] = {
        name: check_sizes(values[name], f"config.{name}") for name in ("grid", "block", "cluster")
    }
    return check_config(LaunchConfig(**{**values, **sizes}))


def _argument(plan: GraphPlan, parameter: Parameter, entry: Any) -> Any:
    _require(isinstance(entry, dict), "arguments: expected an object for each")
    if "view" in entry:
        return _view(plan, entry["view"])
    if "condition" in entry:
        return _named(plan._registry.conditions, entry, "condition")
    if parameter.is_pointer:
        return None
    data = bytes.fromhex(_text(entry, "bytes", empty=True))
    _require(len(data) == parameter.size, f"argument {parameter.name!r}: expected its bytes")
    return parameter.unpack(data)


# ---- parts of nodes -------------------------------------------------------------------------


def _buffer(entry: Any) -> PlanBuffer:
    name, dtype = _text(entry, "name"), find_dtype(_text(entry, "dtype"))
    shape = check_sizes(entry["shape"], f"buffer {name!r}.shape")
    strides = check_sizes(entry["strides"], f"buffer {name!r}.strides", least=None)
    _require(len(shape) == len(strides), f"buffer {name!r}: expected a stride for each axis")
    origin = entry["origin"]
    _require(origin in ("argument", "allocated"), f"buffer {name!r}: unknown origin")
    buffer = PlanBuffer(name, shape, dtype.name, dtype.itemsize, strides, origin)
    check_reach(buffer.whole, f"buffer {name!r}")
    return buffer


def _view(plan: GraphPlan, entry: Any) -> View:
    _require(isinstance(entry, list) and len(entry) == 5, "view: expected five fields")
    name, offset, shape, strides, dtype = entry
    buffer = plan._registry.buffers.get(name) if isinstance(name, str) else None
    if buffer is None:
        raise ConfigurationError(f"view: no buffer {name!r:.60}")
    _require(isinstance(dtype, str), "view: expected the name of an element type")
    found = find_dtype(dtype)
    (first,) = check_sizes([offset], "view.offset", least=None)
    sizes, steps = check_sizes(shape, "view.shape"), check_sizes(strides, "view", least=None)
    _require(len(sizes) == len(steps), "view: expected a stride for each axis")
    view = View(buffer, first, sizes, steps, found.name, found.itemsize)
    return check_reach(view, f"view of {name}")


def _memset(dst: View, value: Any) -> Memset:
    (bits,) = check_sizes([value], "memset value")
    _require(
        dst.itemsize in (1, 2, 4) and bits < 1 << (8 * dst.itemsize),
        "memset: expected the bits of one element of 1, 2 or 4 bytes",
    )
    return Memset(dst, bits)


def _after(entry: Any, count: int) -> tuple[tuple[int, ...] | None, list[str]]:
    """(indices, names that no node has) of a saved ``after``."""
    if "after" not in entry:
        return None, []
    items = _list(entry, "after")
    names = [item for item in items if isinstance(item, str)]
    found = check_sizes([item for item in items if not isinstance(item, str)], "after")
    _require(all(index < count for index in found), f"after: expected nodes below {count}")
    return found, names


# ---- fields ---------------------------------------------------------------------------------


def _text(entry: Any, field: str, *, empty: bool = False) -> str:
    _require(isinstance(entry, dict), f"{field}: expected an object around it")
    value = entry[field]
    if not isinstance(value, str) or not (value or empty):
        raise ConfigurationError(f"{field}: expected a text, got {value!r:.40}")
    return value


def _list(entry: Any, field: str) -> list[Any]:
    _require(isinstance(entry, dict), f"{field}: expected an object around it")
    value = entry[field]
    if not isinstance(value, list):
        raise ConfigurationError(f"{field}: expected a list, got {value!r:.40}")
    return value


def _pairs(entry: Any, field: str) -> list[tuple[str, Any]]:
    """Lists of (name, something)."""
    items = _list(entry, field)
    for item in items:
        fits = isinstance(item, list) and len(item) == 2 and isinstance(item[0], str)
        _require(fits, f"{field}: expected pairs of a name and a value")
    return [(item[0], item[1]) for item in items]


def _index(entry: Any, field: str, count: int) -> int:
    (number,) = check_sizes([entry[field]], field)
    _require(number < count, f"{field}: expected a number below {count}, got {number}")
    return number


def _named(known: dict[str, Any], entry: Any, field: str) -> Any:
    name = _text(entry, field)
    _require(name in known, f"{field}: the plan has no {name!r:.60}")
    return known[name]


def _unique(known: dict[str, Any], name: str) -> dict[str, Any]:
    _require(name not in known, f"{name!r:.60} is declared twice")
    return known


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ConfigurationError(what)


def _damaged(why: str) -> ConfigurationError:
    return ConfigurationError("plan: " + " ".join(why.split())[:400])
