"""One number for plain values: 64 bits, the same in every process, never 0."""

from __future__ import annotations

import hashlib


def number_of(values: object) -> int:
    """A number of what ``values`` (numbers, text, tuples of them) say; 0 stands for "none"."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1
