"""Capturing many buckets at once: order, progress, what stands after a failure."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import torch
from helpers.caching import Steps, add_up, check
from helpers.tensors import cuda_driver, filled

from graphcore import CacheTypeError, CapacityError, ConfigurationError, GraphCache
from graphcore.driver import Driver


def test_the_largest_is_captured_first_and_each_once(graphcore_driver: Driver) -> None:
    cache, steps = GraphCache(driver=graphcore_driver), Steps(graphcore_driver)
    order: list[Any] = []

    def step(key: int) -> torch.Tensor:
        order.append(key)
        return steps.of(key)

    made = cache.capture_all([2, 8, 4, 8], step, progress=False, warmup=0)
    assert order == [8, 4, 2]
    assert list(made) == [2, 8, 4]
    for key, executable in made.items():
        check(executable, 2.0 * key + 1)
    again = cache.capture_all([4, 16], step, progress=False, warmup=0)
    assert again[4] is made[4]
    assert order == [8, 4, 2, 16]
    add_up(cache)


@pytest.mark.parametrize(
    ("keys", "size", "order"),
    [
        ([("a", 2, 8), ("a", 4, 2), ("b", 1, 32)], None, [("b", 1, 32), ("a", 2, 8), ("a", 4, 2)]),
        (["b", "aaa", "cc"], len, ["aaa", "cc", "b"]),
    ],
    ids=["the product of a tuple", "a function of the key"],
)
def test_what_is_large_is_the_keys_numbers_or_what_size_says(
    graphcore_driver: Driver, keys: list[Any], size: Any, order: list[Any]
) -> None:
    cache = GraphCache(driver=graphcore_driver)
    cache.capture_all(keys, lambda _: None, progress=False, size=size, warmup=0)
    assert cache.keys() == order


def test_keys_without_an_order_are_refused_before_anything_is_captured(
    graphcore_driver: Driver,
) -> None:
    cache, steps = GraphCache(driver=graphcore_driver), Steps(graphcore_driver)
    with pytest.raises(ConfigurationError, match="pass size="):
        cache.capture_all(["a", "b"], steps.of, progress=False)
    with pytest.raises(CacheTypeError, match="key: expected a value that cannot change"):
        cache.capture_all([1, [2]], steps.of, progress=False)  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="fn: expected a callable"):
        cache.capture_all([1], 3, progress=False)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="family: expected none in capture_all"):
        cache.capture_all([1, 2], steps.of, progress=False, family="decode")
    with pytest.raises(ConfigurationError, match=r"got 1\.0, which Python takes for equal to 1;"):
        cache.capture_all([1, 2, 1.0], steps.of, progress=False)
    assert (len(cache), steps.runs) == (0, 0)


def test_a_bar_shows_how_far_it_is_and_the_memory(
    graphcore_driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm")
    cache, steps = GraphCache(10**9, driver=graphcore_driver), Steps(graphcore_driver)
    cache.capture_all([1, 2, 3], steps.of)
    shown = capsys.readouterr().err
    assert "capturing graphs" in shown
    assert "3/3" in shown
    assert "iB of 953.7 MiB" in shown


@pytest.mark.parametrize("progress", [True, False])
def test_without_tqdm_the_log_says_how_far_it_is(
    graphcore_driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    progress: bool,
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    cache, steps = GraphCache(driver=graphcore_driver), Steps(graphcore_driver)
    with caplog.at_level(logging.INFO, logger="graphcore"):
        cache.capture_all([1, 2], steps.of, progress=progress)
    lines = [line for line in caplog.messages if line.startswith("capturing graphs")]
    assert [line.partition(",")[0] for line in lines] == (
        ["capturing graphs: 1 of 2", "capturing graphs: 2 of 2"] if progress else []
    )


def test_a_failure_stops_and_says_what_stands(graphcore_driver: Driver) -> None:
    cache, steps = GraphCache(driver=graphcore_driver), Steps(graphcore_driver)

    def step(key: int) -> torch.Tensor:
        if key == 2:
            raise ZeroDivisionError
        return steps.of(key)

    with pytest.raises(ZeroDivisionError) as caught:
        cache.capture_all([1, 2, 3, 4], step, progress=False)
    assert "capture_all: key 2 failed, 2 of 4 stand: 4, 3" in caught.value.__notes__
    assert cache.keys() == [4, 3]
    check(cache.get_or_capture(4, steps(4)), 9.0)
    cache.get_or_capture(9, steps(9))
    assert len(cache) == 3
    add_up(cache)


def test_buckets_that_do_not_fit_together_do_not_push_each_other_out(
    graphcore_driver: Driver,
) -> None:
    cache, steps = GraphCache(max_entries=3, driver=graphcore_driver), Steps(graphcore_driver)
    cache.get_or_capture(100, steps(100))
    with pytest.raises(CapacityError) as caught:
        cache.capture_all([1, 2, 3, 4, 5], steps.of, progress=False)
    assert "capture_all: key 2 failed, 3 of 5 stand: 5, 4, 3" in caught.value.__notes__
    assert cache.keys() == [5, 4, 3]
    cache.get_or_capture(6, steps(6))
    assert cache.keys() == [4, 3, 6], "afterwards they are entries like any other"
    add_up(cache)


def test_many_new_buckets_are_no_churn(graphcore_driver: Driver) -> None:
    cache, steps = GraphCache(driver=graphcore_driver), Steps(graphcore_driver)
    cache.capture_all(list(range(40)), steps.of, progress=False, warmup=0)
    assert cache.warnings == ()


@pytest.mark.gpu
def test_64_buckets_in_a_shared_pool_take_little_more_than_the_largest() -> None:
    driver = cuda_driver()
    x = filled(driver, 1.0, 64, 1 << 16)

    def step(rows: int) -> torch.Tensor:
        return ((x[:rows] + 1) * 2).sum(1)

    keys = list(range(1, 65))
    shared = GraphCache(driver=driver, share_pool=True)
    shared.capture_all(keys, step, progress=False, warmup=1)
    one = GraphCache(driver=driver)
    one.get_or_capture(64, lambda: step(64), warmup=1)
    private = GraphCache(driver=driver)
    private.capture_all(keys, step, progress=False, warmup=1)
    assert shared.bytes < 2 * one.bytes
    assert shared.bytes * 4 < private.bytes
    for key in (1, 33, 64):
        executable = shared.get(key)
        assert executable is not None
        check(executable, 4.0 * (1 << 16))
