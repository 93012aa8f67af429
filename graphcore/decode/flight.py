"""Flight: the launch that decodes a whole generation now, if there is one.

While it runs, the device alone knows the position: the host mirror is unknown, and is read once
when the flight ends. Whoever uses the runner next ends it first, so that a generation that was
interrupted or forgotten harms nobody.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from graphcore.decode.cache_state import CacheState
from graphcore.decode.one_launch import OneLaunch
from graphcore.errors import CaptureError, LifecycleError


class Flight:
    """At most one running launch. Not locked."""

    def __init__(self) -> None:
        self._launch: OneLaunch | None = None
        self.number = 0
        """How many flights have begun: who began one tells it from those after it."""
        self._held = 0
        self._was_launched = False
        self.is_whole = True
        """Whether every step of the last flight is whole, so that decoding may go on behind it."""

    @property
    def is_under_way(self) -> bool:
        """Whether a launch runs, or has run and was not ended."""
        return self._launch is not None

    def begin(
        self,
        launch: OneLaunch,
        max_new_tokens: int,
        state: CacheState,
        *,
        may_end_early: bool = True,
    ) -> None:
        """Launches; raises as :meth:`OneLaunch.start`, and may be under way also then.

        Args:
            launch: What decodes.
            max_new_tokens: The budget.
            state: Of the cache whose position the launch moves.
            may_end_early: As of :meth:`OneLaunch.start`.
        """
        assert self._launch is None
        self._state = state
        self._held = state.known_seen()
        self._was_launched, self.is_whole = False, True
        self.number += 1
        self._launch = launch
        self._state.seen = None
        try:
            launch.start(max_new_tokens, may_end_early=may_end_early)
        except CaptureError:  # before anything was launched, for a capture that a look would break
            self._launch, self._state.seen = None, self._held
            raise
        self._was_launched = True

    def tokens(self) -> Iterator[torch.Tensor]:
        """The tokens of this launch, int64 ``[rows]`` on the host, as they appear.

        Raises:
            LifecycleError: The flight was ended before the last token was taken.
            CudaError: The launch failed.
        """
        assert self._launch is not None
        # bound here: a generator's body begins at its first next, when another flight may be on
        return self._tokens_of(self._launch, self.number)

    def _tokens_of(self, launch: OneLaunch, number: int) -> Iterator[torch.Tensor]:
        taken = 0
        while True:
            self._refuse_others(launch, number)
            if not launch.wait_for(taken + 1):
                return
            yield launch.ring.token(taken)
            taken += 1

    def wait(self, number: int) -> None:
        """Waits until that launch is over; no token is looked at.

        Raises:
            LifecycleError, CudaError: As :meth:`tokens`.
        """
        launch = self._launch
        self._refuse_others(launch, number)
        assert launch is not None
        launch.wait()
        self._refuse_others(launch, number)

    def _refuse_others(self, launch: OneLaunch | None, number: int) -> None:
        if launch is None or self._launch is not launch or self.number != number:
            raise LifecycleError(
                "stream_in_one_launch: another call on this runner has ended the generation"
            )

    def stop(self, number: int | None = None) -> None:
        """Asks the running loop to end after its token; no driver call.

        Args:
            number: Only where that flight is the one; None: whichever.
        """
        if self._launch is not None and number in (None, self.number):
            self._launch.stop()

    def end(self) -> None:
        """Stops the launch, waits for it, and reads the position; nothing where none is under way.

        Interrupted, it is still under way, and may be ended again.

        Raises:
            CudaError: The launch failed; the flight is over.
        """
        launch = self._launch
        if launch is None:
            return
        launch.stop()
        try:
            launch.wait()
            self._state.seen = None
            position = self._state.known_seen()
        except Exception:  # torch's errors are of its own kinds
            self.is_whole, self._launch = False, None
            raise
        self.is_whole = self._was_launched or (
            position == self._held and launch.ring.published == 0
        )
        self._launch = None
