"""Publishing manifests: whole, one generation after another, with users who wait or are refused."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import Any

import pytest
from helpers.moe_manifests import fused, manifest
from helpers.threads import SOON, in_thread, until

from graphcore import ConfigurationError, CudaError, LifecycleError
from graphcore.moe.manifests.manifest import Manifest
from graphcore.moe.manifests.manifest_registry import MOST_GENERATIONS, ManifestRegistry, Published
from graphcore.moe.manifests.names import PublicationCode, Rejection
from graphcore.moe.manifests.ownership import Admission, Lease, Refusal, RefusalReason

OUT_OF_MEMORY = CudaError("CUDA_ERROR_OUT_OF_MEMORY", "cuMemAlloc", number=2)


def test_nothing_is_published_at_first() -> None:
    assert ManifestRegistry().current == Published(Manifest(), 0)


def test_a_manifest_is_published_with_the_next_generation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "graphcore")
    registry = ManifestRegistry()
    first = registry.replace(manifest())
    second = registry.replace(manifest(1))
    assert (first.code, first.generation) == (PublicationCode.ACCEPTED, 1)
    assert (second.is_accepted, second.generation) == (True, 2)
    assert registry.current == Published(manifest(1), 2)
    assert caplog.messages == [
        "manifest accepted, generation 1",
        "manifest accepted, generation 2",
    ]


def test_the_same_manifest_again_is_another_generation() -> None:
    registry = ManifestRegistry()
    generations = [registry.replace(manifest()).generation for _ in range(3)]
    assert generations == [1, 2, 3]


@pytest.mark.parametrize(
    ("given", "code", "rejection"),
    [
        (replace(manifest(), version=2), PublicationCode.INVALID_VERSION, Rejection.VERSION),
        (manifest(slots=9), PublicationCode.REJECTED, Rejection.COUNT),
    ],
    ids=["version", "count"],
)
def test_a_wrong_manifest_changes_nothing_and_waits_for_nobody(
    given: Manifest, code: PublicationCode, rejection: Rejection
) -> None:
    registry = ManifestRegistry()
    registry.replace(manifest())
    with registry.ownership.held("step"):  # it would wait for this one
        publication = registry.replace(given)
    assert (publication.code, publication.generation) == (code, 1)
    assert publication.rejected[0].rejection is rejection
    assert str(rejection.value) in str(publication)
    assert registry.current == Published(manifest(), 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("manifest", "manifest: expected a Manifest, got str"),
        (Manifest([fused()]), "manifest.groups: expected a tuple, got list"),
        (Manifest(("group",)), r"manifest.groups\[0\]: expected a ExpertGroup, got str"),
        (Manifest((replace(fused(), banks=[]),)), "group layers.0: banks: expected a tuple"),
        (Manifest((replace(fused(), banks=(1,)),)), r"banks\[0\]: expected a ExpertBank, got int"),
    ],
    ids=["no manifest", "groups in a list", "no group", "banks in a list", "no bank"],
)
def test_what_is_no_manifest_raises(given: Any, message: str) -> None:
    registry = ManifestRegistry()
    with pytest.raises(ConfigurationError, match=message):
        registry.replace(given)
    assert registry.current.generation == 0


def test_a_manifest_waits_for_its_users_and_newcomers_are_refused() -> None:
    registry = ManifestRegistry()
    registry.replace(manifest())
    lease = registry.ownership.lease("step")
    assert isinstance(lease, Lease)
    allocated: list[dict[Any, int]] = []

    def publish() -> Any:
        return registry.replace(
            manifest(1), allocate=lambda _: allocated.append(registry.ownership.users())
        )

    with in_thread(publish) as result:
        until(lambda: registry.ownership.admission is Admission.REPLACING)
        assert registry.ownership.lease("new") == Refusal(RefusalReason.REPLACING)
        assert registry.current == Published(manifest(), 1)
        assert registry.ownership.check(lease) is None
        registry.ownership.release(lease)
    assert result[0].is_accepted
    assert allocated == [{}]
    assert registry.current == Published(manifest(1), 2)
    assert registry.ownership.check(lease).reason is RefusalReason.GENERATION
    assert isinstance(registry.ownership.lease("new"), Lease)


def test_users_that_stay_leave_the_old_manifest_and_admission_open() -> None:
    registry = ManifestRegistry()
    registry.replace(manifest())
    with in_thread(lambda: registry.ownership.lease("step")) as lease:
        pass
    publication = registry.replace(manifest(1), timeout=0.01)
    assert (publication.code, publication.generation) == (PublicationCode.BUSY, 1)
    assert registry.current == Published(manifest(), 1)
    assert registry.ownership.check(lease[0]) is None
    assert isinstance(registry.ownership.lease("new"), Lease)


@pytest.mark.parametrize("error", [MemoryError("no more"), OUT_OF_MEMORY], ids=["host", "device"])
def test_without_memory_the_old_manifest_stays_under_a_new_generation(error: Exception) -> None:
    registry = ManifestRegistry()
    registry.replace(manifest())
    old = registry.ownership.lease("step")
    assert isinstance(old, Lease)
    registry.ownership.release(old)

    def allocate(_: Manifest) -> None:
        raise error

    publication = registry.replace(manifest(1), allocate=allocate)
    assert (publication.code, publication.generation) == (PublicationCode.ERROR, 2)
    assert publication.rejected[0].rejection is Rejection.ALLOCATION
    assert registry.current == Published(manifest(), 2)
    assert registry.ownership.check(old).reason is RefusalReason.GENERATION
    assert isinstance(registry.ownership.lease("new"), Lease)


def test_an_interrupt_while_slots_are_made_leaves_admission_open_and_no_old_graph_valid() -> None:
    registry = ManifestRegistry()
    registry.replace(manifest())

    def allocate(_: Manifest) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        registry.replace(manifest(1), allocate=allocate)
    assert registry.current == Published(manifest(), 2)
    assert isinstance(registry.ownership.lease("new"), Lease)


def test_generations_never_repeat() -> None:
    registry = ManifestRegistry(MOST_GENERATIONS - 1)
    assert registry.replace(manifest()).generation == MOST_GENERATIONS
    publication = registry.replace(manifest(1))
    assert publication.code is PublicationCode.REJECTED
    assert publication.rejected[0].rejection is Rejection.GENERATION_EXHAUSTED
    assert registry.current == Published(manifest(), MOST_GENERATIONS)
    assert isinstance(registry.ownership.lease("new"), Lease)


def test_a_thread_that_would_wait_for_itself_is_told_and_nothing_is_left_closed() -> None:
    registry = ManifestRegistry()
    registry.replace(manifest())
    with registry.ownership.held("me"):
        with pytest.raises(LifecycleError, match="wait for itself"):
            registry.replace(manifest(1))
        with pytest.raises(LifecycleError, match="wait for itself"):
            registry.shut_down()
        assert isinstance(registry.ownership.lease("new"), Lease)
    fresh = ManifestRegistry()
    fresh.replace(manifest())
    with fresh.ownership.changing(["layers.0"]):
        with pytest.raises(LifecycleError, match="wait for itself"):
            fresh.replace(manifest(1))
        assert fresh.ownership.admission is Admission.OPEN


def test_a_manifest_waits_for_a_group_that_is_being_changed() -> None:
    registry = ManifestRegistry()
    registry.replace(manifest())
    begun, end = threading.Event(), threading.Event()

    def change() -> None:
        with registry.ownership.changing(["layers.0"]):
            begun.set()
            end.wait(SOON)

    with in_thread(change):
        begun.wait(SOON)
        assert registry.replace(manifest(1), timeout=0.01).code is PublicationCode.BUSY
        with in_thread(lambda: registry.replace(manifest(1), timeout=SOON)) as result:
            end.set()
    assert result[0].is_accepted


def test_manifests_published_at_once_come_one_after_another() -> None:
    registry = ManifestRegistry()
    publish = [lambda: registry.replace(manifest()).generation] * 4
    with (
        in_thread(publish[0]) as one,
        in_thread(publish[1]) as two,
        in_thread(publish[2]) as three,
        in_thread(publish[3]) as four,
    ):
        pass
    assert sorted(one + two + three + four) == [1, 2, 3, 4]


def test_readers_never_see_half_a_publication() -> None:
    registry = ManifestRegistry()
    wrong: list[Published] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            found = registry.current
            # odd generations have one layer, even ones two
            if found.generation and len(found.manifest.groups) != 2 - found.generation % 2:
                wrong.append(found)

    with in_thread(read):
        for _ in range(50):
            registry.replace(manifest(1))
            registry.replace(manifest(2))
        done.set()
    assert wrong == []
    assert registry.current.generation == 100


# ---- shutting down ------------------------------------------------------------------------------


def test_after_a_shut_down_nothing_is_given_out_or_published() -> None:
    registry = ManifestRegistry()
    registry.replace(manifest())
    assert registry.shut_down()
    assert registry.shut_down()
    assert registry.ownership.lease("late") == Refusal(RefusalReason.CLOSED)
    with pytest.raises(LifecycleError, match="shut down"):
        registry.replace(manifest())


def test_a_shut_down_waits_for_users_and_refuses_newcomers() -> None:
    registry = ManifestRegistry()
    registry.replace(manifest())
    lease = registry.ownership.lease("step")
    assert isinstance(lease, Lease)
    with in_thread(registry.shut_down) as result:
        until(lambda: registry.ownership.admission is Admission.DRAINING)
        assert registry.ownership.lease("new") == Refusal(RefusalReason.DRAINING)
        registry.ownership.release(lease)
    assert result == [True]


def test_a_shut_down_that_ran_out_of_time_is_none() -> None:
    registry = ManifestRegistry()
    registry.replace(manifest())
    with in_thread(lambda: registry.ownership.lease("step")):
        pass
    assert not registry.shut_down(timeout=0.01)
    assert isinstance(registry.ownership.lease("new"), Lease)
