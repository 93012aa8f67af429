"""What a GraphReuse is given, checked before anything is made or launched."""

from __future__ import annotations

from collections.abc import Hashable

from graphcore.errors import CacheTypeError, ConfigurationError
from graphcore.moe.manifests.names import Phase


def check_making(owner: object, rank: object, ranks: object, patience_seconds: object) -> None:
    """Raises ConfigurationError for what no reuse can be made with."""
    if not isinstance(owner, Hashable):
        raise ConfigurationError(f"owner: expected something hashable, got {type(owner).__name__}")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise ConfigurationError(f"rank: expected an int of at least 0, got {rank!r}")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks <= rank:
        raise ConfigurationError(f"ranks: expected an int above rank {rank}, got {ranks!r}")
    if isinstance(patience_seconds, bool) or not (
        isinstance(patience_seconds, int | float) and patience_seconds >= 0
    ):
        raise ConfigurationError(f"patience_seconds: expected at least 0, got {patience_seconds!r}")


def check_work(work: object) -> None:
    """Raises CacheTypeError for what is no step."""
    if not (hasattr(work, "rows") and hasattr(work, "identity")):
        raise CacheTypeError(
            f"work: expected a step, as handle.step(...), CallableStep and PlanStep make it; got "
            f"{type(work).__name__}"
        )


def check_call(rows: int, phase: object, prompt_rows: object) -> None:
    """Raises ConfigurationError for what no step can be, of ``rows`` rows."""
    if phase is not None and not isinstance(phase, Phase):
        raise ConfigurationError(f"phase: expected a Phase or None, got {phase!r}")
    if isinstance(prompt_rows, bool) or not isinstance(prompt_rows, int):
        raise ConfigurationError(f"prompt_rows: expected an int, got {prompt_rows!r}")
    if not 0 <= prompt_rows <= rows:
        raise ConfigurationError(f"prompt_rows: expected 0 to {rows} rows, got {prompt_rows}")
