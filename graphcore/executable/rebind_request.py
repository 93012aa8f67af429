"""What a caller of ``GraphExec.rebind`` means: which memory goes, which takes its place.

An old buffer is taken as it was when the graph was made, where the graph keeps it: that is what the
nodes point at, whatever the tensor has become since. Everything is checked before anything happens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from graphcore.driver import Driver
from graphcore.driver.records import MemoryKind
from graphcore.errors import CacheTypeError, ConfigurationError
from graphcore.executable.placement import check_alignment, check_like, placed
from graphcore.resources.lifetime import Owner, OwnerSet
from graphcore.resources.spans import Span
from graphcore.resources.tensors import TensorRef, describe, is_tensor


@dataclass(frozen=True, slots=True)
class Exchange:
    """One buffer for another.

    Args:
        old: The memory that goes, under the name that outcome and errors use.
        new: What the caller gave for it.
        by: How far a pointer moves, in bytes.
        owns: Whether ``new`` can be kept alive (not a bare address).
    """

    old: Span
    new: Any
    by: int
    owns: bool


def checked_names(names: Any) -> Mapping[str, Any]:
    """``names``, none for None; ConfigurationError for anything but a mapping."""
    if names is None:
        return {}
    if not isinstance(names, Mapping):
        raise ConfigurationError(
            f"names: expected a mapping of name -> tensor, got {type(names).__name__}"
        )
    return names


def exchanges(
    driver: Driver,
    owners: OwnerSet,
    given: Mapping[str, Any] | Iterable[tuple[Any, Any]],
    names: Mapping[str, Any],
) -> list[Exchange]:
    """The exchanges that a call of ``GraphExec.rebind`` asks for; raises as that does."""
    pairs = _pairs(owners, given, names)
    if not pairs:
        raise ConfigurationError("rebind: expected at least one buffer to exchange, got none")
    found = [_exchange(driver, *pair) for pair in pairs]
    _refuse_overlap([each.old for each in found], "are both to be replaced")
    targets = [Span(each.old.name, each.old.start + each.by, each.old.size, None) for each in found]
    _refuse_overlap(targets, "would both be the new memory of one buffer and another")
    return found


def rivals(owners: OwnerSet, names: Mapping[str, Any], wanted: Sequence[Exchange]) -> list[Span]:
    """Other memory that is known by name: what the graph keeps, and what the caller names."""
    spans = [
        Span.of(owner.label or "an owner", owner.record.tensor)
        for owner in owners
        if owner.record is not None
    ]
    spans += [Span.of(str(name), item) for name, item in names.items()]
    olds = [each.old for each in wanted]
    return [span for span in spans if span.size and not any(old.covers(span) for old in olds)]


def _pairs(
    owners: OwnerSet, given: Any, names: Mapping[str, Any]
) -> list[tuple[str, Any, TensorRef | None, Any]]:
    """(name, old, the old as the graph was made with it, new) of each pair."""
    if isinstance(given, Mapping):
        return [(str(name), *_named(owners, name, names), new) for name, new in given.items()]
    if isinstance(given, (str, bytes)) or is_tensor(given) or not isinstance(given, Iterable):
        raise CacheTypeError(
            "rebind: expected a list of (old, new) or a mapping of name -> new, got "
            f"{type(given).__name__}"
        )
    pairs = []
    for index, pair in enumerate(given):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise CacheTypeError(f"rebind: pair {index}: expected (old, new), got {pair!r:.60}")
        old, new = pair
        owner = next((each for each in owners if each.object is old), None)
        label = owner.label if owner is not None else ""
        given_as = next((str(name) for name, each in names.items() if each is old), "")
        pairs.append((given_as or label or f"old {index}", old, _record_of(owner), new))
    return pairs


def _named(owners: OwnerSet, name: Any, names: Mapping[str, Any]) -> tuple[Any, TensorRef | None]:
    if name in names:
        old = names[name]
        return old, _record_of(next((each for each in owners if each.object is old), None))
    found = [each for each in owners if each.label == name and each.record is not None]
    if len(found) == 1:
        return found[0].object, _record_of(found[0])
    known = sorted({each.label for each in owners if each.record is not None and each.label})
    known = [*map(str, names), *known]
    if found:
        raise ConfigurationError(
            f"rebind: {name!r}: expected a name of one buffer, got one of {len(found)}; give "
            "(old, new) pairs, or names="
        )
    raise ConfigurationError(
        f"rebind: {name!r}: expected a name that was given at capture or in names= "
        f"({', '.join(known[:12]) or 'there is none'})"
    )


def _record_of(owner: Owner | None) -> TensorRef | None:
    return None if owner is None or owner.record is None else owner.record.tensor


def _exchange(driver: Driver, name: str, old: Any, record: TensorRef | None, new: Any) -> Exchange:
    if _is_range(old) and _is_range(new):
        return _raw_exchange(driver, name, old, new)
    if _is_range(old) or (record is None and not is_tensor(old)):
        raise CacheTypeError(
            f"{name}: expected a tensor for a tensor, or (address, bytes) for (address, bytes), "
            f"got {type(new).__name__} for {type(old).__name__}"
        )
    was = describe(old, name=name) if record is None else record
    # a copy's host side stays on the host
    on_host = was.device_kind == "cpu" and not driver.is_emulated
    memory = MemoryKind.HOST if on_host else MemoryKind.DEVICE
    now = placed(new, driver, f"{name}: new", memory)
    if record is None:
        placed(old, driver, f"{name}: old", memory)
    if on_host and driver.allocation_of(now.address) is None:
        raise ConfigurationError(f"{name}: new: expected pinned host memory, got pageable memory")
    if was.address == now.address:
        raise ConfigurationError(f"{name}: expected other memory, got the old buffer as the new")
    check_like(was, now, f"{name}: new")
    span = Span.of(name, was)
    if not span.size:
        raise ConfigurationError(f"{name}: expected a buffer with memory, got one without elements")
    return Exchange(span, new, now.address - was.address, owns=not isinstance(new, TensorRef))


def _raw_exchange(
    driver: Driver, name: str, old: tuple[int, int], new: tuple[int, int]
) -> Exchange:
    span = Span.of(name, old)
    if not span.size:
        raise ConfigurationError(f"{name}: expected a range with bytes, got {old}")
    if new[1] < old[1]:
        raise ConfigurationError(f"{name}: new: expected at least {old[1]} bytes, got {new[1]}")
    if new[0] == old[0]:
        raise ConfigurationError(f"{name}: expected other memory, got the old range as the new")
    check_alignment(old[0], new[0], f"{name}: new")
    there = driver.allocation_of(new[0])
    if there is None or new[0] + old[1] > there.base + there.size:
        raise ConfigurationError(
            f"{name}: new: expected memory that driver {driver.name}:{driver.device} knows, got "
            f"{new[0]:#x} with {new[1]} bytes"
        )
    return Exchange(span, new, new[0] - old[0], owns=False)


def _is_range(item: Any) -> bool:
    return (
        isinstance(item, tuple)
        and len(item) == 2
        and all(isinstance(part, int) and not isinstance(part, bool) for part in item)
    )


def _refuse_overlap(spans: list[Span], what: str) -> None:
    ordered = sorted(spans, key=lambda span: span.start)
    for before, after in pairwise(ordered):
        if before.overlaps(after):
            raise ConfigurationError(
                f"rebind: {before.name} and {after.name} overlap and {what}; which is meant cannot "
                "be told"
            )
