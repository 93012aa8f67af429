"""The kernels of ``route_plan.cu`` in NumPy: what the emulated driver runs."""

from __future__ import annotations

from typing import Any

from graphcore.driver.kernel import Pointer
from graphcore.driver.records import LaunchConfig
from graphcore_kernels.route_layout import (
    EPOCH_STEPS,
    MOST_FREQUENCY,
    RouteStatus,
    output_shapes,
    table_shapes,
)

_FORGOTTEN_EPOCHS = 32
# the weights' element types, by their number in the source; bfloat16 is seen as its 16 bits
_WEIGHT_TYPES = {1: "float32", 2: "float16", 3: "uint16"}
_BFLOAT16 = 3

Arrays = dict[str, Any]


class _RefusedError(Exception):
    """The step has no plan."""

    def __init__(self, status: RouteStatus, detail: int = -1) -> None:
        super().__init__(status)
        self.status, self.detail = status, detail


def run(_config: LaunchConfig, ids: Pointer, weights: Pointer, *rest: Any) -> None:
    """Plans one step; ``rest`` is the tables, the outputs and the sizes, as in the source."""
    *pointers, routes, top_k, experts, slots, by_frequency, weight_type, clock_bound, step_bound = (
        rest
    )
    tables = _arrays(table_shapes(experts, slots), pointers)
    out = _arrays(output_shapes(experts, routes // top_k, top_k), pointers[len(tables) :])
    chosen = ids.array(routes)
    try:
        _check(chosen, tables)
        state = _committed(tables, clock_bound, step_bound)
        unique, slot_of, misses = _assign(chosen, state, tables["pinned"], bool(by_frequency))
    except _RefusedError as refused:
        _refuse(tables, out, refused)
        return
    _write_rows(chosen, slot_of, out, top_k)
    if weight_type:
        out["scale"][:] = _as_float32(weights, routes, weight_type)[out["scatter"]]
    _store(tables, state, unique, slot_of, misses, routes)
    out["report"][:] = RouteStatus.OK, len(unique), len(misses), -1


def _arrays(shapes: Any, pointers: Any) -> Arrays:
    return {
        name: pointer.array(shape)
        for (name, (_, shape)), pointer in zip(shapes.items(), pointers, strict=False)
    }


def _as_float32(weights: Pointer, routes: int, weight_type: int) -> Any:
    import numpy

    values = Pointer(weights.address, _WEIGHT_TYPES[weight_type]).array(routes)
    if weight_type == _BFLOAT16:
        return (values.astype(numpy.uint32) << 16).view(numpy.float32)
    return values.astype(numpy.float32)


# ---- what is refused ----------------------------------------------------------------------------


def _check(ids: Any, tables: Arrays) -> None:
    experts, slots = len(tables["slot_for_expert"]), len(tables["expert_for_slot"])
    needed = min(len(ids), experts)
    if not tables["is_open"][0]:
        raise _RefusedError(RouteStatus.CLOSED)
    if needed > slots:
        raise _RefusedError(RouteStatus.TOO_MANY_ROUTES, needed)
    bad = (ids < 0) | (ids >= experts)
    if bad.any():
        raise _RefusedError(RouteStatus.INVALID_ROUTE, int(bad.argmax()))
    forth, back = tables["slot_for_expert"], tables["expert_for_slot"]
    if not (_is_inverse(forth, back) and _is_inverse(back, forth) and _pending_agrees(tables)):
        raise _RefusedError(RouteStatus.INVALID_STATE)


def _is_inverse(table: Any, other: Any) -> bool:
    import numpy

    if ((table < -1) | (table >= len(other))).any():
        return False
    held = numpy.flatnonzero(table >= 0)
    return bool((other[table[held]] == held).all())


def _pending_agrees(tables: Arrays) -> bool:
    import numpy

    is_pending, unique, routes, misses = tables["pending"].tolist()
    if is_pending == 0:
        return True
    if is_pending != 1 or not 0 <= unique <= len(tables["expert_for_slot"]) or routes < unique:
        return False
    chosen, places = tables["pending_expert"][:unique], tables["pending_slot"][:unique]
    for values, table in ((chosen, "slot_for_expert"), (places, "expert_for_slot")):
        if ((values < 0) | (values >= len(tables[table]))).any():
            return False
        if len(numpy.unique(values)) != unique:
            return False
    now = tables["slot_for_expert"][chosen]
    return bool(((now == -1) | (now == places)).all()) and int((now == -1).sum()) == misses


# ---- the state ----------------------------------------------------------------------------------


def _effective(state: Arrays) -> Any:
    import numpy

    passed = state["step"][0] // EPOCH_STEPS - state["frequency_epoch"].astype(numpy.int64)
    counts = state["frequency"] >> numpy.clip(passed, 0, _FORGOTTEN_EPOCHS - 1)
    return numpy.where((passed >= 0) & (passed < _FORGOTTEN_EPOCHS), counts, 0)


def _committed(tables: Arrays, clock_bound: int, step_bound: int) -> Arrays:
    """A copy of the tables in which what is pending holds."""
    import numpy

    state = {name: table.copy() for name, table in tables.items()}
    empty = state["expert_for_slot"] < 0
    for name in ("last_used", "frequency", "frequency_epoch"):
        state[name][empty] = 0
    is_pending, unique, routes, _ = state["pending"].tolist()
    if not is_pending:
        return state
    _refresh(state, routes, clock_bound, step_bound)
    chosen, places = state["pending_expert"][:unique], state["pending_slot"][:unique]
    is_miss = state["slot_for_expert"][chosen] != places
    counts = numpy.where(is_miss, 0, _effective(state)[places])
    old = state["expert_for_slot"][places[is_miss]]
    state["slot_for_expert"][old[old >= 0]] = -1
    state["slot_for_expert"][chosen] = places
    state["expert_for_slot"][places] = chosen
    state["frequency"][places] = counts + (counts < MOST_FREQUENCY)
    state["frequency_epoch"][places] = state["step"][0] // EPOCH_STEPS
    state["last_used"][places] = state["clock"][0] + 1 + numpy.arange(unique)
    state["clock"] += routes
    state["step"] += 1
    return state


def _refresh(state: Arrays, routes: int, clock_bound: int, step_bound: int) -> None:
    import numpy

    if state["step"][0] >= step_bound:
        state["frequency"][:] = _effective(state)
        state["frequency_epoch"][:] = 0
        state["step"] %= EPOCH_STEPS
    if state["clock"][0] > clock_bound - routes:
        held = state["expert_for_slot"] >= 0
        ages = numpy.sort(state["last_used"][held])
        state["last_used"][held] = 1 + numpy.searchsorted(ages, state["last_used"][held])
        state["clock"][:] = len(held)


def _assign(ids: Any, state: Arrays, pinned: Any, by_frequency: bool) -> tuple[Any, Any, Any]:
    """The unique experts in the order of their first routes, all experts' slots, the misses."""
    import numpy

    found, first = numpy.unique(ids, return_index=True)
    unique = found[numpy.argsort(first)].astype(numpy.int64)
    slot_of = numpy.full(len(pinned), -1, numpy.int32)
    slot_of[unique] = state["slot_for_expert"][unique]
    misses = unique[slot_of[unique] < 0]
    held = state["expert_for_slot"]
    is_free = held < 0
    is_free[~is_free] = ~numpy.isin(held[~is_free], unique) & (pinned[held[~is_free]] == 0)
    free = numpy.flatnonzero(is_free)
    if len(misses) > len(free):
        raise _RefusedError(RouteStatus.TOO_MANY_ROUTES, len(misses))
    counts = _effective(state)[free] if by_frequency else numpy.zeros(len(free))
    order = numpy.lexsort((free, state["last_used"][free], counts))
    slot_of[misses] = free[order[: len(misses)]]
    return unique, slot_of, misses


# ---- what is written ----------------------------------------------------------------------------


def _write_rows(ids: Any, slot_of: Any, out: Arrays, top_k: int) -> None:
    import numpy

    order = numpy.argsort(ids, kind="stable")
    out["scatter"][:] = order
    out["gather"][:] = order // top_k
    counts = numpy.bincount(ids.astype(numpy.int64), minlength=len(slot_of))
    out["offsets"][0] = 0
    out["offsets"][1:] = numpy.cumsum(counts)
    out["slots"][:] = slot_of
    out["route_slots"].reshape(-1)[:] = slot_of[ids]


def _store(
    tables: Arrays, state: Arrays, unique: Any, slot_of: Any, misses: Any, routes: int
) -> None:
    state["pending"][:] = 1, len(unique), routes, len(misses)
    state["pending_expert"][: len(unique)] = unique
    state["pending_slot"][: len(unique)] = slot_of[unique]
    state["miss_expert"][: len(misses)] = misses
    state["miss_slot"][: len(misses)] = slot_of[misses]
    state["miss_count"][0] = len(misses)
    state["totals"] += 1, routes, len(unique) - len(misses), len(misses)
    for name, table in tables.items():
        table[:] = state[name]


def _refuse(tables: Arrays, out: Arrays, refused: _RefusedError) -> None:
    for name in ("route_slots", "slots", "gather", "scatter"):
        out[name][...] = -1
    out["offsets"][:] = 0
    out["scale"][:] = 0
    out["report"][:] = refused.status, 0, 0, refused.detail
    tables["miss_count"][0] = 0
    fault = tables["fault"]
    if fault[0] == RouteStatus.OK:
        fault[:2] = refused.status, refused.detail
    fault[2] += fault[2] < MOST_FREQUENCY
