"""A whole generation of a runner: step by step, or in one launch where that is asked for and works.

Which of them it was is told with why: a step that no WHILE node takes is replayed step by step.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from graphcore.decode.runner import CUDAGraphAR
from graphcore.errors import ConfigurationError, PlanError

_log = logging.getLogger("graphcore")


@dataclass(frozen=True, slots=True)
class Decoded:
    """Ids that were decoded, and how.

    Attributes:
        ids: int64 ``[batch, prompt + new]``.
        execution: "graph" (a replay for each token), "one launch" or "eager".
        reason: Why.
    """

    ids: torch.Tensor
    execution: str
    reason: str


def decode_whole(
    runner: CUDAGraphAR, *arguments: Any, one_launch: bool, poll_every: int = 16, **options: Any
) -> Decoded:
    """What ``runner.generate`` decodes of these arguments, with the same ids either way.

    Args:
        runner: Decodes.
        arguments: As of :meth:`CUDAGraphAR.generate`.
        one_launch: Whether in one launch.
        poll_every: As of :meth:`CUDAGraphAR.generate`; one launch ends by itself.
        options: As of :meth:`CUDAGraphAR.generate`.

    Raises:
        ConfigurationError: An option of one of the two ways alone, or ``keep_cache``: where one
            launch is impossible, the prompt is forwarded a second time.
    """
    for name in ("keep_cache", "on_token"):
        if name in options:
            raise ConfigurationError(f"{name}: a whole generation takes no such input")
    reason = None
    if one_launch:
        try:
            ids = runner.generate_in_one_launch(*arguments, **options)
            return Decoded(ids, *told(runner, one_launch=True))
        except PlanError as error:  # nothing was launched: the prompt is forwarded again
            reason = f"not in one launch: {error}"
            _log.info("decoding step by step: %s", reason)
    ids = runner.generate(*arguments, poll_every=poll_every, **options)
    execution, why = told(runner, one_launch=False)
    return Decoded(ids, execution, reason or why)


def told(runner: CUDAGraphAR, *, one_launch: bool) -> tuple[str, str]:
    """(execution, reason) of a generation that went through."""
    if not one_launch or runner.execution == "eager":
        return runner.execution, runner.reason
    return (
        "one launch",
        f"the captured step is the body of a WHILE node on the {runner.driver.name} driver",
    )
