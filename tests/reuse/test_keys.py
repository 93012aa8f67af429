"""What a key of a cache may be, and how keys are made of tensors."""

from __future__ import annotations

import dataclasses
import enum
import fractions
import functools
import math
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from helpers.tensors import filled

from graphcore import CacheTypeError, ConfigurationError
from graphcore.driver import Driver
from graphcore.reuse import TensorKey, check_key, key_of
from graphcore.reuse.keys import refuse_addresses, same_kinds, size_of


class Kind(enum.Enum):
    PREFILL = 1


class Bucket(NamedTuple):
    batch: int
    flags: Any = ()


@dataclasses.dataclass(frozen=True)
class Frozen:
    batch: int
    extra: Any = None


@dataclasses.dataclass(unsafe_hash=True)
class Changing:
    batch: int


@dataclasses.dataclass(frozen=True, eq=False)
class ByIdentity:
    batch: int


class Holder:
    """Compares by content, and holds a tensor."""

    def __init__(self) -> None:
        self.weight = torch.zeros(2)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Holder)

    def __hash__(self) -> int:
        return 7


class Unsure:
    def __eq__(self, other: object) -> bool:
        raise ValueError("compares elements")

    def __hash__(self) -> int:
        return 7


GOOD = [
    1,
    "decode",
    b"x",
    None,
    True,
    2.5,
    (1, ("a", None), frozenset({1, 2})),
    Kind.PREFILL,
    Bucket(4, ("greedy",)),
    Frozen(4, (1, 2)),
    torch.float16,
    torch.Size([2, 3]),
    torch.device("cpu"),
    numpy.dtype("float32"),
    numpy.int64(3),
    fractions.Fraction(1, 3),
    int,
    TensorKey((1,), "float32", (1,), "cuda:0"),
]


@pytest.mark.parametrize("key", GOOD, ids=repr)
def test_values_that_compare_by_content_are_keys(key: Any) -> None:
    assert check_key(key) is key


BAD: list[tuple[Any, type[Exception], str]] = [
    ([1], CacheTypeError, r"key: expected a value that cannot change, got list \[1\]"),
    ((1, {"a": 1}), CacheTypeError, r"key\[1\]: expected a value that cannot change, got dict"),
    ((1, (2, {3})), CacheTypeError, r"key\[1\]\[1\]: .* got set"),
    (Bucket(1, [2]), CacheTypeError, r"key\.flags: .* got list"),
    (Frozen(1, bytearray(b"x")), CacheTypeError, r"key\.extra: .* got bytearray"),
    (Changing(1), CacheTypeError, r"key: .* got the dataclass Changing, which is not frozen"),
    ((ByIdentity(1),), CacheTypeError, r"key\[0\]: .* got ByIdentity, which compares by identity"),
    (torch.zeros(2), CacheTypeError, r"key: expected no tensor, got Tensor.*key_of\(tensor\)"),
    ((1, numpy.zeros(2)), CacheTypeError, r"key\[1\]: expected no tensor, got ndarray"),
    (Holder(), CacheTypeError, r"key\.weight: expected no tensor inside Holder, got Tensor"),
    (object(), CacheTypeError, r"key: expected a value that compares by content, got object"),
    (lambda: 1, CacheTypeError, r"key: .* got function, which compares by identity"),
    (functools.partial(int), CacheTypeError, r"key: .* got partial, which compares by identity"),
    ("x".upper, CacheTypeError, r"key: .* got builtin_function_or_method"),
    (torch.nn.Linear(1, 1), CacheTypeError, r"key: .* got Linear, which compares by identity"),
    ((1, math.nan), ConfigurationError, r"key\[1\]: expected a value that equals itself, got nan"),
    (Frozen(1, math.nan), ConfigurationError, r"key\.extra: .* it is never found again"),
    (numpy.float32("nan"), ConfigurationError, r"key: expected a value that equals itself"),
    (Unsure(), CacheTypeError, r"key: expected a value that can be compared, got Unsure: compares"),
]


