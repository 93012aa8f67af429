"""What a GraphReuse and its steps are given, checked before anything is made or launched."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from graphcore.errors import CacheTypeError, ConfigurationError
from graphcore.moe.decisions.certificate import Certificate
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


def check_content(field: str, value: object) -> None:
    """Raises CacheTypeError for what can change in place, and so never tells that it did."""
    try:
        hash(value)
    except TypeError as error:
        raise CacheTypeError(
            f"{field}: expected a hashable value, got {value!r:.80}: {error}"
        ) from None


def check_step(
    identity: object,
    functions: Mapping[str, Callable[..., object] | None],
    tensors: object,
    rows: object,
    capabilities: Sequence[object],
) -> None:
    """Raises ConfigurationError or CacheTypeError for what no step can be made of."""
    for name, function in functions.items():
        if not callable(function) and not (name == "staged" and function is None):
            raise ConfigurationError(f"{name}: expected a callable, got {function!r:.80}")
    if not isinstance(tensors, Mapping):
        raise ConfigurationError(
            f"tensors: expected a mapping of name -> tensor, got {type(tensors).__name__}"
        )
    if not tensors:
        raise ConfigurationError("tensors: expected at least one, got none")
    check_rows(rows)
    check_content("identity", identity)
    for index, each in enumerate(capabilities):
        check_content(f"capabilities[{index}]", each)


def check_rows(rows: object) -> None:
    """Raises ConfigurationError for what is no number of rows; None is the step's own."""
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 0):
        raise ConfigurationError(f"rows: expected an int of at least 0 or None, got {rows!r}")


def check_call(rows: int, phase: object, prompt_rows: object, certificate: object) -> None:
    """Raises ConfigurationError for what no step can be, of ``rows`` rows."""
    if certificate is not None and not isinstance(certificate, Certificate):
        raise ConfigurationError(
            "certificate: expected one, as reuse.certificate(step) makes it, or None, got "
            f"{certificate!r:.80}"
        )
    if phase is not None and not isinstance(phase, Phase):
        raise ConfigurationError(f"phase: expected a Phase or None, got {phase!r}")
    if isinstance(prompt_rows, bool) or not isinstance(prompt_rows, int):
        raise ConfigurationError(f"prompt_rows: expected an int, got {prompt_rows!r}")
    if not 0 <= prompt_rows <= rows:
        raise ConfigurationError(f"prompt_rows: expected 0 to {rows} rows, got {prompt_rows}")
