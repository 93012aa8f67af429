"""Generating: the half of a runner that decodes whole generations: step by step, or in one launch.

A generation begins with its checks and its prompt. Step by step, each token is one replay. In one
launch, the device decides whether there is another one, and the runner is in flight until somebody
asks for something else: then what still runs is stopped after its token and waited for.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

import torch

from graphcore.decode import checks, prompt
from graphcore.decode.cache_state import refuse_inside_capture
from graphcore.decode.end_look import EndLook
from graphcore.decode.ending import EosIds, cut_after_end, end_ids
from graphcore.decode.flight import Flight
from graphcore.decode.prompt import Prompt
from graphcore.decode.prompting import Prompting
from graphcore.decode.sizes import check_positive
from graphcore.decode.static_cache import StaticKVCache
from graphcore.decode.token_stream import TokenStream
from graphcore.errors import ConfigurationError, LifecycleError

_IN_FLIGHT = "a generation runs in one launch"


class Generating(Prompting):
    """Decodes generations with the step, the cache and the replays of a runner."""

    model: Any
    cache: StaticKVCache
    _flight: Flight
    _generation: int
    _limit: int
    _why_not: str

    # ---- what the runner does -------------------------------------------------------------------

    @abstractmethod
    def replay(self, token: int | torch.Tensor | None = None) -> torch.Tensor:
        """Decodes one token."""

    # ---- step by step ---------------------------------------------------------------------------

    def generate(  # noqa: PLR0913  (each is a choice of its own)
        self,
        input_ids: torch.Tensor | None,
        max_new_tokens: int,
        eos_token_id: EosIds = None,
        pad_token_id: int | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        num_beams: int = 1,
        poll_every: int = 16,
        keep_cache: bool = False,
        cache: StaticKVCache | None = None,
        seed: int | None = None,
        **inputs: Any,
    ) -> torch.Tensor:
        """Decodes up to ``max_new_tokens``, as transformers' ``generate`` does.

        Args:
            input_ids: As in :meth:`capture`; None where ``inputs`` has it by its name.
            max_new_tokens: At least 1; prompt and new tokens must fit.
            eos_token_id: Ids that end a row; None: what the model's generation config says; an
                empty sequence: nothing ends a row.
            pad_token_id: What a finished row repeats; None: the generation config's, else the
                first end-of-sequence id.
            attention_mask: As in :meth:`capture`.
            num_beams: Only 1; beam search is refused.
            poll_every: Steps between two looks at whether all rows have finished. A look reads what
                the one before it asked for, so that the device never waits for the host; up to
                twice as many steps are decoded past the end, and dropped, from the cache too:
                then only a prompt or a forced token may follow. 1: the host waits for each step,
                and none is decoded past the end. Where layers slide they cannot be dropped from a
                full window: what would follow raises, until the cache is emptied.
            keep_cache: Continue behind what the cache holds, instead of emptying it first.
            cache: Another cache, taken over first as by :meth:`use`.
            seed: As in :meth:`capture`.
            inputs: As in :meth:`capture`.

        Returns:
            int64 ``[batch, prompt + new]``, a tensor of its own: ``input_ids`` as they were given,
            with their padding, then the new ids. Of an encoder-decoder: the decoder's ids.

        Raises:
            ConfigurationError, CapacityError, CaptureError, LifecycleError: As :meth:`capture`;
                nothing was launched.
        """
        checks.check_beams(num_beams)
        check_positive("poll_every", poll_every)
        checked = self._checked_prompt("generate()", input_ids, attention_mask, cache, seed, inputs)
        ends = end_ids(self._step.forward, eos_token_id, pad_token_id)
        start = self._start(checked, max_new_tokens, *ends, keep_cache=keep_cache)
        look = EndLook(self._step.finished, at_once=poll_every == 1)
        for count in range(1, max_new_tokens + 1):
            self.replay()
            if ends[0] and count % poll_every == 0 and self._has_ended(look.have_all_finished()):
                break
        self._step.set_eos((), 0)
        given = checked.as_given.shape[1]
        ids = cut_after_end(self._decoded(checked, start), given, ends[0])
        self._drop_surplus(start + checked.length + ids.shape[1] - given)
        return ids

    def stream(
        self,
        input_ids: torch.Tensor | None,
        max_new_tokens: int,
        eos_token_id: EosIds = None,
        pad_token_id: int | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        keep_cache: bool = False,
        cache: StaticKVCache | None = None,
        seed: int | None = None,
        **inputs: Any,
    ) -> Iterator[torch.Tensor]:
        """As :meth:`generate`, one token at a time.

        Checks, prompt and capture happen in this call; each ``next`` decodes one token and waits
        for it. ``int(ids)`` is the id where the batch is 1. Where it is left half way, a row that
        has finished repeats the pad for :meth:`replay` too, until the next prompt.

        Returns:
            An iterator of int64 ``[batch]`` on the host, each a tensor of its own. It ends after
            ``max_new_tokens``, or once all rows have finished.
        """
        checked = self._checked_prompt("stream()", input_ids, attention_mask, cache, seed, inputs)
        ends = end_ids(self._step.forward, eos_token_id, pad_token_id)
        self._start(checked, max_new_tokens, *ends, keep_cache=keep_cache)
        return self._tokens(max_new_tokens, ends[0], self._generation)

    def _tokens(
        self, max_new_tokens: int, eos: tuple[int, ...], generation: int
    ) -> Generator[torch.Tensor]:
        finished: torch.Tensor | None = None
        ends = torch.tensor(eos, dtype=torch.int64, device="cpu")
        for _ in range(max_new_tokens):
            if generation != self._generation:
                raise LifecycleError("stream: another generation has begun on this runner")
            ids = self.replay().to("cpu", copy=True)
            if finished is None:  # some rows are from the beginning: those that pad a bucket
                finished = self._step.finished.to("cpu", copy=True)
            yield ids
            # not in place: it may have been made in inference mode, which may have ended
            finished = finished | torch.isin(ids, ends)
            if eos and self._has_ended(bool(finished.all())):
                break
        # not in a finally: a forgotten iterator may be collected while something is captured
        if generation == self._generation:
            self._step.set_eos((), 0)

    def _has_ended(self, has_here: bool) -> bool:
        """Whether a generation ends; where ranks have rows of their own: once all have finished."""
        return has_here

    # ---- in one launch ---------------------------------------------------------------------------

    def generate_in_one_launch(  # noqa: PLR0913  (each is a choice of its own)
        self,
        input_ids: torch.Tensor | None,
        max_new_tokens: int,
        eos_token_id: EosIds = None,
        pad_token_id: int | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        on_token: Callable[[torch.Tensor], object] | None = None,
        keep_cache: bool = False,
        cache: StaticKVCache | None = None,
        seed: int | None = None,
        **inputs: Any,
    ) -> torch.Tensor:
        """As :meth:`generate`, with the same ids, in one launch of a graph with a WHILE node.

        The device decides whether there is another step. The host looks at pinned memory: with
        ``on_token`` every 20 to 200 us; else it sleeps for half of the time that is left, as the
        tokens up to now tell it, so that a token costs it next to nothing
        (:class:`~graphcore.decode.pace.Pace`). Where decoding is eager, it is here too
        (:attr:`execution`, :attr:`reason`).

        Args:
            input_ids: As of :meth:`generate`, and so are the others that are not named here.
            max_new_tokens: At least 1; every number uses the same executable.
            eos_token_id: Ids that end a row.
            pad_token_id: What a finished row repeats.
            attention_mask: As in :meth:`capture`.
            on_token: Called with int64 ``[batch]`` on the host for each step, while the device
                works on later ones; an exception in it ends the generation and comes through.
            keep_cache: Continue behind what the cache holds.
            cache: Another cache, taken over first as by :meth:`use`.
            seed: As in :meth:`capture`.
            inputs: As in :meth:`capture`.

        Returns:
            int64 ``[batch, prompt + new]``, a tensor of its own: ``input_ids`` as they were given,
            with their padding, then the new ids. Of an encoder-decoder: the decoder's ids.

        Raises:
            ConfigurationError, CapacityError, CaptureError, LifecycleError, StaleGraphError: As
                :meth:`capture` and :meth:`replay`; nothing was launched.
            PlanError: The captured step holds what no conditional body takes.
            CudaError: The launch failed.
        """
        checked = self._checked_prompt(
            "generate_in_one_launch()", input_ids, attention_mask, cache, seed, inputs
        )
        ends = end_ids(self._step.forward, eos_token_id, pad_token_id)
        start = self._start(checked, max_new_tokens, *ends, keep_cache=keep_cache)
        with self._take_off(max_new_tokens, ends[0]) as tokens:
            if on_token is None:
                tokens.wait()
            else:
                for ids in tokens:
                    on_token(ids)
        return self._decoded(checked, start)

    def stream_in_one_launch(
        self,
        input_ids: torch.Tensor | None,
        max_new_tokens: int,
        eos_token_id: EosIds = None,
        pad_token_id: int | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        keep_cache: bool = False,
        cache: StaticKVCache | None = None,
        seed: int | None = None,
        **inputs: Any,
    ) -> TokenStream:
        """As :meth:`generate_in_one_launch`, one token at a time while the launch runs.

        The launch is made in this call; the device goes on without waiting for the reader. Ending
        the stream early (``close()``, the end of a ``with`` block, the next call on the runner)
        stops the device after the token it works on: :meth:`replay` continues behind that one,
        which may be some tokens past the last one that was read.

        Returns:
            An iterator of int64 ``[batch]`` on the host, each a tensor of its own.
        """
        checked = self._checked_prompt(
            "stream_in_one_launch()", input_ids, attention_mask, cache, seed, inputs
        )
        ends = end_ids(self._step.forward, eos_token_id, pad_token_id)
        self._start(checked, max_new_tokens, *ends, keep_cache=keep_cache)
        return self._take_off(max_new_tokens, ends[0])

    def _take_off(self, max_new_tokens: int, eos: tuple[int, ...]) -> TokenStream:
        """Launches the generation behind the prompt; step by step where decoding is eager."""
        if self._captured is None:
            eager = self._undisturbed(self._tokens(max_new_tokens, eos, self._generation))
            return TokenStream(eager, stop=_nothing, end=eager.close, wait=partial(_exhaust, eager))
        loop = self._captured.in_one_launch(self._step)
        self._count_for_guards(loop.executable)
        try:
            self._disarm(_IN_FLIGHT)
            self._flight.begin(loop, max_new_tokens, self.cache._state, may_end_early=bool(eos))
            number = self._flight.number
            return TokenStream(
                self._flight.tokens(),
                stop=partial(self._flight.stop, number),
                end=partial(self._end_flight, number),
                wait=partial(self._flight.wait, number),
            )
        except BaseException as error:
            try:
                self._end_flight()
            except Exception as second:
                error.add_note(f"while ending the launch: {second}")
            raise

    def _undisturbed(self, tokens: Iterator[torch.Tensor]) -> Generator[torch.Tensor]:
        """``tokens``, as long as nobody else decodes between two of them, as in a launch."""
        for ids in tokens:
            behind = self._generation, self.cache.seen_tokens
            yield ids
            if behind != (self._generation, self.cache.seen_tokens):
                raise LifecycleError(
                    "stream_in_one_launch: another call on this runner has ended the generation"
                )

    def _end_flight(self, number: int | None = None) -> None:
        """Ends a generation that runs in one launch: stopped, waited for, its position read.

        ``number``: only where that flight is the newest; None: whichever is.
        """
        if number not in (None, self._flight.number):
            return
        if self._flight.is_under_way:
            refuse_inside_capture("ending a generation that runs in one launch")
            try:
                self._flight.end()
            except Exception as error:
                self._disarm(f"the last launch failed: {error}")
                raise
        if self._limit >= 0 or self._why_not != _IN_FLIGHT:
            return  # emptied meanwhile, or none was under way
        if self._flight.is_whole:
            self._step.set_eos((), 0)
            self._arm()
        else:
            self._disarm("the last launch was interrupted: capture a prompt, or generate")

    def _drop_surplus(self, kept: int) -> None:
        """Forgets what was decoded past the end: what follows does not depend on ``poll_every``."""
        surplus = self.cache.seen_tokens - kept
        if not surplus:
            return
        self._step.sampler.take_back(surplus)
        try:
            self.cache.rewind(kept)
        except LifecycleError as overwritten:
            why = f"{surplus} tokens past the end of a generation cannot be dropped: {overwritten}"
            self.cache._state.lost = f"{why}; poll_every=1 decodes none"
            self._disarm(why)

    def _decoded(self, checked: Prompt, start: int) -> torch.Tensor:
        """The prompt as it was given, and what was decoded behind it."""
        new = self._step.history[:, start + checked.length : self.cache.seen_tokens]
        return torch.cat([checked.as_given, new], dim=1)

    # ---- both ------------------------------------------------------------------------------------

    def _start(
        self,
        checked: Prompt,
        max_new_tokens: int,
        eos: tuple[int, ...],
        pad: int,
        *,
        keep_cache: bool,
    ) -> int:
        """Checks the budget, then forwards the checked prompt; the slot of its first token."""
        if keep_cache and checked.begins_anew:
            raise ConfigurationError(
                "keep_cache: expected False with an encoder's input, which begins a generation; "
                "decoder_input_ids alone continue one"
            )
        start = self.cache.seen_tokens if keep_cache else 0
        prompt.check_budget(self.cache, start, checked.length, max_new_tokens)
        if not keep_cache:
            self.cache.reset()
        self._begin(checked)
        self._step.set_eos(eos, pad)
        return start


def _nothing() -> None:
    """An eager generation does nothing between two tokens."""


def _exhaust(tokens: Iterator[torch.Tensor]) -> None:
    for _ in tokens:
        pass
