"""DecodeModel: what OverlappedDecode runs: a model whose steps take their tokens from the device.

A step has a row for each place of the batch. What the host says of a row is three words: its
position, its token where the host gives one, and whether the row counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from graphcore.moe.decisions.decode_overlap import Row
from graphcore.moe.steps.step_work import StepWork

POSITION, TOKEN, IS_LIVE = range(3)
"""Columns of the inputs. TOKEN is -1 where the token is the one that the device chose for the row
one step before; IS_LIVE is 0 or 1."""
INPUT_WORDS = 3


class DecodeModel(Protocol):
    """A model.

    The number of rows of a step is always the same, whoever is live: then what a row gives does not
    depend on when others end, and options change no bit.

    Attributes:
        rows: Of every step; a sequence is a number below it, and has the row of that number.
        inputs: int64 [rows, 3] on the device, read by its step, columns as above.
        tokens: int64 [rows] on the device: what its step reads as the tokens of the step before,
            and writes as those that it chose. A row that is not live keeps its token.
        devices: On how many it lies.
        embeddings_on_device: Whether they lie there too.
        is_sampled_on_device: Whether its step writes ``tokens``.
        can_roll_back: Whether the newest token of a sequence can be taken back.
    """

    @property
    def rows(self) -> int: ...

    @property
    def inputs(self) -> Any: ...

    @property
    def tokens(self) -> Any: ...

    @property
    def devices(self) -> int: ...

    @property
    def embeddings_on_device(self) -> bool: ...

    @property
    def is_sampled_on_device(self) -> bool: ...

    @property
    def can_roll_back(self) -> bool: ...

    def grows(self, rows: Sequence[Row]) -> bool:
        """Whether a buffer has to grow before a step of these rows, or there is no room for it.

        Such a step is an ordinary one: it may turn out that nobody wants it.
        """

    def prepare(self, rows: Sequence[Row]) -> StepWork:
        """The step of these rows: all that the host has to do for it before its launch.

        Called while the step before may still run; waits for nothing, but to grow.
        """

    def roll_back(self, row: Row) -> None:
        """Takes back the step of ``row``, whose token nobody wants.

        Its position is written again by whoever comes next: most models have nothing to do.
        """
