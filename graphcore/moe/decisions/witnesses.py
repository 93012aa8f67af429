"""Witnesses: the objects that owned a graph's resources, kept weakly, to be recognised later.

A new object at the old address is not the old object: identity is compared, not content.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class OwnersMatch(Enum):
    """How the owners of now stand to those of then."""

    SAME = "the same owners"
    COUNT = "another number of owners"
    EXPIRED = "an owner is gone"
    DIFFERENT = "another owner"
    NONE = "no owner is known"


@dataclass(frozen=True, slots=True)
class Witnesses:
    """The owners at a capture, in order."""

    references: tuple[weakref.ref[object], ...]

    @classmethod
    def of(cls, owners: Iterable[object]) -> Witnesses | None:
        """Those of ``owners``; None where one cannot be referred to weakly, or memory is out."""
        try:
            return cls(tuple(weakref.ref(owner) for owner in owners))
        except (TypeError, MemoryError):
            return None

    @property
    def are_alive(self) -> bool:
        """Whether there are any, and every one is still there."""
        return bool(self.references) and all(each() is not None for each in self.references)

    def compare(self, owners: Iterable[object]) -> OwnersMatch:
        """How ``owners``, in order, stand to these."""
        now = tuple(owners)
        then = tuple(reference() for reference in self.references)
        if not then:
            return OwnersMatch.NONE
        if any(owner is None for owner in then):
            return OwnersMatch.EXPIRED
        if len(now) != len(then):
            return OwnersMatch.COUNT
        same = all(old is new for old, new in zip(then, now, strict=True))
        return OwnersMatch.SAME if same else OwnersMatch.DIFFERENT
