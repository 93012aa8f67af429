"""Reading a pool's segments leaves the references to its id as they were."""

import ctypes
import sys

import pytest

from graphcore.interop.pool_snapshot import pool_snapshot
from graphcore.testing import run_isolated

PIECES = [{"address": 64, "total_size": 2}]


def losing(pool_id):
    """As torch does it: the references of the tuple are given back once too often."""
    for number in pool_id:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(number))
    return PIECES


@pytest.mark.parametrize("snapshot", [losing, lambda pool_id: PIECES], ids=["losing", "right"])
def test_the_numbers_of_an_id_keep_their_references(snapshot):
    pool_id = (int("5000"), int("70000"))
    before = [sys.getrefcount(number) for number in pool_id]
    for _ in range(5):
        assert pool_snapshot(snapshot, pool_id) == PIECES
    assert [sys.getrefcount(number) for number in pool_id] == before


def test_without_the_count_the_references_would_be_lost():
    pool_id = (int("5000"), int("70000"))
    held = [[number] * 10 for number in pool_id]
    before = [sys.getrefcount(number) for number in pool_id]
    losing(pool_id)
    assert [sys.getrefcount(number) for number in pool_id] == [count - 1 for count in before]
    for number in pool_id:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
    assert held


@pytest.mark.gpu
def test_a_thousand_pools_are_read_without_a_crash():
    done = run_isolated(
        """
import torch
from graphcore.interop.torch import MemoryPool
torch.zeros(1, device="cuda")
for _ in range(1000):
    pool = MemoryPool(0)
    assert pool.segments() == []
    [str(number) + "x" for number in range(300, 700)]  # uses what may have been freed
print("alive")
""",
        timeout=120,
    )
    assert done.survived, done.stderr
    assert "alive" in done.stdout
