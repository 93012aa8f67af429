"""CUDAGraphAR: captures a model's decode step once and replays it for every token.

Guarantees: capacity and staleness are checked before every launch; a call that raises has launched
nothing, or says what it left; host mirror and device position agree after every call. A replay is
one comparison, one launch and one addition on the host. Not locked.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from graphcore.advice import advises
from graphcore.decode import checks, prompt
from graphcore.decode.cache_binding import CacheBinding
from graphcore.decode.cache_state import is_capturing, refuse_inside_capture
from graphcore.decode.capture_lane import CaptureLane
from graphcore.decode.captured_step import CapturedStep
from graphcore.decode.compiled_step import Compile, check_compile
from graphcore.decode.first_step import FirstStep, check_first_step
from graphcore.decode.fixed import fixed
from graphcore.decode.flight import Flight
from graphcore.decode.forwards import cache_for, forward_for
from graphcore.decode.generating import Generating
from graphcore.decode.generation_settings import tell_unfollowed
from graphcore.decode.guidance import Guidance, Guide
from graphcore.decode.holding import Holding
from graphcore.decode.prefill import check_prefill, feed_for
from graphcore.decode.prompt_graphs import AllPromptGraphs
from graphcore.decode.sampler import Sampler
from graphcore.decode.sampling import Sampling
from graphcore.decode.static_cache import StaticKVCache
from graphcore.decode.step import DecodeStep
from graphcore.decode.variants import Variants
from graphcore.decode.weak_call import weakly
from graphcore.driver import Driver, active
from graphcore.driver.active import UNDER_WAY
from graphcore.errors import CapacityError, CaptureError, ConfigurationError, LifecycleError
from graphcore.executable.capture_options import LegacyWork, check_legacy_work, check_pool
from graphcore.executable.handles import NotCopied
from graphcore.interop import choose_driver
from graphcore.interop.torch import MemoryPool

_log = logging.getLogger("graphcore")


@advises
class CUDAGraphAR(Holding, Generating, NotCopied):
    """Autoregressive decoding through one captured graph, of a transformers model or a function.

    ``capture(input_ids)`` forwards a prompt and captures the step; each ``replay()`` after it
    returns the next token. ``generate`` and ``stream`` do all of it, ``generate_in_one_launch`` and
    ``stream_in_one_launch`` with one launch. Call order that makes no sense raises
    :class:`LifecycleError`; ``close()`` is final.

    Args:
        model: A transformers causal language model or encoder-decoder on one device; in training
            mode only where that changes nothing. Or a step function, with ``cache`` and
            ``vocabulary``: any callable, see
            :class:`graphcore.decode.function_forward.FunctionForward`.
        cache: A :class:`StaticKVCache` that fits it (an encoder-decoder: an
            :class:`EncoderDecoderKVCache`); None makes one. With ``guidance`` it has two
            rows for every one of the batch.
        max_seq_len: Capacity of the cache that is made, of an encoder-decoder for the decoder's
            tokens; None: as many as the model has positions for.
        batch_size: Rows of prompts; None: as many as the cache serves, or 1.
        encoder_len: Of an encoder-decoder: encoder tokens that the cache which is made holds; None:
            as many as the model has positions for.
        exact_encoder: Of an encoder-decoder: False reads the whole cross half under a mask, with
            one graph for encoder prompts of every length. True reads exactly the prompt's length,
            which is faster, with a graph for each length. Whisper is always read exactly.
        sampling: How a token is chosen; None: greedy.
        driver: Where the graph lives; None: the one for the model's device.
        capture: False decodes eagerly, with the same cache and the same step.
        compile: True captures a step that torch compiled (cuda driver): fewer and larger kernels,
            for seconds at the first prompt. Or options of inductor, as ``torch.compile`` takes
            them; False: the model's own kernels.
        on_legacy_work: As of :func:`graphcore.capture`. "error": work of other threads on the
            legacy stream breaks the capture of the step. "ignore": it runs; for servers whose
            threads launch there, other runners' replays without a stream among them.
        pool: As of :func:`graphcore.capture`: a torch memory pool that several runners capture
            into. They must not replay at the same time. None: one for each captured step.
        prefill_chunk_size: Prompts are forwarded in pieces of this many tokens, which gives the
            same tokens; None: in one. Masks and activations grow with a piece, not with the prompt:
            T tokens in pieces of C need about C / T of the memory beside weights and cache (and
            beside the K and V that a model repeats for each query head). Logits are computed of
            the last token of a piece only.
        capture_prefill: Full pieces replay a graph of their own, captured at the first one; the
            rest of a prompt is eager. Worth it for pieces so small that launching them takes
            longer than computing them.
        capture_first_step: Of an encoder-decoder: the decoder's first token, whose forward writes
            the cross K and V, replays a graph of its own, captured at the first prompt. The encoder
            and further tokens of the prompt are forwarded as without.
        guidance: Classifier-free guidance: a second, unconditional branch of every row.
        vocabulary: Of a step function: how many ids it gives logits for.

    Attributes:
        model: What decodes.
        cache: The cache in use.
        driver: Where the graphs live.
        captures: Graphs captured so far, of steps and of full pieces of prompts.
        rebinds: Graphs that :meth:`use` has rebound to another cache so far.
        last_binding: What :meth:`use` did last; None before.

    Raises:
        ConfigurationError: A model, a size, a driver or an option that cannot work.
        CacheTypeError: A cache that is not static.
    """

    # what every token reads: side by side in the object, not spread over a dictionary
    __slots__ = ("_launch", "_limit", "_state", "_token")

    model: Any = fixed("make a runner for the other model")
    cache: StaticKVCache = fixed("use(cache) takes another one over")
    _gave_back = False

    def __init__(  # noqa: PLR0913  (each is a choice of its own)
        self,
        model: Any,
        cache: Any = None,
        *,
        max_seq_len: int | None = None,
        batch_size: int | None = None,
        encoder_len: int | None = None,
        exact_encoder: bool = False,
        sampling: Sampling | None = None,
        driver: Driver | None = None,
        capture: bool = True,
        compile: Compile = False,  # noqa: A002  (as published)
        on_legacy_work: LegacyWork = "error",
        pool: MemoryPool | None = None,
        prefill_chunk_size: int | None = None,
        capture_prefill: bool = False,
        capture_first_step: bool = False,
        guidance: Guidance | None = None,
        vocabulary: int | None = None,
    ) -> None:
        refuse_inside_capture("CUDAGraphAR")
        check_legacy_work(on_legacy_work)
        check_pool(pool)
        check_prefill(prefill_chunk_size, capture_prefill)
        check_first_step(model, capture_first_step)
        if sampling is not None and not isinstance(sampling, Sampling):
            raise ConfigurationError(f"sampling: expected Sampling or None, got {sampling!r}")
        tell_unfollowed(model, sampling)
        self.model = model
        self._kind: dict[str, Any] = {
            "vocabulary": vocabulary,
            "guidance": guidance,
            "exact_encoder": exact_encoder,
        }
        self.cache = cache_for(
            model, cache, max_seq_len, batch_size, encoder_len=encoder_len, **self._kind
        )
        self.driver = choose_driver(self.cache.position) if driver is None else driver
        checks.check_driver(self.driver, self.cache.device)
        check_compile(compile, self.driver, capture=capture)
        self.captures = 0
        self.rebinds = 0
        self.last_binding: CacheBinding | None = None
        self._compile = compile
        self._lane = CaptureLane(self.driver, on_legacy_work, pool)
        self._sampling = sampling or Sampling.greedy()
        self._eager_because = None if capture else "capture=False"
        self._guide = None if guidance is None else Guide(guidance, self.cache.device)
        captures_chunks = capture_prefill and capture
        self._feed = feed_for(prefill_chunk_size, self._lane, captured=captures_chunks)
        self._first = FirstStep(self._lane) if capture_first_step and capture else None
        self._prompt_graphs = AllPromptGraphs(self._feed, self._first)
        self._step = self._step_for(self.cache)
        self._variants = Variants()
        self._captured: CapturedStep | None = None
        self._state = self.cache._state
        self._flight = Flight()
        self._token = self._step.token
        self._generation = 0
        self._closed = False
        self._launch: Callable[[], object] = weakly(self._run_eagerly)
        self._limit = -1
        self._disarm("expected a prompt first: call capture(input_ids)")
        self.cache.watch(self)

    def _step_for(self, cache: StaticKVCache) -> DecodeStep:
        """A step with buffers of its own for caches of the layout of ``cache``."""
        forward = forward_for(
            self.model,
            cache,
            self._feed,
            self._first,
            vocabulary=self._kind["vocabulary"],
            guide=self._guide,
            exact_encoder=self._kind["exact_encoder"],
        )
        sampler = Sampler(self._sampling, forward.rows, forward.vocabulary, cache.device)
        return DecodeStep(forward, sampler)

    # ---- capture and replay ---------------------------------------------------------------------

    def capture(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        cache: StaticKVCache | None = None,
        seed: int | None = None,
        **inputs: Any,
    ) -> None:
        """Forwards a prompt behind what the cache holds, and captures the step the first time.

        Afterwards ``cache.seen_tokens`` has grown by the prompt's length: by the tokens of its
        longest row, where they differ. Later prompts, of any length that fits, reuse the graph;
        the first one whose rows differ captures a second, which hides the pads. Where the model's
        weights are other tensors since, or lie elsewhere (cast, moved, exchanged), the step is
        captured again.

        Args:
            input_ids: int64 or int32 ``[batch, tokens]`` on the model's device. Of an
                encoder-decoder it is the encoder's main input (Whisper: ``input_features``), begins
                a generation, and empties the cache first; without one, ``decoder_input_ids``
                continue.
            attention_mask: Ones for tokens and zeros for padding, as a tokenizer gives it. Padding
                may stand on either side, or between: every row gives what it gives alone.
            cache: Another cache, taken over first as by :meth:`use`.
            seed: Of the random numbers of what follows; None: the sampling's, or one is drawn.
                Behind held tokens None lets the numbers go on.
            inputs: With guidance: ``negative_input_ids``, the prompts of the unconditional branches
                (of any length, ``[batch, tokens]`` or one for all; left out: each row's last token,
                as in transformers), and ``negative_attention_mask``, theirs. Of an encoder-decoder:
                ``decoder_input_ids`` (None: the start token), ``decoder_attention_mask``,
                ``encoder_outputs``, and what else the encoder takes, by name (with guidance also
                with "negative_" before it).

        Raises:
            ConfigurationError: An empty prompt, a wrong shape, dtype, device, batch or id, a row of
                padding only; or the model was put into a training mode that makes the step random.
            CapacityError: The prompt does not fit.
            CaptureError: The step cannot be captured; the cache is as before.
            LifecycleError: The runner is closed; or decoder ids alone, and the cross K/V are not
                those of this runner's last prompt.
        """
        checked = self._checked_prompt("capture()", input_ids, attention_mask, cache, seed, inputs)
        start = 0 if checked.begins_anew else self.cache.seen_tokens
        prompt.check_prompt_fits(self.cache, start, checked.length)
        if checked.begins_anew:
            self.cache.reset()
        self._begin(checked)

    def replay(self, token: int | torch.Tensor | None = None) -> torch.Tensor:
        """Decodes one token.

        Args:
            token: What to feed instead of choosing: an id of the vocabulary, or ids ``[batch]`` on
                the device (not checked there, but clamped) or on the host.

        Returns:
            The static int64 tensor ``[batch]`` with the token of this step; the next step
            overwrites it. :meth:`guarded_token` gives it so that a later read raises.

        Raises:
            CapacityError: The cache is full; nothing was launched.
            StaleGraphError: A captured buffer was replaced; names it; nothing was launched.
            LifecycleError: No prompt yet, closed, or tokens were written to the cache past this
                runner, so that the logits are not those of its last token.
            CaptureError: Inside a capture, where the token would be counted but not decoded; or the
                current stream is the legacy one and another thread's capture would break.
        """
        if UNDER_WAY and active.current() is not None:
            refuse_inside_capture("replay()")
        if token is not None:
            return self._replay_forced(token)
        state = self._state
        seen = state.seen
        if seen is None or seen >= self._limit:
            seen = self._checked_seen()
        try:
            self._launch()
            state.seen = seen + 1
        except BaseException as error:
            self._after_failure(error, seen)
            raise
        return self._token

    def close(self) -> None:
        """Gives graph and executable back; final. The cache and the model stay the caller's."""
        if self._gave_back:
            return
        self._closed = True  # interrupted, it is done again by the next close()
        try:
            if not is_capturing():  # otherwise what runs is asked to stop, and given back behind it
                self._end_flight()
        finally:
            self._disarm("the runner is closed")
            self.cache.unwatch(self)
            self._captured = None
            self._variants.close()
            self._prompt_graphs.close()
            self._lane.close()
            self._gave_back = True

    def __enter__(self) -> CUDAGraphAR:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what the cache tells -------------------------------------------------------------------

    def cache_changed(self, name: str, how: str) -> None:
        """A captured buffer was replaced: every later replay raises, naming it."""
        self._variants.mark_stale(name, how)
        self._prompt_graphs.mark_stale(name, how)

    @property
    def holds_graph(self) -> bool:
        """Whether a graph with the cache's addresses exists."""
        return len(self._variants) > 0 or self._prompt_graphs.holds_graph

    def cache_was_emptied(self, reason: str) -> None:
        """The logits belong to nothing any more; a forced token may continue from here."""
        can_force = self._step.has_logits
        self._flight.stop()
        if self._state.seen == 0:
            self._step.sampler.forget()
        self._disarm(f"{reason}: expected a prompt, or a forced token", may_force=can_force)

    # ---- inside ---------------------------------------------------------------------------------

    def _eager_reason(self) -> str | None:
        if os.environ.get("GRAPHCORE_DISABLE") == "1":
            return "GRAPHCORE_DISABLE=1"
        return self._eager_because

    def _arm(self) -> None:
        if self._captured is None:
            _log.info("decoding eagerly: %s", self._eager_reason())
            self._launch = weakly(self._run_eagerly)
        else:
            self._launch = self._captured.executable.launch
        self._limit = self.cache.max_seq_len
        self._may_force = False

    def _disarm(self, why: str, *, may_force: bool = False) -> None:
        self._limit = -1
        self._why_not = why
        self._may_force = may_force

    def _run_eagerly(self) -> None:
        with torch.no_grad(), self._state.written_by(self):
            self._step.run()
        self._step_ran_eagerly()

    def _refuse_closed(self, caller: str) -> None:
        if self._closed:
            raise LifecycleError(f"{caller}: expected an open runner, the runner is closed")

    def _checked_seen(self) -> int:
        """The number of held tokens, if one more may be decoded."""
        self._end_flight()
        if self._limit < 0:
            raise LifecycleError(f"replay: {self._why_not}")
        seen = self.cache.seen_tokens
        if seen >= self._limit:
            raise CapacityError(
                f"replay: max_seq_len is {self._limit} tokens and {seen} are held; one more needs "
                f"{seen + 1}. Nothing was launched"
            )
        return seen

    def _replay_forced(self, token: int | torch.Tensor) -> torch.Tensor:
        self._end_flight()
        is_behind_others = self._limit < 0 and self._may_force
        if not is_behind_others:
            self._checked_seen()
        checked = prompt.check_token(self._step.forward, token)
        held, why = self.cache.seen_tokens, self._why_not
        try:
            if is_behind_others:
                self._arm_behind_others()
                self._checked_seen()
            self._step.force(checked)
            return self.replay()
        except BaseException:
            if is_behind_others and self._limit >= 0 and self._state.seen == held:
                # nothing was decoded: the logits still belong to nothing
                self._disarm(why, may_force=True)
            self._step.forget_forced()
            raise

    def _after_failure(self, error: BaseException, seen: int) -> None:
        """Finds out what a failed or interrupted step has done."""
        if isinstance(error, CaptureError):
            return  # refused before anything was launched, for a capture that a look would break
        try:
            position = int(self.cache.position.item())
        except Exception as second:  # the context may be lost
            self._disarm(f"the last step failed: {error}")
            error.add_note(f"the position could not be read afterwards: {second}")
            return
        self._state.seen = position
        if position != seen:
            # K and V are written and the position moved, but the logits may be half done
            self._disarm("the last step was interrupted: capture a prompt, or generate")
