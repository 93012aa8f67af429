"""RankManifests: manifests of the experts of all ranks, published on all of them or on none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from graphcore.moe.manifests.manifest import Manifest
from graphcore.moe.manifests.manifest_registry import ManifestRegistry, Publication
from graphcore.parallel.ranks import Ranks

_log = logging.getLogger("graphcore")
_TAKEN, _REFUSED = "taken", "refused"


class RankManifests(ManifestRegistry):
    """The registry of one rank; every rank replaces its manifest in the same call.

    Args:
        ranks: That share the experts.
        first_generation: As of :class:`ManifestRegistry`; the same on all ranks.
    """

    def __init__(self, ranks: Ranks, first_generation: int = 0) -> None:
        super().__init__(first_generation)
        self._ranks = ranks

    def replace(
        self,
        manifest: Manifest,
        *,
        allocate: Callable[[Manifest], object] | None = None,
        timeout: float | None = None,
    ) -> Publication:
        """As :meth:`ManifestRegistry.replace`, on all ranks or on none.

        What one rank rejects, finds busy or has no memory for is refused on all, and the old
        manifests hold, under equal generations. Together the manifests must be all experts that
        the routers choose from, each once.

        Raises:
            ConfigurationError, LifecycleError: As of :meth:`ManifestRegistry.replace`.
            RankError: Another rank failed or is missing; the old manifest holds.
        """
        with self._ranks.together("manifest"):
            return super().replace(manifest, allocate=allocate, timeout=timeout)

    def _agree(self, manifest: Manifest, about: str, problem: str) -> str:
        agreed = self._ranks.agree(
            f"manifest: {about}",
            _REFUSED if problem else _TAKEN,
            among=(_TAKEN, _REFUSED),
            detail=problem,
            facts={"manifest generation": self.current.generation},
            value=parts_of(manifest),
        )
        if agreed.choice == _REFUSED:
            return problem or agreed.reason
        return partition_problem(agreed.values)


def parts_of(manifest: Manifest) -> dict[str, Any]:
    """Which experts a manifest has, as JSON has it."""
    groups = [
        [group.name, group.first_expert, group.experts, group.router_size]
        for group in manifest.groups
    ]
    return {"rank": manifest.rank, "ranks": manifest.ranks, "groups": groups}


def partition_problem(parts: Sequence[dict[str, Any]]) -> str:
    """Why the manifests of all ranks are together not all experts once; "" where they are."""
    for rank, part in enumerate(parts):
        if (part["rank"], part["ranks"]) != (rank, len(parts)):
            return f"expected rank {rank} of {len(parts)}, got {part['rank']} of {part['ranks']}"
    names = [[group[0] for group in part["groups"]] for part in parts]
    for rank, each in enumerate(names):
        if each != names[0]:
            return f"expected groups {names[0]} on all ranks, got {each} on rank {rank}"
    for index, name in enumerate(names[0]):
        found = _group_problem([part["groups"][index] for part in parts])
        if found:
            return f"group {name}: {found}"
    return ""


def _group_problem(groups: Sequence[Sequence[Any]]) -> str:
    sizes = {size for *_, size in groups}
    if len(sizes) > 1:
        return f"expected one number of experts that the router chooses from, got {sorted(sizes)}"
    following = 0
    for rank, (_, first, count, _) in enumerate(groups):
        if first != following:
            return f"expected rank {rank} to begin with expert {following}, got {first}"
        following += count
    size = sizes.pop()
    return "" if following == size else f"expected {size} experts on all ranks, got {following}"
