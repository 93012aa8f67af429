"""What buckets say they take of memory: every part, each byte once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.decode_models import device_of, make_model, make_prompt

from graphcore.decode import DecodeBuckets, bucket_memory
from graphcore.driver import Driver, Stream


def buckets_on(driver: Driver, **options: Any) -> DecodeBuckets:
    model = make_model(device=device_of(driver))
    sizes = {"max_seq_lens": [12, 32], "batch_sizes": [1, 4], "progress": False}
    return DecodeBuckets(model, **{**sizes, **options}, driver=driver)


def prompt_for(buckets: DecodeBuckets, tokens: int = 5) -> torch.Tensor:
    return make_prompt(tokens, device=str(buckets.cache.device))


def test_the_report_names_every_part_and_each_byte_once(graphcore_driver: Driver) -> None:
    with buckets_on(graphcore_driver) as buckets:
        report = buckets.memory_report()
        assert report.total_bytes == sum(report.parts.values())
        steps = sum(each.step_bytes for each in report.buckets)
        assert report.parts["static tensors"] == report.shared_bytes + steps
        # logits of the largest bucket, the cache's position, what says where pads are
        cache, largest = buckets.cache, buckets.runner(buckets.buckets[-1])
        others = [largest.logits, cache.position, *cache.padding.named_tensors().values()]
        assert report.shared_bytes == sum(each.untyped_storage().nbytes() for each in others)
        every = sum(buckets.runner(each).logits.nbytes for each in buckets.buckets)
        assert largest.logits.nbytes < every, "counted once for all buckets"
    lines = str(report).splitlines()
    for name in report.parts:
        assert sum(line.startswith(name) for line in lines) == 1


def test_a_padded_step_counts_beside_the_plain_one(graphcore_driver: Driver) -> None:
    with buckets_on(graphcore_driver, max_seq_lens=[32], batch_sizes=[2]) as buckets:
        before = buckets.memory_report()
        prompt = prompt_for(buckets).repeat(2, 1)
        mask = torch.ones_like(prompt)
        mask[0, :2] = 0
        buckets.generate(prompt, 3, attention_mask=mask)
        report = buckets.memory_report()
    assert [len(each.buckets[0].graphs) for each in (before, report)] == [1, 2]
    assert report.node_bytes > 1.5 * before.node_bytes


def test_the_graph_of_one_launch_counts_and_its_step_s_pool_counts_once(
    graphcore_driver: Driver,
) -> None:
    one = {"max_seq_lens": [32], "batch_sizes": [1], "share_pool": False}
    with buckets_on(graphcore_driver, **one) as buckets:
        before = buckets.memory_report()
        done = buckets.generate(prompt_for(buckets), 6, one_launch=True)
        assert done.execution == "one launch", done.reason
        report = buckets.memory_report()
    (step,), (_, loop) = before.buckets[0].graphs, report.buckets[0].graphs
    assert loop.nodes > step.nodes
    assert report.node_bytes == before.node_bytes + loop.node_bytes
    assert before.pool_bytes <= report.pool_bytes < step.pool_bytes + loop.pool_bytes


def test_eager_buckets_take_no_graphs(graphcore_driver: Driver) -> None:
    with buckets_on(graphcore_driver, capture=False) as buckets:
        report = buckets.memory_report()
    assert (report.node_bytes, report.pool_bytes) == (0, 0)
    assert report.total_bytes == report.kv_bytes + report.parts["static tensors"]


def test_the_workspace_of_the_stream_of_all_buckets_counts_once(
    graphcore_driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Stream] = []

    def told(owner: object) -> int:
        if not isinstance(owner, Stream):
            return 0
        seen.append(owner)
        return 1 << 20

    monkeypatch.setattr(bucket_memory, "workspace_bytes", told)
    with buckets_on(graphcore_driver) as buckets:
        report = buckets.memory_report()
    assert len(seen) == 1
    assert report.workspace_bytes == report.parts["workspaces"] == 1 << 20
    assert report.total_bytes == sum(report.parts.values())
    assert "workspaces" in str(report)
