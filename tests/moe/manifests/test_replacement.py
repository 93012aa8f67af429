"""Manifests replaced from another thread while steps run: who waits, and what is stale."""

from __future__ import annotations

import time
from dataclasses import replace

from helpers.moe_calls import REQUIRED
from helpers.moe_cases import CERTIFICATE
from helpers.moe_plans import MANIFEST
from helpers.moe_variants import Variants, kinds
from helpers.threads import SOON, in_thread, until

from graphcore.moe.decisions.reasons import Reason
from graphcore.moe.manifests.manifest_registry import ManifestRegistry
from graphcore.moe.manifests.names import Kind, Way
from graphcore.moe.manifests.ownership import Admission, Lease, Transaction

STEPS = 1000


def test_a_dispatch_under_way_holds_up_a_replacement_and_required_work_fails_meanwhile() -> None:
    registry, variants = ManifestRegistry(), Variants()
    variants.generation = registry.replace(MANIFEST).generation
    kinds(variants, 3)
    kinds(variants, 3, certificate=REQUIRED)
    lease = registry.ownership.lease("running")
    assert isinstance(lease, Lease)
    assert isinstance(registry.ownership.begin(lease), Transaction)
    with in_thread(lambda: registry.replace(MANIFEST)) as published:
        until(lambda: registry.ownership.admission is Admission.REPLACING)
        variants.admission = registry.ownership.admission
        required = variants.step(REQUIRED)
        assert (required.kind, required.reason) == (Kind.FAILED, Reason.UNAVAILABLE)
        assert variants.counting.snapshot().required_unsupported == 1
        ordinary = variants.step()
        assert (ordinary.kind, ordinary.way) == (Kind.DECLINED, Way.STAGED)
        assert published == []
        registry.ownership.release(lease)
    assert published[0].is_accepted
    variants.admission, variants.generation = registry.ownership.admission, 2
    for certificate in (CERTIFICATE, REQUIRED):
        assert kinds(variants, 3, certificate=certificate)[1:] == [Kind.REPLAY] * 2


def test_a_manifest_replaced_during_1000_steps_loses_none_and_no_stale_capture_is_replayed() -> (
    None
):
    registry, variants = ManifestRegistry(), Variants()
    registry.replace(MANIFEST)
    wrong: list[str] = []
    done: list[Kind] = []

    def steps() -> None:
        for _ in range(STEPS):
            lease = registry.ownership.lease("step", wait_seconds=SOON)
            if not isinstance(lease, Lease):
                wrong.append(str(lease))
                continue
            # nobody replaces what a lease holds: manifest and generation are read as one
            if registry.current.generation != lease.generation:
                wrong.append(f"{registry.current.generation} under a lease of {lease.generation}")
            variants.generation = lease.generation
            decision = variants.step()
            done.append(decision.kind)
            (entry,) = variants.entries.values()
            if decision.uses_graph and entry.capture.generation != lease.generation:
                wrong.append(f"stale: {decision}")
            registry.ownership.release(lease)

    with in_thread(steps) as result:
        while not result:
            assert registry.replace(MANIFEST, timeout=SOON).is_accepted
            time.sleep(0.005)
            if len(done) == STEPS:
                break
    assert result == [None]
    assert wrong == []
    assert len(done) == STEPS
    # it was replaced often, and there was time to replay in between
    assert done.count(Kind.CAPTURE) > 3
    assert Kind.REPLAY in done
    assert registry.ownership.users() == {}


def test_a_lora_adapter_is_another_manifest_and_its_bank_is_not_served() -> None:
    registry = ManifestRegistry()
    registry.replace(MANIFEST)
    adapted = registry.replace(MANIFEST.adapted("lora", ["layers.1.experts.down"]))
    assert (adapted.is_accepted, adapted.generation) == (True, 2)
    assert registry.current.manifest.adapters == ("lora",)
    # taking it off again is a third one, not the first
    assert registry.replace(replace(MANIFEST)).generation == 3
