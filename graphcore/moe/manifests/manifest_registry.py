"""ManifestRegistry: the manifest that holds now, published whole, one generation after another.

The one locked object of expert caching: whoever works with the manifest holds a lease, and a
manifest is replaced only when nobody does. Reading the current one takes no lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from graphcore.errors import ConfigurationError, CudaError, LifecycleError
from graphcore.moe.manifests.changes import Changes
from graphcore.moe.manifests.manifest import ExpertBank, ExpertGroup, Manifest
from graphcore.moe.manifests.manifest_check import Rejected, examine
from graphcore.moe.manifests.names import PublicationCode, Rejection
from graphcore.moe.manifests.ownership import Admission, Ownership

MOST_GENERATIONS = 2**64 - 1

_log = logging.getLogger("graphcore")


class Published(NamedTuple):
    """A manifest and its generation: 0, with an empty manifest, before any was published."""

    manifest: Manifest
    generation: int


@dataclass(frozen=True, slots=True)
class Publication:
    """What became of a manifest; ``rejected`` says why it was not published."""

    code: PublicationCode
    generation: int
    rejected: tuple[Rejected, ...] = ()

    @property
    def is_accepted(self) -> bool:
        return self.code is PublicationCode.ACCEPTED

    def __str__(self) -> str:
        reasons = "".join(f"; {each}" for each in self.rejected)
        return f"manifest {self.code.value}, generation {self.generation}{reasons}"


class ManifestRegistry:
    """Publishes manifests and knows who uses the current one.

    Args:
        first_generation: What the first publication counts from; generations never repeat.
    """

    def __init__(self, first_generation: int = 0) -> None:
        self._changed = Changes()
        self._current = Published(Manifest(), first_generation)
        self._ownership = Ownership(generation=first_generation, changes=self._changed)

    @property
    def current(self) -> Published:
        """The manifest and its generation, together; never one of the one and one of the other."""
        return self._current

    @property
    def ownership(self) -> Ownership:
        """Who uses its groups."""
        return self._ownership

    def replace(
        self,
        manifest: Manifest,
        *,
        allocate: Callable[[Manifest], object] | None = None,
        timeout: float | None = None,
    ) -> Publication:
        """Publishes ``manifest`` instead of the current one; a wrong one changes nothing.

        Admission is closed, users are waited for, ``allocate`` is called, then both manifest and
        generation are swapped at once. What happens is logged at INFO.

        Args:
            manifest: The new one.
            allocate: Makes its slots, with nobody using the old ones; it may raise MemoryError or
                CudaError, and the old manifest stays, under a new generation, because its slots may
                have gone.
            timeout: Seconds to wait for users; None: as long as it takes.

        Returns:
            ``BUSY`` where users were not gone in time: admission is open again, nothing changed.

        Raises:
            ConfigurationError: It is no manifest of groups of banks.
            LifecycleError: The registry was shut down, or this thread has a lease, or is changing a
                group, itself.
        """
        publication = self._replace(manifest, allocate, timeout)
        _log.info("%s", publication)
        return publication

    def _replace(
        self,
        manifest: Manifest,
        allocate: Callable[[Manifest], object] | None,
        timeout: float | None,
    ) -> Publication:
        _check_types(manifest)
        rejected = examine(manifest)
        elsewhere = self._agree(manifest, "manifest", "; ".join(map(str, rejected)))
        rejected = rejected or _by_ranks(elsewhere)
        if rejected:
            return Publication(_code_of(rejected), self._current.generation, rejected)
        deadline = None if timeout is None else time.monotonic() + timeout
        is_closed = self._close_admission(Admission.REPLACING, deadline)
        try:
            users = "" if is_closed else PublicationCode.BUSY.value
            elsewhere = self._agree(manifest, "its users", users)
            if not is_closed or elsewhere:
                busy = _by_ranks(elsewhere)
                return Publication(PublicationCode.BUSY, self._current.generation, busy)
            return self._publish(manifest, allocate)
        finally:
            if is_closed:
                self._ownership.set_admission(Admission.OPEN)

    def _agree(self, manifest: Manifest, about: str, problem: str) -> str:
        """What keeps another rank from taking ``manifest``; "" where one alone decides.

        Args:
            manifest: That is to be published.
            about: What was just looked at.
            problem: Of this rank; "" where there is none.
        """
        del manifest, about, problem
        return ""

    def _publish(
        self, manifest: Manifest, allocate: Callable[[Manifest], object] | None
    ) -> Publication:
        before, generation = self._current
        if generation >= MOST_GENERATIONS:
            none_left = Rejected(
                Rejection.GENERATION_EXHAUSTED, "manifest", f"below {MOST_GENERATIONS}", generation
            )
            return Publication(PublicationCode.REJECTED, generation, (none_left,))
        failed: tuple[Rejected, ...] = ()
        try:
            try:
                if allocate is not None:
                    allocate(manifest)
            except (MemoryError, CudaError) as error:
                expected = "memory for its slots"
                failed = (Rejected(Rejection.ALLOCATION, "manifest", expected, str(error)),)
            elsewhere = self._agree(manifest, "its slots", "; ".join(map(str, failed)))
            failed = failed or _by_ranks(elsewhere)
        except BaseException:
            # whatever it was, slots may have gone: graphs over them must not be replayed
            self._swap(Published(before, generation + 1))
            raise
        if failed:
            self._swap(Published(before, generation + 1))
            return Publication(PublicationCode.ERROR, generation + 1, failed)
        self._swap(Published(manifest, generation + 1))
        return Publication(PublicationCode.ACCEPTED, generation + 1)

    def _swap(self, published: Published) -> None:
        with self._changed:
            names = [group.name for group in published.manifest.groups]
            self._ownership.succeed(names, published.generation)
            self._current = published

    def _close_admission(self, admission: Admission, deadline: float | None) -> bool:
        """Closes admission and waits for users; False, and open again, where they stay."""
        ownership = self._ownership

        def left() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        def is_open() -> bool:
            is_passing = ownership.admission in (Admission.REPLACING, Admission.DRAINING)
            return not (is_passing or ownership.is_changing())

        with self._changed:
            if not self._changed.wait_for(is_open, left()):
                return False
            if ownership.admission is Admission.CLOSED:
                raise LifecycleError("manifest: the registry was shut down")
            ownership.set_admission(admission)
            try:
                is_idle = ownership.wait_idle(left())
            except BaseException:
                ownership.set_admission(Admission.OPEN)
                raise
            if not is_idle:
                ownership.set_admission(Admission.OPEN)
            return is_idle

    def shut_down(self, *, timeout: float | None = None) -> bool:
        """Waits for users and closes for good; False where they stayed: it is open again.

        A second time does nothing.

        Raises:
            LifecycleError: This thread has a lease, or is changing a group, itself.
        """
        if self._ownership.admission is Admission.CLOSED:
            return True
        deadline = None if timeout is None else time.monotonic() + timeout
        is_idle = self._close_admission(Admission.DRAINING, deadline)
        if is_idle:
            self._ownership.set_admission(Admission.CLOSED)
            _log.info("manifest of generation %d: shut down", self._current.generation)
        return is_idle


def _by_ranks(problem: str) -> tuple[Rejected, ...]:
    """What another rank's problem is for this one."""
    if not problem:
        return ()
    return (Rejected(Rejection.RANKS, "manifest", "one that every rank takes", problem),)


def _check_types(manifest: object) -> None:
    """Raises ConfigurationError for what is no manifest of groups of banks."""
    _check_type("manifest", manifest, Manifest)
    assert isinstance(manifest, Manifest)
    for index, group in enumerate(_tuple("manifest.groups", manifest.groups)):
        _check_type(f"manifest.groups[{index}]", group, ExpertGroup)
        for number, bank in enumerate(_tuple(f"group {group.name}: banks", group.banks)):
            _check_type(f"group {group.name}: banks[{number}]", bank, ExpertBank)


def _tuple(where: str, value: Any) -> tuple[Any, ...]:
    _check_type(where, value, tuple)
    return tuple(value)


def _check_type(where: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise ConfigurationError(f"{where}: expected a {kind.__name__}, got {type(value).__name__}")


def _code_of(rejected: tuple[Rejected, ...]) -> PublicationCode:
    if rejected[0].rejection is Rejection.VERSION:
        return PublicationCode.INVALID_VERSION
    return PublicationCode.REJECTED