@pytest.mark.parametrize(("key", "error", "match"), BAD, ids=[type(bad[0]).__name__ for bad in BAD])
def test_what_changes_or_is_never_found_again_is_refused_with_its_path(
    key: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        check_key(key)


# ---- keys of tensors ----------------------------------------------------------------------------


def test_a_key_of_tensors_has_all_that_a_graph_depends_on_but_the_address(
    graphcore_driver: Driver,
) -> None:
    x = filled(graphcore_driver, 1.0, 4, 6)
    device = "cpu:0" if graphcore_driver.is_emulated else f"cuda:{graphcore_driver.device}"
    assert key_of(x) == (TensorKey((4, 6), "float32", (6, 1), device),)
    assert key_of(x) == key_of(x.clone()), "another address is the same key"
    others = [x[:2], x.half(), x.t(), x[:, ::2], x.view(24)]
    assert len({key_of(x), *map(key_of, others)}) == 6
    assert key_of(x, x[0]) == key_of(x) + key_of(x[0])
    assert check_key(key_of(x, x))


def test_what_is_no_tensor_has_no_key() -> None:
    with pytest.raises(CacheTypeError, match=r"tensors\[1\]: expected a torch"):
        key_of(torch.zeros(1), 3)


# ---- addresses ----------------------------------------------------------------------------------

LIVE = 0x7F0000001000


@pytest.mark.parametrize(
    ("key", "path"),
    [
        (LIVE, "key"),
        (("decode", 4, LIVE + 8), r"key\[2\]"),
        (Bucket(1, (LIVE,)), r"key\.flags\[0\]"),
        (Frozen(LIVE), r"key\.batch"),
        (numpy.int64(LIVE), "key"),
    ],
    ids=repr,
)
def test_an_address_in_a_key_is_refused_by_its_path(key: Any, path: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{path}: expected no address, got 0x7f0000001"):
        refuse_addresses(key, lambda number: LIVE <= number < LIVE + 64)


def test_large_numbers_that_are_no_addresses_are_fine_and_small_ones_are_not_asked() -> None:
    asked: list[int] = []

    def is_memory(number: int) -> bool:
        asked.append(number)
        return False

    refuse_addresses((1, 4096, True, (1 << 40), "x", frozenset({2}), int), is_memory)
    assert asked == [1 << 40]


# ---- equal, and not the same --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1, True),
        (1, numpy.int64(1), True),
        (1, True, False),
        (1, 1.0, False),
        (0, False, False),
        ((1, ("a", 0)), (1, ("a", False)), False),
        ((1, ("a", 0)), (1, ("a", 0)), True),
        ("a", "a", True),
        (0.0, -0.0, False),
        ((1, -0.0), (1, -0.0), True),
        (numpy.float32(-0.0), 0.0, False),
        (frozenset({1, 2}), frozenset({2, True}), False),
        (frozenset({1, 2}), frozenset({2, 1}), True),
        (Frozen(1), Frozen(True), False),
        (Frozen(1), Frozen(1.0), False),
        (Frozen((0, 1)), Frozen((0, 1)), True),
        (Frozen, Frozen, True),
    ],
    ids=repr,
)
def test_equal_numbers_of_another_kind_are_told_apart(one: Any, other: Any, same: bool) -> None:
    assert one == other
    assert same_kinds(one, other) is same


@pytest.mark.parametrize(
    ("key", "size"),
    [
        (8, 8.0),
        (2.5, 2.5),
        (("decode", 4, 128), 512.0),
        ((True, 4), 4.0),
        ((TensorKey((2, 3), "float32", (3, 1), "cuda:0"), 5), 30.0),
    ],
    ids=repr,
)
def test_the_size_of_a_bucket_is_the_product_of_its_numbers(key: Any, size: float) -> None:
    assert size_of(key) == size


@pytest.mark.parametrize("key", ["decode", (), ("a", None), True], ids=repr)
def test_a_key_without_a_number_has_no_size(key: Any) -> None:
    with pytest.raises(ConfigurationError, match="pass size=, a function of the key"):
        size_of(key)
