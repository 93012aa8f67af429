"""TokenStream: what ``stream_in_one_launch`` returns: tokens as they appear, and a way to stop.

It asks for nothing while nobody asks it. Dropped half way it asks the loop on the device to stop,
by a flag in pinned memory; the runner waits for it when it is next used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType

import torch

from graphcore.decode.cache_state import refuse_inside_capture


class TokenStream(Iterator[torch.Tensor]):
    """An iterator of int64 ``[rows]`` on the host, each a tensor of its own.

    ``close()``, or the end of a ``with`` block, stops the generation after the token it works on,
    and waits for that; so does any exception in ``next``, Ctrl-C among them.

    Args:
        source: Gives the tokens.
        stop: Asks the device to stop; no driver call.
        end: Waits until nothing runs any more, and lets the runner go on; may be called twice.
        wait: Waits until the generation is over, and takes no token of it.
    """

    def __init__(
        self,
        source: Iterator[torch.Tensor],
        stop: Callable[[], None],
        end: Callable[[], None],
        wait: Callable[[], None],
    ) -> None:
        self._source = source
        self._stop = stop
        self._end = end
        self._wait = wait
        self._is_open = True

    def __next__(self) -> torch.Tensor:
        """The next token; waits for it.

        Raises:
            CaptureError: A graph is being captured, which the waiting would break.
            LifecycleError: Another call on the runner has ended the generation.
            CudaError: The launch failed.
        """
        if not self._is_open:
            raise StopIteration
        refuse_inside_capture("next()")
        try:
            return next(self._source)
        except StopIteration:
            self.close()
            raise
        except BaseException as error:
            self._close_after(error)
            raise

    def wait(self) -> None:
        """Waits until the generation is over, and closes: tokens that were not read are dropped.

        The host looks far less often than where it waits for each token.

        Raises:
            CaptureError, LifecycleError, CudaError: As :meth:`__next__`.
        """
        if not self._is_open:
            return
        refuse_inside_capture("wait()")
        try:
            self._wait()
        except BaseException as error:
            self._close_after(error)
            raise
        self.close()

    def _close_after(self, error: BaseException) -> None:
        try:
            self.close()
        except Exception as second:
            error.add_note(f"while ending the generation: {second}")

    def close(self) -> None:
        """Stops the generation, if it still runs, and waits for that; a second call does nothing.

        Raises:
            CaptureError: A graph is being captured; the generation stops all the same.
            CudaError: The launch failed.
        """
        if self._is_open:
            self._stop()
            self._end()
            self._is_open = False

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # no waiting here: a forgotten iterator may be collected while something is captured
        if self._is_open:
            self._stop()
